"""Fingerprint of a sweep: a hash of everything that its rows depend on, by kind, so that a change can be named.

The version of meshcast is not part of it: an editable installation changes without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import hardware
import simulator
from experiments.sweeps.grid import Sweep
from hardware.documents.input_file import DATA as LIMIT
from hardware.documents.input_file import Unreadable, read_bytes
from hardware.errors import MeshcastError
from hardware.load import FILES, read_yaml

PACKAGES = {
    "hardware": Path(hardware.__file__).parent,
    "simulator": Path(simulator.__file__).parent,
    "sweeps": Path(__file__).parent,
}
"""Folders of the code and of the data that forecasts are made with."""

DATA = {
    "hardware/catalog": "hardware catalog",
    "simulator/costs/calibration": "calibration",
    "simulator/job/frameworks": "framework profiles",
    "simulator/models/presets": "model presets",
}
"""Kinds of the YAML files in these folders; every Python file is code."""

Fingerprint = dict[str, str]
"""SHA-256 by kind of input: code, the kinds of `DATA`, job, points, and ``file NAME`` of each file of the job."""


def fingerprint(sweep: Sweep, chunk: int) -> Fingerprint:
    """Hashes everything that the rows of a sweep depend on, by kind. chunk: points that are stored together."""
    points = [chunk, sweep.axes, [constraint.text for constraint in sweep.where]]
    files = dict(_read_named_files([sweep.job, sweep.axes], sweep.base))
    return {
        **hash_installation(),
        "job": _hash(json.dumps(sweep.job).encode()),
        "points": _hash(json.dumps(points).encode()),
        **{f"file {name}": _hash(files[name]) for name in sorted(files)},
    }


def changed_inputs(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """Kinds of input whose hashes differ, or that only one of two fingerprints has."""
    return [kind for kind in {**current, **stored} if stored.get(kind) != current.get(kind)]


def parse_fingerprint(data: Any) -> Fingerprint:
    """Checks a fingerprint read from a file; one of unknown form, as of earlier versions, is ``{"version": ...}``."""
    if isinstance(data, Mapping) and data and all(isinstance(value, str) for value in data.values()):
        return {str(kind): value for kind, value in data.items()}
    return {"version": str(data)}


@cache
def hash_installation() -> Fingerprint:
    """Hashes the code and the data files of meshcast, by kind: once per process, some hundredths of a second."""
    found = {kind: hashlib.sha256() for kind in ("code", *DATA.values())}
    for name, package in PACKAGES.items():
        for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", *FILES)):
            folder = f"{name}/{path.relative_to(package).as_posix()}"
            kinds = (kind for start, kind in DATA.items() if folder.startswith(f"{start}/") and path.suffix in FILES)
            kind, content = next(kinds, "code"), path.read_bytes()
            found[kind].update(f"{folder} {len(content)}\n".encode() + content)
    return {kind: each.hexdigest() for kind, each in found.items()}


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_named_files(data: Any, base: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files that strings in `data` name, and of those that strings in these files name."""
    left, seen = [(word, base) for word in sorted(set(_strings_in(data)))], set[str]()
    while left:
        word, folder = left.pop()
        path = None if word in seen else _find_file(word, folder)
        seen.add(word)
        if path is None:
            continue
        with suppress(Unreadable):  # every point that needs the file is answered with the mistake
            yield word, read_bytes(path, LIMIT)
        if path.suffix in FILES:
            with suppress(MeshcastError):  # every point that needs the file is answered with the mistake
                left += [(inner, path.parent) for inner in _strings_in(read_yaml(path).data)]


def _find_file(word: str, folder: Path) -> Path | None:
    """The file that a string names: from the folder of the file that holds the string, else from the current folder."""
    try:
        paths = [start / Path(word).expanduser() for start in (folder, Path())]
        found = [path / "config.json" if path.is_dir() else path for path in paths]
        return next((path for path in found if path.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # too long for a file system, a zero byte, an unknown ~user
        return None


def _strings_in(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list | tuple):
        for inner in data.values() if isinstance(data, dict) else data:
            yield from _strings_in(inner)
