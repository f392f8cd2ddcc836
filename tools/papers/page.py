"""docs/papers.md: the errors of all figures, then every figure with its points, ours beside the published ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from statistics import median

from meshcast.experiments.render.markdown import render_table
from meshcast.experiments.views.table import Table, numbers
from tools.papers.forecasts import ForecastFigure, ForecastPoint
from tools.papers.words import format_error, format_number, format_share

IMAGES = "images/papers"
"""Folder of the images of the page, beside it."""

HEAD = """\
# Figures of papers, redrawn

Made by `make papers` from the files in `tools/papers/figures/`; do not edit it. A point is a published number
beside the forecast of the job that it is of, most often one of the [claims](claims.md). What a paper leaves open is run
at both ends of what is plausible: *ours* is the middle, followed by the range. *Off by* is ours / published - 1. Marked
as *in view* are runs that were known when coefficients or profiles were made, as all [published
runs](published-runs.md) were. Numbers that were read off a plot or are recalled say so. A job that *does not fit* needs
more memory in the forecast than its GPUs have. `make papers` draws all figures into `out/papers/`, and
`python -m tools.papers NAME ...` those of some files, with their deviations.
"""


def write_page(figures: Sequence[ForecastFigure]) -> str:
    """Returns the page. figures: with their forecasts, in the order of the page."""
    parts = [HEAD, _sum_up(figures), _write_summary(figures)]
    for paper, group in groupby(figures, key=lambda figure: figure.file.figure.paper):
        of_paper = list(group)
        parts.append(f"## {paper}\n\n[{of_paper[0].file.figure.link}]({of_paper[0].file.figure.link})\n")
        parts += [_write_figure(figure) for figure in of_paper]
    return "\n".join(parts).rstrip() + "\n"


def sort_figures(figures: Sequence[ForecastFigure]) -> list[ForecastFigure]:
    """Sorts figures by paper, papers by name, so that those of a paper stand together."""
    return sorted(figures, key=lambda figure: (figure.file.figure.paper.casefold(), figure.file.name))


def _sum_up(figures: Sequence[ForecastFigure]) -> str:
    """Says how large the median deviations are, over all figures, and apart for runs that were in view."""
    words = []
    for name, chosen in (("in view", True), ("not in view", False)):
        errors = [
            forecast.median
            for forecast in figures
            if forecast.file.figure.in_view is chosen and forecast.median is not None
        ]
        if errors:
            words.append(f"{len(errors)} of runs {name}: {format_error(median(errors))}")
    every = [error for figure in figures for error in figure.deviations]
    near = sum(error <= 0.1 for error in every)
    return (
        f"{len(figures)} figures and tables with {len(every)} points, of which {near / max(1, len(every)):.0%} are "
        f"within 10 %. Median over figures of their median deviation: {', '.join(words)}.\n"
    )


def _write_summary(figures: Sequence[ForecastFigure]) -> str:
    rows = [
        [
            f"[{figure.file.figure.paper}, {figure.file.figure.place}](#{anchor_of(figure)})",
            str(len(figure.points)),
            format_error(figure.median),
            format_error(figure.largest),
            "yes" if figure.file.figure.in_view else "",
        ]
        for figure in figures
    ]
    return render_table(Table("figure", *numbers("points", "median", "largest"), "in view", rows=rows))


def _write_figure(forecast: ForecastFigure) -> str:
    """Writes a figure: its source, its image if the page shows it, its points, and why some are missed."""
    figure, parts = forecast.file.figure, [f"### {_title(forecast)}\n"]
    recalled = " The numbers are recalled." if figure.provenance == "recalled" else ""
    parts.append(f"Source: {figure.source}.{recalled} Numbers: {figure.y.label}. File: `{forecast.file.name}`.\n")
    if figure.image:
        parts.append(f"![{forecast.file.title}]({IMAGES}/{forecast.file.name}.png)\n")
    x = figure.x.label if figure.x else ""
    rows = [
        [point.series, _word_x(point), _word_ours(point), format_number(point.theirs), format_share(point)]
        for point in forecast.points
    ]
    parts.append(render_table(Table("series", x, *numbers("ours", "published", "off by"), rows=rows)))
    if figure.note:
        parts.append(figure.note + "\n")
    return "\n".join(parts)


def _title(forecast: ForecastFigure) -> str:
    place = forecast.file.figure.place
    return f"{place[0].upper()}{place[1:]}: {forecast.file.figure.title}"


def anchor_of(figure: ForecastFigure) -> str:
    """Returns the anchor of the heading of a figure, as GitHub and mkdocs make it."""
    words = re.sub(r"[^\w\s-]", "", _title(figure).lower())
    return re.sub(r"[-\s]+", "-", words).strip("-")


def _word_x(point: ForecastPoint) -> str:
    return point.x if isinstance(point.x, str) else format_number(point.x)


def _word_ours(point: ForecastPoint) -> str:
    if point.low is None or point.high is None or point.ours is None:
        return point.reason
    words = format_number(point.ours)
    if point.low != point.high:
        words += f" ({format_number(point.low)} to {format_number(point.high)})"
    return words if point.fits else f"{words}, does not fit"
