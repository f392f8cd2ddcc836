"""Memory of a step: every pipeline device at its peak, and the fullest over the step.

Besides tensors a GPU holds fragmentation of the caching allocator, and the CUDA context with buffers of libraries: both
are hatched. Memory beyond the capacity is red, and the subtitle gives its size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.gantt import LegendEntry, draw_legend, legend_entry, legend_height
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Sheet,
    draw_bar,
    fill_stairs,
    format_time_axis,
    make_heading,
    space_ticks,
    text_width,
    wrap_text,
    write_beside,
    write_on,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.memory import (
    COLUMNS,
    DeviceMemory,
    MemoryCurve,
    device_memories,
    fullest_device,
    memory_curve,
    merge_levels,
)
from meshcast.experiments.views.timeline import time_unit
from meshcast.hardware.units import GIB
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import describe_plan, format_need, format_number
from meshcast.simulator.report.report import Report

THICK = 0.78
"""Thickness of bars, in their distance."""

MAX_ROWS = 32
"""Maximum number of devices that are drawn; of more, evenly spaced ones."""

CAPACITY_FROM = {"peak": 0.2, "time": 0.5}
"""Share of the capacity that must be used for the scale of a panel to reach it."""

LEGEND_FROM = 0.002
"""Minimum share of the memory for a category to be in the legend."""

LEFT, RIGHT, FREE = 0.66, 1.24, 0.76
"""Margins of the bars [in]; the right margin has the sum of each device and, in its last part, the free memory."""

TALL, LOW = 1.75, 1.0
"""Height of the panel over time, and on sheets that are low [in]."""

MIN_ROW = 0.135
"""Minimum distance of bars [in]."""


def memory(report: Report) -> Figure:
    """Returns the figure."""
    everyone = device_memories(report)
    full = fullest_device(everyone)
    capacity, job = full.capacity, report.job
    who = f"{full.name}, the fullest," if len(everyone) > 1 else "a GPU"
    needs = f"needs {format_need(full.total, capacity)} GiB and has {format_gib(capacity)}"
    title = f"{job.model.name} on {job.cluster.name}: {who} {needs}"
    over = [bar for bar in everyone if bar.free < 0]
    verdict = report.fit_in_words
    if over and len(everyone) > 1:
        verdict += f"; {len(over)} of {len(everyone)} stages are too full"
    heading = make_heading(title, describe_plan(report.play.plan))
    verdict_lines = wrap_text(verdict, style.layout_width() - 2 * EDGE, style.TEXT, bold=bool(over))
    tall = TALL if style.layout_height() > 6 else LOW
    first = heading.bottom - 0.06 + LINE * len(verdict_lines) + 0.36
    room = style.layout_height() - first - 0.62 - tall - 0.9
    shown = [everyone[d] for d in choose_devices(len(everyone), min(MAX_ROWS, int(room / MIN_ROW)), full.device)]
    row = min(0.34, max(MIN_ROW, min(3.0, room) / len(shown)))
    left = left_margin(shown)
    curve = memory_curve(report, full.device)
    largest = np.max([[*bar.by.values()] for bar in shown] + [curve.held.max(axis=0)], axis=0)
    names = [name for name, n in zip(CATEGORIES, largest, strict=True) if n > LEGEND_FROM * full.total]
    entries = legend_entries(names, bool(over))
    second = first + row * len(shown) + 0.62
    keys = second + tall + 0.26
    sheet = Sheet(keys + legend_height(entries) + 0.06)
    sheet.head(heading)
    for i, line in enumerate(verdict_lines):
        looks: dict[str, Any] = {"color": palette.RED, "fontweight": "bold"} if over else {"color": palette.FAINT}
        sheet.text(EDGE, heading.bottom - 0.06 + LINE * i, line, **looks)

    where = "the stage at its peak" if len(everyone) == 1 else "every stage at its peak"
    if len(shown) < len(everyone):
        where = f"{len(shown)} of {len(everyone)} stages, each at its peak"
    draw_caption(sheet, first - 0.14, "a", where)
    sheet.text(sheet.width - FREE, first - 0.05, "GiB", ha="right", color=palette.FAINT)
    draw_peaks(sheet.axes(left, first, sheet.width - left - RIGHT, row * len(shown)), shown, row)

    draw_caption(
        sheet,
        second,
        "b",
        "tensors through the step" + (f" on {full.name}, the fullest" if len(everyone) > 1 else ""),
    )
    if shows_capacity(full.total, capacity, "time"):
        words = f"of {format_gib(capacity)}, tensors can have {format_gib(capacity - full.context)}"
    else:
        words = capacity_beyond_scale(capacity)
    if style.is_narrow():  # beside the caption there is no room
        words = ""
    sheet.text(sheet.right, second - 0.08, words, ha="right", color=palette.FAINT)
    draw_time_curve(sheet.axes(LEFT, second, sheet.width - LEFT - 0.14, tall), curve, full)
    draw_legend(sheet, entries, keys)
    return sheet.figure


def left_margin(shown: Sequence[DeviceMemory]) -> float:
    """Returns the room for the names of devices [in]."""
    return max(LEFT, max(text_width(bar.name, style.TEXT) for bar in shown) + 0.12)


# ------------------------------------------------------------------------------------------- drawing


def format_gib(nbytes: float) -> str:
    """Formats bytes in GiB, without decimals if they are zero."""
    value = nbytes / GIB
    return f"{value:,.0f} GiB" if abs(value - round(value)) < 1e-9 else f"{value:,.1f} GiB"


def shows_capacity(need: float, capacity: float, panel: str) -> bool:
    """Says whether the scale of a panel reaches the capacity."""
    return need >= CAPACITY_FROM[panel] * capacity


def capacity_beyond_scale(capacity: float) -> str:
    return f"the capacity, {format_gib(capacity)}, lies beyond this scale"


def draw_caption(sheet: Sheet, top: float, letter: str, words: str) -> None:
    """Writes letter and title of a panel."""
    sheet.text(EDGE, top - 0.08, letter, fontweight="bold")
    sheet.text(EDGE + 0.13, top - 0.08, words, color=palette.FAINT)


def draw_peaks(axes: Any, shown: Sequence[DeviceMemory], row: float) -> None:
    """Draws the upper panel, a bar for every device. row: distance of bars [in]."""
    top, capacity = max(bar.total for bar in shown), max(bar.capacity for bar in shown)
    equal = all(bar.capacity == capacity for bar in shown)
    end = max(top, capacity) * 1.02 if shows_capacity(top, capacity, "peak") else top * 1.1
    room = style.layout_width() - left_margin(shown) - RIGHT
    inches = room / (end / GIB)
    for y, bar in enumerate(shown):
        draw_device(axes, y, bar, inches, row)
        spare = bar.free / GIB
        if not equal:
            axes.plot([bar.capacity / GIB] * 2, [y - 0.5, y + 0.5], color=palette.INK, linewidth=1.1)
        words = f"{abs(spare):,.1f} {'free' if spare >= 0 else 'over'}"
        for column, figure in ((FREE, f"{bar.total / GIB:,.1f}"), (EDGE, words)):
            looks: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center_baseline"}
            looks |= {"color": palette.INK if spare >= 0 else palette.RED, "annotation_clip": False}
            write_beside(axes, figure, (1, y), ((RIGHT - column) * 72, 0), **looks)
    axes.set_xlim(0, end / GIB)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    if shows_capacity(top, capacity, "peak"):
        if equal:
            axes.axvline(capacity / GIB, color=palette.INK, linewidth=1.1)
        words = f"capacity {format_gib(capacity)}" + ("" if equal else " at most")
    else:
        words = capacity_beyond_scale(capacity)
        if text_width(words, style.TEXT) > room:
            words = f"{format_gib(capacity)} beyond"
    place = min(capacity / end, 1 - 0.5 * text_width(words, style.TEXT) / room)
    write_beside(axes, words, (place, 1), (0, 3), xycoords="axes fraction", ha="center", fontsize=style.TEXT)
    # Labels must not overlap.
    every = max(1, math.ceil(0.115 / row))
    rows = range(0, len(shown), every)
    axes.set_yticks(list(rows), [shown[y].name for y in rows])
    space_ticks(axes, lambda value: f"{value:,.10g} GiB")
    axes.set_xlim(0, end / GIB)


def draw_device(axes: Any, y: float, bar: DeviceMemory, inches: float, row: float) -> None:
    """Draws the bar of a device.

    inches: of the panel for a GiB.
    row: distance of bars [in].
    """
    at = 0.0
    for name, nbytes in bar.by.items():
        wide = nbytes / GIB
        looks = style.fill(palette.MEMORY[name])
        draw_bar(axes, y, wide, THICK, at, linewidth=0.3, **looks)
        words = f"{wide:.1f}"
        clear = min(at + wide, bar.capacity / GIB) - at  # the part below the capacity
        if clear * inches > text_width(words) + 0.08 and row * THICK > 0.1:
            write_on(axes, words, (at + clear / 2, y), looks["facecolor"], 0.3)
        at += wide
    for nbytes, kind in ((bar.fragmentation, palette.FRAGMENTATION), (bar.context, palette.CONTEXT)):
        draw_bar(axes, y, nbytes / GIB, THICK, at, linewidth=0, **style.fill(kind))
        at += nbytes / GIB
    if bar.free < 0:
        draw_bar(axes, y, -bar.free / GIB, THICK, bar.capacity / GIB, **EXCESS)


def fill_categories(axes: Any, sums: np.ndarray, edges: np.ndarray, held: np.ndarray) -> None:
    """Fills the areas of all categories through time, each above those before it.

    sums: memory of a category and of those before it [bins, categories].
    edges: of the bins.
    held: memory by category at some moments [moments, categories]; a category that is never held is left out.
    The total is drawn first and lower sums over it, which leaves no seams.
    """
    for i, name in reversed(list(enumerate(CATEGORIES))):
        if held[:, i].any():
            levels, knots = merge_levels(sums[:, i], edges)
            fill_stairs(axes, levels, knots, linewidth=0, **style.fill(palette.MEMORY[name]))


def draw_time_curve(axes: Any, curve: MemoryCurve, full: DeviceMemory) -> None:
    """Draws the lower panel: memory of a device over the step, and its peak."""
    span, capacity = curve.span, full.capacity
    scale, unit = time_unit(span)
    sums = np.cumsum(curve.sample(), axis=1) / GIB
    edges = np.linspace(0.0, span * scale, COLUMNS + 1)
    fill_categories(axes, sums, edges, curve.held)

    seen = shows_capacity(full.total, capacity, "time")
    peak = full.allocated / GIB
    end = max(full.total, capacity) / GIB * 1.1 if seen else peak * 1.22
    if seen:
        room = (capacity - full.context) / GIB
        axes.axhspan(room, capacity / GIB, zorder=0, linewidth=0, **style.fill(palette.CONTEXT))
        if peak > room:
            levels, knots = merge_levels(np.maximum(sums[:, -1], room), edges)
            fill_stairs(axes, levels, knots, room, **EXCESS | {"linewidth": 0})
        axes.axhline(capacity / GIB, color=palette.INK, linewidth=1.1)
    axes.set_ylim(0, end)
    format_time_axis(axes, span, scale, unit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g} GiB")

    at = curve.peak_moment
    words = f"peak {peak:,.1f} GiB at {format_number(at * scale)} {unit}"
    half = 0.5 * text_width(words, style.TEXT) / (style.layout_width() - LEFT - 0.14) * span
    side = "left" if at < half else "right" if at > span - half else "center"
    axes.plot([at * scale], [peak], marker=CARETDOWN, color=palette.INK, markersize=4, clip_on=False)
    patch = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85}
    write_beside(axes, words, (at * scale, peak), (0, 6), ha=side, bbox=patch, fontsize=style.TEXT)


EXCESS: dict[str, Any] = style.fill(palette.EXCESS) | {"facecolor": "none", "linewidth": 0.8}


def legend_entries(names: list[str], over: bool) -> list[LegendEntry]:
    """Lists categories that are drawn, and what a GPU holds beside tensors. over: whether a capacity is exceeded."""
    held = [*(palette.MEMORY[name] for name in names), palette.FRAGMENTATION, palette.CONTEXT]
    return [legend_entry(looks) for looks in (*held, *([palette.EXCESS] if over else []))]
