"""What pages show of the program's output is what it prints, to the digit: every command is run as a reader would."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.excerpts import BLOCK, FRESH, Excerpt, follow_page, run_command, run_page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
TUTORIAL = (DOCS / "tutorial.md").read_text("utf-8")
SWEEPS = (DOCS / "sweeps.md").read_text("utf-8")
WHY = (DOCS / "why.md").read_text("utf-8")


LONG = (
    "meshcast why job.yaml",
    "meshcast predict experts.yaml --plot",
    "meshcast predict job.yaml --set noise",
    "meshcast validate published",
)
"""Commands that take seconds each: two thirds of the tutorial's time."""


@pytest.mark.parametrize("without", [LONG, pytest.param((), marks=pytest.mark.slow)], ids=["short", "all"])
def test_every_command_and_every_excerpt_of_the_tutorial(
    without: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(f"\n{line}" in TUTORIAL for line in LONG)
    assert follow_page(TUTORIAL, without=without) > (12 if without else 15)
    made = {"heatmap.png", "scaling.png"}
    if not without:
        made |= {"timeline.png", "memory.png", "breakdown.png", "step.json.gz"}
    assert made <= {path.name for path in tmp_path.rglob("*")}


def test_figures_in_the_words_of_the_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, _, text in (found.groups() for found in BLOCK.finditer(TUTORIAL)):
        if name == "job.yaml":
            Path(name).write_text(text, "utf-8")
    saved, recomputed = (
        json.loads(run_command(f"meshcast predict job.yaml --json --set plan.tp=1 --set plan.recompute={one}"))
        for one in ("none", "full")
    )
    (share,) = re.findall(r"the step then\s+takes (\d+) % longer", TUTORIAL)
    assert f"{recomputed['step_time_s'] / saved['step_time_s'] - 1:.0%}" == f"{share}%"


@pytest.mark.slow  # all 14 seconds of it
def test_the_sweep_of_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    (one,) = run_page(SWEEPS)
    assert not one.list_stale() and one.text.rstrip() == one.printed.rstrip(), FRESH


@pytest.mark.slow
def test_the_json_sample_of_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (command,) = re.findall(r"`(meshcast why examples/\S+ --json)`", WHY)
    (sample,) = re.findall(r"```json\n(.*?)```", WHY, re.DOTALL)
    check_sample(json.loads(sample, parse_float=str, parse_int=str), json.loads(run_command(command)), "answer")


def check_sample(shown: Any, answer: Any, where: str) -> None:
    """Holds a sample against an answer: numbers to the digits that it shows, of lists the entries with its words in
    their order, of long texts the beginning; what is empty stands for more."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            assert key in answer, f"{where}.{key}"
            check_sample(value, answer[key], f"{where}.{key}")
    elif isinstance(shown, list) and shown and isinstance(shown[0], dict):
        at = 0
        for entry in shown:
            names = {key: value for key, value in entry.items() if key in ("figure", "field")}
            names = names or {key: value for key, value in entry.items() if key == "value"}
            at = next(i for i in range(at, len(answer)) if all(answer[i][key] == names[key] for key in names)) + 1
            check_sample(entry, answer[at - 1], f"{where}[{names}]")
    elif isinstance(shown, list):
        assert not shown or len(shown) == len(answer), where
        for one, other in zip(shown, answer, strict=False):
            check_sample(one, other, where)
    elif isinstance(answer, float | int) and not isinstance(answer, bool):
        decimals = len(shown.partition(".")[2])
        assert shown == f"{answer:.{decimals}f}", f"{where}: {answer} is shown as {shown}"
    elif isinstance(shown, str):
        assert answer.startswith(shown.removesuffix("...")), where
    else:
        assert shown == answer, where


def test_a_stale_digit_is_found_and_refreshed() -> None:
    printed = "step       3.499 s    low 3.22\n\nstage 0  1.0\nstage 1  2.0\n 4  5\n"
    fresh = Excerpt("step       3.499 s    low 3.22\nstage 1  2.0\n 4  5\n", 0, printed)
    assert fresh.list_stale() == [] and fresh.refresh() == fresh.text
    stale = Excerpt("step       3.498 s    low 3.22\nstage 1  2.1\n 4  6\n", 0, printed)
    assert len(stale.list_stale()) == 3 and stale.refresh() == fresh.text
    assert Excerpt("stage 1  2.0\nstage 0  1.0\n", 0, printed).list_stale() == ["stage 0  1.0"]
    with pytest.raises(LookupError, match="memory"):
        Excerpt("memory 3\n", 0, printed).refresh()


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
