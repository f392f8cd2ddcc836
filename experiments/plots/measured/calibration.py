"""Forecasts of kernels and collectives against measured tables.

``draw_errors``: median and 90th percentile of the error of every operation on every GPU, beside its goal.
``draw_ratios``: forecast over measured of every row against how long it took, one panel an operation and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.plots import style
from experiments.plots.sheet import EDGE, Sheet, save
from validation.calibration.tables.rows import SampleComparison
from validation.calibration.tables.summary import SCORED, Goals, cells, figures, group

HUES = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.GREY)
ROW = 0.165
"""Height of a line of the plot of errors [in]."""
LEFT, WIDE = 3.2, 3.35
"""Left end and width of the axes of errors [in]."""
END = 0.5
"""Largest error on the axis; larger ones are drawn at its end."""
ACROSS, HIGH = 4, 1.5
"""Panels of ratios in a line, and height of a line [in]."""
FARTHEST = 3.0
"""Largest ratio on the axis; larger ones are drawn at its end."""


def draw_errors(held: Sequence[SampleComparison], goals: Goals, path: str | Path) -> None:
    """Draws the errors to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: errors(held, goals), path)


def draw_ratios(held: Sequence[SampleComparison], goals: Goals, path: str | Path) -> None:
    """Draws the ratios of all rows to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: ratios(held), path)


def errors(held: Sequence[SampleComparison], goals: Goals) -> Figure:
    """A line for each cell: a dot at the median, a bar to the 90th percentile, and the goals of both as ticks.

    Of an operation that has goals, the cells that have one; of others those of all rows.
    """
    every = cells(held, goals)
    aimed = {(row["gpu"], row["operation"], row["kind"]) for row in every if row["goal"]}
    rows = [
        r for r in every if r["goal"] or ((r["gpu"], r["operation"], r["kind"]) not in aimed and r["class"] == "all")
    ]
    large = [row for row in rows if row["rows"] >= SCORED]
    rows = large or rows  # small tables have small cells only
    sheet = Sheet(1.1 + ROW * len(rows))
    given = figures(held)
    head = (
        f"{given['rows']:,} rows, median error {given['median']:.1%}, {given['inside_90']:.0%} in their 90% intervals"
    )
    key = "Dot: median, end of the bar: 90th percentile; ticks: goals of both."
    key += f" Cells of at least {SCORED} rows." if large else ""
    sheet.head("Forecasts against measured tables", [head, key])
    axes = sheet.axes(LEFT, 0.62, WIDE, ROW * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, END)
    axes.set_yticks([])
    ticks = np.arange(0, END + 0.01, 0.1)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.grid(axis="x", color=style.LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    hues: dict[str, str] = {}
    gpu = ""
    for at, row in enumerate(rows):
        hue = hues.setdefault(row["operation"], HUES[len(hues) % len(HUES)])
        axes.plot(
            [min(row["median"], END), min(row["p90"], END)], [at, at], color=style.lighten(hue, 0.5), linewidth=2.2
        )
        axes.scatter([min(row["median"], END)], [at], s=12, color=hue, zorder=3, linewidths=0)
        for goal in row["goal"] or ():
            axes.plot([goal, goal], [at - 0.42, at + 0.42], color=style.INK, linewidth=0.7, zorder=4)
        y = 0.62 + ROW * (at + 0.68)
        if row["gpu"] != gpu:
            gpu = row["gpu"]
            sheet.text(EDGE, y, gpu, fontsize=style.SMALL - 1, fontweight="bold")
            sheet.patch(EDGE, 0.62 + ROW * at, style.PAGE - 2 * EDGE, 0, edgecolor=style.LINE, linewidth=0.4)
        for x, word in zip((0.85, 1.47, 2.47), (row["operation"], row["kind"], row["class"]), strict=True):
            sheet.text(x, y, word, fontsize=style.SMALL - 1)
        sheet.text(style.PAGE - EDGE, y, f"{row['rows']:,}", fontsize=style.SMALL - 1, ha="right", color=style.FAINT)
    return sheet.figure


def ratios(held: Sequence[SampleComparison]) -> Figure:
    """A panel for every operation and GPU with at least `SCORED` rows."""
    panels = group(held, "operation", "gpu")
    panels = {name: own for name, own in panels.items() if sum(len(one.sample.index) for one in own) >= SCORED}
    lines = -(-len(panels) // ACROSS)
    sheet = Sheet(0.75 + HIGH * lines)
    count = sum(len(one.sample.index) for one in held)
    line = "Across: measured time, down: forecast over measured; the bands are 10 and 20% of the measured value."
    sheet.head(f"{count:,} measured rows, forecast over measured", [line])
    wide = (style.PAGE - 0.4 - EDGE) / ACROSS
    for at, ((operation, gpu), own) in enumerate(panels.items()):
        down, across = divmod(at, ACROSS)
        axes = sheet.axes(0.4 + wide * across, 0.78 + HIGH * down, wide - 0.14, HIGH - 0.52)
        _panel(axes, own, not across)
        sheet.text(0.4 + wide * across, 0.72 + HIGH * down, f"{operation}, {gpu}", fontsize=style.SMALL)
    return sheet.figure


def _panel(axes: Any, held: Sequence[SampleComparison], first: bool) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1 / FARTHEST, FARTHEST)
    marks = (0.5, 0.8, 1, 1.25, 2)
    axes.set_yticks(marks, [f"{mark:g}" if first else "" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
    for band in (0.1, 0.2):
        axes.axhspan(1 - band, 1 + band, color=style.LINE, alpha=0.28, linewidth=0, zorder=0)
    times = []
    for i, own in enumerate(group(held, "kind").values()):
        times.append(np.concatenate([one.sample.seconds for one in own]) * 1e6)
        ratio = np.concatenate([one.priced.seconds / one.sample.seconds for one in own])
        look = {"s": 1.2, "linewidths": 0, "alpha": 0.35, "color": HUES[i % len(HUES)], "rasterized": True}
        axes.scatter(times[-1], np.clip(ratio, 1 / FARTHEST, FARTHEST), **look)
    low, high = (f(np.log10(np.concatenate(times))) for f in (np.min, np.max))
    decades = np.arange(np.ceil(low), np.floor(high) + 1)
    decades = decades[:: max(1, -(-len(decades) // 3))]
    axes.set_xticks(10.0**decades, [_time(float(micro)) for micro in 10.0**decades])
    axes.xaxis.set_minor_locator(NullLocator())


def _time(micro: float) -> str:
    return f"{micro:g} us" if micro < 1e3 else f"{micro / 1e3:g} ms" if micro < 1e6 else f"{micro / 1e6:g} s"
