"""Draws figures of papers: the forecasts as lines or bars, what was published as open marks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Heading,
    Sheet,
    make_heading,
    note_height,
    save,
    text_width,
    truncate_words,
)
from meshcast.experiments.views import palette
from tools.papers.figure_file import FigureAxis
from tools.papers.forecasts import ForecastFigure, ForecastPoint
from tools.papers.words import format_number, format_share, word_errors

ROW, BAR = 0.17, 0.64
"""Height of a row [in], and the share of it that a bar takes."""
LEFT, MOST_LEFT, NARROW_LEFT = 0.62, 2.6, 1.3
"""Left end of the axes of lines, and the largest one after the names of rows, on a page and in a column [in]."""
HEIGHT = 2.5
"""Height of the axes of lines [in]."""
COLOURS = (
    palette.BLUE, palette.ORANGE, palette.GREEN, palette.PURPLE, palette.GREY, palette.SKY, palette.BROWN,
    palette.YELLOW, palette.WINE,
)  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
STEPS = [1, 2, 2.5, 5, 10]
"""Distances of ticks, times powers of ten."""
LINES = "lines with dots"
BARS = "bars"


def draw(figure: ForecastFigure, path: str | Path, width: style.Width = "page") -> None:
    """Draws a figure to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: plot_figure(figure), path, width)


def plot_figure(figure: ForecastFigure) -> Figure:
    """Draws the plot, in the form that the file names."""
    return _plot_lines(figure) if figure.file.figure.form == "lines" else _plot_rows(figure)


def _list_series(figure: ForecastFigure) -> list[tuple[str, list[ForecastPoint]]]:
    return [(name, list(points)) for name, points in groupby(figure.points, key=lambda point: point.series)]


def _head(figure: ForecastFigure, form: str) -> Heading:
    """Writes title, what is drawn how, and the errors."""
    recalled = " Published numbers are recalled." if figure.file.figure.provenance == "recalled" else ""
    looks = f"{form.capitalize()}: meshcast. Open marks: published.{recalled} {word_errors(figure)}."
    return make_heading(figure.file.title, looks)


# ------------------------------------------------------------------------------------------- lines


def _plot_lines(figure: ForecastFigure) -> Figure:
    labels = figure.file.figure
    assert labels.x is not None  # PaperFigure checks it
    heading, series = _head(figure, LINES), _list_series(figure)
    legend = _arrange_legend([name for name, _ in series])
    top = heading.bottom + LINE * (legend[-1][0] + 1) + 0.17
    note = _word_note(figure)
    below = top + HEIGHT + 0.48
    sheet = Sheet(below + note_height(note))
    sheet.head(heading)
    for (line, left), (name, _), colour, mark in zip(legend, series, COLOURS, MARKS, strict=False):
        _draw_key(sheet, left, heading.bottom + LINE * line - 0.03, name, colour, mark)
    sheet.text(EDGE, top - 0.08, labels.y.label, color=palette.INK)
    axes = sheet.axes(LEFT, top, sheet.width - LEFT - EDGE - 0.1, HEIGHT)
    axes.spines["left"].set_visible(True)
    for (_, points), colour, mark in zip(series, COLOURS, MARKS, strict=False):
        _draw_series(axes, points, colour, mark)
    xs = sorted({float(point.x) for point in figure.points})
    _scale_axes(axes, labels.x, labels.y, xs, figure.points)
    axes.set_xlabel(labels.x.label)
    if note:
        sheet.note(below + 0.06, note)
    return sheet.figure


def _draw_series(axes: Any, points: Sequence[ForecastPoint], colour: str, mark: str) -> None:
    """Draws a series: ours as a line, its range where the paper leaves something open, and the published points."""
    ours = [point for point in points if point.ours is not None]
    xs = [float(point.x) for point in ours]
    axes.plot(xs, [point.ours for point in ours], color=colour, linewidth=1.3, marker=".", markersize=5, zorder=3)
    for x, point in zip(xs, ours, strict=True):
        if point.low != point.high:
            axes.plot([x, x], [point.low, point.high], color=colour, linewidth=1.0, alpha=0.55, zorder=2)
    axes.plot(
        [float(point.x) for point in points], [point.theirs for point in points], linestyle="none", marker=mark,
        markersize=6, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.1, zorder=4, clip_on=False,
    )  # fmt: skip


def _scale_axes(axes: Any, x: FigureAxis, y: FigureAxis, xs: list[float], points: Sequence[ForecastPoint]) -> None:
    """Sets limits and ticks: an x tick at every point that has room."""
    if x.log:
        axes.set_xscale("log", base=2)
        axes.set_xlim(xs[0] / 1.25, xs[-1] * 1.25)
    else:
        edge = 0.06 * (xs[-1] - xs[0]) or 1.0
        axes.set_xlim(xs[0] - edge, xs[-1] + edge)
    axes.xaxis.set_major_locator(FixedLocator(_choose_ticks(axes, xs)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    values = [value for point in points for value in (point.theirs, point.low, point.high) if value is not None]
    if y.log:
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.3, max(values) * 1.3)
        axes.yaxis.set_major_locator(FixedLocator(choose_log_ticks(*axes.get_ylim())))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, max(values) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.grid(axis="y", color=palette.lighten(palette.LINE, 0.5), linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)


def _choose_ticks(axes: Any, xs: Sequence[float]) -> list[float]:
    """Chooses the points whose labels do not touch those of the point before; the last has precedence."""
    wide = axes.get_position().width * axes.figure.get_size_inches()[0]
    low, high = axes.transData.transform([(axes.get_xlim()[0], 1.0), (axes.get_xlim()[1], 1.0)])[:, 0]
    places = [(axes.transData.transform((x, 1.0))[0] - low) / (high - low) * wide for x in xs]
    chosen: list[int] = []
    for at in range(len(xs) - 1, -1, -1):
        room = text_width(format_number(xs[at])) / 2 + 0.08
        if not chosen or places[chosen[-1]] - text_width(format_number(xs[chosen[-1]])) / 2 - room >= places[at]:
            chosen.append(at)
    return [xs[at] for at in reversed(chosen)]


def choose_log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 of each power of ten, or the powers alone where there are many."""
    powers = [10.0**n for n in range(-9, 16)]
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * power for power in powers for step in steps if low <= step * power <= high]
        if len(ticks) <= 8:
            break
    return ticks


def _arrange_legend(names: Sequence[str]) -> list[tuple[int, float]]:
    """Returns the line and left end [in] of every key, as many in a line as fit."""
    places, line, left = list[tuple[int, float]](), 0, EDGE
    for name in names:
        wide = 0.42 + text_width(name) + 0.2
        if left > EDGE and left + wide > style.layout_width() - EDGE:
            line, left = line + 1, EDGE
        places.append((line, left))
        left += wide
    return places


def _draw_key(sheet: Sheet, left: float, y: float, name: str, colour: str, mark: str) -> None:
    """Draws the key of a series with the baseline of its text at `y`."""
    place = 1 - (y - 0.035) / sheet.height
    ends = [left / sheet.width, (left + 0.17) / sheet.width, (left + 0.34) / sheet.width]
    looks: dict[str, Any] = {"transform": sheet.figure.transFigure, "color": colour}
    sheet.figure.add_artist(Line2D([ends[0], ends[2]], [place] * 2, linewidth=1.3, **looks))
    sheet.figure.add_artist(
        Line2D(
            [ends[1]], [place], linestyle="none", marker=mark, markersize=6, markerfacecolor="white",
            markeredgewidth=1.1, **looks,
        )
    )  # fmt: skip
    sheet.text(left + 0.4, y, name, fontsize=style.SMALL)


# ------------------------------------------------------------------------------------------- rows


def _plot_rows(figure: ForecastFigure) -> Figure:
    labels, series = figure.file.figure, _list_series(figure)
    heading, note = _head(figure, BARS), _word_note(figure)
    numbers = [_word_numbers(point) for point in figure.points]
    heads = ("ours", "published", "off by")
    wides = [max(text_width(row[at]) for row in [heads, *numbers]) + 0.14 for at in range(3)]
    names = [text_width(str(point.x)) for point in figure.points]
    names += [text_width(name, bold=True) for name, _ in series]
    left = min(NARROW_LEFT if style.is_narrow() else MOST_LEFT, max(names) + 0.12 + EDGE)
    rows = len(figure.points) + len(series)
    top = heading.bottom
    below = top + ROW * rows + 0.46
    sheet = Sheet(below + note_height(note))
    sheet.head(heading)
    axes = sheet.axes(left, top, sheet.width - left - sum(wides) - EDGE - 0.1, ROW * rows)
    axes.spines["left"].set_visible(True)
    _scale_rows(axes, labels.y, figure.points, rows)
    row = 0
    for (name, points), colour in zip(series, COLOURS, strict=False):
        sheet.text(EDGE, top + ROW * (row + 0.72), name, fontsize=style.SMALL, fontweight="bold", color=colour)
        if row == 0:
            _write_numbers(sheet, top + ROW * 0.72, heads, wides, color=palette.FAINT)
        row += 1
        for point in points:
            label = truncate_words(str(point.x), left - EDGE - 0.05)
            sheet.text(left - 0.06, top + ROW * (row + 0.7), label, fontsize=style.SMALL, ha="right")
            _write_numbers(sheet, top + ROW * (row + 0.7), _word_numbers(point), wides)
            _draw_row(axes, row, point, colour)
            row += 1
    axes.set_xlabel(labels.y.label)
    if note:
        sheet.note(below + 0.06, note)
    return sheet.figure


def _word_numbers(point: ForecastPoint) -> tuple[str, str, str]:
    ours = "" if point.ours is None else format_number(point.ours)
    return ours, format_number(point.theirs), "" if point.deviation is None else format_share(point)


def _write_numbers(sheet: Sheet, y: float, words: Sequence[str], wides: Sequence[float], **looks: Any) -> None:
    """Writes the three numbers of a row, right-aligned at the right end of the sheet."""
    right = sheet.right
    for word, wide in zip(reversed(words), reversed(wides), strict=True):
        sheet.text(right, y, word, fontsize=style.SMALL, ha="right", **looks)
        right -= wide


def _scale_rows(axes: Any, y: FigureAxis, points: Sequence[ForecastPoint], rows: int) -> None:
    values = [value for point in points for value in (point.theirs, point.low, point.high) if value is not None]
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    if y.log:
        axes.set_xscale("log")
        axes.set_xlim(min(value for value in values if value > 0) / 1.6, max(values) * 1.15)
        axes.xaxis.set_major_locator(FixedLocator(choose_log_ticks(*axes.get_xlim())))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(values) * 1.05)
        axes.xaxis.set_major_locator(MaxNLocator(4 if style.is_narrow() else 6, steps=STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value)))
    axes.grid(axis="x", color=palette.lighten(palette.LINE, 0.5), linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)


def _draw_row(axes: Any, row: int, point: ForecastPoint, colour: str) -> None:
    middle = row + 0.5
    if point.ours is not None:
        axes.barh(middle, point.ours, BAR, color=palette.lighten(colour, 0.35), linewidth=0, zorder=2)
        if point.low != point.high:
            axes.plot([point.low, point.high], [middle, middle], color=colour, linewidth=1.6, zorder=3)
    axes.plot(
        [point.theirs], [middle], marker="D", markersize=4.2, markerfacecolor="white", markeredgecolor=palette.INK,
        markeredgewidth=1.0, linestyle="none", zorder=4, clip_on=False,
    )  # fmt: skip


def _word_note(figure: ForecastFigure) -> str:
    """Returns the note of the file, and which points have no forecast."""
    missing = [f"{point.series}, {point.x}" for point in figure.points if point.ours is None]
    return " ".join(filter(None, [figure.file.figure.note, f"No forecast: {'; '.join(missing)}." if missing else ""]))
