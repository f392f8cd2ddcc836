"""Plot of a question of size: money against days of the clusters that were looked at, a line for each kind of node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, LINE, Sheet, make_heading, text_width
from meshcast.experiments.sizing.answer import KindAnswer, SizeAnswer
from meshcast.experiments.sizing.sized_cluster import CHANCE, SizedCluster
from meshcast.experiments.sizing.tables import format_money, make_title
from meshcast.experiments.views import palette

LEFT, RIGHT, HEIGHT = 0.72, 0.2, 3.0
"""Room left and right of the axes, and their height [in]."""

HUES = (palette.BLUE, palette.ORANGE, palette.GREEN, palette.VIOLET, palette.AMBER, palette.PINK, palette.GREY)
MARKERS = "osD^vP*X"


def cost_against_days(answer: SizeAnswer) -> Figure:
    """Returns the plot: money, or GPU days where a price is unknown, that nine of ten runs do not exceed."""
    priced = all(kind.kind.price is not None for kind in answer.kinds)
    phrases = [f"{CHANCE:.0%} of simulated runs need no more", "numbers are GPUs", "ringed: the answer"]
    heading = make_heading(f"{make_title(answer)}: {'cost' if priced else 'GPU days'} against days", phrases)
    drawn = [kind for kind in answer.kinds if kind.clusters]
    top = heading.bottom + (LINE * 1.5 if drawn else 0.1)
    sheet = Sheet(top + HEIGHT + 0.5 if drawn else top + 0.3)
    sheet.head(heading)
    if not drawn:
        sheet.text(EDGE, top, "No cluster that was looked at has a plan that fits.")
        return sheet.figure
    axes = sheet.axes(LEFT, top, sheet.width - LEFT - RIGHT, HEIGHT)
    axes.spines["left"].set_visible(True)
    axes.set_xscale("log")
    x = EDGE
    for i, kind in enumerate(drawn):
        hue, marker = HUES[i % len(HUES)], MARKERS[i % len(MARKERS)]
        _draw_kind(axes, kind, (lambda cluster: cluster.sure_cost or 0.0) if priced else _count_gpu_days, hue, marker)
        sheet.text(x, heading.bottom, f"{kind.kind.name}", fontsize=style.SMALL, color=hue, fontweight="bold")
        x += text_width(kind.kind.name, bold=True) + 0.2
    _draw_limits(axes, answer, priced)
    axes.margins(x=0.08, y=0.15)
    low, high = axes.get_ylim()
    axes.set_ylim(max(0.0, min(low, 0.8 * high)), high)  # a slope of a percent is to look like one
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_money(value) if value else "0"))
    axes.xaxis.set_major_locator(MaxNLocator(5 if style.is_narrow() else 7, steps=[1, 2, 5, 10]))
    axes.xaxis.set_minor_locator(MaxNLocator(1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}" if value > 0 else ""))
    axes.tick_params(axis="x", which="minor", length=0, labelbottom=False)
    axes.set_xlabel("days")
    currency = next((kind.kind.price.currency for kind in drawn if kind.kind.price is not None), "")
    axes.set_ylabel((f"cost [{currency}]" if currency else "cost") if priced else "GPU days")
    return sheet.figure


def _count_gpu_days(cluster: SizedCluster) -> float:
    return cluster.sure_days * cluster.gpus


def _draw_kind(
    axes: Any, kind: KindAnswer, measure: Callable[[SizedCluster], float], hue: palette.RGB | str, marker: str
) -> None:
    """Draws the clusters of a kind of node, with their GPUs where these do not cover each other."""
    points = [(cluster.sure_days, measure(cluster), cluster) for cluster in kind.clusters]
    axes.plot([x for x, _, _ in points], [y for _, y, _ in points], color=hue, linewidth=1.0, zorder=2)
    axes.scatter([x for x, _, _ in points], [y for _, y, _ in points], s=16, color=hue, marker=marker, zorder=3)
    last, ringed = 0.0, kind.chosen.sure_days if kind.chosen is not None else None
    for x, y, cluster in points:
        if cluster is kind.chosen:
            axes.scatter([x], [y], s=80, facecolors="none", edgecolors=palette.INK, linewidths=1.0, zorder=4)
        if cluster is kind.chosen or (_is_apart(x, last) and _is_apart(x, ringed)):
            left = cluster is kind.chosen  # of the deadline
            looks = {"fontsize": style.SMALL, "ha": "right" if left else "center", "color": hue}
            axes.annotate(
                f"{cluster.gpus:,}", (x, y), (-5, -12) if left else (0, 7), textcoords="offset points", **looks
            )
            last = x


def _is_apart(days: float, other: float | None) -> bool:
    """Returns whether two lengths are far enough apart for a number at each."""
    return not other or max(days / other, other / days) > 1.25


def _draw_limits(axes: Any, answer: SizeAnswer, priced: bool) -> None:
    """Draws deadline and budget as dashed lines."""
    looks: dict[str, Any] = {"color": palette.INK, "linewidth": 0.8, "linestyle": (0, (4, 3)), "zorder": 1}
    if answer.question.days is not None:
        axes.axvline(answer.question.days, **looks)
    if answer.question.budget is not None and priced:
        axes.axhline(answer.question.budget, **looks)
