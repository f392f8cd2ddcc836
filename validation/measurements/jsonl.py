"""Files with one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hardware.errors import PlanError

Line = tuple[str, dict[str, Any] | str]
"""Where it stands (``file:line``), and its object; for a line that is none, the reason."""

WANTED = "Write one JSON object a line"


def read_lines(path: Path) -> list[Line]:
    """The lines of a JSONL file; empty ones are passed over.

    Raises PlanError for a file that cannot be read.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise PlanError(
            "--data", f"cannot be read ({reason})", "Name a file with one JSON object a line", str(path)
        ) from None
    lines = ((f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), 1))
    return [(where, _object(where, line)) for where, line in lines if line.strip()]


def _object(where: str, line: str) -> dict[str, Any] | str:
    try:
        found = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"not valid JSON ({error})"
        return f"{where}: {reason}. {WANTED}"
    return found if isinstance(found, dict) else f"{where}: not an object. {WANTED}"


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
