"""Files that lie beside a script, or that it writes."""

from __future__ import annotations

import posixpath
from pathlib import Path

from meshcast.simulator.formats.launch.bash.grammar import LARGEST
from meshcast.simulator.formats.launch.bash.state import Shell
from meshcast.simulator.formats.launch.bash.values import read_as_bash

FOLDERS_ABOVE = 4
"""Folders above the script's that a path may start from: examples are started from the root of their repository."""


def find_beside(folder: Path | None, path: str) -> Path | None:
    """Returns the file that a path of a script names, in the folder of the script or one that holds it; None without.

    Absolute paths, and those that lead out of the folder that they start from, name none.
    """
    path = posixpath.normpath(path)
    if folder is None or path.startswith(("/", "..", "~", "$")) or "\0" in path or len(path) > LARGEST // 1000:
        return None
    try:
        start = folder.resolve()
        for base in (start, *start.parents[:FOLDERS_ABOVE]):
            file = (base / path).resolve()
            if file.is_relative_to(base) and file.is_file() and file.stat().st_size <= LARGEST:
                return file
    except (OSError, RuntimeError, ValueError):
        return None
    return None


def read_beside(folder: Path | None, path: str) -> str | None:
    """Returns the text of a file beside a script; None if there is none."""
    file = find_beside(folder, path)
    try:
        return file.read_text("utf-8", "replace") if file is not None else None
    except OSError:
        return None


def resolve(shell: Shell, path: str) -> str:
    """Returns a path as it is from the folder in which the script was started."""
    variable = shell.variables.get("PWD")
    here = read_as_bash(variable.elements.get(0, ())) if variable is not None else "."
    return posixpath.normpath(posixpath.join(here, path))


def file_exists(shell: Shell, path: str) -> bool:
    """Returns whether a script has written a file, or one lies beside it."""
    return path in shell.files or find_beside(shell.folder, resolve(shell, path)) is not None


def read_file(shell: Shell, path: str) -> str | None:
    """Returns the text of a file that a script has written or that lies beside it; None if there is none."""
    if path in shell.files:
        return shell.files[path][0]
    text = read_beside(shell.folder, resolve(shell, path))
    return text if text is not None else read_beside(shell.folder, path)
