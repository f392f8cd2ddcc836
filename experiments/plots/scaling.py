"""Scaling curve: tokens/s against GPUs with ideal scaling as a line, and below it the parts of the step.

Both axes of the curve are logarithmic, so ideal scaling is a straight line; the band is the 90 % interval. A vertical
line marks where the bottleneck changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, save, truncate_words, wrap_words
from experiments.sweeps.scaling import Curve, Point, shorten
from simulator.program.categories import EXPOSED
from simulator.report.report import Report

LEFT, SIDE = 0.62, 4.5
"""Left end and width of the axes [in]."""
KEY = LEFT + SIDE + 0.25
UPPER, LOWER = 2.5, 1.35
"""Heights of the two axes [in]."""

PARTS = (
    ("GEMMs", style.BLUE),
    ("attention", style.lighten(style.BLUE, 0.45)),
    ("memory-bound kernels", style.ORANGE),
    ("exposed communication", style.GREEN),
    ("pipeline bubble", style.lighten(style.INK, 0.75)),
    ("optimizer, host, idle", style.YELLOW),
)
"""Groups of parts of the step with their colours, from the bottom up."""


MOST_ROWS = 12
"""Points in the table beside the curve: as many as fit beside it, with the bottlenecks below."""


def draw(curve: Curve, path: str | Path) -> None:
    """Draws a curve to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: scaling(curve), path)


def scaling(curve: Curve) -> Figure:
    """The plot."""
    job = curve.job
    kept = "batch of a GPU" if curve.kind == "weak" else "global batch"
    words = [f"the {kept} stays, {curve.axis} grows", f"{job.cluster.gpu.name}, {job.framework.name}"]
    words += [" x ".join(f"{axis} {n}" for axis, n in job.plan.mesh.items() if axis != curve.axis and n > 1)]
    lines = wrap_words([word for word in words if word])
    top = 0.42 + LINE * len(lines)
    sheet = Sheet(top + UPPER + LOWER + 0.6)
    sheet.head(f"{curve.kind.capitalize()} scaling of {job.model.name}", lines)
    if not curve.known:
        sheet.text(EDGE, top + 0.2, "The job runs on none of these numbers of GPUs.")
        return sheet.figure
    upper = sheet.axes(LEFT, top, SIDE, UPPER)
    lower = sheet.axes(LEFT, top + UPPER + 0.15, SIDE, LOWER)
    gpus = [point.gpus for point in curve.points]
    for axes in (upper, lower):
        axes.set_xscale("log", base=2)
        axes.set_xlim(gpus[0] / 1.3, gpus[-1] * 1.3)
        axes.xaxis.set_major_locator(FixedLocator(_choose_ticks(gpus)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.spines["left"].set_visible(True)
    _draw_rates(upper, curve)
    _draw_shares(lower, curve)
    upper.tick_params(axis="x", labelbottom=False)
    lower.set_xlabel("GPUs")
    _draw_key(sheet, curve, top)
    return sheet.figure


def _choose_ticks(gpus: list[int]) -> list[int]:
    """At most nine of the numbers, including the last."""
    step = -(-len(gpus) // 9)
    return gpus[::-1][::step][::-1]


def _draw_rates(axes: Any, curve: Curve) -> None:
    known = curve.known
    x, y = [point.gpus for point in known], [point.tokens_per_s for point in known]
    ideal = [y[0] * gpus / x[0] for gpus in x]
    axes.set_yscale("log")
    axes.plot(x, ideal, color=style.FAINT, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    lows, highs = zip(*(point.interval for point in known), strict=True)
    axes.fill_between(x, lows, highs, color=style.lighten(style.BLUE, 0.8), linewidth=0, zorder=0)
    axes.plot(x, y, color=style.BLUE, linewidth=1.2, zorder=2)
    for fits, face in ((True, style.BLUE), (False, "white")):
        own = [point for point in known if point.report is not None and point.report.fits == fits]
        axes.scatter(
            [point.gpus for point in own],
            [point.tokens_per_s for point in own],
            s=16,
            color=face,
            edgecolors=style.BLUE,
            linewidths=0.8,
            zorder=3,
        )
    for one, other in curve.changes:
        axes.axvline((one.gpus * other.gpus) ** 0.5, color=style.ORANGE, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.set_ylabel("tokens/s of all GPUs")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(_format_rate))
    axes.yaxis.set_minor_locator(LogLocator(subs=()))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _format_rate(value: float, _: Any) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"


def step_shares(report: Report) -> list[float]:
    """Shares of the step by group, in the order of `PARTS`; they add up to one."""
    parts, step = report.parts, report.step_time
    rest = parts["optimizer"] + parts["host"] + parts["idle"]
    exposed = sum(parts[axis] for axis in EXPOSED)
    seconds = [parts["gemm"], parts["attention"], parts["memory_bound"], exposed, parts["bubble"], rest]
    return [value / step for value in seconds]


def _draw_shares(axes: Any, curve: Curve) -> None:
    x = [point.gpus for point in curve.known]
    rows = [step_shares(point.report) for point in curve.known if point.report is not None]
    if len(x) == 1:  # an area needs two points
        x, rows = [x[0] - 1, x[0] + 1], rows * 2
    axes.stackplot(
        x, *zip(*rows, strict=True), colors=[colour for _, colour in PARTS], linewidth=0.4, edgecolor="white"
    )
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "50", "100"])
    axes.set_ylabel("% of the step")


def _draw_key(sheet: Sheet, curve: Curve, top: float) -> None:
    """Writes the efficiency at some points, the bottlenecks, and the colours of the parts, right of the axes."""
    right, y = style.PAGE - EDGE, top + 0.08
    for x, head in ((KEY + 0.42, "GPUs"), (KEY + 0.95, "efficiency"), (right, "step")):
        sheet.text(x, y, head, ha="right", color=style.FAINT, fontsize=style.SMALL)
    for point in _choose_points(curve.known, MOST_ROWS):
        y += LINE
        assert point.report is not None
        cells = f"{point.gpus:,}", f"{curve.efficiency(point):.1%}", _format_seconds(point.report.step_time)
        for x, cell in zip((KEY + 0.42, KEY + 0.95, right), cells, strict=True):
            sheet.text(x, y, cell, ha="right", fontsize=style.SMALL)
    y += 1.6 * LINE
    last = curve.known[-1].bottleneck
    notes = [
        *((f"to {one.gpus:,}", one.bottleneck) for one, _ in curve.changes),
        ("all" if not curve.changes else "then", last),
    ]
    sheet.text(KEY, y, "largest cost besides matrix work", color=style.FAINT, fontsize=style.SMALL)
    for when, what in notes[-4:]:
        y += LINE
        sheet.text(KEY + 0.42, y, when, ha="right", fontsize=style.SMALL)
        sheet.text(KEY + 0.5, y, truncate_words(shorten(what), right - KEY - 0.5), fontsize=style.SMALL)
    y = top + UPPER + 0.2
    for name, colour in reversed(PARTS):
        sheet.patch(KEY, y, 0.09, 0.09, facecolor=colour, linewidth=0)
        sheet.text(KEY + 0.15, y + 0.085, name, fontsize=style.SMALL)
        y += 0.17
    if any(point.report is not None and not point.report.fits for point in curve.points):
        sheet.text(KEY, y + 0.1, "hollow: does not fit", fontsize=style.SMALL, color=style.FAINT)


def _choose_points(points: list[Point], most: int) -> list[Point]:
    """At most `most` of the points, including the first and the last."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _format_seconds(value: float) -> str:
    return f"{value:,.2f} s" if value < 100 else f"{value:,.0f} s"
