"""Plot of forecasts against published measurements: a dot for every run about a diagonal, and beside it their ratios.

Both axes are logarithmic, so equal distances from the diagonal are equal relative errors; the bands are 10 and 20 %.
Every source has a colour and a marker; whiskers are 90 % intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Heading,
    Sheet,
    make_heading,
    text_width,
    truncate_words,
)
from meshcast.experiments.views import palette
from meshcast.hardware.records import dataclass

HUES = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.VIOLET, palette.AMBER, palette.PINK, palette.GREY)
SHAPES = "osD^vP"
BANDS = (0.1, 0.2)
LEFT, RIGHT = 0.55, 0.12
"""Room for the labels of the axes, and right of them [in]."""
BELOW = 1.75
"""Height of the ratios where they stand below the diagonal [in]."""
ENTRY = 2.1
"""Least width of an entry of the list of sources [in]."""
FARTHEST = 4.0
"""Largest ratio on the axis; larger ones are drawn at its end."""


@dataclass(frozen=True)
class Dot:
    """Measured value and forecast of a run [s or GiB]. low, high: 90 % interval; both the forecast if it has none."""

    source: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def step_time_dots(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    """Returns the step times of the runs with a measurement [s]."""
    dots = []
    for row in rows:
        if row["error"] is not None:
            forecast = row["predicted"]
            measured = forecast["step_time_s"] / (1 + row["error"])
            dots.append(Dot(row["source"], measured, forecast["step_time_s"], *forecast["interval_90_s"]))
    return dots


def memory_dots(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    """Returns the peak memory of the runs with a measurement [GiB]."""
    dots = []
    for row in rows:
        if row["memory_error"] is not None:
            peak = row["predicted"]["peak_memory_gib"]
            dots.append(Dot(row["source"], peak / (1 + row["memory_error"]), peak, peak, peak))
    return dots


def compare_dots(dots: Sequence[Dot], what: str, unit: str, of: int) -> Figure:
    """Returns the plot. of: number of all runs."""
    title = f"{what} of published runs, forecast against measured"
    if not dots:
        heading = make_heading(title, f"None of the {of:,} runs has both a forecast and a measurement.")
        sheet = Sheet(heading.bottom + 0.1)
        sheet.head(heading)
        return sheet.figure
    sizes = sorted(abs(dot.error) for dot in dots)
    inside = sum(dot.low <= dot.measured <= dot.high for dot in dots) / len(dots)
    words = [f"{len(dots):,} of {of:,} runs, median error {median(sizes):.1%}"]
    words += [f"bias {median(dot.error for dot in dots):+.1%}"]
    if any(dot.low < dot.high for dot in dots):
        words += [f"{inside:.0%} inside their 90% intervals (whiskers)"]
    outside = sum(max(1 + dot.error, 1 / (1 + dot.error)) > FARTHEST for dot in dots)
    if outside:
        words += [f"{outside} beyond a ratio of {FARTHEST:g} (triangles at the edge)"]
    heading = make_heading(title, words, "On the line they agree; the bands are 10 and 20% of the measured value.")
    looks = _source_looks(dots)
    place = _place_axes(heading, len(looks))
    sheet = Sheet(place.key + LINE * 1.15 * (place.lines + 1) + 0.12)
    sheet.head(heading)
    first = sheet.axes(LEFT, place.top, place.side, place.side)
    second = sheet.axes(*place.ratios)
    values = [value for dot in dots for value in (dot.measured, dot.predicted)]
    ends = min(values) / 1.25, max(values) * 1.25
    _draw_diagonal(first, dots, looks, ends)
    _draw_ratios(second, dots, looks, ends)
    for axes in (first, second):
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        axes.spines["left"].set_visible(True)
        _format_axis(axes.xaxis, ends, axes.get_position().width * sheet.width)
        axes.set_xlabel(f"measured [{unit}]", labelpad=2)
    first.set_ylabel(f"forecast [{unit}]", labelpad=2)
    second.set_ylabel("forecast over measured", labelpad=2)
    _draw_key(sheet, dots, looks, place)
    return sheet.figure


class Places(NamedTuple):
    """Places of the axes [in]: upper end and side of the diagonal, box of the ratios, upper end of the list of sources,
    its columns, and the lines of each.
    """

    top: float
    side: float
    ratios: tuple[float, float, float, float]
    key: float
    columns: int
    lines: int


def _place_axes(heading: Heading, sources: int) -> Places:
    """Places the diagonal and the ratios beside each other, or in a column below each other."""
    width, top = style.layout_width(), heading.bottom
    columns = min(sources, max(1, int((width - 2 * EDGE) / ENTRY)))
    lines = -(-sources // columns)
    if style.is_narrow():
        side = width - LEFT - RIGHT
        ratios = (LEFT, top + side + 0.42, side, BELOW)
        return Places(top, side, ratios, ratios[1] + BELOW + 0.55, columns, lines)
    side = width / 2 - LEFT - RIGHT
    room = style.layout_height() - top - 0.55 - LINE * 1.15 * (lines + 1) - 0.12
    side = max(1.6, min(side, room))
    second = LEFT + side + RIGHT + LEFT + 0.05
    return Places(top, side, (second, top, width - second - RIGHT, side), top + side + 0.55, columns, lines)


def _source_looks(dots: Sequence[Dot]) -> dict[str, dict[str, Any]]:
    """Chooses colour and marker of every source; the source with most runs comes first."""
    names = sorted({dot.source for dot in dots}, key=lambda name: (-sum(dot.source == name for dot in dots), name))
    return {
        name: {"color": HUES[i % len(HUES)], "marker": SHAPES[(i + i // len(HUES)) % len(SHAPES)]}
        for i, name in enumerate(names)
    }


def _draw_diagonal(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], ends: tuple[float, float]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(*ends)
    _format_axis(axes.yaxis, ends, axes.get_position().height * axes.figure.get_size_inches()[1])
    for band in BANDS:
        edges = [[end * (1 - band) for end in ends], [end * (1 + band) for end in ends]]
        axes.fill_between(ends, *edges, color=palette.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.plot(ends, ends, color=palette.FAINT, linewidth=0.7, zorder=1)
    _draw_dots(axes, dots, looks, lambda dot, value: value)


def _draw_ratios(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], ends: tuple[float, float]) -> None:
    reach = max(1.5, *(max(1 + dot.error, 1 / (1 + dot.error)) for dot in dots))
    far = [dot for dot in dots if max(1 + dot.error, 1 / (1 + dot.error)) > FARTHEST]
    reach = min(reach * 1.08, FARTHEST)
    axes.set_yscale("log")
    axes.set_ylim(1 / reach, reach)
    near = (0.67, 0.8, 0.9, 1, 1.1, 1.2, 1.5) if reach < 2.2 else (0.8, 1, 1.2)
    ticks = [tick for tick in (0.25, 0.5, *near, 2, 4) if 1 / reach <= tick <= reach]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(LogLocator(subs=()))
    for band in BANDS:
        axes.axhspan(1 - band, 1 + band, color=palette.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.axhline(1, color=palette.FAINT, linewidth=0.7, zorder=1)
    near_dots = [dot for dot in dots if dot not in far]
    _draw_dots(axes, near_dots, looks, lambda dot, value: min(max(value / dot.measured, 1 / reach), reach))
    for dot in far:  # a triangle that points out of the axes: the ratio itself lies beyond them
        up, colour = dot.error > 0, looks[dot.source]["color"]
        edge, marker = (reach, "^") if up else (1 / reach, "v")
        axes.scatter([dot.measured], [edge], marker=marker, s=26, color=colour, clip_on=False, zorder=4, linewidths=0)


def _draw_dots(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], place: Any) -> None:
    for name, look in looks.items():
        group = [dot for dot in dots if dot.source == name]
        x = [dot.measured for dot in group]
        lows, highs = [place(dot, dot.low) for dot in group], [place(dot, dot.high) for dot in group]
        axes.vlines(x, lows, highs, color=palette.lighten(look["color"], 0.45), linewidth=0.6, zorder=2)
        y = [place(dot, dot.predicted) for dot in group]
        axes.scatter(x, y, s=11, linewidths=0.3, edgecolors="white", clip_on=False, zorder=3, **look)


def _format_axis(axis: Any, ends: tuple[float, float], room: float) -> None:
    """Formats a logarithmic axis: ticks at 1, 2 and 5 of every decade, more on short axes, fewer without room.

    room: length of the axis [in].
    """
    decades = math.log10(ends[1] / ends[0])
    subs: tuple[float, ...] = (1.0,)
    if room / decades > 2.2:
        subs = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    elif room / decades > 1.0:
        subs = (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=max(2, int(room / 0.5)) if subs == (1.0,) else None))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.10g}" if 1e-4 <= value < 1e6 else f"{value:.0e}")
    )
    axis.set_minor_locator(LogLocator(subs=()))
    axis.set_minor_formatter(NullFormatter())


def _draw_key(sheet: Sheet, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], place: Places) -> None:
    """Writes marker, name, runs, median error and bias of every source, below the axes."""
    wide = (sheet.width - 2 * EDGE) / place.columns
    names = list(looks)
    for column in range(place.columns):
        left = EDGE + wide * column
        ends = [left + min(wide, 2.6) - 0.12 - right for right in (0.94, 0.47, 0.0)]
        for x, head in zip(ends, ("runs", "median", "bias"), strict=True):
            sheet.text(x, place.key, head, ha="right", color=palette.FAINT, fontsize=style.SMALL)
        sheet.text(left + 0.14, place.key, "source", color=palette.FAINT, fontsize=style.SMALL)
        shown = names[column * place.lines : (column + 1) * place.lines]
        marks = sheet.axes(left, place.key, 0.1, LINE * 1.15 * (len(shown) + 1))
        marks.set_axis_off()
        marks.set_xlim(0, 1)
        marks.set_ylim(len(shown) + 1, 0)
        for i, name in enumerate(shown, 1):
            errors = [dot.error for dot in dots if dot.source == name]
            at = place.key + LINE * 1.15 * i
            marks.scatter([0.5], [i - 0.25], s=13, linewidths=0, clip_on=False, **looks[name])
            room = ends[0] - left - 0.14 - text_width("0000")
            sheet.text(left + 0.14, at, truncate_words(name, room), fontsize=style.SMALL)
            cells = f"{len(errors):,}", f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}"
            for x, cell in zip(ends, cells, strict=True):
                sheet.text(x, at, cell, ha="right", fontsize=style.SMALL)
