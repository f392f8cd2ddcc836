"""The report of many plans: the rows of a sweep or a search, and the sections that are made of them."""

from __future__ import annotations

from meshcast.experiments.render.bokeh.load import PlanRows
from meshcast.experiments.render.bokeh.page import render_page
from meshcast.experiments.render.bokeh.results import parallel, pareto, plan_table, summary
from meshcast.experiments.render.bokeh.results.source import make_source


def report_results(found: PlanRows, title: str | None = None) -> str:
    """The HTML page of many plans."""
    source = make_source(found)
    sections = [
        summary.make_section(found),
        pareto.make_section(source),
        parallel.make_section(source),
        plan_table.make_section(found, source),
    ]
    return render_page(title or summary.make_title(found), summary.make_lead(found), sections)
