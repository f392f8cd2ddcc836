"""Measured kernels and collectives against their forecasts.

``draw_errors``: median and 90th percentile of the error of every operation on every GPU, beside its goal.
``draw_ratios``: forecast over measured of every row against how long it took, one panel an operation and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from experiments.plots import style
from experiments.plots.sheet import EDGE, Sheet, save
from validation.tables.held import Held
from validation.tables.summary import Goals, cells, figures, grouped

HUES = (style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.GREY)
ROW = 0.165
"""Height of a line of the table of errors [in]."""
LEFT, WIDE = 3.0, 3.55
"""Where the axes of errors begin, and how wide they are [in]."""
FARTHEST = 3.0
"""Ratios beyond are drawn at the edge."""


def draw_errors(held: Sequence[Held], goals: Goals, path: str | Path) -> None:
    """Draws the errors into a .png or .svg. Raises OSError where it cannot be written."""
    save(lambda: errors(held, goals), path)


def draw_ratios(held: Sequence[Held], goals: Goals, path: str | Path) -> None:
    """Draws every row into a .png or .svg. Raises OSError where it cannot be written."""
    save(lambda: ratios(held), path)


def errors(held: Sequence[Held], goals: Goals) -> Figure:
    """A line for each cell: a dot at the median, a bar to the 90th percentile, and the goals of both as ticks."""
    rows = cells(held, goals)
    sheet = Sheet(1.1 + ROW * len(rows))
    told = figures(held)
    head = (
        f"{told['rows']:,} rows, median error {told['median']:.1%}, {told['inside_90']:.0%} inside their 90% intervals"
    )
    sheet.head(
        "Forecasts against measured tables", [head, "Dot: median, end of the bar: 90th percentile; ticks: goals."]
    )
    axes = sheet.axes(LEFT, 0.62, WIDE, ROW * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 0.5)
    axes.set_yticks([])
    axes.set_xticks([0, 0.1, 0.2, 0.3, 0.4, 0.5], ["0", "10", "20", "30", "40", "50 %"])
    axes.grid(axis="x", color=style.LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    hues: dict[str, str] = {}
    for at, row in enumerate(rows):
        hue = hues.setdefault(row["operation"], HUES[len(hues) % len(HUES)])
        axes.plot([row["median"], min(row["p90"], 0.5)], [at, at], color=style.lighter(hue, 0.5), linewidth=2.2)
        axes.scatter([min(row["median"], 0.5)], [at], s=12, color=hue, zorder=3, linewidths=0)
        for goal in row["goal"] or ():
            axes.plot([goal, goal], [at - 0.42, at + 0.42], color=style.INK, linewidth=0.7, zorder=4)
        y = 0.62 + ROW * (at + 0.68)
        words = row["gpu"], row["operation"], row["kind"], row["class"]
        for x, word in zip((EDGE, 0.85, 1.5, 2.25), words, strict=True):
            sheet.text(x, y, word, fontsize=style.SMALL - 1)
        tail = f"{row['rows']:,}"
        sheet.text(style.PAGE - EDGE, y, tail, fontsize=style.SMALL - 1, ha="right", color=style.FAINT)
    return sheet.figure


def ratios(held: Sequence[Held]) -> Figure:
    """Operations down, GPUs across."""
    operations = sorted({one.sample.operation for one in held})
    gpus = sorted({one.sample.gpu for one in held})
    wide = (style.PAGE - 0.75 - EDGE) / len(gpus)
    sheet = Sheet(0.75 + 1.5 * len(operations))
    count = sum(len(one.sample.index) for one in held)
    line = "Across: measured time, down: forecast over measured; the bands are 10 and 20% of the measured value."
    sheet.head(f"{count:,} measured rows, forecast over measured", [line])
    for down, operation in enumerate(operations):
        for across, gpu in enumerate(gpus):
            axes = sheet.axes(0.75 + wide * across, 0.72 + 1.5 * down, wide - 0.08, 1.15)
            own = [one for one in held if (one.sample.operation, one.sample.gpu) == (operation, gpu)]
            _panel(axes, own, not across)
            axes.set_title(gpu if own else "", fontsize=style.SMALL, pad=2)
        sheet.text(EDGE, 0.72 + 1.5 * down - 0.06, operation, fontweight="bold")
    return sheet.figure


def _panel(axes: Any, held: Sequence[Held], first: bool) -> None:
    if not held:
        axes.set_axis_off()
        return
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1 / FARTHEST, FARTHEST)
    axes.set_yticks([0.5, 0.8, 1, 1.25, 2], ["0.5", "0.8", "1", "1.25", "2"] if first else [""] * 5)
    axes.yaxis.set_minor_locator(LogLocator(subs=()))
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_minor_locator(LogLocator(subs=()))
    axes.xaxis.set_major_formatter(FuncFormatter(_time))
    for band in (0.1, 0.2):
        axes.axhspan(1 - band, 1 + band, color=style.LINE, alpha=0.28, linewidth=0, zorder=0)
    for i, own in enumerate(grouped(held, "kind").values()):
        seconds = np.concatenate([one.sample.seconds for one in own])
        ratio = np.concatenate([one.priced.seconds / one.sample.seconds for one in own])
        look = {"s": 1.2, "linewidths": 0, "alpha": 0.35, "color": HUES[i % len(HUES)], "rasterized": True}
        axes.scatter(seconds * 1e6, np.clip(ratio, 1 / FARTHEST, FARTHEST), **look)


def _time(micro: float, _: int) -> str:
    return f"{micro:g} us" if micro < 1000 else f"{micro / 1000:g} ms" if micro < 1e6 else f"{micro / 1e6:g} s"
