"""The version of meshcast that is at work, and the commit of its source. Imports nothing heavy."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

HERE = Path(str(sys.modules["meshcast"].__file__)).resolve().parents[1]
"""Folder in which the package meshcast is: in a checkout the root of the repository."""


@cache
def product_version() -> str:
    """Returns the version of the installed distribution, by the name of the folder with its metadata: to read them,
    ``importlib.metadata`` imports parsers of e-mail and sockets."""
    for place in map(Path, sys.path):
        for folder in place.glob("meshcast-*.dist-info"):
            return folder.stem.partition("-")[2]
    return "0+unknown"


@cache
def find_commit(here: Path = HERE) -> str:
    """Returns the commit of meshcast's source, 40 digits, with ``-dirty`` if files differ from it.

    Of a git checkout that of HEAD, of a wheel that which it was built of (`setup.py`); otherwise the value of the
    environment variable MESHCAST_COMMIT, or "".
    """
    # An environment may lie inside the checkout of another project, whose commit says nothing.
    if (here / ".git").exists():
        command = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        import subprocess  # few answers state the commit

        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return os.environ.get("MESHCAST_COMMIT", "")
    built = here / "meshcast" / "commit.txt"
    return built.read_text("utf-8").strip() if built.is_file() else os.environ.get("MESHCAST_COMMIT", "")


def describe_version() -> str:
    """
    >>> describe_version().split()[0] == product_version()
    True
    """
    digits, _, dirty = find_commit().partition("-")
    commit = digits[:12] + (f"-{dirty}" if dirty else "")
    return product_version() + (f" (commit {commit})" if commit else "")
