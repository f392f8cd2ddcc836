"""The paper that figures are drawn on: places in inches from its upper left corner, widths of words, the file."""

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
"""Margin of words at the sides of the paper [in]."""

LINE = 0.135
"""From one line of words to the next [in]."""


class Sheet:
    """A figure of a page's width."""

    def __init__(self, height: float) -> None:
        self.height = height
        self.figure = Figure(figsize=(style.PAGE, height), facecolor="white")

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Axes without a box around them."""
        axes = self.figure.add_axes(
            (left / style.PAGE, 1 - (top + height) / self.height, width / style.PAGE, height / self.height)
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=3)
        axes.tick_params(axis="x", length=2.5, pad=2)
        return axes

    def text(self, x: float, y: float, words: str, **looks: Any) -> None:
        """Words whose baseline is at `y`."""
        self.figure.text(x / style.PAGE, 1 - y / self.height, words, parse_math=False, **looks)

    def patch(self, x: float, y: float, width: float, height: float, **looks: Any) -> None:
        """A rectangle; `y` is its upper side."""
        corner = x / style.PAGE, 1 - (y + height) / self.height
        size = width / style.PAGE, height / self.height
        self.figure.add_artist(Rectangle(corner, *size, transform=self.figure.transFigure, **looks))

    def head(self, title: str, lines: Sequence[str]) -> None:
        """The title, made smaller where it would not fit, and the lines below it."""
        room = style.PAGE - 2 * EDGE
        size = style.TITLE * min(1.0, room / width_of(title, style.TITLE, bold=True))
        self.text(EDGE, 0.2, title, fontsize=size, fontweight="bold")
        for i, line in enumerate(lines):
            self.text(EDGE, 0.36 + LINE * i, line, color=style.FAINT)


def wrapped(parts: Sequence[str]) -> list[str]:
    """Parts of a sentence, in lines as wide as the paper."""
    return textwrap.wrap(", ".join(parts), 112)


def width_of(words: str, size: float = style.SMALL, bold: bool = False) -> float:
    """How wide words are in print [in]."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return float(text_to_path.get_text_width_height_descent(words, font, False)[0]) / 72


def fitting(words: str, room: float) -> str:
    """As much of `words` as there is room for [in]."""
    if width_of(words) <= room:
        return words
    while words and width_of(words + "...") > room:
        words = words[:-1]
    return f"{words.rstrip()}..." if words else ""


def clock(axes: Any, span: float, scale: float, unit: str) -> None:
    """An axis of time from 0 to `span` seconds, `scale` units each."""
    axes.set_xlim(0, span * scale)
    # A label that would stick out on the right is left away.
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= span * scale * 0.975])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} {unit}")


def unit_of(span: float) -> tuple[float, str]:
    """The unit that suits a step, and how many there are in a second."""
    return (1.0, "s") if span >= 2 else (1e3, "ms")


def save(make: Callable[[], Figure], path: str | Path) -> None:
    """Makes a figure in the house style and writes it. Raises OSError where it cannot be written."""
    with matplotlib.rc_context(style.RC):
        make().savefig(path, dpi=style.DPI, metadata=style.metadata(str(path).lower()))
