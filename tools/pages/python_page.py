"""Executes docs/python.md like a notebook and writes the outputs of its cells (``make docs-python``):
``python -m tools.pages.python_page docs/python.md``.

A block of Python is a cell. All cells share their names and run in an empty folder. What a cell prints, and the
``repr`` of its last line if that is an expression, stands in a block of text below it. Pictures that a cell saves there
are copied to ``images/python-NAME``.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshcast.hardware.documents.output_file import write_file

CELL = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n.*?^```\n)?", re.DOTALL | re.MULTILINE)
"""A cell and the output below it."""


def execute_page(text: str, folder: Path) -> str:
    """Returns the page with the outputs of its cells, which run in `folder`. An exception of a cell is raised."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(match: re.Match[str]) -> str:
        printed = run_cell(match[1], names)
        return f"```python\n{match[1]}```\n" + (f"\n```text\n{printed}```\n" if printed else "")

    with _working_in(folder):
        return CELL.sub(run, text)


def run_cell(code: str, names: dict[str, Any]) -> str:
    """Returns what a cell prints, and its last value; without spaces at the ends of lines."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


@contextlib.contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def write_page(page: Path) -> None:
    """Executes a page and writes it, and the pictures of its cells."""
    with tempfile.TemporaryDirectory() as folder:
        write_file(page, execute_page(page.read_text("utf-8"), Path(folder)))
        for picture in Path(folder).glob("*.png"):
            write_file(page.parent / "images" / f"python-{picture.name}", picture.read_bytes())


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
