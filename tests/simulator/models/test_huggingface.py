"""Hugging Face configs: the models they describe, and keys that are refused rather than dropped."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.simulator.models.huggingface import SUPPORTED, from_config
from meshcast.simulator.models.load import load_model
from meshcast.simulator.models.model import Model
from tests.simulator.models.configs import (
    BLOOM,
    CONFIGS,
    ENCODER_DECODERS,
    LLAMA,
    MPT,
    RESNET,
    ROUND_TRIP,
    VISION,
    unfold,
)
from tests.simulator.models.configs import rename_keys as renamed
from tests.simulator.models.test_types import TYPES

EXAMPLE = Path(__file__).parents[3] / "examples" / "llama3-70b"


def test_the_example_is_the_preset() -> None:
    assert load_model(str(EXAMPLE)) == load_model("llama3-70b")
    assert load_model(str(EXAMPLE / "config.json")) == load_model("llama3-70b")
    assert load_model("llama3-70b/config.json", base=EXAMPLE.parent) == load_model("llama3-70b")


def test_a_config_imports_the_readers_of_its_family_alone_and_no_traces() -> None:
    said = "import json, sys; from meshcast.simulator.models.huggingface import from_config; "
    said += f"from_config(json.loads({json.dumps(json.dumps(LLAMA))})); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, check=True).stdout.split()
    readers = {name.rpartition(".")[2] for name in loaded if "models.huggingface." in name}
    assert readers == {"config", "heads", "readers", "llama"}
    assert not [name for name in loaded if "models.trace" in name or name.partition(".")[0] in ("pydantic", "torch")]


def test_of_synonyms_of_a_key_the_first_counts() -> None:
    """The config.json of GPT-2 has ``n_positions`` and ``n_ctx``."""
    config = ROUND_TRIP["gpt2-124m"] | {"n_ctx": 7, "num_hidden_layers": 3}
    assert from_config(config) == from_config(dict(reversed(config.items()))) == from_config(ROUND_TRIP["gpt2-124m"])


@pytest.mark.parametrize("name", ROUND_TRIP)
def test_configs_give_the_presets(name: str) -> None:
    """All but the default sequence, as configs name the longest that a model takes, and formats of a checkpoint."""
    m = from_config(ROUND_TRIP[name], name=name)
    changed = {"seq": m.seq, "left_out": m.left_out} | (
        {"position_rows": m.position_rows} if m.positions == "learned" else {}
    )
    assert m == load_model({"preset": name, "name": name, **changed})


def test_every_kind_is_tried() -> None:
    tried = {
        config["model_type"]
        for config in (
            *ROUND_TRIP.values(),
            *CONFIGS.values(),
            *VISION.values(),
            *ENCODER_DECODERS.values(),
            *TYPES,
            RESNET,
        )
    }
    assert tried == set(SUPPORTED)


ENTRIES = [
    (name, entry)
    for name, entries in yaml.load(
        Path(__file__).with_name("config_fields.yaml").read_text("utf-8"), yaml.CSafeLoader
    ).items()
    for entry in entries
]


def read_field(model: Model, path: str) -> Any:
    """Returns a field of a model, or the layers of a kind."""
    if path == "experts in":
        return [layer for layer in range(model.layers) if model.is_moe(layer)]
    if path == "local":
        return [layer for layer in range(model.layers) if model.kind(layer).local]
    return reduce(getattr, path.split("."), model)


@pytest.mark.parametrize(("name", "entry"), ENTRIES)
def test_keys_of_configs_mean_fields_of_models(name: str, entry: dict[str, Any]) -> None:
    config = MPT if name == "mpt" else ROUND_TRIP[name]
    changes = {key: unfold(value) for key, value in entry.items() if key not in ("without", "same", "gives", "more")}
    kept = {key: value for key, value in config.items() if key not in entry.get("without", ())}
    plain, model = from_config(config), from_config(kept | changes)
    assert (model == plain) or not entry.get("same")
    assert {path: read_field(model, path) for path in entry.get("gives", {})} == entry.get("gives", {})
    assert model.layer_parameters() - plain.layer_parameters() == entry.get("more", 0) or "more" not in entry


def test_other_names_of_keys() -> None:
    assert from_config(renamed(BLOOM, n_embed="hidden_size", n_layer="num_hidden_layers")) == from_config(BLOOM)


@pytest.mark.parametrize(
    ("folder", "more", "name"),
    [
        ("inputs", {}, "llama"),
        ("inputs", {"_name_or_path": "meta-llama/Llama-2-7b"}, "meta-llama/Llama-2-7b"),
        ("llama2-7b", {"_name_or_path": "other"}, "llama2-7b"),
        ("my-llama", {}, "my-llama"),
    ],
)
def test_a_config_is_named_after_its_folder_if_that_says_what_it_holds(
    folder: str, more: dict[str, Any], name: str, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "config.json").write_text(json.dumps(LLAMA | {"model_type": "llama"} | more))
    assert load_model("config.json", base=tmp_path / folder).name == name
    assert load_model(f"{folder}/config.json", base=tmp_path).name == folder
