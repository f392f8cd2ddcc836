"""Malformed files of every format, a few of each; `make fuzz` reads many more."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshcast.hardware.errors import PlanError
from tests.fuzz import run
from tests.fuzz.generate import LAYERS
from tests.fuzz.readers import READERS, needs_torch
from tests.fuzz.run import make_file, run_seed, try_file
from tests.fuzz.seeds import prepare
from tests.strategies import EVERY_EXAMPLE

FILES = 3 if EVERY_EXAMPLE else 1
"""Files of each reader."""

SLOW = 0.1
"""Share of readers that take seconds for a file; `make test-all` runs them."""

BY_SPEED = [pytest.param(name, marks=[pytest.mark.slow] * (one.share <= SLOW)) for name, one in READERS.items()]


@pytest.mark.parametrize("name", BY_SPEED)
def test_a_valid_file_is_accepted_and_malformed_ones_are_read_or_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Forecasts of changed plans take most of the time where a plan does not fit; `make fuzz` asks for them.
    monkeypatch.setattr("meshcast.experiments.explain.fitting_changes.fitting_changes", lambda report: [])
    prepare(tmp_path)
    reader = READERS[name]
    if needs_torch(reader):
        pytest.importorskip("torch")
    content = reader.make_seeds(tmp_path)
    (tmp_path / reader.name).write_bytes(content[0])
    assert try_file(reader, tmp_path) == "accepted"
    outcomes = [run_seed(name, seed, content, tmp_path) for seed in range(FILES)]
    assert not [outcome for outcome in outcomes if outcome.failure]


def test_a_seed_gives_the_same_file_again(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert LAYERS.keys() == {reader.form for reader in READERS.values()}
    for name in ("job", "pipeline", "routing", "schedule", "megatron-log", "sweep rows", "words"):
        valid = READERS[name].make_seeds(tmp_path)
        found = [make_file(name, seed, valid) for seed in range(20)]
        assert found == [make_file(name, seed, valid) for seed in range(20)]
        assert len(set(found) - set(valid)) >= 15


# ------------------------------------------------------------------------------------- failures are seen


def refuse(path: Path) -> None:
    raise PlanError(str(path), "a rule", "A remedy")


def fail(path: Path) -> None:
    raise ValueError("two\nlines")


def wait(path: Path) -> None:
    with suppress(Exception):
        time.sleep(30)


def end(path: Path) -> None:
    os._exit(3)


def fill_memory(path: Path) -> None:
    bytearray(3 * 2**30)


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (refuse, ""),
        (fail, "ValueError: two lines"),
        (wait, "more than 1 s"),
        (end, "it ended or stopped the process"),
        (fill_memory, "MemoryError"),
    ],
)
def test_failures_of_a_reader_are_reported(monkeypatch: pytest.MonkeyPatch, read: Any, words: str) -> None:
    monkeypatch.setattr(run, "SECONDS", 1)
    monkeypatch.setattr(run, "PATIENCE", 1)
    monkeypatch.setitem(READERS, "routing", READERS["routing"]._replace(read=read))
    first, second = run.run_limited("routing", range(5, 7))
    assert (first.seed, second.seed) == (5, 6) and first.answer == second.answer == ("failed" if words else "refused")
    assert words in first.failure and bool(words) == bool(first.failure)


@pytest.mark.parametrize(
    ("out", "err", "code", "words"),
    [
        ('{"a": NaN}', "", 0, "NaN in JSON"),
        ("step  inf s", "", 0, "inf in an answer"),
        ('{"error": {}}', "", 2, None),
        ("", "meshcast: a: b. C", 2, None),
        ("", "", 2, "no message"),
        ("", "one\ntwo", 2, "2 lines of errors"),
        ('{"reason": "meshcast failed: KeyError"}', "", 0, "an error of meshcast"),
        ("", "", 5, "exit code 5"),
    ],
)
def test_bad_answers_are_failures(out: str, err: str, code: int, words: str | None) -> None:
    ended = SystemExit(code) if code else None
    result = Result(CliRunner(), out.encode(), err.encode(), (out + err).encode(), None, code, ended)
    with pytest.raises(AssertionError, match=words) if words else nullcontext():
        assert run.check(result, ["--json"] if out.startswith("{") else []) == "refused"
