"""Memory of a step: what every pipeline device holds at its peak, and the fullest one through the step.

A GPU must hold more than tensors: blocks lie broken in the allocator, and the CUDA context and the libraries take their
share. Both are hatched; what a GPU has no room for is red, and said in words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.markers import CARETDOWN
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, clock, save, unit_of, width_of, wrapped
from hardware.units import GIB
from simulator.program.memory_profile import CATEGORIES
from simulator.report.report import Report
from simulator.report.words import describe_plan, format_number

COLOURS = {
    "parameters": style.BLUE,
    "gradients": style.ORANGE,
    "optimizer": style.GREY,
    "activations": style.SKY,
    "workspace": style.YELLOW,
    "buffers": style.INK,
    "logits": "#cc79a7",
    "other": "#b8a37e",
}
WORDS = {"optimizer": "optimizer state", "buffers": "buffers in flight"}

RED = "#c1121f"

ROWS = 32
"""Devices that are drawn; of more, evenly chosen ones."""

BINS = 1440
"""Columns of time of the lower panel: more than can be told apart in print."""

SEEN = {"peak": 0.2, "time": 0.5}
"""A panel's scale reaches the capacity where the memory fills at least this share of it."""

SMALLEST = 0.002
"""Share of all memory from which on a category can be seen, and is told in the legend."""

LEFT, RIGHT, FREE = 0.66, 1.24, 0.76
"""Margins beside the bars [in]; the right one holds each device's sum and, in its last part, what stays free."""

TALL = 1.75
"""Height of the panel over time [in]."""


@dataclass(frozen=True)
class Bar:
    """One device at its peak [bytes]."""

    device: int
    by: dict[str, float]
    broken: float
    """What the allocator holds beside what is allocated."""
    context: float
    """The CUDA context and the libraries' own buffers."""

    @property
    def allocated(self) -> float:
        return sum(self.by.values())

    @property
    def total(self) -> float:
        return self.allocated + self.broken + self.context


def draw(report: Report, path: str | Path) -> None:
    """Draws both panels into `path`, a .png or .svg file.

    Raises OSError where it cannot be written.
    """
    save(lambda: memory(report), path)


def memory(report: Report) -> Figure:
    """The figure."""
    everyone = bars(report)
    full = fullest(everyone)
    shown = [everyone[d] for d in chosen(len(everyone), full.device)]
    row = min(0.34, max(0.135, 3.0 / len(shown)))
    capacity, job = report.capacity, report.job

    head = wrapped(describe_plan(report.play.plan))
    first = 0.36 + LINE * (len(head) + 1) + 0.36
    second = first + row * len(shown) + 0.62
    keys = second + TALL + 0.26
    sheet = Sheet(keys + 0.56)

    who = f"device {full.device}, the fullest," if len(everyone) > 1 else "a GPU"
    title = f"{job.model.name} on {job.cluster.name}: {who} needs {gib(full.total)} and has {gib(capacity)}"
    sheet.head(title, head)
    over = [bar for bar in everyone if bar.total > capacity]
    verdict = f"fits: {gib(capacity - full.total)} of {gib(capacity)} stay free"
    if over:
        verdict = f"does not fit: {gib(full.total - capacity)} more than the {gib(capacity)} of a GPU"
        if len(everyone) > 1:
            verdict += f"; {len(over)} of {len(everyone)} devices are too full"
    sheet.text(
        EDGE,
        0.36 + LINE * len(head),
        verdict,
        color=RED if over else style.FAINT,
        fontweight="bold" if over else "normal",
    )

    where = "the device at its peak" if len(everyone) == 1 else "every device at its peak"
    if len(shown) < len(everyone):
        where = f"{len(shown)} of {len(everyone)} devices, each at its peak"
    caption(sheet, first - 0.14, "a", where)
    sheet.text(style.PAGE - FREE, first - 0.05, "GiB", ha="right", color=style.FAINT)
    stacks(sheet.axes(LEFT, first, style.PAGE - LEFT - RIGHT, row * len(shown)), shown, row, capacity)

    caption(
        sheet,
        second,
        "b",
        "tensors through the step" + (f" on device {full.device}, the fullest" if len(everyone) > 1 else ""),
    )
    if within(full.total, capacity, "time"):
        words = f"of {gib(capacity)}, tensors can have {gib(room_of(report))}"
    else:
        words = beyond(capacity)
    sheet.text(style.PAGE - EDGE, second - 0.08, words, ha="right", color=style.FAINT)
    moments, held = report.play.memory(full.device)
    curve(sheet.axes(LEFT, second, style.PAGE - LEFT - 0.14, TALL), report, moments, held, full)
    most = np.max([[bar.by[name] for name in CATEGORIES] for bar in shown] + [held.max(axis=0)], axis=0)
    legend(
        sheet, [name for name, n in zip(CATEGORIES, most, strict=True) if n > SMALLEST * full.total], bool(over), keys
    )
    return sheet.figure


# ---------------------------------------------------------------------------------------------- data


def bars(report: Report) -> list[Bar]:
    """Every device at its peak."""
    framework = report.job.framework.memory
    found = []
    for device, peak in enumerate(report.play.peaks):
        by = {category: float(peak.by.get(category, 0.0)) for category in CATEGORIES}
        found.append(Bar(device, by, sum(by.values()) * (framework.reserved_share - 1), framework.context_gib * GIB))
    return found


def fullest(everyone: list[Bar]) -> Bar:
    return max(everyone, key=lambda bar: bar.total)


def chosen(devices: int, full: int, most: int = ROWS) -> list[int]:
    """The devices that are drawn: evenly chosen, among them the first, the last and the fullest."""
    count = min(devices, most)
    even = [round(i * (devices - 1) / max(1, count - 1)) for i in range(count)]
    if full not in even:  # it takes the place of its neighbour, never that of an end
        even[min(range(1, count - 1), key=lambda i: abs(even[i] - full))] = full
    return sorted(even)


def room_of(report: Report) -> float:
    """What tensors can have of a GPU's memory: what broken blocks and the context leave [bytes]."""
    framework = report.job.framework.memory
    return (report.capacity - framework.context_gib * GIB) / framework.reserved_share


def columns(moments: np.ndarray, held: np.ndarray, span: float, count: int = BINS) -> np.ndarray:
    """For every one of `count` columns of time, the categories at the moment in it that holds most [count, categories].

    A column begins with what was there before, and no peak is lost, however short it is.
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


def gib(nbytes: float) -> str:
    """A capacity is a round figure and is told as one."""
    value = nbytes / GIB
    return f"{value:,.0f} GiB" if abs(value - round(value)) < 1e-9 else f"{value:,.1f} GiB"


def within(need: float, capacity: float, panel: str) -> bool:
    """Whether the capacity stands on a panel's scale."""
    return need >= SEEN[panel] * capacity


def beyond(capacity: float) -> str:
    return f"the capacity, {gib(capacity)}, lies beyond this scale"


def caption(sheet: Sheet, top: float, letter: str, words: str) -> None:
    """What a panel shows."""
    sheet.text(EDGE, top - 0.08, letter, fontweight="bold")
    sheet.text(EDGE + 0.13, top - 0.08, words, color=style.FAINT)


def stacks(axes: Any, shown: list[Bar], row: float, capacity: float) -> None:
    """The upper panel: a bar for each device, `row` inches from one to the next."""
    top = max(bar.total for bar in shown)
    end = max(top, capacity) * 1.02 if within(top, capacity, "peak") else top * 1.1
    inches = (style.PAGE - LEFT - RIGHT) / (end / GIB)
    tall = 0.78
    for y, bar in enumerate(shown):
        at = 0.0
        for name, nbytes in bar.by.items():
            wide = nbytes / GIB
            axes.barh(y, wide, tall, at, color=COLOURS[name], edgecolor="white", linewidth=0.3)
            words = f"{wide:.1f}"
            clear = min(at + wide, capacity / GIB) - at  # what is not crossed out
            if clear * inches > width_of(words) + 0.08 and row * tall > 0.1:
                ink = style.ink_on(style.rgb(COLOURS[name]))
                axes.text(at + clear / 2, y, words, ha="center", va="center_baseline", fontsize=style.SMALL, color=ink)
            at += wide
        for nbytes, looks in ((bar.broken, BROKEN), (bar.context, CONTEXT)):
            axes.barh(y, nbytes / GIB, tall, at, **looks)
            at += nbytes / GIB
        spare = (capacity - bar.total) / GIB
        if spare < 0:
            axes.barh(y, -spare, tall, capacity / GIB, **TOO_MUCH)
        words = f"{abs(spare):,.1f} {'free' if spare >= 0 else 'over'}"
        for column, told in ((FREE, f"{bar.total / GIB:,.1f}"), (EDGE, words)):
            axes.annotate(
                told,
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
    if within(top, capacity, "peak"):
        axes.axvline(capacity / GIB, color=style.INK, linewidth=1.1)
        words = f"capacity {gib(capacity)}"
    else:
        words = beyond(capacity)
    place = min(capacity / end, 1 - 0.5 * width_of(words, style.TEXT) / (style.PAGE - LEFT - RIGHT))
    axes.annotate(words, (place, 1), (0, 3), xycoords="axes fraction", textcoords="offset points", ha="center")
    # Labels need as much room as type is high.
    every = max(1, math.ceil(0.115 / row))
    rows = range(0, len(shown), every)
    axes.set_yticks(list(rows), [f"device {shown[y].device}" for y in rows])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} GiB")


def curve(axes: Any, report: Report, moments: np.ndarray, held: np.ndarray, full: Bar) -> None:
    """The lower panel: what one device holds from moment to moment, and its peak."""
    span, capacity = report.play.step.span, report.capacity
    scale, unit = unit_of(span)
    sums = np.cumsum(columns(moments, held, span), axis=1) / GIB
    edges = np.linspace(0.0, span * scale, BINS + 1)
    # The highest stack is drawn first and the others over it: no seams, and what does not change is a rectangle.
    for i, name in reversed(list(enumerate(CATEGORIES))):
        if held[:, i].any():
            levels, knots = merged(sums[:, i], edges)
            axes.stairs(levels, knots, fill=True, color=COLOURS[name], linewidth=0)

    seen = within(full.total, capacity, "time")
    peak = full.allocated / GIB
    end = max(full.total, capacity) / GIB * 1.1 if seen else peak * 1.22
    if seen:
        room = room_of(report) / GIB
        axes.axhspan(room, (capacity - full.context) / GIB, zorder=0, **BROKEN)
        axes.axhspan((capacity - full.context) / GIB, capacity / GIB, zorder=0, **CONTEXT)
        if peak > room:
            levels, knots = merged(np.maximum(sums[:, -1], room), edges)
            axes.stairs(levels, knots, baseline=room, fill=True, **TOO_MUCH | {"linewidth": 0})
        axes.axhline(capacity / GIB, color=style.INK, linewidth=1.1)
    axes.set_ylim(0, end)
    clock(axes, span, scale, unit)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g} GiB")

    total = held.sum(axis=1)
    at = float(moments[int(np.argmax(total > total.max() * (1 - 1e-9)))])  # the first of equal ones
    side = "left" if at < 0.2 * span else "right" if at > 0.8 * span else "center"
    axes.plot([at * scale], [peak], marker=CARETDOWN, color=style.INK, markersize=4, clip_on=False)
    axes.annotate(
        f"peak {peak:,.1f} GiB at {format_number(at * scale)} {unit}",
        (at * scale, peak),
        (0, 6),
        textcoords="offset points",
        ha=side,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
    )


def merged(levels: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Stairs without the steps of no height."""
    new = np.concatenate([[True], levels[1:] != levels[:-1]])
    return levels[new], np.append(edges[:-1][new], edges[-1])


PALE = style.lighter(style.GREY, 0.82)
BROKEN: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#8a8a8a", "hatch": "//////", "linewidth": 0}
CONTEXT: dict[str, Any] = {"facecolor": PALE, "edgecolor": "#8a8a8a", "hatch": "......", "linewidth": 0}
TOO_MUCH: dict[str, Any] = {"facecolor": "none", "edgecolor": RED, "hatch": "xxxxx", "linewidth": 0.8}


def legend(sheet: Sheet, names: list[str], over: bool, top: float) -> None:
    """What the colours mean, below the panels."""
    handles = [Patch(facecolor=COLOURS[name], linewidth=0) for name in names]
    words = [WORDS.get(name, name) for name in names]
    handles += [Patch(**BROKEN), Patch(**CONTEXT)]
    words += ["broken in the allocator", "context, libraries"]
    if over:
        handles.append(Patch(**TOO_MUCH))
        words.append("no room for it")
    sheet.figure.legend(
        handles,
        words,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - top / sheet.height),
        ncols=math.ceil(len(words) / 2),
        frameon=False,
        handlelength=1.4,
        handleheight=0.8,
        columnspacing=1.1,
        handletextpad=0.5,
        borderpad=0.2,
    )
