"""Breakdown: the parts of a step on the slowest pipeline device, and communication that computation hides."""

from __future__ import annotations

from meshcast.experiments.render.bokeh.html import BarPiece, bar, paragraph, swatch, table
from meshcast.experiments.render.bokeh.page import PageSection
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import step_parts
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import format_seconds, name_device
from meshcast.simulator.report.report import Report


def make_section(report: Report) -> PageSection:
    parts, figures, step = step_parts(report), parts_of_step(), report.step_time
    pieces = []
    for key, part in parts.items():
        words = f"{figures[key].label}: {format_seconds(part.took)}, {part.took / step:.1%} of the step"
        pieces.append(BarPiece(part.begin / step, min(1.0, part.end / step), palette.PARTS[key].colour, words))
    longest = max(part.took + part.hidden for part in parts.values())
    rows = []
    for key, part in parts.items():
        if part.is_empty:
            continue
        ends = part.took / longest, (part.took + part.hidden) / longest
        colour, hidden = palette.PARTS[key].colour, f"hidden: {format_seconds(part.hidden)}"
        pieces_of_row = [
            BarPiece(0.0, ends[0], colour, format_seconds(part.took)),
            BarPiece(ends[0], ends[1], colour, hidden, striped=True),
        ]
        rows.append(
            [
                swatch(colour, figures[key].label),
                bar(pieces_of_row),
                f"{1e3 * part.took:,.1f}",
                f"{100 * part.took / step:.1f}",
                f"{1e3 * part.hidden:,.1f}" if part.hidden else "",
            ]
        )
    where = name_device(report.play.plan, report.device) if report.play.program.devices > 1 else ""
    words = f"Parts of the {format_seconds(step)} of a step" + (
        f" on {where}, which computes longest. " if where else ". "
    )
    words += (
        "They add up to the step. Striped: communication that computation hides; it is not in the sum. An exposed "
        "axis counts the time in which neither computation nor an axis above it runs."
    )
    foot = ["step", "", f"{1e3 * step:,.1f}", "100.0", ""]
    heads = ["part", "", "ms", "% of the step", "hidden ms"]
    body = [paragraph(words), bar(pieces, "tall"), table(heads, rows, "bars wide", foot)]
    return PageSection("breakdown", "Where the time goes", body)
