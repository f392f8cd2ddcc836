"""Writes the benchmark tables of docs/planners.md: below each link to a job of examples/benchmark, what is proposed.

``python -m tools.pages.benchmark docs/planners.md`` (``make docs-benchmark``): some ten minutes on a machine that
does nothing else.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from meshcast.experiments.planning.benchmark.answer import name_method, to_answer
from meshcast.experiments.planning.benchmark.optimum import find_optimum
from meshcast.experiments.planning.benchmark.rows import choose_planners, rank_proposals
from meshcast.experiments.planning.pricing.mixed import open_problem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Column, Table
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.units import GIB

COLUMNS = (
    *("planner", "step", "90 % interval", "GiB", "regret", "in its own space"),
    *("objective", "evaluations", "CPU time", "executable"),
)
TABLE = re.compile(r"\[[\w.-]+\]\(\.\./(examples/benchmark/[\w.-]+\.yaml)\)\n\n(\|.*\n)+")
"""A link to a job, and the table below it."""


def write_tables(page: str, root: Path, seconds: float = 20.0, steps: int = 10_000) -> str:
    """Writes the page with its tables made anew.

    root: folder of the paths of jobs. seconds, steps: see `SearchBudget`.
    """

    def make_table(match: re.Match[str]) -> str:
        link, job = match[0].partition("\n")[0], root / match[1]
        print(f"{job}", file=sys.stderr)
        problem = open_problem(job)
        budget = SearchBudget(seconds, steps)
        best = find_optimum(problem, budget)
        rows = rank_proposals(problem, choose_planners("all"), budget, best)
        return f"{link}\n\n{format_table(to_answer(problem, rows, best))}"

    return TABLE.sub(make_table, page)


def format_table(answer: dict[str, Any]) -> str:
    """Writes the table of a job. answer: of ``plan --json``."""
    left = ("planner", "in its own space", "executable")
    table = Table(*(Column(name, align="left" if name in left else "right") for name in COLUMNS))
    if "step_time_s" in (proof := answer.get("certificate", {})):
        cells = [f"{proof['step_time_s']:.3f} s", "", "", f"0, gap {100 * proof['gap']:.1f} %", "", ""]
        table.add("certified optimum", *cells, f"{_count(proof['plans'])} plans", _seconds(proof))
    for row in answer["rows"]:
        table.add(f"`{row['planner']}`", *_cells(row))
    return render_table(table)


def _cells(row: dict[str, Any]) -> list[str]:
    if "evaluations" not in row:
        return [*[""] * 7, _seconds(row), f"no: {row['refused']['rule']}"]
    objective = f"{row['objective'] / GIB:.1f} GiB" if row["unit"] == "bytes" else f"{row['objective']:.3f} s"
    priced = [objective, _count(row["evaluations"]), _seconds(row)]
    if row["step_time_s"] is None:
        return [*[""] * 5, *priced, f"no: {row['executable']}"]
    low, high = row["interval_90_s"]
    forecast = [f"{row['step_time_s']:.3f} s", f"{low:.2f} to {high:.2f}", f"{row['peak_device_gib']:.1f}"]
    if row["executable"] is not True:
        return [*forecast, "", "", *priced, "too large"]
    regret = "" if row["regret"] is None else f"{100 * row['regret']:.1f} %"
    restricted = "not known"
    if row["regret_restricted"] is not None:
        method = name_method(row["space_optimum"]["method"])
        restricted = f"{max(0.0, 100 * row['regret_restricted']):.1f} %, {method}"  # equal to the solver's tolerance
    return [*forecast, regret, restricted, *priced, "yes"]


def _count(number: float) -> str:
    return f"{number:,}" if number < 1e5 else f"{number:.1e}".replace("e+0", "e")


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['cpu_s']:.1f} s"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    write_file(path, write_tables(path.read_text("utf-8"), Path()))
