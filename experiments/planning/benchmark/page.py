"""The benchmark table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table as RichTable

from meshcast.experiments.planning.benchmark.answer import name_method
from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum
from meshcast.experiments.planning.benchmark.rows import BenchmarkRow
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.render.terminal.safe_console import Lines
from meshcast.experiments.render.terminal.tables import make_grid
from meshcast.experiments.views.table import Column, Table, Wrap, numbers
from meshcast.hardware.errors import PlanError
from meshcast.simulator.report.formatting import format_need

HEADS = ("step s", "90%", "GiB", "regret", "own regret", "objective s", "priced", "CPU s")
LEGEND = (
    "regret: against the certified optimum. own regret: against the best plan of the planner's own space, and the "
    "method that found it. objective: the step by the planner's own prices. priced: candidates, graphs or "
    "entries of tables."
)
SHORT = {"elimination": "elim", "enumeration": "enum", "one plan": "one"}


def benchmark_table(rows: Sequence[BenchmarkRow], optimum: CertifiedOptimum | PlanError | None) -> RichTable:
    """Returns a row for every planner: forecast, memory, regret against the certified optimum and against the optimum
    of its space, its objective, evaluations, CPU time. Below: what the columns are, why planners refused, and
    what is outside of the space.
    """
    table = Table(Column("planner", wrap="never"))
    for head in HEADS:
        wrap: Wrap = "never" if head == "90%" else "words"
        table.columns += numbers(head, width=max(map(len, head.split())), wrap=wrap)
    if isinstance(optimum, CertifiedOptimum):
        cells = (f"{optimum.step_time:.4g}", "", "", "0.0%", f"{optimum.gap:.1%} search", "", f"{optimum.plans:.3g}")
        table.add("certified", *cells, f"{optimum.cpu_s:.1f}")
        table.end_section()
    for row in rows:
        table.add(row.name, *_cells(row), f"{row.cpu_s:.1f}")
    notes = [LEGEND, *(f"{row.name}: {row.refused}" for row in rows if row.refused)]
    notes += [f"{row.name}: {row.not_executable}" for row in rows if row.not_executable]
    notes += [
        f"{row.name}: faster than the certified optimum, whose space has no such {', '.join(row.outside)}"
        for row in rows
        if row.outside
    ]
    notes += [f"certified: {optimum}"] if isinstance(optimum, PlanError) else []
    grid = make_grid(table)
    grid.caption, grid.caption_justify = Lines(*notes), "left"
    return grid


def _cells(row: BenchmarkRow) -> tuple[str, ...]:
    proposal, report = row.proposal, row.report
    if proposal is None:
        return ("refused", "", "", "", "", "", "")
    objective = "-" if find_planner(row.name).unit == "bytes" else f"{proposal.value:.4g}"
    evaluated = f"{proposal.visited:.3g}"
    if report is None:
        return ("not executable", "", "", "", "", objective, evaluated)
    low, high = report.interval_90
    method = "" if row.space is None else name_method(row.space.method)
    memory = format_need(report.peak_device, report.capacity) + ("" if row.fits else " too large")
    return (
        f"{report.step_time:.4g}",
        f"{low:.3g}-{high:.3g}",
        memory,
        "-" if row.regret is None else f"{row.regret:.1%}",
        f"{'-' if row.own_regret is None else f'{row.own_regret:.1%}'} {SHORT.get(method, method)}".strip(),
        objective,
        evaluated,
    )
