"""The public package as mypy sees it from a user's script."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RIGHT = ROOT / "tests" / "data" / "user_script.py"

WRONG = """\
from meshcast import simulat, simulate

words: str = simulate("job.yaml").step_time
simulate(3)
simulate("job.yaml").timelines()
"""
"""A script with a mistake in each line."""


def check_scripts(folder: Path, *options: str, path: str = "") -> dict[str, list[tuple[int, str]]]:
    """Errors of mypy, (line, kind), by script. path: folders where imports are looked for besides the environment."""
    shutil.copy(RIGHT, folder / "right.py")
    (folder / "wrong.py").write_text(WRONG, "utf-8")
    # Nobody installs pandas-stubs for this.
    command = [sys.executable, "-m", "mypy", "--strict", "--disable-error-code=import-untyped", *options]
    done = subprocess.run(
        [*command, "right.py", "wrong.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found: dict[str, list[tuple[int, str]]] = {}
    # Unlike those of an installed package, errors in files of the checkout are told, too: they are left out.
    for file, line, kind in re.findall(r"^(\S+?):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE):
        if not Path(file).is_absolute():
            found.setdefault(file, []).append((int(line), kind))
    return found


EXPECTED = {"wrong.py": [(1, "attr-defined"), (3, "assignment"), (4, "arg-type"), (5, "attr-defined")]}


@pytest.mark.slow
def test_mypy_checks_scripts_of_users(tmp_path: Path) -> None:
    assert check_scripts(tmp_path, path=str(ROOT)) == EXPECTED
