"""Plot of a league table: how much slower than the certified optimum a plan is, against the CPU time of its planner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from experiments.planning.league.optimum import CertifiedOptimum
from experiments.planning.league.rows import LeagueRow
from experiments.planning.pricing.job import JobProblem
from experiments.plots import style
from experiments.plots.sheet import LINE, Sheet, save, wrap_words
from simulator.report.words import format_seconds

LEFT, SIDE, HEIGHT = 0.62, 6.2, 3.2
"""Left end, width and height of the axes [in]."""


def draw(problem: JobProblem, rows: Sequence[LeagueRow], optimum: CertifiedOptimum, path: str | Path) -> None:
    """Draws the plot to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: regret_and_time(problem, rows, optimum), path)


def regret_and_time(problem: JobProblem, rows: Sequence[LeagueRow], optimum: CertifiedOptimum) -> Figure:
    """The plot."""
    shown = [(row, row.regret) for row in rows if row.regret is not None]
    too_large = [row.name for row in rows if row.report is not None and not row.fits]
    refused = [row.name for row in rows if row.refused is not None]
    words = [
        f"{problem.gpus:,} x {problem.job.cluster.gpu.name}, {problem.sequences:,} sequences a step",
        f"certified optimum {format_seconds(optimum.step_time)} (gap {optimum.gap:.2%}) of {optimum.plans:,} plans",
    ]
    lines = wrap_words(words)
    for reason, names in (("too large", too_large), ("refused", refused)):
        lines += wrap_words([f"{reason}: {', '.join(names)}"]) if names else []
    top = 0.52 + LINE * len(lines)
    sheet = Sheet(top + HEIGHT + 0.6)
    sheet.head(f"Planners of {problem.job.model.name}: regret and time of the search", lines)
    axes = sheet.axes(LEFT, top, SIDE, HEIGHT)
    axes.spines["left"].set_visible(True)
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.axhline(0, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.scatter(
        [max(row.cpu_s, 1e-2) for row, _ in shown], [100 * value for _, value in shown], s=20, color=style.PURPLE
    )
    axes.scatter(max(optimum.cpu_s, 1e-2), 0.0, s=60, marker="*", color=style.INK, zorder=4)
    axes.margins(x=0.16, y=0.12)
    labels = [("search", max(optimum.cpu_s, 1e-2), 0.0)]
    labels += [(row.name, max(row.cpu_s, 1e-2), 100 * value) for row, value in shown]
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)
    height = (high - low) * 0.045
    taken: list[float] = []
    for name, x, y in sorted(labels, key=lambda one: one[2]):
        # Equal plans of several planners have labels one above the other.
        at = max([y, *(one + height for one in taken if one + height > y)], default=y)
        taken.append(at)
        offset = 7, (at - y) / (high - low) * HEIGHT * 72
        axes.annotate(
            name,
            (x, y),
            offset,
            textcoords="offset points",
            fontsize=style.SMALL,
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    axes.set_xlabel("CPU time of the planner [s]")
    axes.set_ylabel("slower than the certified optimum [%]")
    return sheet.figure
