"""The output in the README is the output of the program."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
EXAMPLE = "examples/llama3-70b-dgx-h100.yaml"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_job_is_the_example() -> None:
    assert (ROOT / EXAMPLE).read_text("utf-8") in blocks("yaml")


def test_the_page_is_the_output_of_the_command(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["predict", EXAMPLE])
    assert result.exit_code == 0
    assert [result.output] == blocks("text"), "`make docs-readme` puts it right"


def test_the_search_is_the_output_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (shown,) = blocks("console")
    (command,) = (one for one in blocks("sh") if one.startswith("meshcast search"))
    output = CliRunner().invoke(app, command.split()[1:]).output
    without_time = [re.sub(r"effort +[0-9.]+ s", "effort", one.rstrip("\n")) for one in (output, shown)]
    assert without_time[0] == without_time[1]


def test_the_python_example_runs() -> None:
    (example,) = [block for block in blocks("python") if "simulate(" in block]
    exec(compile(example, "README.md", "exec"), {})


def test_every_path_it_names_exists() -> None:
    named = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert len(named) >= 4
    assert all((ROOT / path).exists() for path in named)
