"""``meshcast validate claims``: verdicts on what papers claim, as a table for people and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.published import keep_until_interrupted, progress
from meshcast.experiments.render.terminal.safe_console import Lines
from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.views.table import Column, Table, numbers
from meshcast.hardware.documents.document import to_yaml
from meshcast.hardware.errors import PlanError, nearest, shorten
from meshcast.validation.claims.claim_file import Claim, ClaimFile, read_claims
from meshcast.validation.claims.judge import DEPENDS, MISSES, OPEN, ClaimTask, judge_claims, summarize_judgements
from meshcast.validation.claims.planner_run import PlanFinder

COUNTS = {
    "claims": "claims", "judged": "judged", "holds": "hold", "misses": "miss", "depends": "depend",
    "cannot_be_judged": "open", "recalled": "recalled",
}  # fmt: skip
"""Headings of the counts."""


def validate_claims(
    paths: Sequence[Path] = (),
    workers: int | None = None,
    family: str | None = None,
    system: str | None = None,
    claim: str | None = None,
    slow: bool = False,
    find_plan: PlanFinder | None = None,
) -> tuple[dict[str, Any], int]:
    """Judges claims: the answer, and the number of claims that an interruption has left out.

    A claim that is named runs even if it is slow.
    find_plan: runs a planner, for the claims of planners. Raises PlanError for a family, system or id that no claim
        has.
    """
    tasks = _choose_tasks(read_claims(paths), family, system, claim)
    run = [task for task in tasks if slow or claim or not task.claim.slow]
    rows = keep_until_interrupted(progress(judge_claims(run, workers, find_plan), len(run), "claims"))
    if claim is not None:
        for row, task in zip(rows, run, strict=False):
            row["jobs"] = list_jobs(*task)
    summary = summarize_judgements(rows) | {"left_out": len(tasks) - len(run)}
    return {"rows": rows, "summary": summary}, len(run) - len(rows)


def _choose_tasks(
    files: Sequence[ClaimFile], family: str | None, system: str | None, claim: str | None
) -> list[ClaimTask]:
    tasks = [ClaimTask(file, task) for file in files for task in file.entries]
    for option, wanted, name_of in (
        ("--family", family, lambda task: task.file.family),
        ("--system", system, lambda task: task.file.system),
        ("--claim", claim, lambda task: task.claim.id),
    ):
        if wanted is None:
            continue
        known = list(dict.fromkeys(map(name_of, tasks)))
        tasks = [task for task in tasks if name_of(task).casefold() == wanted.casefold()]
        if not tasks:
            raise PlanError(option, "no claim has it", nearest(wanted, known), wanted)
    return tasks


def list_jobs(file: ClaimFile, claim: Claim) -> dict[str, Any]:
    """Returns the jobs, pipeline cases or plans of a claim by name, with the first value of everything that it
    assumes."""
    if claim.cannot_judge:
        return {}
    jobs_by_name = file.expand(claim, next(file.alternatives(claim)))
    return {name: jobs[0] if len(jobs) == 1 else jobs for name, jobs in jobs_by_name.items()}


# ------------------------------------------------------------------------------------------- the page


def claims_page(answer: dict[str, Any]) -> RenderableType:
    """Returns all verdicts by family and system, the counts, and the reasons of those that do not hold."""
    rows, summary = answer["rows"], answer["summary"]
    if len(rows) == 1 and "jobs" in rows[0]:
        return _claim_page(rows[0])
    parts = [_judgements_table(rows), show_table(tabulate_counts(summary))]
    if summary["judged"]:
        shares = f"{summary['share_holds']:.0%} hold, {summary['share_near']:.0%} hold or deviate by 25 % at most"
        parts.append(Text(f"of {summary['judged']} judged claims whose source was read: {shares}", "bold"))
    if summary["left_out"]:
        parts.append(Text(f"{summary['left_out']} slow claims are left out; --slow runs them", "dim"))
    return Group(*parts)


def _judgements_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    table = Table(
        Column("claim", style="bold", wrap="letters"),
        Column("says", wrap="letters"),
        *numbers("ours", "theirs", format=".4g", wrap="letters"),
        Column("verdict", wrap="letters"),
    )
    system = None
    for row in rows:
        if row["system"] != system:
            system = row["system"]
            table.add(f"{system} ({row['family']})", style="bold")
        table.add(f"  {row['id']}", row["says"], row["ours"], row["theirs"], word_verdict(row))
    return show_table(table)


def word_verdict(row: dict[str, Any]) -> str:
    """Returns the verdict with by how much it misses, on what it depends, or why there is none."""
    verdict = str(row["status"]).replace("-", " ")
    if row["status"] == MISSES:
        verdict += f" by {row['miss']:+.1%}" if row["target"].get("value") != 0 else f" by {row['miss']:+.3g}"
    elif row["status"] == DEPENDS:
        verdict += f" on {', '.join(row['depends_on'])}"
    elif row["status"] == OPEN:
        verdict += f": {row['reason']}"
    return verdict if row["scored"] else f"{verdict} (recalled)"


def tabulate_counts(summary: dict[str, Any]) -> Table:
    """Returns the number of claims by family and verdict."""
    table = Table(Column("family", style="bold"), *numbers(*COUNTS.values()))
    for name, counts in (*summary["by_family"].items(), ("all", summary)):
        table.add(name, *(counts[key] for key in COUNTS), style="bold" if name == "all" else "")
    return table


def _claim_page(row: dict[str, Any]) -> RenderableType:
    """Returns a claim: what it says, its jobs, their numbers for all assumptions, and the verdict."""
    lines = {
        "claim": f"{row['id']}: {row['says']}",
        "system": f"{row['system']} ({row['family']}), {row['reference']}",
        "source": f"{row['source']} ({row['provenance']})",
        "relation": f"{row['relation']} of {row['measure'] or 'the default measure'}",
        "theirs": row["theirs"],
        "verdict": word_verdict(row),
        "note": row["note"],
    }
    stated = [line for line in lines.items() if line[1]]
    parts = [show_table(Table(Column(style="bold"), Column(wrap="letters"), rows=stated, ruled=False))]
    formats = {"assumed": "", "values": "", "ours": ".4g", "miss": "+.1%", "status": ""}
    table = Table(*(Column(name, format=form, wrap="letters") for name, form in formats.items()))
    for tried in row["alternatives"]:
        assumed = ", ".join(f"{key} = {shorten(value)}" for key, value in tried["assumed"].items())
        values = ", ".join(f"{name} {_word_quantity(value)}" for name, value in tried["values"].items())
        table.add(assumed, values, tried["ours"], tried["miss"], tried["status"])
    unfit = sorted({name for tried in row["alternatives"] for name in tried["does_not_fit"]})
    parts += [show_table(table)] if row["alternatives"] else []
    if unfit:
        parts.append(Text(f"does not fit in memory: {', '.join(unfit)}", "dim"))
    jobs = to_yaml(row["jobs"], default_flow_style=None, width=110)
    return Group(
        *parts, Text(), Lines("jobs:", *(f"  {line}" for line in jobs.splitlines())) if row["jobs"] else Text("no jobs")
    )


def _word_quantity(value: float | list[float]) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in value)}]" if isinstance(value, list) else f"{value:.4g}"
