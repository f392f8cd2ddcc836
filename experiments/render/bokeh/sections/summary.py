"""Summary: the headline figures of a forecast, whether it fits, what limits it, and its warnings."""

from __future__ import annotations

from meshcast.experiments.render.bokeh.html import Html, KeyFigure, concat, key_figures, paragraph
from meshcast.experiments.render.bokeh.page import PageSection
from meshcast.hardware.units import GIB
from meshcast.simulator.report.figures import FIGURES, name_contribution
from meshcast.simulator.report.formatting import (
    describe_microbatches,
    describe_plan,
    format_count,
    format_need,
)
from meshcast.simulator.report.report import Report


def make_lead(report: Report) -> Html:
    """Says what was forecast: HTML below the title of the page."""
    job, batch = report.job, report.job.batch
    tokens = f"{batch.total:,} sequences of {batch.sequence:,} tokens a step" if batch.total else ""
    words = [
        f"{format_count(job.model.parameters)} parameters on {job.cluster}",
        ", ".join(describe_plan(report.play.plan)),
        ", ".join(words for words in (tokens, describe_microbatches(report.play.plan), job.framework.name) if words),
    ]
    return concat(paragraph(line, "lead") for line in words)


def make_section(report: Report) -> PageSection:
    tiles = []
    for figure in FIGURES.values():
        if figure.headline and (value := figure.compute(report)):
            tiles.append(KeyFigure(figure.label, figure.headline.form(value), figure.remark(report)))
    peak = f"{format_need(report.peak_device, report.capacity)} of {report.capacity / GIB:,.0f} GiB"
    tiles.append(KeyFigure("peak memory of a GPU", peak, report.fit_in_words, bad=report.fit.verdict != "fits"))
    widest = ", ".join(f"{name_contribution(name)} {sigma:.1%}" for name, sigma in report.widest.items())
    body = [
        key_figures(tiles),
        paragraph(report.limits),
        *(paragraph(f"Warning: {warning}.", "warning") for warning in report.warnings),
        paragraph(
            f"The 90% interval should hold nine of ten measured steps. Its largest standard deviations of "
            f"log(measured / forecast): {widest}. Regime of the forecast: {report.regime}."
        ),
    ]
    return PageSection("summary", "Summary", body)
