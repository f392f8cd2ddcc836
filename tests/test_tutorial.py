"""The tutorial is run from its first line to its last, in an empty folder, as a reader would."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.app import app

DOCS = Path(__file__).resolve().parents[1] / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text("utf-8")


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """(name of the file that a block is, or empty; its language; its text), in order."""
    for found in re.finditer(r"(?:^`(\S+)`:\n\n)?^```(\w+)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        yield found[1] or "", found[2], found[3]


def words(text: str) -> str:
    """Text that stays when figures move: words, without numbers, bars and line breaks."""
    return " ".join(re.findall(r"[A-Za-z][A-Za-z./-]*", text))


def run(line: str) -> str:
    """The output of one command, whose exit code is that of its comment."""
    command, _, comment = line.partition("#")
    wanted = re.search(r"exit code (\d)", comment)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == (int(wanted[1]) if wanted else 0), f"{line}\n{result.output}"
    return result.output


@pytest.mark.slow
def test_every_command_and_every_excerpt(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    commands, output = 0, ""
    for name, language, text in blocks(TUTORIAL):
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, "utf-8")
        elif language == "sh":
            lines = [line for line in text.splitlines() if line.startswith("meshcast ")]
            commands += len(lines)
            output = "\n".join(map(run, lines))
        elif language == "python":
            exec(compile(text, "tutorial.md", "exec"), {})
            output = capsys.readouterr().out
        elif language == "text":
            for line in text.splitlines():
                assert words(line) in words(output), f"{line}\nis not in\n{output}"
    assert commands > 20
    made = {"timeline.png", "memory.png", "breakdown.png", "heatmap.png", "scaling.png", "step.json.gz"}
    assert made <= {path.name for path in tmp_path.rglob("*")}


def test_paths_named_by_the_pages_exist() -> None:
    for page in DOCS.glob("*.md"):
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            goal = (DOCS / path).resolve() if path else page
            assert goal.exists(), f"{page.name}: {target}"
            if anchor and goal.suffix == ".md":
                heads = re.findall(r"^#+ (.*)$", goal.read_text("utf-8"), re.MULTILINE)
                known = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
                assert anchor in known, f"{page.name}: {target}"
