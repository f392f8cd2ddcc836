"""Sensitivity: the step time with each figure of the hardware better and worse, and with other values of assumed
fields, as tornado bars."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.render.bokeh.html import BarPiece, Html, bar, heading, legend, paragraph, table
from meshcast.experiments.render.bokeh.page import PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.tornado import StepRange, make_tornado
from meshcast.simulator.report.formatting import format_seconds

NAME, TITLE = "sensitivity", "Sensitivity"


def make_section(sensitivities: Sensitivities) -> PageSection:
    tornado = make_tornado(sensitivities)
    words = (
        f"Every figure of the hardware {RANGE:.0%} better and {RANGE:.0%} worse, all others kept. The line is the step "
        f"of {format_seconds(tornado.step)}."
    )
    body = [paragraph(words), legend((looks.name, looks.colour) for looks in (palette.BETTER, palette.WORSE))]
    if tornado.hardware:
        body.append(_tabulate("figure of the hardware", tornado.hardware, tornado.step, "1% better saves"))
    if tornado.without_influence:
        body.append(paragraph(f"Without influence on this step: {', '.join(tornado.without_influence)}."))
    if tornado.fields:
        body.append(heading("Fields that the job does not state"))
        body.append(paragraph("From the shortest to the longest step of the values that the rest of the job admits."))
        body.append(_tabulate("field", tornado.fields, tornado.step, "assumed"))
    return PageSection(NAME, TITLE, body)


def make_note(reason: str) -> PageSection:
    """Returns the section where there are no sensitivities."""
    return PageSection(NAME, TITLE, [paragraph(reason)])


def _tabulate(head: str, bars: Sequence[StepRange], step: float, last: str) -> Html:
    """Makes a table with a bar around the step time for every row."""
    low, high = min(each.low_s for each in bars), max(each.high_s for each in bars)
    low, high = min(low, step), max(high, step)
    room = max(high - low, 1e-12)

    def place(seconds: float) -> float:
        return (seconds - low) / room

    rows = []
    for shown in bars:
        pieces = [
            BarPiece(place(shown.low_s), place(step), palette.BETTER.colour, format_seconds(shown.low_s)),
            BarPiece(place(step), place(shown.high_s), palette.WORSE.colour, format_seconds(shown.high_s)),
        ]
        ends = format_seconds(shown.low_s), format_seconds(shown.high_s)
        rows.append([shown.name, bar(pieces, mark=place(step)), *ends, shown.about])
    return table([head, "", "shortest step", "longest step", last], rows, "bars wide")
