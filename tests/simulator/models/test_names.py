"""Names of models elsewhere: each means the preset or the id of its shape, or none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from meshcast.hardware.errors import ModelError
from meshcast.simulator.formats.launch.keys import find_preset_vocabulary
from meshcast.simulator.models import hub
from meshcast.simulator.models.hub import HubModel, hub_files, hub_models
from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import (
    ALIASES,
    find_id_of_shape,
    find_model,
    load_model,
    model_source,
    presets,
)
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.names import split_name
from meshcast.validation.contract.of_plugins import model_problems
from tests.draws import drawn
from tests.simulator.models.test_load import EXACT

IDS = {name: meant for maker in hub_files() for name, meant in hub_models(maker).items()}
SHAPES = {name: model for name, model in IDS.items() if isinstance(model, HubModel)}
CHECKPOINTS = {
    ids[-1]: preset for preset, (_, source) in EXACT.items() if (ids := re.findall(r"\w[\w.-]+/[\w.-]*\w", source))
}

MEANT = {
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2-7b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "llama2 7B": "llama2-7b",
    "Llama-3-70B": "llama3-70b",
    "llama3.1:8b": "llama3-8b",
    "qwen3_30b_a3b": "qwen3-30b-a3b",
    "/data/models/Meta-Llama-3-8B-Instruct/": "llama3-8b",
    "TheBloke/Llama-2-13B-chat-GPTQ": "llama2-13b",
    "unsloth/Meta-Llama-3.1-8B-bnb-4bit": "llama3-8b",
    "google/gemma-2b-it": "gemma-2b",
    "google/gemma-2-2b-it": "gemma2-2b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "EleutherAI/pythia-6.9b": "EleutherAI/pythia-6.9b",
    "eleutherai/Pythia-6.9B": "EleutherAI/pythia-6.9b",
    "pythia 6.9b": "EleutherAI/pythia-6.9b",
    "/checkpoints/pythia-6.9b-deduped/": "EleutherAI/pythia-6.9b",
    "google/gemma-3-27b-it": "google/gemma-3-27b-pt",
    "unsloth/Qwen2.5-VL-7B-Instruct-bnb-4bit": "Qwen/Qwen2.5-VL-7B-Instruct",
    "CohereForAI/c4ai-command-r-v01": "CohereLabs/c4ai-command-r-v01",
    "bigscience/mt0-large": "google/mt5-large",
}

OF_ANOTHER_SHAPE = [
    *("Qwen/Qwen2.5-VL-8B-Instruct", "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen2-Audio-7B"),
    *("Qwen/Qwen2.5-Math-RM-72B", "Alibaba-NLP/gte-Qwen2-7B-instruct", "intfloat/e5-mistral-7b-instruct"),
    *("Skywork/Skywork-Reward-Llama-3.1-8B", "meta-llama/Llama-3.2-11B-Vision", "meta-llama/Llama-Guard-3-8B"),
    *("gradientai/Llama-3-8B-Instruct-Gradient-1048k", "EleutherAI/pythia-2b", "microsoft/Phi-4-multimodal-instruct"),
    *("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "gpt-5", "qwen257b", "8B", "llama", "instruct"),
]


@pytest.mark.parametrize("name", MEANT)
def test_a_name_means_the_preset_or_the_id_of_its_shape(name: str) -> None:
    assert find_model(name) == MEANT[name]
    assert load_model(name) is load_model(MEANT[name])


@pytest.mark.parametrize("name", [*OF_ANOTHER_SHAPE, "", "-", "/", "x" * 10_000])
def test_a_name_of_another_shape_means_none(name: str) -> None:
    assert find_model(name) is None


def test_the_repository_of_a_checkpoint_means_its_preset() -> None:
    assert {name: find_model(name) for name in CHECKPOINTS} == CHECKPOINTS


def test_the_table_has_hundreds_of_ids_each_of_them_once() -> None:
    assert len(IDS) >= 400 and len(SHAPES) >= 150
    meant: dict[tuple[str, ...], set[str | None]] = {}
    for name, shape in IDS.items():
        target = ALIASES.get(shape, shape) if isinstance(shape, str) else name
        assert find_model(name) == target == find_model(f"{name}-Instruct") == find_model(name.partition("/")[2])
        assert target in SHAPES or target in presets(), name
        meant.setdefault(split_name(name), set()).add(target)
    assert all(len(targets) == 1 for targets in meant.values())


NAMED_LARGER = {"openbmb/MiniCPM4-0.5B": 433_873_920}
"""Parameters of models whose names say more than an eighth too much."""


@pytest.mark.parametrize("name", drawn(IDS, keep=10))
def test_an_id_of_the_table_is_of_the_size_that_it_says(name: str) -> None:
    """Parameters, or active ones, with tables of words or without, are those in the name: to its last digit, or an
    eighth (Gemma 7B has 7.8 B beside its table); `NAMED_LARGER` are those of their modules."""
    model = load_model(name)
    assert len(model_source(str(find_model(name)))) > 10
    if name in NAMED_LARGER:
        assert model.parameters == NAMED_LARGER[name]
        return
    assert [*model_problems(name)] == []


@pytest.mark.parametrize("name", drawn(SHAPES, keep=10))
def test_an_id_is_read_as_its_config_is(name: str) -> None:
    short = name.rpartition("/")[2]
    assert load_model(name) == from_config(SHAPES[name].config, name=short)
    assert hub._read_fields(name, short) == hub.read_hub_fields(name)


def test_the_fields_of_an_id_are_kept_for_its_file_and_its_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    fields = hub.read_hub_fields.__wrapped__(name)
    monkeypatch.setattr(hub, "_read_fields", None)
    assert hub.read_hub_fields.__wrapped__(name) == fields
    monkeypatch.setattr(hub, "_identify_readers", lambda: -1)
    with pytest.raises(TypeError):
        hub.read_hub_fields.__wrapped__(name)


def test_an_id_of_the_shape_of_a_model_is_found() -> None:
    fields = load_model("EleutherAI/pythia-1.4b").model_dump(exclude={"name"}) | {"seq": 512}
    assert find_id_of_shape(Model.model_validate(fields)) == "EleutherAI/pythia-1.4b"
    assert find_id_of_shape(Model.model_validate(fields | {"ffn": 8000})) is None


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("EleutherAI/pythia-1b-dedup", "'EleutherAI/pythia-1b-deduped'"),
        ("Qwen/Qwen3.5-28B", "'Qwen/Qwen3.5-27B'"),
        ("llama3-71b", "'llama3-70b'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ModelError, match=f"Did you mean {near}"):
        load_model(name)


def test_other_spellings_of_all_presets_mean_them() -> None:
    for name in presets():
        assert find_model(name) == find_model(name.upper()) == find_model(f"someone/{name}-Chat") == name
        assert find_model(name.replace("-", "_")) == name
    assert all(find_model(alias) == name for alias, name in ALIASES.items())


def test_a_file_of_that_name_goes_first(tmp_path: Path) -> None:
    (folder := tmp_path / "meta-llama/Llama-3.1-8B").mkdir(parents=True)
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model("meta-llama/Llama-3.1-8B", base=tmp_path).layers == 2


def test_a_path_that_no_file_can_have_is_still_a_name() -> None:
    assert load_model(f"{'x' * 300}/llama3-8b") is load_model("llama3-8b")


@pytest.mark.parametrize(("preset", "sequence"), [("llama2-7b", 4096), ("llama3-8b", 32768)])
def test_a_vocabulary_that_nothing_states_is_that_of_the_best_known_model_of_the_shape(
    preset: str, sequence: int
) -> None:
    model = load_model(preset)
    fields = model.model_dump(exclude_unset=True, exclude={"name", "vocab"})
    found = find_preset_vocabulary(fields | {"seq": sequence})
    assert found is not None and found[1] == model.vocab
