"""Launch files of training programs: their settings become a job, and a job becomes their settings.

Each program is a module with a table of rows (a setting, the key of a job, the conversion), used in both directions.
Conversions need the same knowledge as the short form of a plan: the names of schemes, and their defaults.
"""

import re
from pathlib import Path

LAUNCH_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", ".args", ".toml", ".py")
"""Endings of launch files that are no YAML or JSON: scripts, lists of arguments, TOML, Python."""

HEAD = 4096
"""Letters at the beginning of a file that tell a manifest."""


def is_workload_manifest(path: Path) -> bool:
    """Returns whether a file is a manifest of Kubernetes, which may hold several documents."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        return False
    try:
        if not path.is_file():  # a pipe would be waited for
            return False
        with path.open(encoding="utf-8", errors="replace") as file:
            return is_manifest_text(file.read(HEAD))
    except OSError:  # it may not be read: whoever reads the whole file says so
        return False


def is_manifest_text(text: str) -> bool:
    """Returns whether a text begins as a manifest of Kubernetes does."""
    return all(re.search(rf"^{key}:\s", text[:HEAD], re.MULTILINE) for key in ("apiVersion", "kind"))
