"""Fingerprint of a sweep: a hash of everything that its rows depend on, by kind, so that a change can be named.

The version of meshcast is not part of it: an editable installation changes without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from meshcast import hardware, simulator
from meshcast.experiments.sweeps.grid import Sweep
from meshcast.hardware.documents.import_time import IMPORTED_NS
from meshcast.hardware.documents.input_file import DATA as LIMIT
from meshcast.hardware.documents.input_file import Unreadable, read_bytes
from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.load import FILES, read_yaml
from meshcast.hardware.plugins import list_plugin_files
from meshcast.simulator.batch.loops.compiled import HAS_COMPILER

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

MANY = 256
"""Points from which on plain plans are forecast by compiled loops, where numba is there: compiling takes some ten
seconds once for an installation. Their figures differ from those of single forecasts by rounding."""

Fingerprint = dict[str, str]
"""SHA-256 by kind of input: code, the kinds of `DATA`, plug-ins, job, points, ``file NAME`` of each file of the job."""

Stats = dict[Path, tuple[int, int, int] | None]
"""Inode, size and time of change [ns] of files; None of a file that is gone."""


class SweepInputs:
    """Everything that the rows of a sweep depend on.

    fingerprint: hashes by kind; of the installation as it was when this process loaded it, which a later change of its
        files does not reach.
    """

    def __init__(self, sweep: Sweep, chunk: int) -> None:
        """chunk: points that are stored together."""
        self._sweep, self._chunk = sweep, chunk
        self._named = stat_named_files([sweep.job, sweep.axes], sweep.base)
        self.fingerprint = fingerprint(sweep, chunk)

    def find_changes(self) -> list[str]:
        """Returns kinds of input that differ on disk from those that this process has, or may have, loaded."""
        installed, _ = _read_installation()
        late = {_kind_of(path) for path, stat in installed.items() if stat is not None and stat[2] > IMPORTED_NS}
        if not late and _stat_files(installed) == installed and _stat_files(self._named) == self._named:
            return []
        current = fingerprint(self._sweep, self._chunk, _hash_installation())
        return [kind for kind in current if kind in late or self.fingerprint.get(kind) != current[kind]]


def fingerprint(sweep: Sweep, chunk: int, installation: Fingerprint | None = None) -> Fingerprint:
    """Hashes everything that the rows of a sweep depend on, by kind. chunk: points that are stored together."""
    points = [chunk, sweep.axes, [constraint.text for constraint in sweep.where]]
    files = dict[str, str]()
    for name, path in _find_named_files([sweep.job, sweep.axes], sweep.base):
        with suppress(Unreadable):  # every point that needs the file is answered with the mistake
            files[name] = _hash(read_bytes(path, LIMIT))
    return {
        **(installation or hash_installation()),
        **_hash_plugins(),
        "job": _hash(json.dumps(sweep.job).encode()),
        "points": _hash(json.dumps(points).encode()),
        **({"loops": str(HAS_COMPILER)} if sweep.points >= MANY else {}),
        **{f"file {name}": files[name] for name in sorted(files)},
    }


def identify_job(job: SomeFields, base: Path) -> str:
    """Returns a hash of everything that the forecasts of a job depend on. base: folder of relative paths in it."""
    files = list[str]()
    for name, path in _find_named_files(job, base):
        with suppress(Unreadable):
            files.append(f"{name} {_hash(read_bytes(path, LIMIT))}")
    return _hash(json.dumps([hash_installation() | _hash_plugins(), job, sorted(files)], sort_keys=True).encode())


def stat_named_files(data: Any, base: Path) -> Stats:
    """Returns the state of the files that strings of plain data name, and of those that these files name. base: folder
    of relative paths."""
    return _stat_files(path for _, path in _find_named_files(data, base))


def changed_inputs(stored: Fingerprint, current: Fingerprint) -> list[str]:
    """Returns kinds of input whose hashes differ, or that a single fingerprint has."""
    return [kind for kind in {**current, **stored} if stored.get(kind) != current.get(kind)]


def parse_fingerprint(data: Any) -> Fingerprint:
    """Checks a fingerprint read from a file; of unknown form, as of earlier versions, it is ``{"version": ...}``."""
    if isinstance(data, Mapping) and data and all(isinstance(value, str) for value in data.values()):
        return {str(kind): value for kind, value in data.items()}
    return {"version": str(data)}


def hash_installation() -> Fingerprint:
    """Hashes the code and the data files of meshcast, by kind: once per process, some hundredths of a second."""
    return _read_installation()[1]


def _hash_plugins() -> Fingerprint:
    """Hashes the files of plug-ins, if there are some."""
    files = [f"{name} {_hash(path.read_bytes())}" for name, path in list_plugin_files()]
    return {"plug-ins": _hash("\n".join(files).encode())} if files else {}


@cache
def _read_installation() -> tuple[Stats, Fingerprint]:
    stats = _stat_files(_list_installation())
    return stats, _hash_installation()


def _hash_installation() -> Fingerprint:
    hashes = {kind: hashlib.sha256() for kind in ("code", *DATA.values())}
    for path in _list_installation():
        content = path.read_bytes()
        hashes[_kind_of(path)].update(f"{_name_of(path)} {len(content)}\n".encode() + content)
    return {kind: each.hexdigest() for kind, each in hashes.items()}


def _list_installation() -> list[Path]:
    folders = PACKAGES.values()
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", *FILES)]


def _name_of(path: Path) -> str:
    """Returns the name of a file of the installation, wherever that is."""
    folders = ((name, folder) for name, folder in PACKAGES.items() if path.is_relative_to(folder))
    name, folder = next(folders)
    return f"{name}/{path.relative_to(folder).as_posix()}"


def _kind_of(path: Path) -> str:
    name = _name_of(path)
    kinds = (kind for start, kind in DATA.items() if name.startswith(f"{start}/") and path.suffix in FILES)
    return next(kinds, "code")


def _stat_files(paths: Iterable[Path]) -> Stats:
    stats: Stats = {}
    for path in paths:
        try:
            stat = path.stat()
            stats[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
        except OSError:
            stats[path] = None
    return stats


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _find_named_files(data: Any, base: Path) -> Iterator[tuple[str, Path]]:
    """Yields names and paths of the files that strings of plain data name, and of those that these files name."""
    left = [(word, base) for word in sorted(set(_strings_in(data)))]
    seen = set[str]()
    while left:
        word, folder = left.pop()
        path = None if word in seen else _find_file(word, folder)
        seen.add(word)
        if path is None:
            continue
        yield word, path
        if path.suffix in FILES:
            with suppress(MeshcastError):  # every point that needs the file is answered with the mistake
                left += [(inner, path.parent) for inner in _strings_in(read_yaml(path).data)]


def _find_file(word: str, folder: Path) -> Path | None:
    """Returns the file that a string names, from `folder`, that of the file with the string, or the current folder."""
    try:
        paths = [start / Path(word).expanduser() for start in (folder, Path())]
        candidates = [path / "config.json" if path.is_dir() else path for path in paths]
        return next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError, RuntimeError):  # too long for a file system, a zero byte, an unknown ~user
        return None


def _strings_in(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list | tuple):
        for inner in data.values() if isinstance(data, dict) else data:
            yield from _strings_in(inner)
