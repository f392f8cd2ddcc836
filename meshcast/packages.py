"""Finds out whether a folder of the user hides one of meshcast's packages, whose names are common words."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("hardware", "simulator", "validation", "experiments")
"""The import packages of meshcast besides `meshcast` itself."""


HERE = Path(__file__).resolve().parents[1]
"""Folder in which meshcast's packages are."""


def check_packages(own: Path = HERE) -> None:
    """Raises ImportError if an import of one of `PACKAGES` finds another package than that of meshcast.

    own: the folder in which they should be.
    """
    for name in PACKAGES:
        found = _folder(name)
        if found is None:
            rule = f"meshcast's package {name!r} is missing in {own}"
            raise ImportError(f"{rule}. Install meshcast again: python -m pip install --force-reinstall meshcast")
        if found != own / name:
            rule = f"{found} hides meshcast's package {name!r}, which is in {own}"
            raise ImportError(f"{rule}. Start Python in another directory, or give yours another name")


def _folder(name: str) -> Path | None:
    """The folder, or the file, that an import of `name` finds."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) or find_spec(name)
    if spec is None:
        return None
    places = list(spec.submodule_search_locations or ()) or [spec.origin or ""]
    return Path(places[0]).resolve()
