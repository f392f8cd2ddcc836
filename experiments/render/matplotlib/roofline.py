"""Rooflines of a step: kernels below the roofs of their GPU, and communication below those of the links.

Left: the rate of every kind of kernel against its FLOPs a byte of memory traffic; no kernel is faster than the peak of
its number format, or than the memory bandwidth lets it be. Right: the same for the network (Williams et al. 2009 have
the former): what an axis sends over the links of a tier in a step bounds the rate of the whole step. As in the report,
a point lies at the rate that the step attains, below its roof.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Sheet,
    format_large,
    make_heading,
    note_height,
    truncate_words,
    write_beside,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.roofline import KernelGroup, NetworkPoint, StepRoofline, group_kernels
from meshcast.simulator.report.formatting import describe_plan
from meshcast.simulator.report.report import Report

NUMBERED = 8
"""Maximum number of kernels with a number and a line below the plot: those that take longest."""
MIN_SHARE = 0.001
"""Minimum share of the step of a kernel, and of links that are busy with an axis, that is drawn."""
LEFT, GAP, HIGH = 0.5, 0.55, 2.6
"""Room left of the axes, between them, and their largest height [in]."""
AXIS = 0.42
"""Height of the labels below the axes [in]."""
LOOKS: dict[str, dict[str, Any]] = {
    "gemm": {"color": palette.BLUE, "marker": "o"},
    "attention": {"color": palette.ORANGE, "marker": "D"},
    "optimizer": {"color": palette.GREY, "marker": "v"},
}
"""Colour and marker by part of the breakdown; kernels of others have those of ``memory_bound``."""
OTHER: dict[str, Any] = {"color": palette.PINK, "marker": "s"}
TIER_LINES: dict[str, Any] = {"scale-up": "-", "host": (0, (4, 2)), "network": (0, (1, 1.5))}
"""Dashes of the roofs of the tiers of links."""
TIER_MARKERS = {"scale-up": "o", "host": "s", "network": "^"}


PHASES = {"F": "forward", "B": "backward", "W": "weight gradient", "R": "recompute", "U": "update"}


def roofline(report: Report, roofs: StepRoofline) -> Figure:
    """Returns the plot."""
    job = report.job
    kernels = [group for group in group_kernels(roofs.kernels) if group.seconds >= MIN_SHARE * roofs.step_seconds]
    title = f"{job.model.name} on {job.cluster.name}: rooflines of {roofs.name}"
    heading = make_heading(title, describe_plan(report.play.plan), *describe_memory_bound(roofs))
    numbered = kernels[:NUMBERED]
    points = roofs.links_above(MIN_SHARE)
    narrow, network = style.is_narrow(), bool(points)
    lines = numbered_lines(numbered, roofs)
    note = "Left: " if network and not narrow else ""
    note += (
        "kernels by name and phase; area: time in a step. A point at its roof could not be faster. "
        if kernels
        else "no kernel with FLOPs. "
    )
    note = note[0].upper() + note[1:]
    if network:
        note += (
            f"{'Below' if narrow else 'Right'}: a point is what an axis sends over the links of a tier, at the rate "
            "of the whole step; above it, the rate that these links would admit."
        )
    few = [f"{point.axis} over {point.tier}" for point in roofs.network if point not in points]
    note += f" Not drawn, for it keeps links busy for less than {MIN_SHARE:.1%}: {', '.join(few)}." if few else ""
    columns = 1 if narrow else 2
    per_column = -(-len(lines) // columns)
    foot = LINE * per_column + note_height(note) + 0.2
    panels = 2 if network else 1
    rows = panels if narrow else 1
    high = min(HIGH, (style.layout_height() - heading.bottom - foot) / rows - AXIS - 0.34)
    block = high + AXIS + (0.24 if rows > 1 else 0.0)
    sheet = Sheet(heading.bottom + block * rows + foot)
    sheet.head(heading)
    wide = sheet.width - LEFT - EDGE
    wide = wide if narrow or not network else (wide - GAP) / 2
    first = sheet.axes(LEFT, heading.bottom, wide, high)
    _draw_kernels(first, roofs, kernels, numbered)
    if network:
        place = (LEFT, heading.bottom + block) if narrow else (LEFT + wide + GAP, heading.bottom)
        _draw_network(sheet.axes(*place, wide, high), roofs, points)
    y = heading.bottom + block * rows + 0.1
    for i, line in enumerate(lines):
        column, row = divmod(i, per_column)
        room = (sheet.width - 2 * EDGE) / columns
        sheet.text(EDGE + room * column, y + LINE * row, truncate_words(line, room - 0.1), fontsize=style.SMALL)
    sheet.note(y + LINE * per_column + 0.02, note)
    return sheet.figure


def describe_kernel(group: KernelGroup) -> str:
    """Returns the names a kernel and its phase."""
    return f"{group.name}, {PHASES.get(group.phase, group.phase)}"


def numbered_lines(numbered: Sequence[KernelGroup], roofs: StepRoofline) -> list[str]:
    """Writes a line for every numbered kernel: its share of the step and of its roof."""
    return [
        f"{i}  {describe_kernel(kernel)}: {kernel.seconds / roofs.step_seconds:.1%} of the step, "
        f"{kernel.attained / kernel.roof:.0%} of its roof"
        for i, kernel in enumerate(numbered, 1)
    ]


def describe_memory_bound(roofs: StepRoofline) -> list[str]:
    """Says what memory-bound kernels attain: without FLOPs they have no place on the axis of intensity."""
    share, attained = roofs.memory_bound
    if not share:
        return []
    return [
        f"Memory-bound kernels, whose FLOPs are not counted, are not drawn: {share:.1%} of the "
        f"step, {attained:.0%} of the memory bandwidth."
    ]


def _format_rates(axes: Any) -> None:
    """Formats logarithmic axes of FLOPs a byte, and of TFLOP/s."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.spines["left"].set_visible(True)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0), numticks=8))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_large(value, "g")))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e12:,.10g}"))
    axes.set_ylabel("TFLOP/s of a GPU", labelpad=2)


def _limits(values: Sequence[float], wider: float = 1.6) -> tuple[float, float]:
    return min(values) / wider, max(values) * wider


def _draw_kernels(
    axes: Any, roofs: StepRoofline, kernels: Sequence[KernelGroup], numbered: Sequence[KernelGroup]
) -> None:
    """Draws the roofs of the GPU and the kernels below them."""
    top = roofs.top
    ridge = top / roofs.memory_bandwidth
    left, right = _limits([ridge, *(kernel.intensity for kernel in kernels)], 3)
    x = np.geomspace(left, right, 200)
    axes.plot(x, np.minimum(top, x * roofs.memory_bandwidth), color=palette.INK, linewidth=1.0, zorder=2)
    for dtype, peak in roofs.peaks.items():
        axes.plot([peak / roofs.memory_bandwidth, right], [peak, peak], color=palette.INK, linewidth=0.8, zorder=2)
        words = f"{peak / 1e12:,.0f} TFLOP/s {dtype}"
        write_beside(axes, words, (right, peak), (-2, 2), ha="right")
    low = min([top / 4, *(kernel.attained for kernel in kernels)]) / 2.5
    axes.set_xlim(left, right)
    axes.set_ylim(low, top * 1.7)
    longest = max((kernel.seconds for kernel in kernels), default=1.0)
    for kernel in kernels:
        look = LOOKS.get(kernel.kind, OTHER)
        axes.scatter(
            [kernel.intensity], [kernel.attained], s=6 + 60 * kernel.seconds / longest, linewidths=0.4,
            edgecolors="white", zorder=3, alpha=0.85, **look,
        )  # fmt: skip
    _write_numbers(axes, numbered)
    _format_rates(axes)
    axes.set_xlabel("FLOPs a byte of memory traffic", labelpad=2)
    words = f"memory {roofs.memory_bandwidth / 1e12:.3g} TB/s"
    start = max(left, low / roofs.memory_bandwidth) * 1.15  # where the slanted roof enters the axes
    place = start, start * roofs.memory_bandwidth
    write_beside(axes, words, place, (5, -3), va="top", color=palette.FAINT)
    present = dict.fromkeys(kernel.kind if kernel.kind in LOOKS else "memory_bound" for kernel in kernels)
    for kind in present:
        axes.scatter([], [], s=14, linewidths=0, label=kind.replace("_", "-"), **LOOKS.get(kind, OTHER))
    if len(present) > 1:
        axes.legend(loc="lower right", frameon=False, borderaxespad=0.2, handletextpad=0.2, labelspacing=0.25)


def _write_numbers(axes: Any, numbered: Sequence[KernelGroup]) -> None:
    """Writes the numbers of kernels beside their points, each where it hits no other number and no roof."""
    height = axes.figure.get_size_inches()[1] * axes.get_position().height * 72
    width = axes.figure.get_size_inches()[0] * axes.get_position().width * 72
    (x0, x1), (y0, y1) = np.log(axes.get_xlim()), np.log(axes.get_ylim())
    places = [
        ((np.log(kernel.intensity) - x0) / (x1 - x0) * width, (np.log(kernel.attained) - y0) / (y1 - y0) * height)
        for kernel in numbered
    ]
    taken = [*places]
    for i, (kernel, (x, y)) in enumerate(zip(numbered, places, strict=True), 1):
        roof = (np.log(kernel.roof) - y0) / (y1 - y0) * height
        tries = [
            (dx, dy) for r in (8, 15, 22, 30) for dx, dy in ((r, -2), (0, -r - 2), (-r, -2), (r, -r), (-r, -r), (0, r))
        ]
        dx, dy = next(
            (
                (dx, dy)
                for dx, dy in tries
                if all(abs(x + dx - a) > 7 or abs(y + dy - b) > 8 for a, b in taken)
                and abs(y + dy + 3 - roof) > 8
                and 4 < x + dx < width - 6
                and y + dy > 4
            ),
            tries[0],
        )
        taken.append((x + dx, y + dy))
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": palette.FAINT, "shrinkA": 2, "shrinkB": 0}
        looks: dict[str, Any] = {"ha": "center", "fontweight": "bold", "zorder": 5, "arrowprops": line}
        write_beside(axes, str(i), (kernel.intensity, kernel.attained), (dx, dy), **looks)


def _draw_network(axes: Any, roofs: StepRoofline, points: Sequence[NetworkPoint]) -> None:
    """Draws the roofs of the links, what every axis sends over them, and the rate of the step."""
    peak, attained = points[0].peak, points[0].attained
    tiers = [tier for tier in TIER_LINES if any(point.tier == tier for point in points)]
    ridges = [peak / roofs.links[tier] for tier in tiers]
    left, right = _limits([*ridges, *(point.intensity for point in points)], 3)
    low = min([attained, *(point.roof for point in points)]) / 4
    x = np.geomspace(left, right, 200)
    for tier in tiers:
        axes.plot(
            x, np.minimum(peak, x * roofs.links[tier]), color=palette.INK, linewidth=0.9, linestyle=TIER_LINES[tier],
            label=f"{tier} {roofs.links[tier] / 1e9:,.4g} GB/s", zorder=2,
        )  # fmt: skip
    axes.axhline(attained, color=palette.FAINT, linewidth=0.9, zorder=1)
    words = f"step {attained / 1e12:,.0f}"
    write_beside(axes, words, (right, attained), (-3, -3), ha="right", va="top", color=palette.FAINT)
    for point in points:
        words = f"{palette.AXES[point.axis].words}, {point.tier}: busy {point.busy_share:.1%}"
        colour = palette.AXES[point.axis].colour
        axes.plot([point.intensity] * 2, [attained, point.roof], color=colour, linewidth=0.7, zorder=3)
        axes.scatter(
            [point.intensity], [attained], s=26, color=colour, marker=TIER_MARKERS[point.tier],
            linewidths=0.4, edgecolors="white", zorder=4, label=words,
        )  # fmt: skip
    axes.set_xlim(left, right)
    axes.set_ylim(low, peak * 1.7)
    _format_rates(axes)
    axes.set_xlabel("FLOPs a byte sent", labelpad=2)
    axes.legend(
        loc="lower right", frameon=True, framealpha=0.85, edgecolor="none", borderaxespad=0.2, handletextpad=0.4,
        labelspacing=0.25, handlelength=1.6,
    )  # fmt: skip
