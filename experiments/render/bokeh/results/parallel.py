"""Parallel coordinates: an axis for every varied field and figure, a line for every plan that fits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.render.bokeh.charts import FONT, new_figure, sequential, style_axis
from meshcast.experiments.render.bokeh.html import paragraph
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.render.bokeh.results.source import PlanSource
from meshcast.experiments.views import palette
from meshcast.simulator.report.figures import FIGURES, Figure

SHOWN = ("peak_device_gib", "mfu_palm", "step_time_s", "tokens_per_s_per_gpu")
"""Figures that have an axis, the last at the right end."""
MAX_VALUES = 12
"""Maximum number of values of a field that are all written beside its axis."""
LETTERS, NAME_LETTERS = 14, 40
"""Longest value beside an axis, and longest name below it [characters]."""


class ParallelAxis(NamedTuple):
    """An axis: its name, the place of every plan on it from 0 to 1, and values at places of it."""

    name: str
    places: np.ndarray
    labels: list[tuple[float, str]]


def make_section(source: PlanSource) -> PageSection:
    axes = list_axes(source)
    if source.fitting < 2 or len(axes) < 2:
        words = "Fewer than two plans fit, or they differ in nothing."
        return PageSection("parallel", "Parallel coordinates", [paragraph(words)])
    words = (
        "A line for every plan that fits, the darker the higher its tokens/s of a GPU. Plans selected in the scatter "
        "plot or in the table stand out; hold the pointer over a line for its plan."
    )
    drawing = Drawing("parallel", _draw(source, axes))
    return PageSection("parallel", "Parallel coordinates", [paragraph(words), drawing])


def list_axes(source: PlanSource) -> list[ParallelAxis]:
    """Lists axes of the varied fields and of `SHOWN` that differ between the plans that fit."""
    fitting, columns = source.fitting, source.data.data
    axes = []
    for number, name in enumerate(source.fields):
        values = list(columns[f"f{number}"][:fitting])
        distinct = sorted(set(values), key=lambda value: (isinstance(value, str), value))
        if len(distinct) > 1:
            axes.append(_field_axis(name, values, distinct))
    for name in SHOWN:
        numbers = np.asarray(columns.get(name, [])[:fitting], float)
        if len(numbers) and np.isfinite(numbers).all() and np.ptp(numbers) > 0:
            axes.append(_figure_axis(FIGURES[name], numbers))
    return axes


def _field_axis(name: str, values: list[Any], distinct: list[Any]) -> ParallelAxis:
    """Returns the axis of a field, on which its distinct values lie at equal distances. values: of every plan."""
    place = {value: i / (len(distinct) - 1) for i, value in enumerate(distinct)}
    every = -(-len(distinct) // MAX_VALUES)
    labels = [
        (place[value], _shorten(f"{value:g}" if isinstance(value, float) else str(value), LETTERS))
        for value in distinct[::every]
    ]
    return ParallelAxis(_shorten(name, NAME_LETTERS), np.array([place[value] for value in values]), labels)


def _figure_axis(figure: Figure, values: np.ndarray) -> ParallelAxis:
    low, high = float(values.min()), float(values.max())
    scale = 100.0 if figure.form.endswith("%}") else 1.0  # the title has the unit
    ticks = np.linspace(low, high, 5)
    labels = [((tick - low) / (high - low), _round(scale * tick)) for tick in ticks.tolist()]
    return ParallelAxis(figure.title, (values - low) / (high - low), labels)


def _round(value: float) -> str:
    """Formats three significant figures, and all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _shorten(words: str, letters: int) -> str:
    return words if len(words) <= letters else f"{words[: letters - 1]}…"


def _draw(source: PlanSource, axes: list[ParallelAxis]) -> Any:
    from bokeh.models import HoverTool, LinearColorMapper, PlainText, Range1d
    from bokeh.transform import transform

    count, fitting = len(axes), source.fitting
    table = np.stack([axis.places for axis in axes], axis=1)
    pale = [[0.0] * 0 for _ in range(len(source.rows) - fitting)]
    source.data.data["parallel_x"] = [list(range(count)) for _ in range(fitting)] + pale
    source.data.data["parallel_y"] = [row for row in table.round(5).tolist()] + pale
    figure = new_figure(
        460, "", "", "box_zoom,tap,reset,save", x_range=Range1d(-0.3, count - 0.25), y_range=Range1d(-0.06, 1.06)
    )
    rate = np.asarray(source.data.data["tokens_per_s_per_gpu"][:fitting], float)
    mapper = LinearColorMapper(sequential(palette.BLUE)[10:], low=float(rate.min()), high=float(rate.max()))
    width, alpha = (1.6, 0.8) if fitting <= 300 else (1.0, 0.35)
    lines = figure.multi_line(
        "parallel_x", "parallel_y", source=source.data, line_color=transform("tokens_per_s_per_gpu", mapper),
        line_width=width, line_alpha=alpha, nonselection_alpha=0.06, selection_line_width=2.4, selection_alpha=1.0,
        hover_line_color=palette.ORANGE, hover_line_width=3, hover_line_alpha=1.0,
    )  # fmt: skip
    figure.add_tools(HoverTool(renderers=[lines], tooltips=[("", "@plan")], line_policy="interp", visible=False))
    for at, axis in enumerate(axes):
        figure.segment([at], [0], [at], [1], line_color=palette.INK, line_width=1)
        heights, words = zip(*axis.labels, strict=True)
        figure.text(
            [at] * len(words), list(heights), list(words), x_offset=5, text_baseline="middle",
            text_font={"value": FONT}, text_font_size="12px", text_color=palette.INK,
            background_fill_color="#ffffff", background_fill_alpha=0.92,
        )  # fmt: skip
    figure.xaxis.ticker = list(range(count))
    # Plain: Bokeh takes other text between dollar signs for formulas, and loads what sets them.
    figure.xaxis.major_label_overrides = {at: PlainText(axis.name) for at, axis in enumerate(axes)}
    figure.xaxis.major_label_orientation = 0.5
    style_axis(figure.xaxis)
    figure.yaxis.visible = figure.grid.visible = False
    return figure
