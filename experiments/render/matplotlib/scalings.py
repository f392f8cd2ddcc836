"""Scaling curves of several jobs on one axis of GPUs: tokens/s of a GPU, and days and cost of the training.

A job has the same colour and mark in every panel. Bands are the 90 % intervals; open marks do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_uppercase

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.scaling import LEFT, format_rate, set_gpu_axis
from meshcast.experiments.render.matplotlib.sheet import EDGE, LINE, Sheet, make_heading, note_height, truncate_words
from meshcast.experiments.sweeps.scaling import Curve, list_lengths
from meshcast.experiments.views import palette
from meshcast.experiments.views.scaling import ScaledStep, make_scaling_curve

COLOURS = (
    *(palette.BLUE, palette.ORANGE, palette.GREEN, palette.PURPLE),
    *(palette.INK, palette.SKY, palette.BROWN, palette.YELLOW),
)
MARKS = "osD^vPX*"
"""Colours and marks of the jobs, in their order."""

LENGTHS = ("days", "cost")
"""Figures of a whole training that have a panel."""

PANEL, GAP = 1.7, 0.18
"""Height of a panel, and the distance of two [in]."""


def scalings(labelled: Sequence[tuple[str, Curve]]) -> Figure:
    """Returns the plot. labelled: curves with the labels of their jobs."""
    curves = [curve for _, curve in labelled]
    views = [make_scaling_curve(curve) for curve in curves]
    kind, models = curves[0].kind, {curve.job.model.name for curve in curves}
    subject = models.pop() if len(models) == 1 else f"{len(models)} models"
    kept = "batch of a GPU" if kind == "weak" else "global batch"
    heading = make_heading(f"{kind.capitalize()} scaling of {subject}: {len(curves)} jobs", [f"the {kept} stays"])
    lengths = [name for name in LENGTHS if all(name in list_lengths(curve.job) for curve in curves)]
    panels: dict[str, Callable[[ScaledStep], float]] = {"tokens/s of a GPU": lambda step: step.rate}
    for name in lengths:
        panels[name] = lambda step, name=name: getattr(step.report, name)  # type: ignore[misc]
    top = heading.bottom + LINE * len(labelled) + 0.1
    is_open = any(not step.report.fits for view in views for step in view.steps)
    note = "Bands: nine of ten measured steps should lie between."
    note += " Open marks: the job does not fit." if is_open else ""
    note += " Days and cost: without interruptions." if lengths else ""
    foot = top + len(panels) * (PANEL + GAP) + 0.3
    sheet = Sheet(foot + note_height(note) + 0.04)
    sheet.head(heading)
    for row, (label, _) in enumerate(labelled):
        _write_key(sheet, heading.bottom + LINE * row, f"{ascii_uppercase[row]}  {label}", row)
    gpus, side = views[0].gpus, style.layout_width() - LEFT - EDGE
    for number, (words, value) in enumerate(panels.items()):
        axes = sheet.axes(LEFT, top + number * (PANEL + GAP), side, PANEL)
        set_gpu_axis(axes, gpus, side)
        for row, view in enumerate(views):
            _draw_curve(axes, view.steps, value, row, has_band=number == 0)
        axes.set_ylabel(words)
        if words == "days":  # which halve with every doubling
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda days, _: f"{days:,g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        else:
            highest = max((value(step) for view in views for step in view.steps), default=1.0)
            axes.set_ylim(0, max(1.08 * highest, axes.get_ylim()[1]))
            axes.yaxis.set_major_locator(MaxNLocator(5))
            axes.yaxis.set_major_formatter(FuncFormatter(format_rate))
        if number < len(panels) - 1:
            axes.tick_params(axis="x", labelbottom=False)
        else:
            axes.set_xlabel("GPUs")
    sheet.note(foot + 0.04, note)
    return sheet.figure


def _write_key(sheet: Sheet, y: float, label: str, row: int) -> None:
    """Writes a row of the legend."""
    x = [(EDGE + inches) / sheet.width for inches in (0, 0.15, 0.3)]
    height, colour = 1 - (y - 0.035) / sheet.height, COLOURS[row]
    sheet.figure.add_artist(
        Line2D(x, [height] * 3, markevery=[1], color=colour, marker=MARKS[row], markersize=3.6, linewidth=1.2)
    )
    sheet.text(EDGE + 0.4, y, truncate_words(label, sheet.width - EDGE - 0.5, style.TEXT))


def _draw_curve(
    axes: Axes, steps: Sequence[ScaledStep], value: Callable[[ScaledStep], float], row: int, has_band: bool
) -> None:
    """Draws a job. row: its number, which chooses colour and mark. has_band: whether its interval is drawn."""
    colour, counts = COLOURS[row], [step.gpus for step in steps]
    if has_band:
        band = [step.low for step in steps], [step.high for step in steps]
        axes.fill_between(counts, *band, color=colour, alpha=0.12, linewidth=0, zorder=0)
    axes.plot(counts, [value(step) for step in steps], color=colour, linewidth=1.2, zorder=2)
    for step in steps:
        face = colour if step.report.fits else "white"
        x, y = step.gpus, value(step)
        axes.scatter(x, y, s=18, marker=MARKS[row], facecolors=face, edgecolors=colour, linewidths=0.8, zorder=3)
