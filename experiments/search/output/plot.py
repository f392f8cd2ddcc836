"""Plot of a search: step time against memory of the plans that were forecast, the best marked.

Each tensor-parallel degree has a marker and a colour; plans of the Pareto front are filled, others hollow,
and a line joins the front. A dashed line is the memory of a GPU; plans above it do not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Heading,
    Sheet,
    make_heading,
    save,
    space_ticks,
    text_width,
)
from meshcast.experiments.search.certificate.result import SearchResult
from meshcast.experiments.search.frontier.plan_search import ForecastPlan, PlanSearch
from meshcast.experiments.views import palette
from meshcast.experiments.views.timeline import time_unit
from meshcast.hardware.units import GIB
from meshcast.simulator.report.formatting import describe_value, format_seconds

LEFT, RIGHT, HEIGHT = 0.55, 0.12, 3.0
"""Room left and right of the axes, and their largest height [in]."""
MARKERS = "osD^vP*X<>"
KEY_WORDS = "tensor-parallel ranks"
HUES = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.VIOLET, palette.AMBER, palette.PINK, palette.GREY)


def draw(search: PlanSearch, result: SearchResult, path: str | Path, width: style.Width = "page") -> None:
    """Draws the plot to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    save(lambda: time_and_memory(search, result), path, width)


def time_and_memory(search: PlanSearch, result: SearchResult) -> Figure:
    certificate, plans, heading = result.certificate, result.forecasts, _describe(search, result)
    if not plans:
        sheet = Sheet(heading.bottom + 0.2)
        sheet.head(heading)
        sheet.text(EDGE, heading.bottom, "No plan was forecast.")
        return sheet.figure
    fronted = len(certificate.objectives) > 1
    degrees = sorted({_tensor_ranks(plan) for plan in plans})
    entries = [*(f"tp {tp}" for tp in degrees), *(["on the front", "not on it"] if fronted else [])]
    places, lines = _place_entries([KEY_WORDS, *entries])
    top = heading.bottom + 0.1 + LINE * 1.1 * lines
    sheet = Sheet(min(top + HEIGHT + 0.55, style.layout_height()))
    sheet.head(heading)
    axes = sheet.axes(LEFT, top, sheet.width - LEFT - RIGHT, sheet.height - top - 0.55)
    axes.spines["left"].set_visible(True)
    scale, unit = time_unit(max(plan.forecast.step_time for plan in plans))
    _draw_plans(axes, result, degrees, scale)
    _draw_key(sheet, heading.bottom, entries, places, len(degrees))
    _draw_limits(axes, search)
    if {*certificate.objectives} == {"time", "memory"}:
        seconds = [plan.searched.forecast.step_time * scale for plan in result.best]
        memory = [plan.searched.forecast.peak_device / GIB for plan in result.best]
        axes.step(seconds, memory, where="post", color=palette.INK, linewidth=0.8, zorder=2)
    if result.best and (not fronted or "time" in certificate.objectives):
        _mark_best(axes, result, scale)
    axes.margins(x=0.08)
    axes.set_xlim(axes.get_xlim())
    space_ticks(axes, lambda value: f"{value:,.10g}")
    axes.set_xlabel(f"step time [{unit}]")
    axes.set_ylabel("memory of the fullest GPU [GiB]")
    return sheet.figure


def _describe(search: PlanSearch, result: SearchResult) -> Heading:
    certificate, job = result.certificate, search.space.loaded
    words = [
        f"{certificate.exact:,} of {certificate.plans:,} plans were forecast, gap {certificate.gap:.2%}",
        " or ".join(f"{space.loaded.cluster.gpus:,} x {space.loaded.cluster.gpu.name}" for space in search.jobs),
        job.framework.name,
    ]
    best = [f"front of {len(result.best)} plans by {' and '.join(certificate.objectives)}"]
    if len(certificate.objectives) == 1:
        best = [
            "best: " + ", ".join(f"{name} {describe_value(value)}" for name, value in plan.changes.items())
            for plan in result.best[:1]
        ]
    return make_heading(f"Search for the best plan of {job.model.name}: step time and memory", words, *best)


def _draw_plans(axes: Axes, result: SearchResult, degrees: list[int], scale: float) -> None:
    """Draws a mark for every plan, filled on the front. scale: of seconds."""
    fronted = len(result.certificate.objectives) > 1
    front = {id(plan.searched) for plan in result.best} if fronted else {id(plan) for plan in result.forecasts}
    for i, tp in enumerate(degrees):
        hue = HUES[i % len(HUES)]
        for inside in (False, True):
            plans = [plan for plan in result.forecasts if _tensor_ranks(plan) == tp and (id(plan) in front) == inside]
            axes.scatter(
                [plan.forecast.step_time * scale for plan in plans],
                [plan.forecast.peak_device / GIB for plan in plans],
                facecolors=hue if inside else "white",
                edgecolors=hue,
                marker=MARKERS[i % len(MARKERS)],
                s=17,
                zorder=3,
                linewidths=0.8,
            )


def _draw_key(sheet: Sheet, top: float, entries: list[str], places: list[tuple[float, int]], degrees: int) -> None:
    """Draws the legend below the heading. degrees: number of its entries that are tensor-parallel degrees."""
    (head, *others) = places
    sheet.text(head[0], top, KEY_WORDS, fontsize=style.SMALL, color=palette.FAINT)
    for i, (words, (x, line)) in enumerate(zip(entries, others, strict=True)):
        y = top + LINE * 1.1 * line
        marker, hue = (MARKERS[i % len(MARKERS)], HUES[i % len(HUES)]) if i < degrees else ("o", palette.INK)
        face = hue if i != degrees + 1 else "white"
        place = [(x + 0.05) / sheet.width], [1 - (y - 0.035) / sheet.height]
        looks: dict[str, Any] = {"markersize": 4.2, "markerfacecolor": face, "markeredgecolor": hue, "linewidth": 0}
        sheet.figure.add_artist(Line2D(*place, marker=marker, transform=sheet.figure.transFigure, **looks))
        sheet.text(x + 0.16, y, words, fontsize=style.SMALL)


def _place_entries(entries: list[str]) -> tuple[list[tuple[float, int]], int]:
    """Returns the left end [in] and line of every entry of the legend, and the number of lines."""
    places: list[tuple[float, int]] = []
    x, line = EDGE, 0
    for words in entries:
        wide = text_width(words) + 0.34
        if x + wide > style.layout_width() and x > EDGE:
            x, line = EDGE, line + 1
        places.append((x, line))
        x += wide
    return places, line + 1


def _tensor_ranks(plan: ForecastPlan) -> int:
    return int(plan.job["plan"].get("tp", 1))


def _draw_limits(axes: Any, search: PlanSearch) -> None:
    lines = []
    for space in search.jobs:
        gpu, several = space.loaded.cluster.gpu, len({space.capacity for space in search.jobs}) > 1
        memory, name = gpu.program_memory / GIB, gpu.name if several else "a GPU"
        lines.append((memory, f"memory of {name}, {memory:.4g} GiB"))
        if space.capacity < gpu.program_memory:
            lines.append((space.capacity / GIB, f"with the margin, {space.capacity / GIB:.4g} GiB"))
    memory, lines = max(height for height, _ in lines), [*dict.fromkeys(lines)]
    axes.set_ylim(0, max(axes.get_ylim()[1], memory * 1.08))
    for height, label in lines:
        axes.axhline(height, color=palette.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.annotate(
            label,
            (1.0, height),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            fontsize=style.SMALL,
            color=palette.FAINT,
        )


def _mark_best(axes: Any, result: SearchResult, scale: float) -> None:
    if len(result.certificate.objectives) == 1:
        best, words = result.best[0].searched.forecast, "best"
    else:
        best, words = (
            min((plan.searched.forecast for plan in result.best), key=lambda forecast: forecast.step_time),
            "fastest",
        )
    place = best.step_time * scale, best.peak_device / GIB
    axes.scatter(*place, s=70, facecolors="none", edgecolors=palette.INK, linewidths=1.0, zorder=4)
    axes.annotate(
        f"{words}: {format_seconds(best.step_time)}",
        place,
        (-5, -14) if words == "best" else (30, -3),
        textcoords="offset points",
        ha="left",
        fontsize=style.SMALL,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},
        zorder=5,
    )
