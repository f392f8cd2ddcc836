"""Files that lie beside a script, or that it writes."""

from __future__ import annotations

import posixpath
from pathlib import Path

from meshcast.simulator.formats.launch.bash.grammar import LARGEST
from meshcast.simulator.formats.launch.bash.state import Shell
from meshcast.simulator.formats.launch.bash.values import read_as_bash
from meshcast.simulator.formats.launch.edited import find_edited

LONGEST_PATH = 1_000
"""Letters of a path that is looked for."""

STEPS_UP = 2
"""Folders above the script's that a path with ``..`` may lead to."""

SCRIPT_SUFFIXES = (".sh", ".bash", ".env", ".slurm", ".sbatch")

FOLDERS_ABOVE = 4
"""Folders above the script's that a path may start from: examples are started from the root of their repository."""


def find_beside(folder: Path | None, path: str) -> Path | None:
    """Returns the file that a path of a script names, in the folder of the script or near it; None without.

    Relative paths start from the folder of the script, or from a folder that holds it; a path that leads up may name a
    script within two folders above. All others name none.
    """
    path = posixpath.normpath(path)
    leads_up = path.startswith("..")
    if folder is None or path.startswith(("/", "~", "$")) or "\0" in path or len(path) > LONGEST_PATH:
        return None
    try:
        start = folder.resolve()
        above = [start, *start.parents]
        for base in [start] if leads_up else above[: FOLDERS_ABOVE + 1]:
            file = (base / path).resolve()
            root = above[: STEPS_UP + 1][-1] if leads_up else base
            inside = file.is_relative_to(root) and (not leads_up or file.suffix in SCRIPT_SUFFIXES)
            if inside and file.is_file() and file.stat().st_size <= LARGEST:
                return file
    except (OSError, RuntimeError, ValueError):
        return None
    return None


def read_beside(folder: Path | None, path: str) -> str | None:
    """Returns the text of a file beside a script; None if there is none."""
    file = find_beside(folder, path)
    if file is None:
        return None
    text = find_edited(file)
    try:
        return text if text is not None else file.read_text("utf-8", "replace")
    except OSError:
        return None


def resolve(shell: Shell, path: str) -> str:
    """Returns a path as it is from the folder in which the script was started."""
    variable = shell.variables.get("PWD")
    here = read_as_bash(variable.elements.get(0, ())) if variable is not None else "."
    return posixpath.normpath(posixpath.join(here, path))


def file_exists(shell: Shell, path: str) -> bool:
    """Returns whether a script has written a file, or a file lies beside it."""
    return path in shell.files or find_beside(shell.folder, resolve(shell, path)) is not None


def read_file(shell: Shell, path: str) -> str | None:
    """Returns the text of a file that a script has written or that lies beside it; None if there is none."""
    if path in shell.files:
        return shell.files[path][0]
    text = read_beside(shell.folder, resolve(shell, path))
    return text if text is not None else read_beside(shell.folder, path)
