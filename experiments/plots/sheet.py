"""The sheet that plots are drawn on: positions in inches from its upper left corner, widths of text, the image file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle
from matplotlib.textpath import text_to_path

from experiments.plots import style

EDGE = 0.1
"""Left and right margin of text [in]."""

LINE = 0.135
"""Distance between lines of text [in]."""


class Sheet:
    """A matplotlib figure as wide as a page."""

    def __init__(self, height: float) -> None:
        self.height = height
        self.figure = Figure(figsize=(style.PAGE, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Adds axes without a frame."""
        axes = self.figure.add_axes(
            (left / style.PAGE, 1 - (top + height) / self.height, width / style.PAGE, height / self.height)
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=3)
        axes.tick_params(axis="x", length=2.5, pad=2)
        return axes

    def text(self, x: float, y: float, words: str, **looks: Any) -> None:
        """Writes text with its baseline at `y`."""
        self.figure.text(x / style.PAGE, 1 - y / self.height, words, parse_math=False, **looks)

    def patch(self, x: float, y: float, width: float, height: float, **looks: Any) -> None:
        """Draws a rectangle with its upper side at `y`."""
        corner = x / style.PAGE, 1 - (y + height) / self.height
        size = width / style.PAGE, height / self.height
        self.figure.add_artist(Rectangle(corner, *size, transform=self.figure.transFigure, **looks))

    def head(self, title: str, lines: Sequence[str]) -> None:
        """Writes the title, in smaller type if it is too long, and the lines below it."""
        room = style.PAGE - 2 * EDGE
        size = style.TITLE * min(1.0, room / text_width(title, style.TITLE, bold=True))
        self.text(EDGE, 0.2, title, fontsize=size, fontweight="bold")
        for i, line in enumerate(lines):
            self.text(EDGE, 0.36 + LINE * i, line, color=style.FAINT)


def wrap_words(parts: Sequence[str]) -> list[str]:
    """Joins parts of a sentence and breaks them into lines of the sheet's width."""
    return textwrap.wrap(", ".join(parts), 112)


def text_width(words: str, size: float = style.SMALL, bold: bool = False) -> float:
    """Width of a line of text [in]. size: of its type [pt]."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return float(text_to_path.get_text_width_height_descent(words, font, False)[0]) / 72


def truncate_words(words: str, room: float) -> str:
    """Cuts text to a width. room: that width [in]."""
    if text_width(words) <= room:
        return words
    while words and text_width(words + "...") > room:
        words = words[:-1]
    return f"{words.rstrip()}..." if words else ""


def format_time_axis(axes: Any, span: float, scale: float, unit: str) -> None:
    """Formats an x axis of time. span: its length [s]. scale: units per second."""
    axes.set_xlim(0, span * scale)
    # A label at the right end would leave the sheet.
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= span * scale * 0.975])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} {unit}")


def time_unit(span: float) -> tuple[float, str]:
    """Units per second, and name of the unit, for times up to `span` [s]."""
    return (1.0, "s") if span >= 2 else (1e3, "ms")


def save(make: Callable[[], Figure], path: str | Path) -> None:
    """Makes a plot in the common style and writes it. Raises OSError if the file cannot be written."""
    with matplotlib.rc_context(style.RC):
        make().savefig(path, dpi=style.DPI, metadata=style.metadata(str(path).lower()))
