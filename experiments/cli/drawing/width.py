"""``--width``: what a plot is made for."""

from __future__ import annotations

from typing import Annotated

import typer

from meshcast.experiments.plots.style import WIDTHS, Width
from meshcast.hardware.errors import PlanError, nearest

WidthOption = Annotated[
    str | None,
    typer.Option(
        "--width",
        metavar="|".join(WIDTHS),
        help="What the plot is made for: a column of a paper (3.33 in), a page (7 in), a slide (13.33 in).",
    ),
]


def choose_width(given: str | None, plot: object) -> Width:
    """The width of a plot, a page if none is given.

    plot: what is to be drawn; None if nothing is. Raises PlanError for an unknown width, and for one without a plot.
    """
    if given is None:
        return "page"
    if given not in WIDTHS:
        raise PlanError("--width", "there is no width of this name", nearest(given, WIDTHS), given)
    if plot is None:
        raise PlanError("--width", "it is for a plot", "Name the file with --plot, or leave it out", given)
    return given  # type: ignore[return-value]
