"""Rooflines of a step: kernels below the roofs of their GPU, and communication below those of the links.

Left: the rate of every kind of kernel against its FLOPs a byte of memory traffic; no kernel is faster than the peak of
its number format, or than the memory bandwidth lets it be. Right: the same for the network (Williams et al. 2009 have
the former): what an axis sends over the links of a tier in a step bounds the rate of the whole step. As in the report,
a point lies at the rate that the step attains, below its roof.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from meshcast.experiments.explain.roofline import KernelPoint, NetworkPoint, StepRoofline, step_roofline
from meshcast.experiments.plots import style
from meshcast.experiments.plots.gantt import LANES
from meshcast.experiments.plots.sheet import (
    EDGE,
    LINE,
    Sheet,
    format_large,
    make_heading,
    note_height,
    save,
    truncate_words,
)
from meshcast.simulator.report.formatting import describe_plan
from meshcast.simulator.report.report import Report

NUMBERED = 8
"""Most kernels with a number and a line below the plot: those that take longest."""
LEAST_SHARE = 0.001
"""Least share of the step of a kernel, and of links that are busy with an axis, that is drawn."""
LEFT, GAP, HIGH = 0.5, 0.55, 2.6
"""Room left of the axes, between them, and their largest height [in]."""
AXIS = 0.42
"""Height of the labels below the axes [in]."""
LOOKS: dict[str, dict[str, Any]] = {
    "gemm": {"color": style.BLUE, "marker": "o"},
    "attention": {"color": style.ORANGE, "marker": "D"},
    "optimizer": {"color": style.GREY, "marker": "v"},
}
"""Colour and marker by part of the breakdown; kernels of others have those of ``memory_bound``."""
OTHER: dict[str, Any] = {"color": style.PINK, "marker": "s"}
TIER_LINES: dict[str, Any] = {"scale-up": "-", "host": (0, (4, 2)), "network": (0, (1, 1.5))}
"""Dashes of the roofs of the tiers of links."""
TIER_MARKERS = {"scale-up": "o", "host": "s", "network": "^"}


class KernelGroup(NamedTuple):
    """Kernels of one name and phase, as one point.

    words: name and phase. intensity: FLOPs a byte. attained, roof: rates [FLOP/s]. seconds: in a step [s].
    """

    words: str
    kind: str
    intensity: float
    attained: float
    roof: float
    seconds: float


PHASES = {"F": "forward", "B": "backward", "W": "weight gradient", "R": "recompute", "U": "update"}


def draw(report: Report, path: str | Path, width: style.Width = "page") -> None:
    """Draws the rooflines to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    found = step_roofline(report)
    save(lambda: roofline(report, found), path, width)


def group_kernels(kernels: Sequence[KernelPoint]) -> list[KernelGroup]:
    """Kernels with FLOPs by name and phase, the one that takes longest first."""
    groups: dict[tuple[str, str, str], list[KernelPoint]] = {}
    for one in kernels:
        if one.flops:
            groups.setdefault((one.name, one.phase, one.kind), []).append(one)
    found = []
    for (name, phase, kind), own in groups.items():
        seconds = sum(one.total_seconds for one in own)
        flops, nbytes = (sum(getattr(one, key) * one.count for one in own) for key in ("flops", "nbytes"))
        # Kernels one after another are as fast as their roofs together let them be.
        fastest = sum(one.flops * one.count / one.roof for one in own)
        words = f"{name}, {PHASES.get(phase, phase)}"
        found.append(KernelGroup(words, kind, flops / nbytes, flops / seconds, flops / fastest, seconds))
    return sorted(found, key=lambda one: -one.seconds)


def roofline(report: Report, found: StepRoofline) -> Figure:
    """Returns the plot."""
    job = report.job
    kernels = [one for one in group_kernels(found.kernels) if one.seconds >= LEAST_SHARE * found.step_seconds]
    title = f"{job.model.name} on {job.cluster.name}: rooflines of {found.name}"
    heading = make_heading(title, describe_plan(report.play.plan), *describe_memory_bound(found))
    numbered = kernels[:NUMBERED]
    points = [one for one in found.network if one.busy_share >= LEAST_SHARE]
    narrow, network = style.is_narrow(), bool(points)
    lines = numbered_lines(numbered, found)
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
    few = [f"{one.axis} over {one.tier}" for one in found.network if one.busy_share < LEAST_SHARE]
    note += f" Not drawn, for it keeps links busy for less than {LEAST_SHARE:.1%}: {', '.join(few)}." if few else ""
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
    _draw_kernels(first, found, kernels, numbered)
    if network:
        place = (LEFT, heading.bottom + block) if narrow else (LEFT + wide + GAP, heading.bottom)
        _draw_network(sheet.axes(*place, wide, high), found, points)
    y = heading.bottom + block * rows + 0.1
    for i, line in enumerate(lines):
        column, row = divmod(i, per_column)
        room = (sheet.width - 2 * EDGE) / columns
        sheet.text(EDGE + room * column, y + LINE * row, truncate_words(line, room - 0.1), fontsize=style.SMALL)
    sheet.note(y + LINE * per_column + 0.02, note)
    return sheet.figure


def numbered_lines(numbered: Sequence[KernelGroup], found: StepRoofline) -> list[str]:
    """A line for every numbered kernel: its share of the step and of its roof."""
    return [
        f"{i}  {kernel.words}: {kernel.seconds / found.step_seconds:.1%} of the step, "
        f"{kernel.attained / kernel.roof:.0%} of its roof"
        for i, kernel in enumerate(numbered, 1)
    ]


def describe_memory_bound(found: StepRoofline) -> list[str]:
    """What memory-bound kernels attain: their FLOPs are neglected, so they have no place on the axis of intensity."""
    own = [one for one in found.kernels if not one.flops and one.nbytes]
    seconds = sum(one.total_seconds for one in own)
    if not seconds:
        return []
    nbytes = sum(one.nbytes * one.count for one in own)
    share = nbytes / seconds / found.memory_bandwidth
    return [
        f"Memory-bound kernels, whose FLOPs are not counted, are not drawn: {seconds / found.step_seconds:.1%} of the "
        f"step, {share:.0%} of the memory bandwidth."
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
    axes: Any, found: StepRoofline, kernels: Sequence[KernelGroup], numbered: Sequence[KernelGroup]
) -> None:
    """Draws the roofs of the GPU and the kernels below them."""
    top = max(found.peaks.values(), default=1e12)
    ridge = top / found.memory_bandwidth
    left, right = _limits([ridge, *(one.intensity for one in kernels)], 3)
    x = np.geomspace(left, right, 200)
    axes.plot(x, np.minimum(top, x * found.memory_bandwidth), color=style.INK, linewidth=1.0, zorder=2)
    for dtype, peak in found.peaks.items():
        axes.plot([peak / found.memory_bandwidth, right], [peak, peak], color=style.INK, linewidth=0.8, zorder=2)
        words = f"{peak / 1e12:,.0f} TFLOP/s {dtype}"
        axes.annotate(words, (right, peak), (-2, 2), textcoords="offset points", ha="right", fontsize=style.SMALL)
    low = min([top / 4, *(one.attained for one in kernels)]) / 2.5
    axes.set_xlim(left, right)
    axes.set_ylim(low, top * 1.7)
    longest = max((one.seconds for one in kernels), default=1.0)
    for one in kernels:
        look = LOOKS.get(one.kind, OTHER)
        axes.scatter(
            [one.intensity], [one.attained], s=6 + 60 * one.seconds / longest, linewidths=0.4, edgecolors="white",
            zorder=3, alpha=0.85, **look,
        )  # fmt: skip
    _write_numbers(axes, numbered)
    _format_rates(axes)
    axes.set_xlabel("FLOPs a byte of memory traffic", labelpad=2)
    words = f"memory {found.memory_bandwidth / 1e12:.3g} TB/s"
    start = max(left, low / found.memory_bandwidth) * 1.15  # where the slanted roof enters the axes
    spot: Any = {"textcoords": "offset points", "va": "top", "fontsize": style.SMALL, "color": style.FAINT}
    axes.annotate(words, (start, start * found.memory_bandwidth), (5, -3), **spot)
    present = dict.fromkeys(one.kind if one.kind in LOOKS else "memory_bound" for one in kernels)
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
        ((np.log(one.intensity) - x0) / (x1 - x0) * width, (np.log(one.attained) - y0) / (y1 - y0) * height)
        for one in numbered
    ]
    taken = [*places]
    for i, (one, (x, y)) in enumerate(zip(numbered, places, strict=True), 1):
        roof = (np.log(one.roof) - y0) / (y1 - y0) * height
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
        axes.annotate(
            str(i), (one.intensity, one.attained), (dx, dy), textcoords="offset points", ha="center", zorder=5,
            fontsize=style.SMALL, fontweight="bold",
            arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": style.FAINT, "shrinkA": 2, "shrinkB": 0},
        )  # fmt: skip


def _draw_network(axes: Any, found: StepRoofline, points: Sequence[NetworkPoint]) -> None:
    """Draws the roofs of the links, what every axis sends over them, and the rate of the step."""
    peak, attained = points[0].peak, points[0].attained
    tiers = [tier for tier in TIER_LINES if any(one.tier == tier for one in points)]
    ridges = [peak / found.links[tier] for tier in tiers]
    left, right = _limits([*ridges, *(one.intensity for one in points)], 3)
    low = min([attained, *(one.roof for one in points)]) / 4
    x = np.geomspace(left, right, 200)
    for tier in tiers:
        axes.plot(
            x, np.minimum(peak, x * found.links[tier]), color=style.INK, linewidth=0.9, linestyle=TIER_LINES[tier],
            label=f"{tier} {found.links[tier] / 1e9:,.4g} GB/s", zorder=2,
        )  # fmt: skip
    axes.axhline(attained, color=style.FAINT, linewidth=0.9, zorder=1)
    axes.annotate(
        f"step {attained / 1e12:,.0f}", (right, attained), (-3, -3), textcoords="offset points", ha="right", va="top",
        fontsize=style.SMALL, color=style.FAINT,
    )  # fmt: skip
    for one in points:
        words = f"{LANES[one.axis]}{' comm.' if one.axis != 'copy' else ''}, {one.tier}: busy {one.busy_share:.1%}"
        axes.plot([one.intensity] * 2, [attained, one.roof], color=style.AXES[one.axis], linewidth=0.7, zorder=3)
        axes.scatter(
            [one.intensity], [attained], s=26, color=style.AXES[one.axis], marker=TIER_MARKERS[one.tier],
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
