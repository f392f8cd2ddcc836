"""JSONL files: one JSON object on each line."""

from __future__ import annotations

import json
from math import isinf
from pathlib import Path
from typing import Any

from hardware.errors import PlanError

Line = tuple[str, dict[str, Any] | str]
"""Place of a line (``file:line``) and its object, or the reason why it is not an object."""

REMEDY = "Write one JSON object on each line"


def read_lines(path: Path) -> list[Line]:
    """Lines of a JSONL file without the empty ones. Raises PlanError for a file that cannot be read."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise PlanError(
            "--data", f"cannot be read ({reason})", "Name a file with one JSON object on each line", str(path)
        ) from None
    lines = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1))
    return [(where, _parse_object(where, line)) for where, line in lines if line.strip()]


def _parse_object(where: str, line: str) -> dict[str, Any] | str:
    try:
        found = json.loads(line, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON ({error})"
        return f"{where}: {reason}. {REMEDY}"
    return found if isinstance(found, dict) else f"{where}: not an object. {REMEDY}"


def _refuse_constant(name: str) -> None:
    """Rejects NaN and Infinity, which Python's parser would accept."""
    raise ValueError(f"{name} is not a JSON number")


def _parse_finite(digits: str) -> float:
    """Rejects numbers like 1e400, which Python's parser would read as infinity."""
    number = float(digits)
    if isinf(number):
        raise ValueError(f"{digits} is too large for a number of 64 bits")
    return number
