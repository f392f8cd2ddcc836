"""Measurement files against their forecasts: a point for every row, times and memory in panels apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, Sheet, make_heading
from meshcast.experiments.views import palette
from meshcast.hardware.units import GIB
from meshcast.validation.measurements.row_errors import QUANTITIES, error_statistics

LOOKS: dict[str, dict[str, Any]] = {
    "catalog": {"color": palette.ORANGE, "marker": "o"},
    "calibration": {"color": palette.BLUE, "marker": "D"},
}
"""Colours and markers of forecasts by their coefficients: those of the catalog, or of a calibration."""

HIGH, LEFT = 2.5, 0.5
"""Height of a panel, and width of its labels [in]."""
KEY = 0.34
"""Height of the legend of a panel [in]."""


def forecasts(rows: Sequence[Mapping[str, Any]], files: Sequence[Any] = ()) -> Figure:
    """Draws for every quantity a panel of forecast over measured against measured."""
    measured = {q: [r for r in rows if r["quantity"] == q and r["measured"]] for q in QUANTITIES}
    shown = {quantity: group for quantity, group in measured.items() if group}
    line = (
        "Across: measured, up: forecast over measured; on the line at 1 they agree. The bands are 10 and 20% of the "
        "measured value, the whiskers 90% intervals of the forecast (memory has none)."
    )
    title = f"{sum(map(len, shown.values())):,} measurements and their forecasts"
    heading = make_heading(title, *describe_times(files), line)
    columns = 1 if style.is_narrow() else max(1, len(shown))
    lines = -(-max(1, len(shown)) // columns)
    high = min(HIGH, (style.layout_height() - heading.bottom) / lines - KEY - 0.5)
    block = KEY + high + 0.5
    sheet = Sheet(heading.bottom + block * lines)
    sheet.head(heading)
    wide = (sheet.width - EDGE) / columns
    for at, (quantity, group) in enumerate(shown.items()):
        row, column = divmod(at, columns)
        top = heading.bottom + KEY + block * row
        axes = sheet.axes(wide * column + LEFT, top, wide - LEFT - 0.12, high)
        _panel(axes, group, quantity)
    return sheet.figure


def describe_times(files: Sequence[Any]) -> list[str]:
    """Says which forecasts were written before their measurement, and which behind it."""
    both = [(file["forecast_written"], file["measured"]) for file in files if file["measured"]]
    before = sum(written <= measured for written, measured in both)
    if not both:
        return []
    if before in (0, len(both)):
        return [f"The forecasts were written {'before' if before else 'after'} the measurements."]
    return [f"The forecasts of {before} of {len(both)} files were written before the measurements, the others after."]


def _panel(axes: Any, rows: Sequence[Mapping[str, Any]], quantity: str) -> None:
    measured, ratios = [], []
    for band in (0.1, 0.2):
        axes.axhspan(1 - band, 1 + band, color=palette.LINE, alpha=0.28, linewidth=0, zorder=0)
    axes.axhline(1, color=palette.INK, linewidth=0.7, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.spines["left"].set_visible(True)
    for by, look in LOOKS.items():
        group = [row for row in rows if row["error"].get(by) is not None]
        if not group:
            continue
        x = [row["measured"] for row in group]
        y = [row["error"][by] + 1 for row in group]
        measured += x
        ratios += y
        statistics = error_statistics(group, by)  # type: ignore[arg-type]
        label = f"{by}: median error {statistics['median']:.1%}, worst {statistics['worst']:.0%}"
        lows, highs = zip(*(_interval(row, by) for row in group), strict=True)
        if any(low < high for low, high in zip(lows, highs, strict=True)):
            axes.vlines(x, lows, highs, color=palette.lighten(look["color"], 0.4), linewidth=0.5, zorder=2)
        axes.scatter(x, y, s=9, alpha=0.8, linewidths=0, label=label, zorder=3, **look)
    most = max(1.3, 1.1 * max(max(ratios), 1 / min(ratios))) if ratios else 2.0
    axes.set_ylim(1 / most, most)
    marks = [mark for mark in (0.1, 0.2, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 2, 5, 10) if 1 / most <= mark <= most]
    axes.set_yticks(marks, [f"{mark:g}" for mark in marks])
    axes.yaxis.set_minor_locator(NullLocator())
    decades = _decades(measured, quantity)
    axes.set_xticks(*decades)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"measured {QUANTITIES[quantity]}", labelpad=2)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), frameon=False, borderaxespad=0.1, handletextpad=0.2,
        borderpad=0.1, handlelength=1.0,
    )  # fmt: skip


def _interval(row: Mapping[str, Any], by: str) -> tuple[float, float]:
    """Returns the 90 % interval of a forecast over the measured value."""
    low, high = row["interval_90"][by]
    return low / row["measured"], high / row["measured"]


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
