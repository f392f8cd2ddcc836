"""docs/add-a-model.md: its job is the preset, and all that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from meshcast.simulator.models.huggingface import from_config
from meshcast.simulator.models.load import load_model
from tests.simulator.models.configs import MIXTRAL

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "add-a-model.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_all_ways_give_the_same_model() -> None:
    inline = yaml.safe_load(blocks("yaml")[1])["model"]
    assert load_model(inline | {"name": "mixtral-8x7b"}) == load_model("mixtral-8x7b")
    assert from_config(MIXTRAL, name="mixtral-8x7b") == load_model("mixtral-8x7b")


def test_the_change_of_a_preset_loads() -> None:
    (change,) = re.findall(r"`(\{preset: .*\})`", PAGE)
    cut = load_model(yaml.safe_load(change))
    assert cut.layers == 8 and cut.moe is not None and cut.moe.capacity == 1.0


def test_every_path_is_there() -> None:
    for path in [*re.findall(r"\]\(\.\./([^)]+)\)", PAGE), *re.findall(r"`((?:tests|simulator)/[\w/]+\.py)`", PAGE)]:
        assert (ROOT / path).exists(), path
