"""The corpus of launch files: every entry is valid, and mistakes in an entry are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.hardware.errors import PlanError
from tools.inputs.corpus import load_corpus

ENTRY: dict[str, Any] = {
    "repository": "someone/scripts",
    "commit": "0" * 40,
    "path": "run.sh",
    "program": "megatron",
    "expect": {"tp": 2, "global": 8},
    "states": "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --global-batch-size 8\n",
}


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    folder.joinpath("megatron.yaml").write_text(yaml.safe_dump(list(entries)), "utf-8")
    return folder


def test_every_entry_of_the_corpus_is_valid() -> None:
    assert load_corpus()


def test_an_entry_is_read_as_written(tmp_path: Path) -> None:
    (entry,) = load_corpus(write(tmp_path, ENTRY))
    assert entry.stated == {"tp", "global"}
    assert entry.expect.batch == 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda entry: entry.pop("expect"), "expects nothing"),
        (lambda entry: entry.update(asks=["tp"]), "both asked for and expected"),
        (lambda entry: entry.update(asks=["colour"]), "asks for colour"),
        (lambda entry: entry.update(path="../run.sh"), "leaves its repository"),
        (lambda entry: entry.update(commit="main"), "commit"),
        (lambda entry: entry.update(program="megatron-lm"), "program"),
        (lambda entry: entry["expect"].update(tpp=1), "tpp"),
    ],
)
def test_a_mistake_in_an_entry_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], word: str) -> None:
    entry = {**ENTRY, "expect": dict(ENTRY["expect"])}
    change(entry)
    with pytest.raises(PlanError, match=word):
        load_corpus(write(tmp_path, entry))


def test_an_entry_stands_in_the_corpus_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="twice"):
        load_corpus(write(tmp_path, ENTRY, ENTRY))
