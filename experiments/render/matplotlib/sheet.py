"""The sheet that plots are drawn on: positions in inches from its upper left corner, widths of text, the image file."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Rectangle, StepPatch
from matplotlib.textpath import text_to_path
from matplotlib.ticker import MaxNLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.views import palette
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import cut_middle, escape_controls

EDGE = 0.1
"""Left and right margin of text [in]."""

LINE, TITLE_LINE = 0.135, 0.16
"""Distances between lines of text, and of a title [in]."""

HEAD = 0.42
"""Upper end of a plot below a title of a single line without lines below it [in]."""

LONGEST = 600
"""Longest text of a heading or a label [letters]: names may have any length, a sheet has not."""


class Heading(NamedTuple):
    """Title and lines below it, broken to the width of the layout."""

    title: list[str]
    lines: list[str]

    @property
    def bottom(self) -> float:
        """Upper end of what follows [in]."""
        return HEAD + TITLE_LINE * (len(self.title) - 1) + LINE * len(self.lines)


def make_heading(title: str, *parts: Sequence[str] | str) -> Heading:
    """Breaks a title and what stands below it into lines.

    parts: each begins a line; a sequence is of phrases, joined by commas.
    """
    room = style.layout_width() - 2 * EDGE
    sentences = (cut_middle(part if isinstance(part, str) else ", ".join(part), LONGEST) for part in parts)
    lines = [line for sentence in sentences for line in wrap_text(sentence, room, style.TEXT)]
    return Heading(wrap_text(cut_middle(title, LONGEST), room, style.TITLE, bold=True), lines)


class Sheet:
    """A matplotlib figure as wide as the layout."""

    def __init__(self, height: float) -> None:
        self.width, self.height = style.layout_width(), height
        self.figure = Figure(figsize=(self.width, height), facecolor="white")

    @property
    def right(self) -> float:
        """Right end of text [in]."""
        return self.width - EDGE

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        """Adds axes without a frame."""
        axes = self.figure.add_axes(
            (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        )
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=3)
        axes.tick_params(axis="x", length=2.5, pad=2)
        return axes

    def text(self, x: float, y: float, words: str, **looks: Any) -> None:
        """Writes text with its baseline at `y`."""
        self.figure.text(x / self.width, 1 - y / self.height, words, parse_math=False, **looks)

    def patch(self, x: float, y: float, width: float, height: float, **looks: Any) -> None:
        """Draws a rectangle with its upper side at `y`."""
        corner = x / self.width, 1 - (y + height) / self.height
        size = width / self.width, height / self.height
        self.figure.add_artist(Rectangle(corner, *size, transform=self.figure.transFigure, **looks))

    def head(self, heading: Heading) -> None:
        """Writes the title and the lines below it."""
        y = 0.2
        for line in heading.title:
            self.text(EDGE, y, line, fontsize=style.TITLE, fontweight="bold")
            y += TITLE_LINE
        for line in heading.lines:
            self.text(EDGE, y, line, color=palette.FAINT)
            y += LINE

    def note(self, y: float, words: str) -> float:
        """Writes a note in small type, broken to the width; returns the baseline of a next line [in]."""
        for line in wrap_text(words, self.width - 2 * EDGE, style.SMALL):
            self.text(EDGE, y, line, fontsize=style.SMALL, color=palette.FAINT)
            y += LINE
        return y


def write_beside(axes: Any, words: str, place: tuple[float, float], offset: tuple[float, float], **looks: Any) -> None:
    """Writes small text beside a point of the axes. offset: from that point [pt]."""
    axes.annotate(words, place, offset, textcoords="offset points", **{"fontsize": style.SMALL, **looks})


def write_on(axes: Any, words: str, place: tuple[float, float], face: palette.RGB, pad: float, **looks: Any) -> None:
    """Writes small text in the middle of an area, on a patch of its colour, which keeps the hatch away from it."""
    patch = {"facecolor": face, "edgecolor": "none", "pad": pad}
    looks = {"ha": "center", "va": "center_baseline", "fontsize": style.SMALL, "color": palette.ink_on(face), **looks}
    axes.text(*place, words, bbox=patch, **looks)


def note_height(words: str) -> float:
    """Returns the height of the lines of a note [in]."""
    return LINE * len(wrap_text(words, style.layout_width() - 2 * EDGE, style.SMALL)) if words else 0.0


def wrap_text(words: str, room: float, size: float = style.SMALL, bold: bool = False) -> list[str]:
    """Breaks text into lines of a width; a word that is too long for it is cut. room: that width [in]."""
    room -= 0.05  # type is a little wider on coarse screens
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size, bold) <= room:
            lines[-1] = longer
        else:
            lines.append(truncate_words(word, room, size, bold))
    return lines


@lru_cache(maxsize=4096)
def text_width(words: str, size: float = style.SMALL, bold: bool = False) -> float:
    """Returns the width of a line of text [in]. size: of its type [pt]."""
    font = FontProperties(family="DejaVu Sans", weight="bold" if bold else "normal", size=size)
    return float(text_to_path.get_text_width_height_descent(escape_controls(words), font, False)[0]) / 72


def truncate_words(words: str, room: float, size: float = style.SMALL, bold: bool = False) -> str:
    """Cuts text to a width. room: that width [in]."""
    if text_width(words, size, bold) <= room:
        return words
    words = words[:LONGEST]
    while words and text_width(words + "...", size, bold) > room:
        words = words[:-1]
    return f"{words.rstrip()}..." if words else ""


def draw_bar(axes: Axes, y: float, width: float, height: float, left: float = 0.0, **looks: Any) -> None:
    """Draws a bar as `Axes.barh` does, nothing where it has no width, on axes whose limits are set explicitly.

    `Axes.barh` fits the limits to every bar: half of the time of a plot of bars.
    """
    if width:
        axes.add_artist(Rectangle((left, y - height / 2), width, height, **looks))


def fill_stairs(axes: Any, levels: np.ndarray, edges: np.ndarray, baseline: float = 0.0, **looks: Any) -> None:
    """Fills the area between a baseline and levels, as `Axes.stairs` does, on axes whose limits are set explicitly.

    `Axes.stairs` searches every segment for extreme points, a Bezier curve each: most of the time of a plot.
    levels: of each step.
    edges: of the steps, rising [levels + 1].
    """
    axes.add_artist(StepPatch(levels, edges, baseline=baseline, fill=True, **looks))


def format_time_axis(axes: Any, span: float, scale: float, unit: str) -> None:
    """Formats an x axis of time.

    span: its length [s].
    scale: units per second.
    """
    axes.set_xlim(0, span * scale)
    space_ticks(axes, lambda value: f"{value:,.10g} {unit}")


def space_ticks(axes: Any, write: Callable[[float], str]) -> None:
    """Labels the x axis with at most as many ticks as have room, none whose label would leave the axes on the right."""
    low, high = axes.get_xlim()
    inches = axes.get_position().width * axes.figure.get_size_inches()[0]
    for most in range(9, 1, -1):
        ticks = [
            tick for tick in MaxNLocator(most, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= tick <= high
        ]
        widest = max((text_width(write(tick)) for tick in ticks), default=0.0)
        if not ticks or (high - low) * (widest + 0.12) <= (ticks[1] - ticks[0] if len(ticks) > 1 else high) * inches:
            break
    ends = high - 0.5 * widest / inches * (high - low) + 0.08 / inches * (high - low)
    axes.set_xticks([tick for tick in ticks if tick <= ends])
    axes.xaxis.set_major_formatter(lambda value, _: write(value))


def format_large(value: float, form: str) -> str:
    """Formats a number with k, M or G for thousands, millions or billions. form: of the number before it."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:{form}} {unit}"
    return f"{value:{form}}"


def save(make: Callable[[], Figure], path: str | Path, width: style.Width = "page") -> None:
    """Makes a plot for a width and writes it. Raises OSError if the file cannot be written."""
    with style.drawing(width):
        write_figure(style.escape_texts(make()), path, width)


def write_figure(figure: Figure, path: str | Path, width: style.Width = "page") -> None:
    """Writes a plot in the format of the suffix, .png, .svg or .pdf. Raises OSError if the file cannot be written."""
    zoom, form = style.WIDTHS[width].zoom, Path(path).suffix.lower()[1:]
    meta = style.metadata(str(path).lower())
    image = io.BytesIO()
    if form not in ("svg", "pdf"):
        # More dots an inch of the layout, and the same an inch of the finished plot.
        dots = (style.DPI, style.DPI)
        Figure.savefig(figure, image, format=form, dpi=style.DPI * zoom, metadata=meta, pil_kwargs={"dpi": dots})
    elif zoom == 1 or form == "svg":
        Figure.savefig(figure, image, format=form, metadata=meta)
    else:
        _draw_enlarged_pdf(figure, image, zoom, meta)
    write_file(path, _enlarge_svg(image.getvalue(), zoom) if form == "svg" and zoom != 1 else image.getvalue())


def _draw_enlarged_pdf(figure: Figure, image: io.BytesIO, zoom: float, meta: dict[str, Any]) -> None:
    """Draws a PDF page that is enlarged as a whole: a larger page, and a scale before everything drawn on it."""
    from matplotlib.backends.backend_mixed import MixedModeRenderer
    from matplotlib.backends.backend_pdf import Op, PdfFile, RendererPdf

    dpi, (wide, high) = figure.dpi, figure.get_size_inches()
    file = PdfFile(image, metadata=meta)
    figure.dpi = 72  # points of a PDF page an inch
    try:
        file.newPage(wide * zoom, high * zoom)
        file.output(zoom, 0, 0, zoom, 0, 0, Op.concat_matrix)
        renderer = MixedModeRenderer(figure, wide, high, dpi, RendererPdf(file, dpi, high, wide))
        figure.draw(renderer)  # type: ignore[arg-type]
        renderer.finalize()
        file.finalize()
    finally:
        file.close()
        figure.dpi = dpi


def _enlarge_svg(image: bytes, zoom: float) -> str:
    """Enlarges an SVG image as a whole: its width and height, while the box of its coordinates stays."""

    def enlarge(size: re.Match[str]) -> str:
        return f'{size[1]}="{float(size[2]) * zoom:g}pt"'

    head, tag, rest = image.decode().partition("<svg ")
    root, end, body = rest.partition(">")
    return head + tag + re.sub(r'\b(width|height)="([0-9.]+)pt"', enlarge, root) + end + body
