"""``meshcast scale``: the scaling curve of a job as a table."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from rich.console import Group, RenderableType
from rich.text import Text

from meshcast.experiments.render.terminal.tables import list_labels, show_table
from meshcast.experiments.sweeps.scaling import Curve, list_lengths
from meshcast.experiments.views.scaling import make_scaling_curve
from meshcast.experiments.views.table import Format, Table, TableCell, formatted_numbers
from meshcast.simulator.report.figures import shown_in

FORMATS = {"days": ",.1f", "cost": ",.0f"}
"""Of the length and the price of a whole training."""

LENGTHS_NOTE = "{}: of run.tokens without interruptions; meshcast size has those with them"


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
        notes.append(LENGTHS_NOTE.format(" and ".join(lengths)))
    notes.append("low, high: nine of ten measured steps should lie between; largest cost: besides matrix work")
    return Group(Text(f"{scaling.title} along {curve.axis}", "bold"), show_table(table), *map(Text, notes))


def page_of_several(labelled: Sequence[tuple[str, Curve]]) -> RenderableType:
    """Returns a row for every number of GPUs and job. labelled: curves with the labels of their jobs."""
    curves = [curve for _, curve in labelled]
    lengths = [name for name in FORMATS if all(name in list_lengths(curve.job) for curve in curves)]
    forms: list[tuple[str, Format]] = [("batch", ","), ("tokens/s", ",.0f"), ("efficiency", ".1%"), ("step s", ",.3f")]
    forms += [("MFU %", ".1p"), *((name, FORMATS[name]) for name in lengths)]
    numbered = formatted_numbers(("GPUs", ","), wrap="never")
    table = Table(*numbered, "job", *formatted_numbers(*forms, wrap="never"), "largest cost")
    views = [*zip(ascii_uppercase, map(make_scaling_curve, curves), strict=False)]
    for gpus in views[0][1].gpus:
        for row, (letter, view) in enumerate(views):
            head, step = gpus if row == 0 else "", next((step for step in view.steps if step.gpus == gpus), None)
            if step is None:
                empty = [""] * len(forms)
                table.add(head, letter, *empty, TableCell(view.refused[gpus], "dim"))
                continue
            table.add(
                *(head, letter, step.report.job.batch.total, step.tokens_per_s, step.efficiency, step.report.step_time),
                *(step.report.mfu["palm"], *(getattr(step.report, name) for name in lengths)),
                step.bottleneck + ("" if step.report.fits else "; does not fit"),
            )
        table.end_section()
    notes = [LENGTHS_NOTE.format(" and ".join(lengths))] if lengths else []
    notes.append(
        "efficiency: tokens/s of a GPU against those of the same job on the fewest; largest cost: besides matrix work"
    )
    title = f"{curves[0].kind.capitalize()} scaling of {len(curves)} jobs"
    return Group(
        Text(title, "bold"), list_labels([label for label, _ in labelled]), show_table(table), *map(Text, notes)
    )
