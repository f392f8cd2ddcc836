"""Memory of a step: every pipeline device at its peak, and the fullest one over the step.

Besides tensors a GPU holds fragmentation of the caching allocator, and the CUDA context with buffers of libraries: both
are hatched. Memory beyond the capacity is red, and the subtitle gives its size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN

from meshcast.experiments.plots import style
from meshcast.experiments.plots.gantt import LegendEntry, draw_legend, legend_height
from meshcast.experiments.plots.sheet import (
    EDGE,
    LINE,
    Sheet,
    fill_stairs,
    format_time_axis,
    make_heading,
    save,
    space_ticks,
    text_width,
    time_unit,
    wrap_text,
)
from meshcast.hardware.units import GIB
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import describe_plan, format_need, format_number, name_device
from meshcast.simulator.report.report import Report

THICK = 0.78
"""Thickness of bars, in their distance."""

COLOURS = {
    "parameters": style.BLUE,
    "gradients": style.ORANGE,
    "optimizer": style.GREY,
    "activations": style.SKY,
    "workspace": style.YELLOW,
    "buffers": style.INK,
    "logits": style.PINK,
    "other": style.BROWN,
}
HATCHES = {"gradients": "////", "optimizer": "\\\\\\\\", "workspace": "....", "logits": "xxxx", "other": "----"}
"""Hatches of categories whose greys are like that of another."""
WORDS = {"optimizer": "optimizer state", "buffers": "buffers in flight"}

RED = "#c1121f"

ROWS = 32
"""Maximum number of devices that are drawn; of more, evenly spaced ones."""

BINS = 1440
"""Columns of time of the lower panel, finer than print resolves."""

CAPACITY_FROM = {"peak": 0.2, "time": 0.5}
"""Share of the capacity that must be used for the scale of a panel to reach it."""

LEGEND_FROM = 0.002
"""Minimum share of the memory for a category to be in the legend."""

LEFT, RIGHT, FREE = 0.66, 1.24, 0.76
"""Margins of the bars [in]; the right one has the sum of each device and, in its last part, the free memory."""

TALL, LOW = 1.75, 1.0
"""Height of the panel over time, and on sheets that are low [in]."""

LEAST_ROW = 0.135
"""Least distance of bars [in]."""


@dataclass(frozen=True)
class Bar:
    """Memory of one device at its peak [bytes]."""

    device: int
    name: str
    by: dict[str, float]
    fragmentation: float
    """Reserved by the caching allocator, but not allocated."""
    context: float
    """CUDA context and buffers of libraries."""
    capacity: float
    """Memory of the GPU."""

    @property
    def allocated(self) -> float:
        return sum(self.by.values())

    @property
    def total(self) -> float:
        return self.allocated + self.fragmentation + self.context


def draw(report: Report, path: str | Path, width: style.Width = "page") -> None:
    """Draws both panels to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    save(lambda: memory(report), path, width)


def memory(report: Report) -> Figure:
    """The figure."""
    everyone = device_bars(report)
    full = fullest_device(everyone)
    capacity, job = full.capacity, report.job
    who = f"{full.name}, the fullest," if len(everyone) > 1 else "a GPU"
    needs = f"needs {format_need(full.total, capacity)} GiB and has {format_gib(capacity)}"
    title = f"{job.model.name} on {job.cluster.name}: {who} {needs}"
    over = [bar for bar in everyone if bar.total > bar.capacity]
    verdict = report.fit_in_words
    if over and len(everyone) > 1:
        verdict += f"; {len(over)} of {len(everyone)} stages are too full"
    heading = make_heading(title, describe_plan(report.play.plan))
    verdict_lines = wrap_text(verdict, style.layout_width() - 2 * EDGE, style.TEXT, bold=bool(over))
    tall = TALL if style.layout_height() > 6 else LOW
    first = heading.bottom - 0.06 + LINE * len(verdict_lines) + 0.36
    room = style.layout_height() - first - 0.62 - tall - 0.9
    shown = [everyone[d] for d in choose_devices(len(everyone), full.device, min(ROWS, int(room / LEAST_ROW)))]
    row = min(0.34, max(LEAST_ROW, min(3.0, room) / len(shown)))
    left = left_margin(shown)
    moments, held = report.play.memory(full.device)
    most = np.max([[bar.by[name] for name in CATEGORIES] for bar in shown] + [held.max(axis=0)], axis=0)
    names = [name for name, n in zip(CATEGORIES, most, strict=True) if n > LEGEND_FROM * full.total]
    entries = legend_entries(names, bool(over))
    second = first + row * len(shown) + 0.62
    keys = second + tall + 0.26
    sheet = Sheet(keys + legend_height(entries) + 0.06)
    sheet.head(heading)
    for i, line in enumerate(verdict_lines):
        looks: dict[str, Any] = {"color": RED, "fontweight": "bold"} if over else {"color": style.FAINT}
        sheet.text(EDGE, heading.bottom - 0.06 + LINE * i, line, **looks)

    where = "the stage at its peak" if len(everyone) == 1 else "every stage at its peak"
    if len(shown) < len(everyone):
        where = f"{len(shown)} of {len(everyone)} stages, each at its peak"
    draw_caption(sheet, first - 0.14, "a", where)
    sheet.text(sheet.width - FREE, first - 0.05, "GiB", ha="right", color=style.FAINT)
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
    sheet.text(sheet.right, second - 0.08, words, ha="right", color=style.FAINT)
    draw_time_curve(sheet.axes(LEFT, second, sheet.width - LEFT - 0.14, tall), report, moments, held, full)
    draw_legend(sheet, entries, keys)
    return sheet.figure


# ---------------------------------------------------------------------------------------------- data


def device_bars(report: Report) -> list[Bar]:
    """Memory of every stage at its peak."""
    context = report.job.framework.memory.context_gib * GIB
    found = []
    for device, (peak, need) in enumerate(zip(report.play.peaks, report.needs, strict=True)):
        by = {category: float(peak.by.get(category, 0.0)) for category in CATEGORIES}
        name = name_device(report.play.plan, device)
        found.append(Bar(device, name, by, need - sum(by.values()) - context, context, report.usable[device]))
    return found


def fullest_device(everyone: list[Bar]) -> Bar:
    """The device that lacks most, or has the least left."""
    return max(everyone, key=lambda bar: bar.total - bar.capacity)


def left_margin(shown: list[Bar]) -> float:
    """Room for the names of devices [in]."""
    return max(LEFT, max(text_width(bar.name, style.TEXT) for bar in shown) + 0.12)


def choose_devices(devices: int, full: int, most: int = ROWS) -> list[int]:
    """Devices that are drawn: evenly spaced, including the first, the last and the fullest."""
    count = min(devices, most)
    even = [round(i * (devices - 1) / max(1, count - 1)) for i in range(count)]
    if full not in even:  # it replaces its neighbour, never an end
        even[min(range(1, count - 1), key=lambda i: abs(even[i] - full))] = full
    return sorted(even)


def sample_columns(moments: np.ndarray, held: np.ndarray, span: float, count: int = BINS) -> np.ndarray:
    """Memory by category at the fullest moment of every column of time [count, categories], so that no peak is lost.

    moments: times of changes [s]. held: bytes from each moment on [moments, categories]. span: of the step [s].
    """
    edges = np.linspace(0.0, span, count + 1)
    total = held.sum(axis=1)
    best = np.searchsorted(moments, edges[:-1], side="right") - 1
    column = np.clip(np.searchsorted(edges, moments, side="right") - 1, 0, count - 1)
    order = np.lexsort((total, column))
    last = np.searchsorted(column[order], np.arange(count), side="right") - 1
    inside = order[last]
    better = (column[inside] == np.arange(count)) & (total[inside] > total[best])
    chosen_moments: np.ndarray = np.where(better, inside, best)
    result: np.ndarray = held[chosen_moments]
    return result


# ------------------------------------------------------------------------------------------- drawing


def format_gib(nbytes: float) -> str:
    """Formats bytes in GiB, without decimals if they are zero."""
    value = nbytes / GIB
    return f"{value:,.0f} GiB" if abs(value - round(value)) < 1e-9 else f"{value:,.1f} GiB"


def shows_capacity(need: float, capacity: float, panel: str) -> bool:
    """Whether the scale of a panel reaches the capacity."""
    return need >= CAPACITY_FROM[panel] * capacity


def capacity_beyond_scale(capacity: float) -> str:
    return f"the capacity, {format_gib(capacity)}, lies beyond this scale"


def draw_caption(sheet: Sheet, top: float, letter: str, words: str) -> None:
    """Writes letter and title of a panel."""
    sheet.text(EDGE, top - 0.08, letter, fontweight="bold")
    sheet.text(EDGE + 0.13, top - 0.08, words, color=style.FAINT)


def draw_peaks(axes: Any, shown: list[Bar], row: float) -> None:
    """Draws the upper panel, a bar for every device. row: distance of bars [in]."""
    top, capacity = max(bar.total for bar in shown), max(bar.capacity for bar in shown)
    equal = all(bar.capacity == capacity for bar in shown)
    end = max(top, capacity) * 1.02 if shows_capacity(top, capacity, "peak") else top * 1.1
    room = style.layout_width() - left_margin(shown) - RIGHT
    inches = room / (end / GIB)
    for y, bar in enumerate(shown):
        draw_bar(axes, y, bar, inches, row)
        spare = (bar.capacity - bar.total) / GIB
        if not equal:
            axes.plot([bar.capacity / GIB] * 2, [y - 0.5, y + 0.5], color=style.INK, linewidth=1.1)
        words = f"{abs(spare):,.1f} {'free' if spare >= 0 else 'over'}"
        for column, figure in ((FREE, f"{bar.total / GIB:,.1f}"), (EDGE, words)):
            axes.annotate(
                figure,
                (1, y),
                ((RIGHT - column) * 72, 0),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                ha="right",
                va="center_baseline",
                fontsize=style.SMALL,
                color=style.INK if spare >= 0 else RED,
                annotation_clip=False,
            )
    axes.set_xlim(0, end / GIB)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    if shows_capacity(top, capacity, "peak"):
        if equal:
            axes.axvline(capacity / GIB, color=style.INK, linewidth=1.1)
        words = f"capacity {format_gib(capacity)}" + ("" if equal else " at most")
    else:
        words = capacity_beyond_scale(capacity)
        if text_width(words, style.TEXT) > room:
            words = f"{format_gib(capacity)} beyond"
    place = min(capacity / end, 1 - 0.5 * text_width(words, style.TEXT) / room)
    axes.annotate(words, (place, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="center")
    # Labels must not overlap.
    every = max(1, math.ceil(0.115 / row))
    rows = range(0, len(shown), every)
    axes.set_yticks(list(rows), [shown[y].name for y in rows])
    space_ticks(axes, lambda value: f"{value:,.10g} GiB")
    axes.set_xlim(0, end / GIB)


def draw_bar(axes: Any, y: float, bar: Bar, inches: float, row: float) -> None:
    """Draws the bar of a device. inches: of the panel for a GiB. row: distance of bars [in]."""
    at = 0.0
    for name, nbytes in bar.by.items():
        wide = nbytes / GIB
        colour, hatch = COLOURS[name], HATCHES.get(name, "")
        axes.barh(y, wide, THICK, at, facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0.3)
        words = f"{wide:.1f}"
        clear = min(at + wide, bar.capacity / GIB) - at  # the part below the capacity
        if clear * inches > text_width(words) + 0.08 and row * THICK > 0.1:
            ink = style.ink_on(style.rgb(colour))
            patch = {"facecolor": colour, "edgecolor": "none", "pad": 0.3}
            spot = at + clear / 2, y
            axes.text(*spot, words, ha="center", va="center_baseline", fontsize=style.SMALL, color=ink, bbox=patch)
        at += wide
    for nbytes, looks in ((bar.fragmentation, FRAGMENTATION), (bar.context, CONTEXT)):
        axes.barh(y, nbytes / GIB, THICK, at, **looks)
        at += nbytes / GIB
    if bar.total > bar.capacity:
        axes.barh(y, (bar.total - bar.capacity) / GIB, THICK, bar.capacity / GIB, **EXCESS)


def fill_categories(axes: Any, sums: np.ndarray, edges: np.ndarray, held: np.ndarray) -> None:
    """Fills the areas of all categories through time, each above those before it.

    sums: memory of a category and of those before it [bins, categories]. edges: of the bins.
    held: memory by category at some moments [moments, categories]; a category that is never held is left out.
    The total is drawn first and lower sums over it, which leaves no seams.
    """
    for i, name in reversed(list(enumerate(CATEGORIES))):
        if held[:, i].any():
            levels, knots = merge_levels(sums[:, i], edges)
            looks: dict[str, Any] = {
                "facecolor": COLOURS[name],
                "hatch": HATCHES.get(name, ""),
                "edgecolor": "white",
                "linewidth": 0,
            }
            fill_stairs(axes, levels, knots, **looks)


def draw_time_curve(axes: Any, report: Report, moments: np.ndarray, held: np.ndarray, full: Bar) -> None:
    """Draws the lower panel: memory of one device over the step, and its peak."""
    span, capacity = report.play.step.span, full.capacity
    scale, unit = time_unit(span)
    sums = np.cumsum(sample_columns(moments, held, span), axis=1) / GIB
    edges = np.linspace(0.0, span * scale, BINS + 1)
    fill_categories(axes, sums, edges, held)

    seen = shows_capacity(full.total, capacity, "time")
    peak = full.allocated / GIB
    end = max(full.total, capacity) / GIB * 1.1 if seen else peak * 1.22
    if seen:
        room = (capacity - full.context) / GIB
        axes.axhspan(room, (capacity - full.context) / GIB, zorder=0, **FRAGMENTATION)
        axes.axhspan((capacity - full.context) / GIB, capacity / GIB, zorder=0, **CONTEXT)
        if peak > room:
            levels, knots = merge_levels(np.maximum(sums[:, -1], room), edges)
            fill_stairs(axes, levels, knots, room, **EXCESS | {"linewidth": 0})
        axes.axhline(capacity / GIB, color=style.INK, linewidth=1.1)
    axes.set_ylim(0, end)
    format_time_axis(axes, span, scale, unit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g} GiB")

    total = held.sum(axis=1)
    at = float(moments[int(np.argmax(total > total.max() * (1 - 1e-9)))])  # the first of equal peaks
    words = f"peak {peak:,.1f} GiB at {format_number(at * scale)} {unit}"
    half = 0.5 * text_width(words, style.TEXT) / (style.layout_width() - LEFT - 0.14) * span
    side = "left" if at < half else "right" if at > span - half else "center"
    axes.plot([at * scale], [peak], marker=CARETDOWN, color=style.INK, markersize=4, clip_on=False)
    axes.annotate(
        words,
        (at * scale, peak),
        (0, 6),
        textcoords="offset points",
        ha=side,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
    )


def merge_levels(levels: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges neighbouring columns of equal height."""
    new = np.concatenate([[True], levels[1:] != levels[:-1]])
    return levels[new], np.append(edges[:-1][new], edges[-1])


PALE = style.lighten(style.GREY, 0.82)
FRAGMENTATION: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#8a8a8a", "hatch": "//////", "linewidth": 0}
CONTEXT: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#8a8a8a", "hatch": "......", "linewidth": 0}
EXCESS: dict[str, Any] = {"facecolor": "none", "edgecolor": RED, "hatch": "xxxxx", "linewidth": 0.8}


def legend_entries(names: list[str], over: bool) -> list[LegendEntry]:
    """The categories that are drawn, and what a GPU holds beside tensors. over: whether memory exceeds a capacity."""
    entries = [LegendEntry(WORDS.get(name, name), [style.rgb(COLOURS[name])], HATCHES.get(name, "")) for name in names]
    for words, looks in (("fragmentation", FRAGMENTATION), ("context, libraries", CONTEXT)):
        entries.append(LegendEntry(words, [looks["facecolor"]], looks["hatch"], looks["edgecolor"]))
    if over:
        entries.append(LegendEntry("beyond the capacity", [(1.0, 1.0, 1.0)], EXCESS["hatch"], EXCESS["edgecolor"]))
    return entries
