"""Command lines that are read without typer: with the same values, or left to it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.cli.app import load_command
from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.experiments.cli.parameters import list_parameters
from meshcast.experiments.cli.plain import read_values
from tests.draws import drawn


def read_by_typer(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any] | None:
    """Returns the values of the parameters of a command that typer reads; None if it refuses the words, or helps."""
    read: list[dict[str, Any]] = []
    monkeypatch.setattr("meshcast.experiments.cli.parameters.run_command", lambda _, values: read.append(values))
    with suppress(SystemExit):
        load_command.__wrapped__(name)(words)
    return read[0] if read else None


def make_lines(name: str) -> list[list[str]]:
    """Returns words for a command: its arguments alone; each option with a word, without one and twice; one more
    argument; what nothing is called."""
    parameters = list_parameters(find_options(name))
    stated = [f"word{i}" for i, parameter in enumerate(parameters) if not parameter.flag.names]
    flags = [(flag, parameter.kind is bool) for parameter in parameters for flag in parameter.flag.names]
    lines = [stated, [*stated, "more"], [], [*stated, "--no-such-option"], [*stated, "--", "-x"], ["--help"]]
    for flag, is_switch in flags:
        once = [flag] if is_switch else [flag, "7"]
        lines += [[*once, *stated], [*stated, *once], [*stated, f"{flag}=7"], [*once, *once, *stated], [*stated, flag]]
        lines += [[*stated, flag, "-7"], [*stated, f"{flag}="]]
    return lines


@pytest.mark.parametrize("name", drawn(COMMANDS, keep=2))
def test_a_line_is_read_as_typer_reads_it_or_left_to_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in make_lines(name):
        read = read_values(name, words)
        assert read is None or read == read_by_typer(name, words, monkeypatch), words


def test_the_usual_lines_are_read() -> None:
    read = read_values("predict", ["job.yaml", "--json", "--set", "plan.tp=4", "--set=plan.pp=2", "--plot", "a.png"])
    assert read is not None
    assert (read["job"], read["as_json"], read["plot"]) == (Path("job.yaml"), True, "a.png")
    assert read["change"] == ["plan.tp=4", "plan.pp=2"]


@pytest.mark.parametrize("word", ["1", "007", "0", "1000000", "-1", "+1", "1_0", "1.0", "٣", "", " 1", "x", "9" * 5000])
def test_whole_numbers_are_read_as_typer_reads_them_or_left_to_it(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["grid.yaml", "--workers", word]
    read = read_values("sweep", words)
    assert (read is None) == (word not in ("1", "007", "1000000"))
    assert read is None or read == read_by_typer("sweep", words, monkeypatch)


@pytest.mark.parametrize("words", [["--help"], ["a", "b"], ["--set"], ["--set", "-x"], ["--json=1"], ["--jso"], [""]])
def test_other_lines_are_left_to_typer(words: list[str]) -> None:
    assert read_values("predict", words) is None
