"""Scatter plots of two figures of every plan, with the Pareto front of those that fit."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshcast.experiments.render.bokeh.charts import new_figure
from meshcast.experiments.render.bokeh.html import Html, legend, paragraph
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.render.bokeh.results.plan_table import number_format
from meshcast.experiments.render.bokeh.results.source import PlanSource
from meshcast.experiments.views import palette
from meshcast.experiments.views.pareto import choose_pairs, find_front
from meshcast.simulator.report.figures import FIGURES, Figure


def make_section(source: PlanSource) -> PageSection:
    fitting = {figure.name: source.data.data[figure.name][: source.fitting] for figure in source.figures}
    pairs = choose_pairs(fitting)
    if not pairs:
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
    entries = [("fits", palette.BLUE), ("tight, or does not fit", palette.RED), ("Pareto front", palette.ORANGE)]
    entries = entries if source.fitting < len(source.rows) else [entries[0], entries[2]]
    body = [paragraph(words), legend(entries), Html('<div class="grid two">'), *panels, Html("</div>")]
    return PageSection("pareto", "Pareto front", body)


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
    parts = [
        (range(source.fitting, len(source.rows)), palette.RED, "x"),
        (range(source.fitting), palette.BLUE, "circle"),
    ]
    for rows, colour, marker in parts:
        if not len(rows):
            continue
        view = CDSView(filter=IndexFilter(list(rows)))
        marks = figure.scatter(
            across.name, up.name, source=source.data, view=view, size=8, marker=marker, fill_color=colour,
            line_color=colour, fill_alpha=0.6, nonselection_alpha=0.12,
        )  # fmt: skip
        tips = [("", "@plan")] + [(shown.label, f"@{shown.name}{{{number_format(shown)}}}") for shown in (across, up)]
        figure.add_tools(HoverTool(renderers=[marks], tooltips=tips, visible=False))
    x, y = (np.asarray(source.data.data[shown.name][: source.fitting], float) for shown in (across, up))
    front = find_front(across.name, up.name, x, y)
    mode = "after" if across.better == "lower" else "before"
    figure.step(x[front], y[front], mode=mode, line_color=palette.ORANGE, line_width=2)
    return figure
