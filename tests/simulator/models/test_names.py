"""Names of models elsewhere: each means the preset of its shape, or none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from meshcast.simulator.formats.launch.keys import find_preset_vocabulary
from meshcast.simulator.models.load import ALIASES, find_model, load_model, presets
from meshcast.simulator.models.names import hub_names
from tests.simulator.models.test_load import EXACT

HUB_IDS = {name: preset for preset, names in hub_names().items() for name in names}
CHECKPOINTS = {
    ids[-1]: preset for preset, (_, source) in EXACT.items() if (ids := re.findall(r"\w[\w.-]+/[\w.-]*\w", source))
}

MEANT = {
    "meta-llama/Llama-3.1-8B": "llama3-8b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2-7b",
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
}

OF_ANOTHER_SHAPE = [
    *("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen2-Audio-7B"),
    *("Qwen/Qwen2.5-Math-RM-72B", "Alibaba-NLP/gte-Qwen2-7B-instruct", "intfloat/e5-mistral-7b-instruct"),
    *("Skywork/Skywork-Reward-Llama-3.1-8B", "meta-llama/Llama-3.2-11B-Vision", "meta-llama/Llama-Guard-3-8B"),
    *("gradientai/Llama-3-8B-Instruct-Gradient-1048k", "mistralai/Mistral-7B-Instruct-v0.2", "google/gemma-3-27b-it"),
    *("meta-llama/Llama-4-Scout-17B-16E", "deepseek-ai/DeepSeek-V3.2-Exp", "microsoft/Phi-4-multimodal-instruct"),
    *("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "gpt-5", "qwen257b", "8B", "llama", "instruct"),
]


@pytest.mark.parametrize("name", MEANT)
def test_a_name_means_the_preset_of_its_shape(name: str) -> None:
    assert find_model(name) == MEANT[name]
    assert load_model(name) is load_model(MEANT[name])


@pytest.mark.parametrize("name", [*OF_ANOTHER_SHAPE, "", "-", "/", "x" * 10_000])
def test_a_name_of_another_shape_means_none(name: str) -> None:
    assert find_model(name) is None


def test_the_repository_of_a_checkpoint_means_its_preset() -> None:
    assert {name: find_model(name) for name in CHECKPOINTS} == CHECKPOINTS


def test_an_id_of_the_table_is_of_the_size_that_it_says() -> None:
    for name, preset in HUB_IDS.items():
        assert preset in presets() and find_model(name) == preset == find_model(f"{name}-Instruct")
        sizes = re.findall(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)[bB](?![a-z0-9])", name)
        if sizes and "moe" not in name.lower():
            assert load_model(preset).parameters_without_mtp / 1e9 / float(sizes[0]) == pytest.approx(1, abs=0.16), name


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
