"""Memory of all pipeline devices through a step: a small curve for each below the other, on a common scale.

A curve is the tensors that are allocated on a device, by what they are; a line is what the GPU has room for, if that
lies on the scale, and a mark is the peak.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.gantt import draw_legend, legend_entry, legend_height
from meshcast.experiments.render.matplotlib.memory import LEGEND_FROM, fill_categories, format_gib
from meshcast.experiments.render.matplotlib.sheet import (
    LINE,
    Sheet,
    format_time_axis,
    make_heading,
    note_height,
    text_width,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.memory import (
    COLUMNS,
    DeviceMemory,
    device_memories,
    fullest_device,
    memory_curve,
)
from meshcast.experiments.views.timeline import time_unit
from meshcast.hardware.units import GIB
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.formatting import describe_plan
from meshcast.simulator.report.report import Report

MAX_HEIGHT, MIN_HEIGHT = 0.62, 0.22
"""Maximum and minimum height of a curve [in]."""
PEAK = 0.7
"""Room right of the curves for the peaks [in]."""
MAX_DEVICES = 64
"""Maximum number of devices that are drawn; of more, evenly spaced ones and the fullest."""
LABELLED = 0.24
"""Least height of axes that have room for labels [in]."""


def stage_memory(report: Report) -> Figure:
    """Returns the plot."""
    everyone = device_memories(report)
    full, job, span = fullest_device(everyone), report.job, report.play.step.span
    title = f"{job.model.name} on {job.cluster.name}: tensors of every stage through a step"
    heading = make_heading(title, describe_plan(report.play.plan))
    columns = 2 if len(everyone) > 16 and not style.is_narrow() else 1
    room = style.layout_height() - heading.bottom - 1.2
    most = min(MAX_DEVICES, columns * int(room / MIN_HEIGHT))
    shown = [everyone[device] for device in choose_devices(len(everyone), most, full.device)]
    rows = -(-len(shown) // columns)
    tall = min(MAX_HEIGHT, room / rows)
    curves = {bar.device: memory_curve(report, bar.device).sample() / GIB for bar in shown}
    peaks = np.max([curve.max(axis=0) for curve in curves.values()], axis=0)
    top = max(bar.allocated for bar in shown) / GIB
    entries = [
        legend_entry(palette.MEMORY[name]) for name, n in zip(CATEGORIES, peaks, strict=True) if n > LEGEND_FROM * top
    ]
    note = "Right: peak of the tensors [GiB]. Axes: GiB from 0, one scale for all."
    rooms = {(bar.capacity - bar.context) / GIB for bar in shown}
    note += " Line: room of the GPU for tensors." if min(rooms) <= 1.25 * top else ""
    note += f" A GPU has {format_gib(full.capacity)}, which lies beyond it." if min(rooms) > 1.25 * top else ""
    if len(shown) < len(everyone):
        note += f" {len(shown)} of {len(everyone)} stages."
    foot = 0.3 + legend_height(entries) + note_height(note) + 0.08
    sheet = Sheet(heading.bottom + tall * rows + foot)
    sheet.head(heading)
    upper = max(top, *(room for room in rooms if room <= 1.25 * top), 0.0) * 1.02
    mark = _round_below(top)
    labels = ["0", f"{mark:,.10g}"] if 0.88 * tall >= LABELLED else []
    names = max(text_width(bar.name, style.TEXT) for bar in shown) + 0.2
    left = names + max(map(text_width, labels), default=0.0) + 0.04
    scale, unit = time_unit(span)
    block = sheet.width / columns
    for i, bar in enumerate(shown):
        column, row = divmod(i, rows)
        at = heading.bottom + tall * row
        axes = sheet.axes(block * column + left, at, block - left - PEAK, 0.88 * tall)
        _draw_curve(axes, bar, curves[bar.device], span * scale, upper)
        axes.spines["left"].set_visible(True)
        axes.set_yticks([0, mark], labels or ["", ""])
        axes.tick_params(axis="y", length=2, pad=1.5)
        zero, highest = axes.get_yticklabels()
        zero.set_verticalalignment("bottom")  # else those of neighbours touch
        highest.set_verticalalignment("top" if mark > 0.8 * upper else "center")
        last = row == rows - 1 or i == len(shown) - 1
        format_time_axis(axes, span, scale, unit)
        if not last:
            axes.set_xticks([])
        weight = "bold" if bar.device == full.device else "normal"
        looks: dict[str, Any] = {"va": "center_baseline", "fontweight": weight}
        middle = at + 0.44 * tall
        sheet.text(block * column + names - 0.06, middle, bar.name, ha="right", **looks)
        words = f"{bar.allocated / GIB:,.1f}"
        sheet.text(block * (column + 1) - 0.12, middle, words, ha="right", fontsize=style.SMALL, **looks)
    at = heading.bottom + tall * rows + 0.26
    draw_legend(sheet, entries, at)
    sheet.note(at + legend_height(entries) + LINE - 0.03, note)
    return sheet.figure


def _round_below(value: float) -> float:
    """Returns the largest of 1, 2, 2.5 and 5 times a power of ten that is not above a value."""
    unit: float = 10.0 ** math.floor(math.log10(value))
    return max(step * unit for step in (1, 2, 2.5, 5) if step * unit <= value)


def _draw_curve(axes: Any, bar: DeviceMemory, curve: np.ndarray, end: float, upper: float) -> None:
    """Draws the memory of a device by category, its peak, and the room of its GPU for tensors."""
    sums, edges = np.cumsum(curve, axis=1), np.linspace(0.0, end, COLUMNS + 1)
    fill_categories(axes, sums, edges, curve)
    at = int(np.argmax(sums[:, -1]))
    middle = (edges[at] + edges[at + 1]) / 2
    axes.plot([middle], [sums[at, -1]], marker="v", color=palette.INK, markersize=2.6, clip_on=False)
    axes.axhline((bar.capacity - bar.context) / GIB, color=palette.INK, linewidth=0.8)
    axes.set_ylim(0, upper)
