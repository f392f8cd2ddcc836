"""Reads YAML files that ship with meshcast. Parsing them takes a tenth of the time of a forecast, so what was parsed is
kept as Python keeps compiled modules: in ``__pycache__`` beside the file, unless that folder cannot be written to or
PYTHONDONTWRITEBYTECODE is set. It counts for the same text, read by the same reader.
"""

from __future__ import annotations

import marshal
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshcast.hardware.documents import document
from meshcast.hardware.documents.document import Document, read_yaml
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import CatalogError, MeshcastError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def read_shipped(file: Traversable, where: str = "", error: type[MeshcastError] = CatalogError) -> Document:
    """Returns the YAML document in a file of meshcast, as `read_yaml` does."""
    if not isinstance(file, Path):  # in a zip file
        return read_yaml(file, where, error)
    text = None
    with suppress(OSError, ValueError):
        text = file.read_text("utf-8")
    if text is None:
        return read_yaml(file, where, error)
    kept = Path(cache_from_source(str(file))).with_suffix(".parsed")
    data = keep_data(kept, (_identify_reader(), text), lambda: read_yaml(file, where, error).data)
    return Document(data, text, where or str(file))


def keep_data(kept: Path, key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """Returns the plain data that `compute` returns, kept in a file as long as the key is the same."""
    with suppress(OSError, ValueError, EOFError, TypeError):
        known, data = marshal.loads(kept.read_bytes())
        if known == key:
            return data
    data = compute()
    if not sys.dont_write_bytecode:
        with suppress(OSError, ValueError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_file(kept, marshal.dumps((key, data)))
    return data


@cache
def _identify_reader() -> int:
    """Returns a number that changes with the source of the reader."""
    return zlib.crc32(Path(document.__file__).read_bytes())
