"""Forecasts of kernels and collectives against measured tables.

``errors``: median and 90th percentile of the error of every operation on every GPU, beside its goal.
``ratios``: forecast over measured of every row against how long it took, a panel for each operation and GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, LINE, Sheet, make_heading, text_width
from meshcast.experiments.views import palette
from meshcast.validation.calibration.tables.rows import SampleComparison
from meshcast.validation.calibration.tables.summary import SCORED, Goals, cells, figures, group

HUES = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.VIOLET, palette.AMBER, palette.GREY)
ROW = 0.165
"""Height of a line of the plot of errors [in]."""
COUNT = 0.98
"""Room right of the axes for errors beyond their end and the number of rows [in]."""
END = 0.5
"""Largest error on the axis; a bar to a larger error ends in an arrow with its value."""
PANEL, HIGH = 1.45, 1.55
"""Least width of a panel of ratios, and height of a line of them [in]."""
FARTHEST = 3.0
"""Largest ratio on the axis; larger ones are triangles at its end."""


def errors(held: Sequence[SampleComparison], goals: Goals) -> Figure:
    """Draws a line for each cell: a dot at the median, a bar to the 90th percentile, and the goals of both as ticks.

    Of an operation that has goals, the cells that have any; of others those of all rows.
    """
    every = cells(held, goals)
    aimed = {(row["gpu"], row["operation"], row["kind"]) for row in every if row["goal"]}
    rows = [
        r for r in every if r["goal"] or ((r["gpu"], r["operation"], r["kind"]) not in aimed and r["class"] == "all")
    ]
    large = [row for row in rows if row["rows"] >= SCORED]
    rows = large or rows  # small tables have small cells only
    statistics = figures(held)
    head = f"{statistics['rows']:,} rows, median error {statistics['median']:.1%}"
    head += f", {statistics['inside_90']:.0%} in their 90% intervals"
    key = "Dot: median, end of the bar: 90th percentile; ticks: goals of both. Right: number of rows."
    key += f" Cells of at least {SCORED} rows." if large else ""
    key += f" Arrow: the error at its right lies beyond {END:.0%}." if any(row["p90"] > END for row in rows) else ""
    heading = make_heading("Forecasts against measured tables", head, key)
    top = heading.bottom + 0.04
    # In a column the name of a cell stands above its bar, else left of it.
    narrow = style.is_narrow()
    row_height = ROW + LINE if narrow else ROW
    columns = [max(text_width(str(row[name])) for row in rows) + 0.14 for name in ("operation", "kind", "class")]
    gpus = max((text_width(str(row["gpu"]), style.SMALL, True) for row in rows), default=0.0) + 0.14
    left = EDGE if narrow else EDGE + gpus + sum(columns)
    sheet = Sheet(top + row_height * len(rows) + 0.34)
    sheet.head(heading)
    axes = sheet.axes(left, top, sheet.width - left - COUNT, row_height * len(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, END)
    axes.set_yticks([])
    ticks = np.arange(0, END + 0.01, 0.1)
    axes.set_xticks(ticks, [f"{tick:.0%}" for tick in ticks])
    axes.grid(axis="x", color=palette.LINE, linewidth=0.4)
    axes.set_axisbelow(True)
    hues: dict[str, str] = {}
    gpu = ""
    for at, row in enumerate(rows):
        y = top + row_height * at + (LINE if narrow else 0.0) + ROW * 0.68
        hue = hues.setdefault(row["operation"], HUES[len(hues) % len(HUES)])
        _draw_error(axes, sheet, at + (0.5 - ROW / 2 / row_height if narrow else 0.0), y, row, hue, row_height)
        if row["gpu"] != gpu:
            sheet.patch(EDGE, top + row_height * at, sheet.width - 2 * EDGE, 0, edgecolor=palette.LINE, linewidth=0.4)
        words = [row["operation"], row["kind"], row["class"]]
        if narrow:
            cell = ", ".join([row["gpu"], *words])
            sheet.text(EDGE, y - LINE, cell, fontsize=style.SMALL, fontweight="bold" if row["gpu"] != gpu else "normal")
        else:
            if row["gpu"] != gpu:
                sheet.text(EDGE, y, row["gpu"], fontsize=style.SMALL, fontweight="bold")
            for i, word in enumerate(words):
                sheet.text(EDGE + gpus + sum(columns[:i]), y, word, fontsize=style.SMALL)
        gpu = row["gpu"]
        sheet.text(sheet.right, y, f"{row['rows']:,}", fontsize=style.SMALL, ha="right", color=palette.FAINT)
    return sheet.figure


def _draw_error(axes: Any, sheet: Sheet, at: float, y: float, row: Any, hue: str, height: float) -> None:
    """Draws median, 90th percentile and goals of a cell.

    at: its place on the axis.
    y: baseline of its text [in].
    """
    half = 0.42 * ROW / height
    axes.plot([min(row["median"], END), min(row["p90"], END)], [at, at], color=palette.lighten(hue, 0.3), linewidth=2.2)
    if row["median"] <= END:
        axes.scatter([row["median"]], [at], s=12, color=hue, zorder=3, linewidths=0)
    if row["p90"] > END:
        axes.scatter([END], [at], s=22, marker=">", color=hue, zorder=5, linewidths=0, clip_on=False)
        words = f"{row['p90']:.0%}" if row["median"] <= END else f"{row['median']:.0%}-{row['p90']:.0%}"
        sheet.text(sheet.width - COUNT + 0.08, y, words, fontsize=style.SMALL)
    for goal in row["goal"] or ():
        axes.plot([goal, goal], [at - half, at + half], color=palette.INK, linewidth=0.8, zorder=4)


def ratios(held: Sequence[SampleComparison]) -> Figure:
    """Draws a panel for every operation and GPU with at least `SCORED` rows."""
    panels = group(held, "operation", "gpu")
    panels = {name: rows for name, rows in panels.items() if sum(len(table.sample.index) for table in rows) >= SCORED}
    across = max(1, int(style.layout_width() / PANEL))
    lines = -(-len(panels) // across)
    count = sum(len(table.sample.index) for table in held)
    line = (
        "Across: measured time, up: forecast over measured. The bands are 10 and 20% of the measured value; rows "
        f"beyond a ratio of {FARTHEST:g} are triangles at the edge. Colours: kinds of an operation."
    )
    heading = make_heading(f"{count:,} measured rows, forecast over measured", line)
    top = heading.bottom
    sheet = Sheet(top + HIGH * lines)
    sheet.head(heading)
    wide = (sheet.width - 0.4 - EDGE) / across
    for at, ((operation, gpu), tables) in enumerate(panels.items()):
        down, column = divmod(at, across)
        axes = sheet.axes(0.4 + wide * column, top + 0.06 + HIGH * down, wide - 0.14, HIGH - 0.45)
        _panel(axes, tables, not column)
        sheet.text(0.4 + wide * column, top + HIGH * down, f"{operation}, {gpu}", fontsize=style.SMALL)
    return sheet.figure


def _panel(axes: Any, held: Sequence[SampleComparison], first: bool) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1 / FARTHEST, FARTHEST)
    marks = (0.5, 0.8, 1, 1.25, 2)
    axes.set_yticks(marks, [f"{mark:g}" if first else "" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.axhline(1, color=palette.INK, linewidth=0.6, zorder=1)
    for band in (0.1, 0.2):
        axes.axhspan(1 - band, 1 + band, color=palette.LINE, alpha=0.28, linewidth=0, zorder=0)
    times = []
    for i, tables in enumerate(group(held, "kind").values()):
        times.append(np.concatenate([table.sample.seconds for table in tables]) * 1e6)
        ratio = np.concatenate([table.priced.seconds / table.sample.seconds for table in tables])
        look = {"linewidths": 0, "color": HUES[i % len(HUES)], "rasterized": True}
        near = np.abs(np.log(ratio)) <= np.log(FARTHEST)
        axes.scatter(times[-1][near], ratio[near], s=2.5, alpha=0.6, **look)
        for beyond, edge, marker in ((ratio > FARTHEST, FARTHEST, "^"), (ratio < 1 / FARTHEST, 1 / FARTHEST, "v")):
            here = times[-1][beyond]
            axes.scatter(here, np.full(len(here), edge), s=12, marker=marker, clip_on=False, zorder=4, **look)
    low, high = (f(np.log10(np.concatenate(times))) for f in (np.min, np.max))
    decades = np.arange(np.ceil(low), np.floor(high) + 1)
    decades = decades[:: max(1, -(-len(decades) // 3))]
    axes.set_xticks(10.0**decades, [_time(float(micro)) for micro in 10.0**decades])
    axes.xaxis.set_minor_locator(NullLocator())


def _time(micro: float) -> str:
    return f"{micro:g} us" if micro < 1e3 else f"{micro / 1e3:g} ms" if micro < 1e6 else f"{micro / 1e6:g} s"
