"""``meshcast scale``: the scaling curve of a job as a table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import show_table
from meshcast.experiments.sweeps.scaling import Curve, list_lengths
from meshcast.experiments.views.scaling import make_scaling_curve
from meshcast.experiments.views.table import Format, Table, TableCell, formatted_numbers
from meshcast.simulator.report.figures import shown_in

FORMATS = {"days": ",.1f", "cost": ",.0f"}
"""Of the length and the price of a whole training."""


def page(curve: Curve) -> RenderableType:
    """Returns a row for every number of GPUs, and where the bottleneck changes."""
    figures, scaling, lengths = shown_in("curve"), make_scaling_curve(curve), list_lengths(curve.job)
    if lengths:  # a page has room for either; efficiency says the same of a GPU
        figures = [figure for figure in figures if figure.name != "tokens_per_s_per_gpu"]
    sizes = ("GPUs", ","), ("batch", ","), ("tokens/s", ",.0f"), ("efficiency", ".1%")
    heads: list[tuple[str, Format]] = [
        *((figure.head, figure.cell) for figure in figures),
        *((name, FORMATS[name]) for name in lengths),
    ]
    columns = formatted_numbers(*sizes, *heads, wrap="never")
    table, steps = Table(*columns, "largest cost"), {step.gpus: step for step in scaling.steps}
    for gpus in scaling.gpus:
        if gpus in scaling.refused:
            table.add(gpus, *[""] * (3 + len(figures) + len(lengths)), TableCell(scaling.refused[gpus], "dim"))
            continue
        step = steps[gpus]
        table.add(
            *(gpus, step.report.job.batch.total, step.tokens_per_s, step.efficiency),
            *(figure.compute(step.report) for figure in figures),
            *(getattr(step.report, name) for name in lengths),
            step.bottleneck + ("" if step.report.fits else "; does not fit"),
        )
    notes = [
        f"Between {smaller.gpus:,} and {larger.gpus:,} GPUs {larger.bottleneck} overtakes {smaller.bottleneck}."
        for smaller, larger in scaling.changes
    ]
    if lengths:
        notes.append(f"{' and '.join(lengths)}: of run.tokens without interruptions; meshcast size has those with them")
    notes.append("low, high: nine of ten measured steps should lie between; largest cost: besides matrix work")
    return Group(Text(f"{scaling.title} along {curve.axis}", "bold"), show_table(table), *map(Text, notes))
