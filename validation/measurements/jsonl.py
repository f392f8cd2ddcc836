"""JSONL files: a JSON object on each line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshcast.hardware.documents.input_file import DATA, Unreadable, parse_json, read_text
from meshcast.hardware.errors import PlanError

Line = tuple[str, dict[str, Any] | str]
"""Place of a line (``file:line``) and its object, or the reason why it is not an object."""

REMEDY = "Write one JSON object on each line"


def read_lines(path: Path) -> list[Line]:
    """Returns the lines of a JSONL file without the empty ones. Raises PlanError for a file that cannot be read."""
    try:
        text = read_text(path, DATA)
    except Unreadable as error:
        remedy = "Name a file with one JSON object on each line"
        raise error.error(PlanError, "--data", remedy, str(path)) from None
    lines = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1))
    return [(where, _parse_object(where, line)) for where, line in lines if line.strip()]


def _parse_object(where: str, line: str) -> dict[str, Any] | str:
    try:
        parsed = parse_json(line)
    except Unreadable as error:
        return f"{where}: {error.rule}. {error.remedy or REMEDY}"
    return parsed if isinstance(parsed, dict) else f"{where}: not an object. {REMEDY}"
