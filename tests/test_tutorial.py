"""The tutorial is run from its first line to its last, in an empty folder, as a reader would."""

import re
import shlex
from collections.abc import Callable, Iterator
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


def split_command(line: str) -> tuple[list[str], int]:
    """Words of a command behind `meshcast`, and the exit code of its comment."""
    command, _, comment = line.partition("#")
    wanted = re.search(r"exit code (\d)", comment)
    return shlex.split(command)[1:], int(wanted[1]) if wanted else 0


def run(line: str) -> str:
    """The output of one command, whose exit code is that of its comment."""
    arguments, wanted = split_command(line)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == wanted, f"{line}\n{result.output}"
    return result.output


def follow_tutorial(run_command: Callable[[str], str], run_python: Callable[[str], str]) -> None:
    """Does all of the tutorial in the working directory, and compares every excerpt.

    run_command, run_python: run a line of the shell, or a script, and return the output.
    """
    commands, output = 0, ""
    for name, language, text in blocks(TUTORIAL):
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, "utf-8")
        elif language == "sh":
            lines = [line for line in text.splitlines() if line.startswith("meshcast ")]
            commands += len(lines)
            output = "\n".join(map(run_command, lines))
        elif language == "python":
            output = run_python(text)
        elif language == "text":
            for line in text.splitlines():
                assert words(line) in words(output), f"{line}\nis not in\n{output}"
    assert commands > 20
    made = {"timeline.png", "memory.png", "breakdown.png", "heatmap.png", "scaling.png", "step.json.gz"}
    assert made <= {path.name for path in Path().rglob("*")}


@pytest.mark.slow
def test_every_command_and_every_excerpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def run_python(text: str) -> str:
        exec(compile(text, "tutorial.md", "exec"), {})
        return capsys.readouterr().out

    follow_tutorial(run, run_python)


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
