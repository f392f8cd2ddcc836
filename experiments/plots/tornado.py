"""Tornado plot: the step time between better and worse hardware, a bar for every figure, the widest first."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from experiments.explain.sensitivity import RANGE, Sensitivities
from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, save, time_unit, wrap_words
from simulator.report.words import describe_plan, format_seconds

ROW = 0.24
"""Height of a bar with its gap [in]."""
LEFT = 2.35
"""Left end of the axes, after the names of the figures [in]."""
LEAST = 1e-4
"""Share of the step below which a figure gets no bar."""
MARGIN = 0.25
"""Room beside the widest bar for the numbers, as a share of its width."""


def draw(found: Sensitivities, path: str | Path) -> None:
    """Draws the plot to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: tornado(found), path)


def tornado(found: Sensitivities) -> Figure:
    """The plot."""
    report, step = found.report, found.report.step_time
    shown = [one for one in found.found if one.swing_s >= LEAST * step]
    lines = [f"Every figure of the hardware {RANGE:.0%} better (green) and {RANGE:.0%} worse, all others kept."]
    lines += wrap_words(describe_plan(report.play.plan))
    top = 0.46 + LINE * len(lines)
    sheet = Sheet(top + ROW * max(1, len(shown)) + 0.28)
    sheet.head(f"{report.job.model.name} on {report.job.cluster.name}: what shortens a step", lines)
    if not shown:
        sheet.text(EDGE, top + 0.1, "No figure of the hardware changes the step.")
        return sheet.figure
    axes = sheet.axes(LEFT, top, style.PAGE - LEFT - EDGE - 0.1, ROW * len(shown))
    scale, unit = time_unit(step)
    low, high = min(one.better_s for one in shown), max(one.worse_s for one in shown)
    room = MARGIN * (high - low)
    axes.set_xlim((low - room) * scale, (high + room) * scale)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    for row, one in enumerate(shown):
        for end, colour, side in ((one.better_s, style.GREEN, "right"), (one.worse_s, style.ORANGE, "left")):
            axes.barh(row, (end - step) * scale, 0.66, step * scale, color=colour, linewidth=0)
            axes.annotate(
                format_seconds(end),
                (end * scale, row),
                (-3 if side == "right" else 3, 0),
                textcoords="offset points",
                ha=side,
                va="center_baseline",
                fontsize=style.SMALL,
            )
    axes.axvline(step * scale, color=style.INK, linewidth=0.8)
    axes.set_yticks(range(len(shown)), [one.figure.label for one in shown])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} {unit}")
    return sheet.figure
