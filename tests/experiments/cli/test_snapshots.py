"""What commands print: a file of `tests/snapshots` a command, of command lines, each with what follows it.

`make snapshots` writes them anew; read the difference before it is committed.
"""

from __future__ import annotations

import shlex
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.experiments.cli.samples import COMMAND_FILES, ROOT, run

SNAPSHOTS = sorted((ROOT / "tests" / "snapshots").glob("*.txt"))


def print_again(snapshot: Path) -> str:
    """Returns a snapshot as it comes out now, its commands run one after the other in one folder."""
    text = ""
    with TemporaryDirectory() as folder, chdir(folder):
        for name, content in COMMAND_FILES.items():
            Path(name).write_text(content, "utf-8")
        for line in snapshot.read_text("utf-8").splitlines():
            if line.startswith("$ meshcast "):
                printed = run(*shlex.split(line)[2:]).output.splitlines()
                text += "\n".join([line, *(row.rstrip() for row in printed)]) + "\n"
    return text


@pytest.mark.parametrize("snapshot", SNAPSHOTS, ids=[path.stem for path in SNAPSHOTS])
def test_a_command_prints_what_it_printed(snapshot: Path) -> None:
    assert print_again(snapshot) == snapshot.read_text("utf-8"), "make snapshots"


if __name__ == "__main__":
    for path in SNAPSHOTS:
        path.write_text(print_again(path), "utf-8")
