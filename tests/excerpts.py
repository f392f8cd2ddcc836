"""Runs the commands of a page of docs, and writes what they print into its excerpts:
``python -m tests.excerpts docs/tutorial.md`` (``make docs-excerpts``).

On such a page a block that is preceded by a file's name is written into that file, ``sh`` blocks are run line by line
(``meshcast`` alone), ``python`` blocks too, and ``text`` blocks are excerpts of what the last one printed: some of its
lines, in their order.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from meshcast.experiments.cli.app import app

BLOCK = re.compile(r"(?:^`(\S+)`:\n\n)?^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A block of a page: the name of the file that it is, or nothing; its language; its text."""


EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

END = "<!-- what follows is not run -->"
"""Ends the part of a page that is run."""

FRESH = "`make docs-excerpts` puts it right"

Run = Callable[[str], str]
"""Runs a line or a script, and returns what it prints."""


class Excerpt(NamedTuple):
    """A block that shows a part of what commands print.

    text: of the block. start: its place on the page. printed: all that the commands print.
    """

    text: str
    start: int
    printed: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def list_stale(self) -> list[str]:
        """The lines that are not printed as they stand, in their order."""
        printed, at, stale = [line.rstrip() for line in self.printed.splitlines()], 0, []
        for line in self.lines:
            if line in printed[at:]:
                at = printed.index(line, at) + 1
            else:
                stale.append(line)
        return stale

    def refresh(self) -> str:
        """The excerpt with the lines that are printed now: of several with the same words the one most
        like it. Raises LookupError if there is none."""
        printed, at, found = [line.rstrip() for line in self.printed.splitlines()], 0, []
        for line in self.lines:
            near = [i for i in range(at, len(printed)) if _key(printed[i]) == _key(line)]
            if not near:
                raise LookupError(f"nothing like this line is printed: {line}")
            at = max(near, key=lambda i: (difflib.SequenceMatcher(None, printed[i], line).ratio(), -i)) + 1
            found.append(printed[at - 1])
        return "".join(f"{line}\n" for line in found)


def _key(line: str) -> tuple[tuple[str, ...], int]:
    """What stays when figures move: words, and for lines without words the number of columns."""
    words = tuple(re.findall(r"[A-Za-z][A-Za-z./-]*", line))
    return words, 0 if words else len(line.split())


def run_page(
    page: str, command: Run | None = None, python: Run | None = None, without: Sequence[str] = ()
) -> Iterator[Excerpt]:
    """Runs the blocks of a page in the current folder, and yields its excerpts.

    command, python: run a line of the shell, or a script, and return what it prints; by default in this process.
    without: lines of the shell that begin so are not run, and their excerpts are left out.
    Raises AssertionError for a command that ends with another exit code than its comment says (``# exit code 2``).
    """
    printed, left_out = "", False
    for found in BLOCK.finditer(page.partition(END)[0]):
        name, language, text = found[1], found[2], found[3]
        if name:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text, "utf-8")
        elif language == "sh":
            lines = [line for line in text.splitlines() if line.startswith("meshcast ")]
            kept = [line for line in lines if not line.startswith(tuple(without))]
            printed, left_out = "\n".join(map(command or run_command, kept)), len(kept) < len(lines)
        elif language == "python":
            printed, left_out = (python or run_python)(text), False
        elif language == "text" and not left_out:
            yield Excerpt(text, found.start(3), printed)


def follow_page(page: str, command: Run | None = None, python: Run | None = None, without: Sequence[str] = ()) -> int:
    """Runs a page like `run_page` and holds its excerpts against what is printed; returns their number."""
    excerpts = [*run_page(page, command, python, without)]
    for one in excerpts:
        assert not one.list_stale(), f"{one.list_stale()}\nis not in\n{one.printed}\n{FRESH}"
    return len(excerpts)


def split_command(line: str) -> tuple[list[str], int]:
    """Words of a command behind `meshcast`, and the exit code of its comment."""
    command, _, comment = line.partition("#")
    wanted = re.search(r"exit code (\d)", comment)
    return shlex.split(command)[1:], int(wanted[1]) if wanted else 0


def run_command(line: str) -> str:
    """The output of one command, whose exit code is that of its comment."""
    arguments, wanted = split_command(line)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == wanted, f"{line}\n{result.output}"
    return result.output


def run_python(text: str) -> str:
    """The output of a script."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "page", "exec"), {})
    return out.getvalue()


def refresh_page(page: str) -> str:
    """A page with fresh excerpts."""
    for one in reversed([*run_page(page)]):
        page = page[: one.start] + one.refresh() + page[one.start + len(one.text) :]
    return page


def main(paths: Sequence[str]) -> None:
    """Refreshes the excerpts of pages, each in a folder with the examples alone."""
    for path in map(Path, paths):
        page, here = path.read_text("utf-8"), Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.symlink(EXAMPLES, Path(folder) / "examples")
            os.chdir(folder)
            try:
                fresh = refresh_page(page)
            finally:
                os.chdir(here)
        path.write_text(fresh, "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
