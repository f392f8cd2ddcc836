"""Forecasts against published measurements: one dot a run on a diagonal, and below it how far off each one is.

Both axes are logarithmic, so that equal distances from the diagonal are equal errors; the bands are 10 and 20 %. Every
source has a colour and a shape of its own, whiskers are the 90 % intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, fitting, save, width_of

HUES = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.GREY)
SHAPES = "osD^vP"
BANDS = (0.1, 0.2)
LEFT, SIDE = 0.55, 4.2
"""Where the axes begin and how wide they are [in]."""
KEY = LEFT + SIDE + 0.22
"""Where the list of sources begins [in]."""
TOP = 0.65
BELOW = 1.75
"""Height of the axes of errors [in]."""
FARTHEST = 4.0
"""Ratios beyond are drawn at the edge."""


@dataclass(frozen=True)
class Dot:
    """One run: measured and forecast, seconds or GiB, with the interval where there is one."""

    source: str
    measured: float
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def times(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    """Step times of the answers that have a measured one [s]."""
    found = []
    for row in rows:
        if row["error"] is not None:
            told = row["predicted"]
            found.append(Dot(row["source"], *_pair(told["step_time_s"], row["error"]), *told["interval_90_s"]))
    return found


def memories(rows: Sequence[dict[str, Any]]) -> list[Dot]:
    """Peaks of the answers that have a measured one [GiB]."""
    found = []
    for row in rows:
        if row["memory_error"] is not None:
            peak = row["predicted"]["peak_memory_gib"]
            found.append(Dot(row["source"], *_pair(peak, row["memory_error"]), peak, peak))
    return found


def _pair(predicted: float, error: float) -> tuple[float, float]:
    return predicted / (1 + error), predicted


def draw_times(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws step times into a .png or .svg. Raises OSError where it cannot be written."""
    save(lambda: against(times(rows), "Step time", "s", len(rows)), path)


def draw_memories(rows: Sequence[dict[str, Any]], path: str | Path) -> None:
    """Draws peaks of memory into a .png or .svg. Raises OSError where it cannot be written."""
    save(lambda: against(memories(rows), "Peak memory of a GPU", "GiB", len(rows)), path)


def against(dots: Sequence[Dot], what: str, unit: str, of: int) -> Figure:
    """The figure. of: how many runs were asked for."""
    sheet = Sheet(7.2)
    title = f"{what} of published runs, forecast against measured"
    if not dots:
        sheet.head(title, [f"None of the {of:,} runs has both a forecast and a measurement."])
        return sheet.figure
    sizes = sorted(abs(dot.error) for dot in dots)
    inside = sum(dot.low <= dot.measured <= dot.high for dot in dots) / len(dots)
    words = [f"{len(dots):,} of {of:,} runs, median error {median(sizes):.1%}"]
    words += [f"bias {median(dot.error for dot in dots):+.1%}"]
    if any(dot.low < dot.high for dot in dots):
        words += [f"{inside:.0%} inside their 90% intervals (whiskers)"]
    sheet.head(title, [", ".join(words), "On the diagonal they agree; the bands are 10 and 20% of the measured value."])
    looks = _looks(dots)
    upper = sheet.axes(LEFT, TOP, SIDE, SIDE)
    lower = sheet.axes(LEFT, TOP + SIDE + 0.15, SIDE, BELOW)
    ends = _ends([*(dot.measured for dot in dots), *(dot.predicted for dot in dots)])
    _diagonal(upper, dots, looks, ends)
    _ratios(lower, dots, looks, ends)
    for axes in (upper, lower):
        axes.set_xscale("log")
        axes.set_xlim(*ends)
        axes.spines["left"].set_visible(True)
        _plain(axes.xaxis, ends)
    upper.set_ylabel(f"forecast [{unit}]")
    upper.tick_params(axis="x", labelbottom=False)
    lower.set_xlabel(f"measured [{unit}]")
    lower.set_ylabel("forecast over measured")
    _key(sheet, dots, looks)
    return sheet.figure


def _looks(dots: Sequence[Dot]) -> dict[str, dict[str, Any]]:
    """Colour and shape of every source, the one with most runs first."""
    names = sorted({dot.source for dot in dots}, key=lambda name: (-sum(dot.source == name for dot in dots), name))
    return {
        name: {"color": HUES[i % len(HUES)], "marker": SHAPES[(i + i // len(HUES)) % len(SHAPES)]}
        for i, name in enumerate(names)
    }


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values) / 1.25, max(values) * 1.25


def _diagonal(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], ends: tuple[float, float]) -> None:
    axes.set_yscale("log")
    axes.set_ylim(*ends)
    _plain(axes.yaxis, ends)
    for band in BANDS:
        edges = [[end * (1 - band) for end in ends], [end * (1 + band) for end in ends]]
        axes.fill_between(ends, *edges, color=style.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.plot(ends, ends, color=style.FAINT, linewidth=0.7, zorder=1)
    _scatter(axes, dots, looks, lambda dot, value: value)


def _ratios(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], ends: tuple[float, float]) -> None:
    reach = max(1.5, *(max(1 + dot.error, 1 / (1 + dot.error)) for dot in dots))
    reach = min(reach * 1.08, FARTHEST)
    axes.set_yscale("log")
    axes.set_ylim(1 / reach, reach)
    near = (0.67, 0.8, 0.9, 1, 1.1, 1.2, 1.5) if reach < 2.2 else (0.8, 1, 1.2)
    ticks = [tick for tick in (0.25, 0.5, *near, 2, 4) if 1 / reach <= tick <= reach]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_minor_locator(LogLocator(subs=()))
    for band in BANDS:
        axes.axhspan(1 - band, 1 + band, color=style.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.axhline(1, color=style.FAINT, linewidth=0.7, zorder=1)
    _scatter(axes, dots, looks, lambda dot, value: min(max(value / dot.measured, 1 / reach), reach))


def _scatter(axes: Any, dots: Sequence[Dot], looks: dict[str, dict[str, Any]], place: Any) -> None:
    for name, look in looks.items():
        own = [dot for dot in dots if dot.source == name]
        x = [dot.measured for dot in own]
        lows, highs = [place(dot, dot.low) for dot in own], [place(dot, dot.high) for dot in own]
        axes.vlines(x, lows, highs, color=style.lighter(look["color"], 0.72), linewidth=0.5, zorder=2)
        y = [place(dot, dot.predicted) for dot in own]
        axes.scatter(x, y, s=11, linewidths=0.3, edgecolors="white", clip_on=False, zorder=3, **look)


def _plain(axis: Any, ends: tuple[float, float]) -> None:
    """Ticks at 1, 2 and 5 of every decade, as numbers; more where there is less than one decade."""
    subs = (1.0, 2.0, 5.0) if ends[1] / ends[0] > 12 else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(LogLocator(subs=()))
    axis.set_minor_formatter(NullFormatter())


def _key(sheet: Sheet, dots: Sequence[Dot], looks: dict[str, dict[str, Any]]) -> None:
    """The sources beside the axes: mark, name, runs, median error and bias."""
    columns = [style.PAGE - EDGE - right for right in (0.94, 0.47, 0.0)]
    y = TOP + 0.12
    for x, head in zip(columns, ("runs", "median", "bias"), strict=True):
        sheet.text(x, y, head, ha="right", color=style.FAINT, fontsize=style.SMALL)
    sheet.text(KEY + 0.14, y, "source", color=style.FAINT, fontsize=style.SMALL)
    marks = sheet.axes(KEY, y, 0.1, LINE * 1.15 * (len(looks) + 1))
    marks.set_axis_off()
    marks.set_xlim(0, 1)
    marks.set_ylim(len(looks) + 1, 0)
    for i, (name, look) in enumerate(looks.items(), 1):
        errors = [dot.error for dot in dots if dot.source == name]
        at = y + LINE * 1.15 * i
        marks.scatter([0.5], [i - 0.25], s=13, linewidths=0, clip_on=False, **look)
        room = columns[0] - KEY - 0.14 - width_of("0000")
        sheet.text(KEY + 0.14, at, fitting(name, room), fontsize=style.SMALL)
        cells = f"{len(errors):,}", f"{median(map(abs, errors)):.1%}", f"{median(errors):+.1%}"
        for x, cell in zip(columns, cells, strict=True):
            sheet.text(x, at, cell, ha="right", fontsize=style.SMALL)
