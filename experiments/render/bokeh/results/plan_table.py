"""The table of plans: sortable by every column."""

from __future__ import annotations

from typing import Any

from meshcast.experiments.render.bokeh.html import Html, paragraph
from meshcast.experiments.render.bokeh.load import PlanRows
from meshcast.experiments.render.bokeh.page import Drawing, PageSection
from meshcast.experiments.render.bokeh.results.source import PlanSource
from meshcast.simulator.report.figures import Figure

FIRST = ("step_time_s", "tokens_per_s_per_gpu", "mfu_palm", "peak_device_gib")
"""Figures in the first columns after those of the fields."""

FORMATS = {"%": "0.0%", "0": "0,0", "1": "0,0.0", "2": "0,0.00", "3": "0,0.000", "g": "0,0.[000]"}
"""Formats of Bokeh by the end of those of figures."""


LETTER = 7
"""Width of a letter in a cell [pixels]."""


def make_section(plans: PlanRows, source: PlanSource) -> PageSection:
    count = len(plans.fitting) + len(plans.others)
    words = (
        "Click a heading to sort by it, again for the other direction. Plans that are selected here, or by dragging a "
        "box in the scatter plot, are marked in all figures; Ctrl adds to them."
    )
    if count > len(source.rows):
        words += f" Listed are the {len(source.rows):,} of {count:,} plans with the highest throughput."
    return PageSection("plans", "Plans", [paragraph(words), Drawing("plans", _draw(source))])


def _draw(source: PlanSource) -> Any:
    from bokeh.models import DataTable, NumberFormatter, StringFormatter, TableColumn

    columns = []
    for number, head in enumerate(source.fields):
        longest = max(map(len, [head, *map(str, source.data.data[f"f{number}"])]))
        wide = min(260, max(70, LETTER * longest + 14))
        title = str(Html.escape(head))  # Bokeh takes it for HTML
        columns.append(TableColumn(field=f"f{number}", title=title, width=wide, formatter=StringFormatter()))
    columns.append(TableColumn(field="status", title="status", width=90))
    for figure in sorted(source.figures, key=lambda figure: figure.name not in FIRST):
        form = NumberFormatter(format=number_format(figure), text_align="right", nan_format="-")
        title = figure.title
        columns.append(
            TableColumn(
                field=figure.name, title=title, width=min(170, max(80, LETTER * len(title) + 14)), formatter=form
            )
        )
    rows = min(len(source.rows), 18)
    return DataTable(
        source=source.data,
        columns=columns,
        sizing_mode="stretch_width",
        min_width=200,
        height=60 + 25 * max(rows, 3),
        index_position=None,
        autosize_mode="none",
        fit_columns=False,
        selectable=True,
        reorderable=False,
    )


def number_format(figure: Figure) -> str:
    """Returns the format of a figure in Bokeh's words."""
    form = figure.form.removesuffix("}")
    return FORMATS[form[-1]] if form[-1] in "%g" else FORMATS[form[-2]]
