"""Scatter plots of two figures of every plan, with the Pareto front of those that fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.render.bokeh.charts import new_figure
from meshcast.experiments.render.bokeh.html import Html, legend, paragraph
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.render.bokeh.results.plan_table import number_format
from meshcast.experiments.render.bokeh.results.source import PlanSource
from meshcast.experiments.render.matplotlib import style
from meshcast.simulator.report.figures import FIGURES, Figure

PAIRS = (("peak_device_gib", "tokens_per_s_per_gpu"), ("cost", "days"), ("gpu_hours", "days"), ("cost", "step_time_s"))
"""Figures across and up; the first pair, and the first of the others that the plans have."""

LARGE = "#c1121f"


def make_section(source: PlanSource) -> PageSection:
    known = {figure.name for figure in source.figures}
    pairs = [pair for pair in PAIRS if {*pair} <= known and _varies(source, pair)]
    pairs = [pair for pair in pairs if pair == PAIRS[0]] + [pair for pair in pairs if pair != PAIRS[0]][:1]
    if not pairs or not source.fitting:
        words = "The plans of this file have no two figures that differ."
        return PageSection("pareto", "Pareto front", [paragraph(words)])
    panels: list[Html | Drawing] = []
    for number, (x, y) in enumerate(pairs):
        drawing = Drawing(f"pareto{number}", _draw(source, FIGURES[x], FIGURES[y]))
        panels += [Html("<div>"), drawing, Html("</div>")]
    words = (
        "Every point is a plan. For a plan on the line there is no other one that fits and is better in both figures. "
        "Drag a box to select plans; the wheel zooms once its tool is chosen."
    )
    entries = [("fits", style.BLUE), ("tight, or does not fit", LARGE), ("Pareto front", style.ORANGE)]
    entries = entries if source.fitting < len(source.rows) else [entries[0], entries[2]]
    body = [paragraph(words), legend(entries), Html('<div class="grid two">'), *panels, Html("</div>")]
    return PageSection("pareto", "Pareto front", body)


def find_front(x: np.ndarray, y: np.ndarray, signs: tuple[int, int]) -> np.ndarray:
    """Indices of the points that no other one dominates, by ascending x; of equal points the first.

    signs: 1 of a figure that is better when lower, -1 of one that is better when higher.
    """
    a, b = signs[0] * x, signs[1] * y
    order = np.lexsort((b, a))
    front, least = [], np.inf
    for index in order.tolist():
        if b[index] < least:
            front.append(index)
            least = b[index]
    return np.array(sorted(front, key=lambda index: x[index]), int)


def _varies(source: PlanSource, pair: tuple[str, str]) -> bool:
    """Whether both figures differ between plans."""
    return all(np.ptp(np.nan_to_num(source.data.data[name][: source.fitting])) > 0 for name in pair if source.fitting)


def _draw(source: PlanSource, across: Figure, up: Figure) -> Any:
    from bokeh.models import CDSView, HoverTool, IndexFilter

    figure = new_figure(
        420,
        across.title,
        up.title,
        "pan,wheel_zoom,box_select,tap,reset,save",
        active_drag="box_select",
        active_scroll=None,
    )
    parts = [(range(source.fitting, len(source.rows)), LARGE, "x"), (range(source.fitting), style.BLUE, "circle")]
    for rows, colour, marker in parts:
        if not len(rows):
            continue
        view = CDSView(filter=IndexFilter(list(rows)))
        made = figure.scatter(
            across.name, up.name, source=source.data, view=view, size=8, marker=marker, fill_color=colour,
            line_color=colour, fill_alpha=0.6, nonselection_alpha=0.12,
        )  # fmt: skip
        tips = [("", "@plan")] + [(one.label, f"@{one.name}{{{number_format(one)}}}") for one in (across, up)]
        figure.add_tools(HoverTool(renderers=[made], tooltips=tips, visible=False))
    x, y = (np.asarray(source.data.data[one.name][: source.fitting], float) for one in (across, up))
    signs = tuple(1 if one.better == "lower" else -1 for one in (across, up))
    front = find_front(x, y, signs)  # type: ignore[arg-type]
    figure.step(x[front], y[front], mode="after" if signs[0] > 0 else "before", line_color=style.ORANGE, line_width=2)
    return figure
