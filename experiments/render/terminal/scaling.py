"""``meshcast scale``: the scaling curve of a job as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import number_columns, ruled_table
from meshcast.experiments.sweeps.scaling import Curve, shorten
from meshcast.simulator.report.figures import shown_in


def page(found: Curve) -> RenderableType:
    """A row for every number of GPUs, and where the bottleneck changes."""
    figures = shown_in("curve")
    heads = ("GPUs", "batch", "tokens/s", "efficiency", *(figure.head for figure in figures))
    table = ruled_table(*number_columns(*heads, no_wrap=True), "largest cost")
    for point in found.points:
        report = point.report
        if report is None:
            reason = Text(point.error.rule if point.error else "", "dim")
            table.add_row(f"{point.gpus:,}", *[""] * (3 + len(figures)), reason)
            continue
        table.add_row(
            f"{point.gpus:,}",
            f"{report.job.batch.total:,}",
            f"{point.tokens_per_s:,.0f}",
            f"{found.efficiency(point):.1%}",
            *(figure.cell(figure.compute(report)) for figure in figures),
            shorten(point.bottleneck) + ("" if report.fits else "; does not fit"),
        )
    notes = [
        f"Between {one.gpus:,} and {other.gpus:,} GPUs {shorten(other.bottleneck)} overtakes {shorten(one.bottleneck)}."
        for one, other in found.changes
    ]
    notes.append("low, high: nine of ten measured steps should lie between; largest cost: besides matrix work")
    head = f"{found.kind.capitalize()} scaling of {found.job.model.name} along {found.axis}"
    return Group(Text(head, "bold"), table, *map(Text, notes))
