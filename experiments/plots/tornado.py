"""Tornado plot: the step time between better and worse hardware, a bar for every figure, the widest first; below it
between the alternatives of every field that the job does not state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from meshcast.experiments.explain.assumed_fields import AssumedFieldEffect
from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.plots import style
from meshcast.experiments.plots.sheet import (
    EDGE,
    Sheet,
    make_heading,
    note_height,
    save,
    space_ticks,
    text_width,
    time_unit,
    truncate_words,
    wrap_text,
)
from meshcast.simulator.report.formatting import describe_plan, format_seconds

ROW = 0.24
"""Height of a bar with its gap [in]."""
LEFT, NARROW = 2.35, 1.45
"""Largest left end of the axes, after the names of the figures, and that in a column [in]."""
LOOKS: dict[str, dict[str, Any]] = {
    "shorter": {"facecolor": style.GREEN, "edgecolor": "white", "linewidth": 0},
    "longer": {"facecolor": style.ORANGE, "edgecolor": "white", "linewidth": 0, "hatch": "////"},
}
LEAST = 1e-4
"""Share of the step below which a figure gets no bar."""
LEAST_FIELD = 1e-3
"""The same for a field that the job does not state."""
MOST_FIELDS = 16
"""Most bars of such fields; fewer where the sheet is low."""


class StepRange(NamedTuple):
    """A bar from the shortest to the longest step [s]."""

    label: str
    low_s: float
    high_s: float


def draw(found: Sensitivities, path: str | Path, width: style.Width = "page") -> None:
    """Draws the plot to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    save(lambda: tornado(found), path, width)


def tornado(found: Sensitivities) -> Figure:
    """The plot."""
    report, step = found.report, found.report.step_time
    hardware = [
        StepRange(one.figure.label, one.better_s, one.worse_s) for one in found.found if one.swing_s >= LEAST * step
    ]
    assumed = [_field_bar(one) for one in found.assumed if one.step_effect_s >= LEAST_FIELD * step][:MOST_FIELDS]
    heading = make_heading(
        f"{report.job.model.name} on {report.job.cluster.name}: what shortens a step of {format_seconds(step)}",
        describe_plan(report.play.plan),
        f"Every figure of the hardware {RANGE:.0%} better and {RANGE:.0%} worse, all others kept: plain bars are "
        "shorter steps, hatched ones longer steps.",
    )
    top = heading.bottom
    words = "Fields that the job does not state: the shortest and the longest step of their alternatives."
    between = 0.5 + note_height(words)
    rows = int((style.layout_height() - top - between - 0.45) / ROW)
    shown, fields = split_rows(rows, len(hardware), len(assumed))
    left_out = [len(hardware) - shown, len(assumed) - fields]
    hardware, assumed = hardware[:shown], assumed[:fields]
    more = f"{sum(left_out)} narrower bars are left out." if any(left_out) else ""
    below = top + ROW * max(1, len(hardware)) + between
    foot = below + ROW * len(assumed) + 0.28 if assumed else below - between + 0.3
    sheet = Sheet(foot + note_height(more))
    sheet.head(heading)
    if hardware:
        _draw_bars(sheet, top, hardware, step)
    else:
        sheet.text(EDGE, top + 0.1, "No figure of the hardware changes the step.")
    if assumed:
        sheet.note(below - 0.02 - note_height(words), words)
        _draw_bars(sheet, below, assumed, step)
    if more:
        sheet.note(foot + 0.06, more)
    return sheet.figure


def split_rows(rows: int, hardware: int, assumed: int) -> tuple[int, int]:
    """Divides rows among bars of the hardware and of fields: each has at least half of them if it needs them."""
    if hardware + assumed <= rows:
        return hardware, assumed
    half = rows // 2
    if hardware <= half:
        return hardware, rows - hardware
    return (rows - assumed, assumed) if assumed <= half else (half, rows - half)


def _field_bar(found: AssumedFieldEffect) -> StepRange:
    """The bar of a field; it ends at the step itself where no alternative is shorter, or none longer."""
    label = found.field.name.removeprefix("framework.set.").removeprefix("plan.schemes.")
    times = [found.step_time_s, *(one.step_time_s for one in found.alternatives)]
    return StepRange(label, min(times), max(times))


def _draw_bars(sheet: Sheet, top: float, bars: Sequence[StepRange], step: float) -> None:
    """Draws the bars one below the other, from the step time [s] to both sides. top: upper end of the axes [in]."""
    most = NARROW if style.is_narrow() else LEFT
    left = min(most, max(text_width(bar.label) for bar in bars) + 0.2)
    wide = sheet.width - left - EDGE - 0.1
    axes = sheet.axes(left, top, wide, ROW * len(bars))
    scale, unit = time_unit(step)
    low, high = min(step, *(bar.low_s for bar in bars)), max(step, *(bar.high_s for bar in bars))
    # Numbers beside the longest bars have room of their own.
    number = max(text_width(format_seconds(end)) for bar in bars for end in bar[1:]) + 0.1
    room = number * (high - low) / max(0.3, wide - 2 * number)
    axes.set_xlim((low - room) * scale, (high + room) * scale)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, bar in enumerate(bars):
        for end, look, side in ((bar.low_s, "shorter", "right"), (bar.high_s, "longer", "left")):
            if end == step:
                continue
            axes.barh(row, (end - step) * scale, 0.66, step * scale, **LOOKS[look])
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
    axes.set_yticks(range(len(bars)), [_break_label(bar.label, left - EDGE - 0.05) for bar in bars], linespacing=0.9)
    limits = axes.get_xlim()
    space_ticks(axes, lambda value: f"{value:,.10g} {unit}")
    axes.set_xlim(limits)


def _break_label(label: str, room: float) -> str:
    """A label in at most two lines of a width [in], cut behind them; a field breaks at its last dot."""
    field, dot, name = label.rpartition(".")
    is_long = " " not in label and text_width(label) > room
    lines = [field + dot, name] if is_long and dot else wrap_text(label, room)
    return "\n".join(truncate_words(line, room) for line in (lines[0], " ".join(lines[1:])) if line)
