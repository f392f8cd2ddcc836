"""``meshcast scale``: the scaling curve of a job as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.sweeps.scaling import Curve, shorten
from meshcast.experiments.views.table import Table, TableCell, formatted_numbers
from meshcast.simulator.report.figures import shown_in


def page(curve: Curve) -> RenderableType:
    """Returns a row for every number of GPUs, and where the bottleneck changes."""
    figures = shown_in("curve")
    sizes = ("GPUs", ","), ("batch", ","), ("tokens/s", ",.0f"), ("efficiency", ".1%")
    columns = formatted_numbers(*sizes, *((figure.head, figure.cell) for figure in figures), wrap="never")
    table = Table(*columns, "largest cost")
    for point in curve.points:
        report = point.report
        if report is None:
            table.add(point.gpus, *[""] * (3 + len(figures)), TableCell(point.error.rule if point.error else "", "dim"))
            continue
        table.add(
            *(point.gpus, report.job.batch.total, point.tokens_per_s, curve.efficiency(point)),
            *(figure.compute(report) for figure in figures),
            shorten(point.bottleneck) + ("" if report.fits else "; does not fit"),
        )
    notes = []
    for below, above in curve.changes:
        gpus = f"Between {below.gpus:,} and {above.gpus:,} GPUs"
        notes.append(f"{gpus} {shorten(above.bottleneck)} overtakes {shorten(below.bottleneck)}.")
    notes.append("low, high: nine of ten measured steps should lie between; largest cost: besides matrix work")
    head = f"{curve.kind.capitalize()} scaling of {curve.job.model.name} along {curve.axis}"
    return Group(Text(head, "bold"), show_table(table), *map(Text, notes))
