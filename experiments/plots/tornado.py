"""Tornado plot: the step time between better and worse hardware, a bar for every figure, the widest first; below it
between the alternatives of every field that the job does not state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from experiments.explain.assumed_fields import AssumedFieldEffect
from experiments.explain.sensitivity import RANGE, Sensitivities
from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, save, time_unit, truncate_words, wrap_words
from simulator.report.words import describe_plan, format_seconds

ROW = 0.24
"""Height of a bar with its gap [in]."""
LEFT = 2.35
"""Left end of the axes, after the names of the figures [in]."""
LEAST = 1e-4
"""Share of the step below which a figure gets no bar."""
LEAST_FIELD = 1e-3
"""The same for a field that the job does not state."""
MOST_FIELDS = 16
"""Most bars of such fields."""
MARGIN = 0.25
"""Room beside the widest bar for the numbers, as a share of its width."""


class StepRange(NamedTuple):
    """A bar from the shortest to the longest step [s]."""

    label: str
    low_s: float
    high_s: float


def draw(found: Sensitivities, path: str | Path) -> None:
    """Draws the plot to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: tornado(found), path)


def tornado(found: Sensitivities) -> Figure:
    """The plot."""
    report, step = found.report, found.report.step_time
    hardware = [
        StepRange(one.figure.label, one.better_s, one.worse_s) for one in found.found if one.swing_s >= LEAST * step
    ]
    assumed = [_field_bar(one) for one in found.assumed if one.step_effect_s >= LEAST_FIELD * step][:MOST_FIELDS]
    lines = [f"Every figure of the hardware {RANGE:.0%} better (green) and {RANGE:.0%} worse, all others kept."]
    lines += wrap_words(describe_plan(report.play.plan))
    top = 0.46 + LINE * len(lines)
    below = top + ROW * max(1, len(hardware)) + 0.62
    sheet = Sheet(below + ROW * len(assumed) + 0.28 if assumed else below - 0.34)
    sheet.head(f"{report.job.model.name} on {report.job.cluster.name}: what shortens a step", lines)
    if hardware:
        _draw_bars(sheet, top, hardware, step)
    else:
        sheet.text(EDGE, top + 0.1, "No figure of the hardware changes the step.")
    if assumed:
        words = "Fields that the job does not state: the shortest and the longest step of their alternatives."
        sheet.text(EDGE, below - 0.16, words, color=style.FAINT)
        _draw_bars(sheet, below, assumed, step)
    return sheet.figure


def _field_bar(found: AssumedFieldEffect) -> StepRange:
    """The bar of a field; it ends at the step itself where no alternative is shorter, or none longer."""
    label = found.field.name.removeprefix("framework.set.").removeprefix("plan.schemes.")
    times = [found.step_time_s, *(one.step_time_s for one in found.alternatives)]
    return StepRange(label, min(times), max(times))


def _draw_bars(sheet: Sheet, top: float, bars: Sequence[StepRange], step: float) -> None:
    """Draws the bars one below the other, from the step time [s] to both sides. top: upper end of the axes [in]."""
    axes = sheet.axes(LEFT, top, style.PAGE - LEFT - EDGE - 0.1, ROW * len(bars))
    scale, unit = time_unit(step)
    low, high = min(bar.low_s for bar in bars), max(bar.high_s for bar in bars)
    room = MARGIN * (high - low)
    axes.set_xlim((low - room) * scale, (high + room) * scale)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, bar in enumerate(bars):
        for end, colour, side in ((bar.low_s, style.GREEN, "right"), (bar.high_s, style.ORANGE, "left")):
            if end == step:
                continue
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
    labels = [truncate_words(bar.label, LEFT - EDGE) for bar in bars]
    axes.set_yticks(range(len(bars)), labels)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} {unit}")
