"""Plot of a benchmark table: how much slower than the certified optimum plans are, against CPU time of planners."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum
from meshcast.experiments.planning.benchmark.rows import BenchmarkRow
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, Sheet, make_heading, save, text_width
from meshcast.experiments.views import palette
from meshcast.simulator.report.formatting import format_seconds

LEFT, HEIGHT = 0.62, 3.8
"""Left end and largest height of the axes [in]."""

LINEAR = 10.0
"""Regret up to which the axis is linear; above it is logarithmic [%]."""

TICKS = (-10, 0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
ROW, GAP = 0.115, 0.07
"""Height of a label, and its distance from its point [in]."""


class PlacedBox(NamedTuple):
    """A rectangle of a plot [in]: left and right end, lower and upper end."""

    left: float
    right: float
    low: float
    high: float

    def overlaps(self, other: PlacedBox) -> bool:
        """Returns whether the two have a part in common."""
        return self.left < other.right and other.left < self.right and self.low < other.high and other.low < self.high


def draw(
    problem: JobProblem,
    rows: Sequence[BenchmarkRow],
    optimum: CertifiedOptimum,
    path: str | Path,
    width: style.Width = "page",
) -> None:
    """Draws the plot to a .png, .svg or .pdf file. Raises OSError if it cannot be written."""
    save(lambda: regret_and_time(problem, rows, optimum), path, width)


def regret_and_time(problem: JobProblem, rows: Sequence[BenchmarkRow], optimum: CertifiedOptimum) -> Figure:
    shown = [(row.name, max(row.cpu_s, 1e-2), 100 * row.regret) for row in rows if row.regret is not None]
    title = f"Planners of {problem.job.model.name}: regret and time of the search"
    heading = make_heading(title, *_describe(problem, rows, optimum))
    top = heading.bottom + 0.1
    high, side = min(HEIGHT, style.layout_height() - top - 0.6), style.layout_width() - LEFT - EDGE
    sheet = Sheet(top + high + 0.5)
    sheet.head(heading)
    axes = sheet.axes(LEFT, top, side, high)
    axes.spines["left"].set_visible(True)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.axhline(0, color=palette.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.scatter([x for _, x, _ in shown], [y for _, _, y in shown], s=20, color=palette.PURPLE, zorder=3)
    star = max(optimum.cpu_s, 1e-2)
    axes.scatter(star, 0.0, s=60, marker="*", color=palette.INK, zorder=4)
    times, regrets = [star, *(x for _, x, _ in shown)], [0.0, *(y for _, _, y in shown)]
    axes.set_xlim(min(times) / 1.6, max(times) * 3.5)
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.8)
    axes.set_ylim(min(-1.5, 1.2 * min(regrets)), max(20.0, 1.4 * max(regrets)))
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    _write_labels(axes, [("search", star, 0.0), *shown], (side, high))
    axes.set_xlabel("CPU time of the planner [s]")
    axes.set_ylabel("slower than the certified optimum [%]")
    return sheet.figure


def _describe(problem: JobProblem, rows: Sequence[BenchmarkRow], optimum: CertifiedOptimum) -> list[list[str] | str]:
    """Returns the sentences below the title: the job, the optimum, and planners without a point."""
    kinds = [*problem.job.cluster.kinds.values()] or [problem.job.cluster]
    words = [
        f"{problem.gpus:,} x {' and '.join(dict.fromkeys(kind.gpu.name for kind in kinds))}",
        f"{problem.sequences:,} sequences a step",
        f"certified optimum {format_seconds(optimum.step_time)} (gap {optimum.gap:.2%}) of {optimum.plans:,} plans",
    ]
    lines: list[list[str] | str] = [words]
    too_large = [row.name for row in rows if row.report is not None and not row.fits]
    not_executable = [row.name for row in rows if row.not_executable]
    refused = [row.name for row in rows if row.refused is not None]
    for reason, names in (("too large", too_large), ("not executable", not_executable), ("refused", refused)):
        lines += [f"{reason}: {', '.join(names)}"] if names else []
    return lines


def _write_labels(axes: Any, points: Sequence[tuple[str, float, float]], size: tuple[float, float]) -> None:
    """Writes the name of each point beside it, or where there is room near it, with a line to it.

    size: width and height of the axes [in].
    """
    side, high = size
    places = []
    for _, x, y in points:
        across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        places.append((across * side, up * high))
    zero = axes.transAxes.inverted().transform(axes.transData.transform((1.0, 0.0)))[1] * high
    taken = [PlacedBox(0.0, side, zero - 0.01, zero + 0.01)]
    taken += [PlacedBox(x - 0.04, x + 0.04, y - 0.04, y + 0.04) for x, y in places]
    # From the right: there labels have room beside their points.
    for (name, *_), (x, y) in sorted(zip(points, places, strict=True), key=lambda labelled: labelled[1], reverse=True):
        width = text_width(name)
        box = next(
            (place for place in _boxes_near(x, y, width, size) if not any(place.overlaps(other) for other in taken)),
            PlacedBox(x + GAP, x + GAP + width, y - ROW / 2, y + ROW / 2),
        )
        taken.append(box)
        middle = (box.low + box.high) / 2
        if abs(middle - y) > ROW / 2:  # beside another point, a label may seem to be of that point
            end = box.left if box.left > x else box.right
            axes.plot(
                [x / side, end / side], [y / high, middle / high], transform=axes.transAxes,
                color=palette.FAINT, linewidth=0.5, zorder=2,
            )  # fmt: skip
        axes.text(
            box.left / side, middle / high, name, transform=axes.transAxes, fontsize=style.SMALL, va="center_baseline"
        )


def _boxes_near(x: float, y: float, width: float, size: tuple[float, float]) -> Iterator[PlacedBox]:
    """Yields places for a label of a point inside the axes, the nearest first."""
    shifts = sorted(product(range(-14, 15), (1, -1)), key=lambda shift: (abs(shift[0]), -shift[1], -shift[0]))
    for row, side in shifts:
        middle = y + row * ROW
        left = x + GAP + 0.02 * abs(row) if side > 0 else x - GAP - 0.02 * abs(row) - width
        if left >= 0 and left + width <= size[0] and ROW / 2 <= middle <= size[1]:
            yield PlacedBox(left, left + width, middle - ROW / 2, middle + ROW / 2)
