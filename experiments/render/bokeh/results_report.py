"""The report of many plans: the rows of a sweep or a search, and the sections that show them."""

from __future__ import annotations

from meshcast.experiments.render.bokeh.load import PlanRows
from meshcast.experiments.render.bokeh.page import render_page
from meshcast.experiments.render.bokeh.results import parallel, pareto, plan_table, summary
from meshcast.experiments.render.bokeh.results.source import make_source


def report_results(plans: PlanRows, title: str | None = None) -> str:
    """Returns the HTML page of many plans."""
    source = make_source(plans)
    sections = [
        summary.make_section(plans),
        pareto.make_section(source),
        parallel.make_section(source),
        plan_table.make_section(plans, source),
    ]
    return render_page(title or summary.make_title(plans), summary.make_lead(plans), sections)
