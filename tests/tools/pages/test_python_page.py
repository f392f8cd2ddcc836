"""docs/python.md is executed again: its cells give the outputs that stand in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.pages.python_page import execute_page, run_cell

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGE = (DOCS / "python.md").read_text("utf-8")


@pytest.mark.slow
def test_the_outputs_are_those_of_the_cells(tmp_path: Path) -> None:
    assert execute_page(PAGE, tmp_path) == PAGE, "make docs-python writes them"
    shown = set(re.findall(r"\]\(images/python-(\S+)\)", PAGE))
    assert shown == {path.name for path in tmp_path.iterdir()}
    assert all((DOCS / "images" / f"python-{name}").exists() for name in shown)


def test_a_cell_prints_and_shows_its_last_value() -> None:
    names: dict[str, object] = {}
    assert run_cell("x = 2\nprint('two  ')\nx + 1\n", names) == "two\n3\n"
    assert run_cell("x += 1\nNone\n", names) == "" and names["x"] == 3
    with pytest.raises(ZeroDivisionError):
        run_cell("1 / 0\n", names)


def test_outputs_are_written_below_their_cells(tmp_path: Path) -> None:
    page = "text\n\n```python\n1 + 1\n```\n\n```text\n3\n```\n\nmore\n\n```python\nx = 1\n```\n"
    right = page.replace("```text\n3", "```text\n2")
    assert execute_page(page, tmp_path) == right == execute_page(right, tmp_path)
    assert execute_page(page.replace("\n```text\n3\n```\n", ""), tmp_path) == right
