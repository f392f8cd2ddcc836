"""Reads text, CSV and JSON files, plain or gzipped. A file that cannot be read raises a PlanError."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

from meshcast.hardware.documents.input_file import (
    DATA,
    MAX_VALUES,
    CsvRow,
    SizeLimit,
    Unreadable,
    parse_csv,
    parse_json,
    read_text,
)
from meshcast.hardware.errors import PlanError

COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Escape sequences of terminals, such as colours."""

AHEAD = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:\s?|\[(?:rank|default)\d+\]:\s?|\d+:\s)+")
"""Prefixes of lines by launchers: mpirun's --tag-output, torchrun's --role, srun's --label."""

Plain = TypeVar("Plain")


def text(path: Path, remedy: str, limit: SizeLimit = DATA) -> str:
    """Reads the text of a file, decompressed if it is gzipped.

    remedy: advice of the error message.
    Raises PlanError for a file that cannot be read, holds no text or is larger than `limit`.
    """
    try:
        return read_text(path, limit)
    except Unreadable as error:
        raise error.error(PlanError, str(path), remedy) from None


def lines(path: Path, remedy: str) -> list[tuple[str, str]]:
    """Reads the lines of a file, each with its place (``file:line``), without colours and prefixes of launchers."""
    rows = text(path, remedy).split("\n")
    return [(f"{path}:{i}", AHEAD.sub("", COLOUR.sub("", row))) for i, row in enumerate(rows, 1)]


def csv_rows(path: Path, remedy: str) -> list[CsvRow]:
    """Reads the rows of a CSV file. Raises PlanError, with the line, for a file that is none."""
    try:
        return parse_csv(read_text(path, DATA))
    except Unreadable as error:
        raise error.error(PlanError, str(path), remedy) from None


def json_object(
    path: Path,
    remedy: str,
    limit: SizeLimit = DATA,
    constants: bool = False,
    repeated: bool = False,
    most: int = MAX_VALUES,
) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises PlanError, with the line, if it holds none.

    constants, repeated, most: see `parse_json`.
    """
    try:
        data = parse_json(text(path, remedy, limit), constants, repeated, most)
    except Unreadable as error:
        raise error.error(PlanError, str(path), remedy) from None
    if not isinstance(data, dict):
        raise PlanError(str(path), f"it holds {_kind(data)} where an object is expected", remedy)
    return data


def member(data: dict[str, Any], key: str, kind: type[Plain], where: str, remedy: str) -> Plain:
    """Returns ``data[key]``. Raises PlanError if it is not of the type `kind`."""
    value = data.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        rule = f"it is {_kind(value)} where {_WORDS.get(kind, kind.__name__)} is expected"
        raise PlanError(f"{where} {key}", rule, remedy)
    return value


_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def _kind(value: Any) -> str:
    return "missing" if value is None else _WORDS.get(type(value), type(value).__name__)
