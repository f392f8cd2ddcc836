"""Plot of a search: step time against memory of the plans that were forecast, the best one marked.

Each tensor-parallel degree has a shade and a marker of its own. A dashed line is the memory of a GPU; plans above it do
not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.sheet import LINE, Sheet, save, time_unit, wrap_words
from experiments.search.found import FoundPlan, PlanSearch
from experiments.search.result import SearchResult
from hardware.units import GIB
from simulator.report.words import describe_value, format_seconds

LEFT, SIDE, HEIGHT = 0.62, 5.1, 3.0
"""Left end, width and height of the axes [in]."""
KEY = LEFT + SIDE + 0.25
MARKERS = "osD^vP*X<>"


def draw(search: PlanSearch, result: SearchResult, path: str | Path) -> None:
    """Draws the plot to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: time_and_memory(search, result), path)


def time_and_memory(search: PlanSearch, result: SearchResult) -> Figure:
    """The plot."""
    found, job, plans = result.certificate, search.space.loaded, result.forecasts
    words = [
        f"{found.exact:,} of {found.plans:,} plans were forecast, gap {found.gap:.2%}",
        " or ".join(f"{one.loaded.cluster.gpus:,} x {one.loaded.cluster.gpu.name}" for one in search.jobs),
        job.framework.name,
    ]
    lines = wrap_words(words)
    if len(found.objectives) > 1:
        lines += wrap_words([f"front of {len(result.best)} plans by {' and '.join(found.objectives)}"])
    elif result.best:
        plan = ", ".join(f"{name} {describe_value(value)}" for name, value in result.best[0].changes.items())
        lines += wrap_words([f"best: {plan}"])
    top = 0.52 + LINE * len(lines)
    sheet = Sheet(top + HEIGHT + 0.55)
    sheet.head(f"Search of the best plan of {job.model.name}: step time and memory", lines)
    if not plans:
        sheet.text(LEFT, top + 0.2, "No plan was forecast.")
        return sheet.figure
    axes = sheet.axes(LEFT, top, SIDE, HEIGHT)
    axes.spines["left"].set_visible(True)
    scale, unit = time_unit(max(one.forecast.step_time for one in plans))
    degrees = sorted({_tensor_ranks(one) for one in plans})
    shades = style.shades(style.PURPLE, len(degrees))
    for i, (tp, shade) in enumerate(zip(degrees, shades, strict=True)):
        own = [one.forecast for one in plans if _tensor_ranks(one) == tp]
        axes.scatter(
            [one.step_time * scale for one in own],
            [one.peak_device / GIB for one in own],
            s=18,
            marker=MARKERS[i % len(MARKERS)],
            color=shade,
            edgecolors="white",
            linewidths=0.4,
            zorder=3,
        )
        height = top + 0.3 + 0.18 * i
        sheet.figure.add_artist(_key_marker(sheet, KEY + 0.05, height - 0.03, MARKERS[i % len(MARKERS)], shade))
        sheet.text(KEY + 0.18, height, f"tp {tp}", fontsize=style.SMALL)
    sheet.text(KEY, top + 0.1, "tensor-parallel ranks", fontsize=style.SMALL, color=style.FAINT)
    _draw_limits(axes, search)
    if {*found.objectives} == {"time", "memory"}:
        front = [one.found.forecast for one in result.best]
        axes.step(
            [one.step_time * scale for one in front],
            [one.peak_device / GIB for one in front],
            where="post",
            color=style.INK,
            linewidth=0.8,
            zorder=2,
        )
    if result.best and (len(found.objectives) == 1 or "time" in found.objectives):
        _mark_best(axes, result, scale)
    axes.margins(x=0.08)
    axes.set_xlabel(f"step time [{unit}]")
    axes.set_ylabel("memory of the fullest GPU [GiB]")
    return sheet.figure


def _tensor_ranks(one: FoundPlan) -> int:
    return int(one.job["plan"].get("tp", 1))


def _key_marker(sheet: Sheet, x: float, y: float, marker: str, colour: Any) -> Any:
    from matplotlib.lines import Line2D

    place = [x / style.PAGE], [1 - y / sheet.height]
    return Line2D(*place, marker=marker, color=colour, markersize=4.2, linewidth=0, transform=sheet.figure.transFigure)


def _draw_limits(axes: Any, search: PlanSearch) -> None:
    """The memory of a GPU, and what a plan may take of it, as lines with labels."""
    lines = []
    for space in search.jobs:
        gpu, several = space.loaded.cluster.gpu, len({one.capacity for one in search.jobs}) > 1
        memory, name = gpu.memory / GIB, gpu.name if several else "a GPU"
        lines.append((memory, f"memory of {name}, {memory:.4g} GiB"))
        if space.capacity < gpu.memory:
            lines.append((space.capacity / GIB, f"with the margin, {space.capacity / GIB:.4g} GiB"))
    memory, lines = max(height for height, _ in lines), [*dict.fromkeys(lines)]
    axes.set_ylim(0, max(axes.get_ylim()[1], memory * 1.08))
    for height, label in lines:
        axes.axhline(height, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            label,
            (1.0, height),
            (0, 2),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=style.SMALL,
            color=style.FAINT,
        )


def _mark_best(axes: Any, result: SearchResult, scale: float) -> None:
    if len(result.certificate.objectives) == 1:
        best, words = result.best[0].found.forecast, "best"
    else:
        best, words = min((one.found.forecast for one in result.best), key=lambda one: one.step_time), "fastest"
    place = best.step_time * scale, best.peak_device / GIB
    axes.scatter(*place, s=70, facecolors="none", edgecolors=style.INK, linewidths=1.0, zorder=4)
    axes.annotate(
        f"{words}: {format_seconds(best.step_time)}",
        place,
        (0, -12) if words == "best" else (8, 4),
        textcoords="offset points",
        ha="center" if words == "best" else "left",
        fontsize=style.SMALL,
        fontweight="bold",
    )
