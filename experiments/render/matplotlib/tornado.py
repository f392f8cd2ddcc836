"""Tornado plot: the step time between better and worse hardware, a bar for every figure, the widest first; below it
between the alternatives of every field that the job does not state.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    Sheet,
    draw_bar,
    make_heading,
    note_height,
    space_ticks,
    text_width,
    truncate_words,
    wrap_text,
    write_beside,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.timeline import time_unit
from meshcast.experiments.views.tornado import StepRange, make_tornado
from meshcast.simulator.report.formatting import describe_plan, format_seconds

ROW = 0.24
"""Height of a bar with its gap [in]."""
LEFT, NARROW = 2.35, 1.45
"""Largest left end of the axes, after the names of the figures, and that in a column [in]."""


def tornado(sensitivities: Sensitivities) -> Figure:
    """Returns the plot."""
    report, bars = sensitivities.report, make_tornado(sensitivities)
    step, hardware, assumed = bars.step, bars.hardware, bars.fields
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


def _draw_bars(sheet: Sheet, top: float, bars: Sequence[StepRange], step: float) -> None:
    """Draws the bars below each other, from the step time [s] to both sides. top: upper end of the axes [in]."""
    most = NARROW if style.is_narrow() else LEFT
    left = min(most, max(text_width(bar.label) for bar in bars) + 0.2)
    wide = sheet.width - left - EDGE - 0.1
    axes = sheet.axes(left, top, wide, ROW * len(bars))
    scale, unit = time_unit(step)
    low, high = min(step, *(bar.low_s for bar in bars)), max(step, *(bar.high_s for bar in bars))
    # Numbers beside the longest bars have room for themselves.
    number = max(text_width(format_seconds(end)) for bar in bars for end in (bar.low_s, bar.high_s)) + 0.1
    room = number * (high - low) / max(0.3, wide - 2 * number)
    axes.set_xlim((low - room) * scale, (high + room) * scale)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    for row, bar in enumerate(bars):
        for end, looks, side in ((bar.low_s, palette.BETTER, "right"), (bar.high_s, palette.WORSE, "left")):
            if end == step:
                continue
            draw_bar(axes, row, (end - step) * scale, 0.66, step * scale, linewidth=0, **style.fill(looks))
            away = (-3 if side == "right" else 3, 0)
            write_beside(axes, format_seconds(end), (end * scale, row), away, ha=side, va="center_baseline")
    axes.axvline(step * scale, color=palette.INK, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [_break_label(bar.label, left - EDGE - 0.05) for bar in bars], linespacing=0.9)
    limits = axes.get_xlim()
    space_ticks(axes, lambda value: f"{value:,.10g} {unit}")
    axes.set_xlim(limits)


def _break_label(label: str, room: float) -> str:
    """Breaks a label into at most two lines of a width [in], cut behind them; a field breaks at its last dot."""
    field, dot, name = label.rpartition(".")
    is_long = " " not in label and text_width(label) > room
    lines = [field + dot, name] if is_long and dot else wrap_text(label, room)
    return "\n".join(truncate_words(line, room) for line in (lines[0], " ".join(lines[1:])) if line)
