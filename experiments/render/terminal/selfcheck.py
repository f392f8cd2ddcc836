"""The page of ``meshcast check``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Table, TableCell, formatted_numbers
from meshcast.validation.selfcheck.replay import Replay

SHOWN = 5
"""Violations of a check that are written out."""


def checks_page(rows: Sequence[dict[str, Any]], replays: Sequence[Replay] = ()) -> RenderableType:
    """Returns a row for every check, then replays of a job, then what is wrong, with the jobs that show it."""
    table = Table("check", *formatted_numbers(("jobs", ""), ("seconds", ".1f")), "result")
    for row in rows:
        wrong = len(row["violations"])
        result = TableCell(f"{wrong} violations", "bold red") if wrong else TableCell("holds", "green")
        table.add(row["check"], row["jobs"] or None, row["seconds"], result)
    texts = [Text(str(played)) for played in replays if played.agrees]
    texts += [Text(line) for row in rows for line in _explain(row)]
    return Group(show_table(table), *texts)


def _explain(row: dict[str, Any]) -> list[str]:
    """Returns the first violations of a check, each with its job."""
    lines = []
    for violation in row["violations"][:SHOWN]:
        lines.append(f"{row['check']}: {violation['what']}")
        if violation["job"] is not None:
            lines.append(f"  job: {json.dumps(violation['job'])}")
    more = len(row["violations"]) - SHOWN
    return [*lines, f"{row['check']}: {more} more"] if more > 0 else lines
