"""Measurement files against their forecasts: a point for every row, times and memory in panels of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from experiments.plots import style
from experiments.plots.sheet import EDGE, Sheet, save
from hardware.units import GIB
from validation.measurements.row_errors import QUANTITIES, error_statistics

HUES = {"catalog": style.ORANGE, "calibration": style.BLUE}
"""Colours of forecasts by their coefficients: those of the catalog, or of a calibration."""

HIGH, TOP, LEFT = 2.75, 0.75, 0.55
"""Height and upper end of a panel, and width of its labels [in]."""


def draw(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Draws rows with measurement and forecast to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: forecasts(rows), path)


def forecasts(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """The plot: for every quantity a panel of forecast over measured against measured."""
    given = {q: [r for r in rows if r["quantity"] == q and r["measured"]] for q in QUANTITIES}
    shown = {quantity: own for quantity, own in given.items() if own}
    sheet = Sheet(TOP + HIGH + 0.5)
    line = "Across: measured, down: forecast over measured; the bands are 10 and 20% of the measured value."
    sheet.head(f"{sum(map(len, shown.values())):,} measurements and what was forecast before", [line])
    wide = (style.PAGE - EDGE) / max(1, len(shown))
    for at, (quantity, own) in enumerate(shown.items()):
        axes = sheet.axes(wide * at + LEFT, TOP, wide - LEFT - 0.12, HIGH)
        _panel(axes, own, quantity)
    return sheet.figure


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], quantity: str) -> None:
    measured, ratios = [], []
    for band in (0.1, 0.2):
        axes.axhspan(1 - band, 1 + band, color=style.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    for by, hue in HUES.items():
        own = [row for row in rows if row["error"].get(by) is not None]
        if not own:
            continue
        x = [row["measured"] for row in own]
        y = [row["error"][by] + 1 for row in own]
        measured += x
        ratios += y
        given = error_statistics(own, by)  # type: ignore[arg-type]
        label = f"{by}: median error {given['median']:.1%}, worst {given['worst']:.0%}"
        axes.scatter(x, y, s=9, color=hue, alpha=0.75, linewidths=0, label=label)
    most = max(1.3, 1.1 * max(max(ratios), 1 / min(ratios))) if ratios else 2.0
    axes.set_ylim(1 / most, most)
    marks = [mark for mark in (0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 2, 5, 10) if 1 / most <= mark <= most]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
    decades = _decades(measured, quantity)
    axes.set_xticks(*decades)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"measured {QUANTITIES[quantity]}")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, borderaxespad=0.1, handletextpad=0.2)


def _decades(values: Sequence[float], quantity: str) -> tuple[list[float], list[str]]:
    """Positions and labels of at most five ticks over `values`."""
    if not values:
        return [], []
    base = 10.0 if quantity == "seconds" else 4.0
    low, high = (np.log(edge) / np.log(base) for edge in (min(values), max(values)))
    powers = np.arange(np.floor(low), np.ceil(high) + 1)
    powers = powers[:: max(1, -(-len(powers) // 5))]
    marks = [float(base**power) for power in powers]
    return marks, [_word(mark, quantity) for mark in marks]


def _word(value: float, quantity: str) -> str:
    if quantity == "bytes":
        return f"{value / GIB:g} GiB" if value >= GIB else f"{value / 2**20:.3g} MiB"
    return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
