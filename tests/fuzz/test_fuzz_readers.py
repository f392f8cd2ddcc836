"""Malformed files of every format, a few of each; `make fuzz` reads many more."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from meshcast.experiments.cli import calibrate, imports, measure, plot, validate
from meshcast.experiments.cli.app import load_command
from meshcast.experiments.cli.commands import COMMANDS as NAMES
from meshcast.experiments.cli.commands import find_options
from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.launch.programs.registry import EXPORTS, FORMATS
from tests.draws import drawn
from tests.fuzz import run
from tests.fuzz.generate import LAYERS, PLACED
from tests.fuzz.readers import COMMANDS, OPEN, READERS, needs_torch
from tests.fuzz.run import make_file, run_seed, try_file
from tests.fuzz.seeds import prepare
from tests.strategies import EVERY_EXAMPLE

FILES, FILES_OF_JOBS, LINES = (3, 10_000, 3_000) if EVERY_EXAMPLE else (1, 20, 4)
MANY = {"predict given.yaml --json": FILES_OF_JOBS, "predict --jobs given.jsonl": LINES}
"""Files of readers; of others there are `FILES`."""

QUICK = [name for name, reader in READERS.items() if reader.share >= 1 and not needs_torch(reader)]
SOME = [*QUICK[::12], *MANY, "set"]
"""Readers whose files `make test` reads; `make test-all` reads those of all."""


@pytest.mark.parametrize("name", drawn(READERS, SOME))
def test_a_valid_file_is_accepted_and_malformed_ones_are_read_or_refused(name: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    reader = READERS[name]
    if needs_torch(reader):
        pytest.importorskip("torch")
    content = reader.make_seeds(tmp_path)
    (tmp_path / reader.name).write_bytes(content[0])
    assert try_file(reader, tmp_path, content[0]) == "accepted" or reader.form == "script"
    outcomes = [run_seed(name, seed, content, tmp_path) for seed in range(MANY.get(name, FILES))]
    assert not [outcome for outcome in outcomes if outcome.failure]


@pytest.mark.parametrize("kind", PLACED)
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "choose_place", lambda reader, seed: kind)
    prepare(tmp_path)
    launch = f"predict launch.sh --json --assume-defaults {OPEN}"
    for name in ("predict given.yaml --json", launch, "failures of a run"):
        outcome = run_seed(name, 0, [], tmp_path)
        assert (outcome.answer, outcome.failure) == ("refused", "")


def test_a_seed_gives_the_same_file_again(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert LAYERS.keys() == {reader.form for reader in READERS.values()}
    names = {reader.form: name for name, reader in READERS.items() if "calibrat" not in name}
    for name in names.values():
        valid = READERS[name].make_seeds(tmp_path)
        files = [make_file(name, seed, valid) for seed in range(20)]
        assert files == [make_file(name, seed, valid) for seed in range(20)]
        assert len(set(files) - set(valid)) >= 15


# ------------------------------------------------------------------------- every command, every file it takes

COMMANDS_OF_ALL: dict[str, Any] = {name: load_command(name) for name in NAMES}
OUTPUTS = {"out", "plot", "trace", "snapshot", "jobs_to", "html"}
"""Parameters that name what is written."""

SERVES = "explore"
"""The command that serves until somebody ends it, which a sound file would make it do; `predict` reads the same."""

WORDS_OR_FILES = {("list", "name"), ("export", "name"), ("export", "kind"), ("plot", "what"), ("plot", "names")}
"""Parameters that take the name of something, or a file."""

KINDS = {
    ("validate", "kind"): validate.KINDS,
    ("calibrate", "kind"): calibrate.KINDS,
    ("measure", "kind"): measure.KINDS,
    ("import", "form"): (*FORMATS, *imports.FORMS, imports.FAILURE_LOG),
    ("export", "to"): tuple(EXPORTS),
    ("plot", "what"): plot.KINDS,
}
"""Words of a command that say which files it reads."""


def parse(words: list[str]) -> dict[str, Any]:
    """The parameters that a command line states."""
    command = COMMANDS_OF_ALL[words[0]]
    context = command.make_context(words[0], words[1:])
    return {
        name: one for name, one in context.params.items() if "COMMANDLINE" in str(context.get_parameter_source(name))
    }


def is_at(value: Any, file: str) -> bool:
    """Whether a parameter names a file, or the folder that holds it."""
    values = value if isinstance(value, list | tuple) else [value]
    return any(str(one) in (file, *map(str, Path(file).parents[:-1])) for one in values)


def test_every_file_that_a_command_takes_has_a_reader() -> None:
    taken = {
        (command, name)
        for command in NAMES
        for name, flag in find_options(command).flags().items()
        if "Path" in f"{find_options(command).model_fields[name].annotation} {flag.reads}" and name not in OUTPUTS
    }
    read = {
        (reader.words[0], name)
        for reader in READERS.values()
        if reader.words
        for name, value in parse(reader.words).items()
        if is_at(value, reader.name)
    }
    assert taken - read == {("init", "file"), ("advise", "write"), (SERVES, "job")}  # the first two are written
    assert read >= WORDS_OR_FILES


def test_every_word_that_a_command_takes_is_drawn() -> None:
    lines = [reader.words for reader in READERS.values() if reader.words] + [line.split() for line in COMMANDS]
    stated = {(words[0], name) for words in lines for name in parse(words)}
    every = {
        (name, word.name) for name, command in COMMANDS_OF_ALL.items() if name != SERVES for word in command.params
    }
    assert {word for word in every if word[1] != "help"} - stated == set()
    words = {(line[0], name, value) for line in lines for name, value in parse(line).items() if isinstance(value, str)}
    missing = {(*place, kind) for place, kinds in KINDS.items() for kind in kinds} - words
    assert not missing


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


ENDS: dict[Any, str] = {
    refuse: "", fail: "ValueError: two lines", wait: "more than 1 s", end: "it ended or stopped the process",
    fill_memory: "MemoryError",
}  # fmt: skip


@pytest.mark.parametrize("read", ENDS)
def test_failures_of_a_reader_are_reported(monkeypatch: pytest.MonkeyPatch, read: Any) -> None:
    words = ENDS[read]
    monkeypatch.setattr(run, "SECONDS", 1)
    monkeypatch.setattr(run, "PATIENCE", 1)
    monkeypatch.setitem(READERS, "link", READERS["link"]._replace(read=read))
    first, second = run.run_limited("link", range(5, 7))
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
