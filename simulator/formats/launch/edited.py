"""Texts that are read in place of those of files that lie there, as these are to be edited."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_TEXTS: ContextVar[Mapping[Path, str] | None] = ContextVar("edited_texts", default=None)


@contextmanager
def reading_edited(texts: Mapping[Path, str]) -> Iterator[None]:
    """Reads these texts inside. texts: by the resolved paths of files."""
    token = _TEXTS.set(texts)
    try:
        yield
    finally:
        _TEXTS.reset(token)


def find_edited(path: Path) -> str | None:
    """Returns the text that is read in place of that of a file; None if it is read as it is."""
    texts = _TEXTS.get()
    return texts.get(path.resolve()) if texts else None
