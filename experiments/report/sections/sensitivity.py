"""Sensitivity: the step time with each figure of the hardware better and worse, and with other values of assumed
fields, as tornado bars."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities
from meshcast.experiments.plots.tornado import LEAST, LEAST_FIELD, MOST_FIELDS, StepRange
from meshcast.experiments.report.colours import BETTER, WORSE
from meshcast.experiments.report.html import BarPiece, Html, bar, heading, legend, paragraph, table
from meshcast.experiments.report.page import PageSection
from meshcast.simulator.report.formatting import describe_value, format_seconds

NAME, TITLE = "sensitivity", "Sensitivity"


def make_section(found: Sensitivities) -> PageSection:
    step = found.report.step_time
    hardware = [
        (StepRange(one.figure.label, one.better_s, one.worse_s), format_seconds(one.saved_s))
        for one in found.found
        if one.swing_s >= LEAST * step
    ]
    words = (
        f"Every figure of the hardware {RANGE:.0%} better and {RANGE:.0%} worse, all others kept. The line is the step "
        f"of {format_seconds(step)}."
    )
    body = [paragraph(words), legend([("shorter step", BETTER), ("longer step", WORSE)])]
    if hardware:
        body.append(_tornado("figure of the hardware", hardware, step, "1% better saves"))
    rest = [one.figure.label for one in found.found if one.swing_s < LEAST * step]
    if rest:
        body.append(paragraph(f"Without influence on this step: {', '.join(rest)}."))
    fields = []
    for one in found.assumed:
        if one.step_effect_s >= LEAST_FIELD * step:
            times = [one.step_time_s, *(other.step_time_s for other in one.alternatives)]
            assumed = "follows from others" if one.field.value is None else describe_value(one.field.value) or "none"
            fields.append((StepRange(one.field.name, min(times), max(times)), assumed))
    if fields:
        body.append(heading("Fields that the job does not state"))
        body.append(paragraph("From the shortest to the longest step of the values that the rest of the job admits."))
        body.append(_tornado("field", fields[:MOST_FIELDS], step, "assumed"))
    return PageSection(NAME, TITLE, body)


def make_note(reason: str) -> PageSection:
    """The section where there are no sensitivities."""
    return PageSection(NAME, TITLE, [paragraph(reason)])


def _tornado(head: str, bars: Sequence[tuple[StepRange, str]], step: float, last: str) -> Html:
    """A table with a bar around the step time for every row."""
    low, high = min(one.low_s for one, _ in bars), max(one.high_s for one, _ in bars)
    low, high = min(low, step), max(high, step)
    room = max(high - low, 1e-12)

    def place(seconds: float) -> float:
        return (seconds - low) / room

    rows = []
    for one, words in bars:
        pieces = [
            BarPiece(place(one.low_s), place(step), BETTER, format_seconds(one.low_s)),
            BarPiece(place(step), place(one.high_s), WORSE, format_seconds(one.high_s)),
        ]
        rows.append(
            [
                one.label,
                bar(pieces, mark=place(step)),
                format_seconds(one.low_s),
                format_seconds(one.high_s),
                words,
            ]
        )
    return table([head, "", "shortest step", "longest step", last], rows, "bars wide")
