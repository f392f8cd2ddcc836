"""Writes docs/claims.md: what papers claim, with our figure, theirs and the verdict.

``python -m tools.pages.claims docs/claims.md`` (``make docs-claims``)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshcast.experiments.planning.benchmark.claimed_plans import find_claimed_plan
from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.render.terminal.claims import tabulate_counts, validate_claims, word_verdict
from meshcast.experiments.views.table import Column, Table
from meshcast.hardware.documents.output_file import write_file
from tools.pages.systems import tabulate_systems

HEAD = """\
# Claims of the papers

Made by `make docs-claims` from the files in `validation/claims/`; do not edit it. Every claim is run as jobs, as
pipeline cases with given times of passes, or as runs of planners, and its relation is held against the paper. It
*holds*, *misses* by the given share, *depends* on what the paper leaves open (tried at all values of `assumed`), or
*cannot be judged*. Claims whose source was not read are marked *recalled* and not counted. `meshcast validate claims
--claim ID` shows the jobs of one.
The format of the files is on the page [validation](validation.md#claims-of-papers).
"""

SYSTEMS = """\
## Systems

Every system that can be forecast or planned with: its file, its idea, the golden job and the file of tests that names
it most (`tests/contract` has every scheme, too), and how its claims are judged: those of its paper, else of others that
use it.

"""


def page(answer: dict[str, Any]) -> str:
    """Writes the page. answer: of ``validate claims``."""
    rows, summary = answer["rows"], answer["summary"]
    parts = [HEAD]
    if summary["judged"]:
        parts.append(
            f"Of {summary['judged']} judged claims {summary['share_holds']:.0%} hold, and {summary['share_near']:.0%} "
            "hold or deviate by 25 % at most.\n"
        )
    parts.append(render_table(tabulate_counts(summary)))
    parts.append(SYSTEMS + render_table(tabulate_systems(rows)))
    for family in summary["by_family"]:
        parts.append(f"## {family.capitalize()}\n")
        of_family = [row for row in rows if row["family"] == family]
        for system in dict.fromkeys(row["system"] for row in of_family):
            parts += _system([row for row in of_family if row["system"] == system])
    return "\n".join(parts).rstrip() + "\n"


def _system(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Writes the claims of a system: a table, and the notes below it."""
    first = rows[0]
    paper = first["reference"]
    paper = f"[{paper}]({paper})" if paper.startswith("http") else paper
    table = Table("claim", "says", Column("ours", format=".4g"), "theirs", "verdict", "source")
    for row in rows:
        table.add(f"`{row['id']}`", row["says"], row["ours"], row["theirs"], word_verdict(row), row["source"])
    of_note: dict[str, list[str]] = {}
    for row in rows:
        of_note.setdefault(row["note"], []).append(f"`{row['id']}`")
    notes = "\n".join(f"- {', '.join(ids)}: {note}" for note, ids in of_note.items() if note)
    return [f"### {first['system']}\n\n{paper}\n", render_table(table), *([notes + "\n"] if notes else [])]


if __name__ == "__main__":
    (path,) = sys.argv[1:]
    answer, missing = validate_claims(slow=True, find_plan=find_claimed_plan)
    if missing:
        raise SystemExit(130)
    write_file(Path(path), page(answer))
