"""Plots of simulated runs: where the time goes, as a stacked bar; goodput against interval, failure rate and scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import EDGE, Sheet, make_heading, note_height, text_width
from meshcast.experiments.runs.curves import CurvePoint, RunCurves
from meshcast.experiments.views import palette
from meshcast.simulator.report.formatting import describe_plan, format_seconds
from meshcast.simulator.runs.answer import LABELS, RunAnswer
from meshcast.simulator.runs.training import TIMES

COLOURS = (
    *(palette.BLUE, palette.ORANGE, palette.YELLOW, palette.GREEN, palette.PURPLE),
    *(palette.SKY, palette.GREY, palette.PINK, palette.BROWN, palette.TEAL),
)
LOOKS: dict[str, dict[str, Any]] = {
    name: style.fill(palette.Looks(name, colour, palette.HATCHES[i % len(palette.HATCHES)])) | {"linewidth": 0.4}
    for i, (name, colour) in enumerate(zip(TIMES, COLOURS, strict=True))
}
"""Colours and hatches by use of the time."""

ROW = 0.18
"""Height of a row of the table [in]."""

BAR = 0.3
"""Height of a bar [in]."""


def _describe(answer: RunAnswer) -> tuple[str, list[str]]:
    """Writes title and lines below it: the run and its assumptions."""
    plan = answer.plan
    title = f"{plan.job.model.name} on {plan.job.cluster.gpus:,} {plan.job.cluster.gpu.name}"
    low, high = answer.days_interval_90
    lines = [
        ", ".join(describe_plan(plan.report.play.plan)),
        f"{answer.days:,.4g} days ({low:,.4g} to {high:,.4g}), goodput {answer.goodput:.1%}, "
        f"mean of {len(answer.runs):,} runs"
        if len(answer.runs) > 1
        else "one run",
    ]
    return title, lines


def stacked_bar(answer: RunAnswer) -> Figure:
    """Draws a bar of all the time, and another of what is lost, enlarged; a table of the parts."""
    title, lines = _describe(answer)
    heading = make_heading(title, *lines)
    shown = [name for name in TIMES if answer.time_s[name] > 0]
    note = "Failures, checkpoints and stragglers are simulated: " + "; ".join(answer.plan.assumed) + "."
    top = heading.bottom + 0.1
    height = top + 2 * (BAR + 0.3) + ROW * len(shown) + 0.3 + note_height(note)
    sheet = Sheet(height)
    sheet.head(heading)
    left, width = EDGE, sheet.width - 2 * EDGE
    y = _bar(sheet, answer, shown, left, top, width, "all of the time")
    lost = [name for name in shown if name != "productive"]
    y = _bar(sheet, answer, lost, left, y, width, f"what is not productive: {1 - answer.goodput:.2%}") if lost else y
    names = max(text_width(LABELS[name]) for name in shown)
    for name in shown:
        sheet.patch(left, y - 0.09, 0.14, 0.1, **LOOKS[name])
        sheet.text(left + 0.2, y, LABELS[name], fontsize=style.SMALL)
        seconds = answer.time_s[name]
        words = f"{seconds / 3600:,.4g} h, {seconds / answer.seconds:.2%}"
        sheet.text(left + 0.4 + names, y, words, fontsize=style.SMALL)
        y += ROW
    sheet.note(y + 0.12, note)
    return sheet.figure


def _bar(
    sheet: Sheet, answer: RunAnswer, names: Sequence[str], left: float, top: float, width: float, words: str
) -> float:
    """Draws a bar with its heading; returns the place below it [in]."""
    sheet.text(left, top + 0.1, words, fontsize=style.SMALL, color=palette.FAINT)
    whole, x = sum(answer.time_s[name] for name in names), left
    for name in names:
        part = width * answer.time_s[name] / whole
        sheet.patch(x, top + 0.15, part, BAR, **LOOKS[name])
        x += part
    return top + BAR + 0.38


PANEL = 1.7
"""Height of the axes of a curve [in]."""


def run_curves(answer: RunAnswer, curves: RunCurves) -> Figure:
    """Draws goodput against the interval of checkpoints, the mean time between failures, and the number of GPUs."""
    title, lines = _describe(answer)
    heading = make_heading(title, *lines)
    panels: list[tuple[str, Sequence[CurvePoint], Callable[[float], str]]] = [
        ("time between checkpoints", curves.interval, format_seconds),
        ("time between failures, over that of the job", curves.mtbf, lambda value: f"x {value:g}"),
        ("GPUs", curves.scale, lambda value: f"{value:,.0f}"),
    ]
    left_out = any(point.reason for _, points, _ in panels for point in points)
    panels = [(label, [point for point in points if not point.reason], form) for label, points, form in panels]
    panels = [panel for panel in panels if len(panel[1]) > 1]
    note = (
        "Points: mean of simulated runs; bars: nine of ten runs; line: Daly's formula, which knows neither spare nodes"
    )
    note += " nor stragglers. All points have the same random numbers."
    note += " Points whose runs do not end are left out." if left_out else ""
    top, narrow = heading.bottom + 0.2, style.is_narrow()
    rows = len(panels) if narrow else 1
    sheet = Sheet(top + rows * (PANEL + 0.55) + 0.1 + note_height(note))
    sheet.head(heading)
    room = (sheet.width - 2 * EDGE) / (1 if narrow else max(len(panels), 1))
    for i, (label, points, form) in enumerate(panels):
        left = EDGE if narrow else EDGE + i * room
        axes = sheet.axes(left + 0.5, top + (i if narrow else 0) * (PANEL + 0.55), room - 0.62, PANEL)
        _curve(axes, points, label, form)
    sheet.note(top + rows * (PANEL + 0.55) + 0.1, note)
    return sheet.figure


def _curve(axes: Any, points: Sequence[CurvePoint], label: str, form: Callable[[float], str]) -> None:
    values, means = [point.value for point in points], [100 * point.goodput for point in points]
    below = [max(100 * (point.goodput - point.interval[0]), 0.0) for point in points]
    above = [max(100 * (point.interval[1] - point.goodput), 0.0) for point in points]
    axes.set_xscale("log")
    if all(point.formula is not None for point in points):
        axes.plot(values, [100 * (point.formula or 0.0) for point in points], color=palette.ORANGE, linewidth=1.0)
    axes.errorbar(values, means, yerr=[below, above], fmt="o", markersize=3, color=palette.BLUE, linewidth=0.8)
    axes.set_xlabel(label)
    axes.set_ylabel("goodput [%]")
    axes.grid(axis="y", color=palette.LINE, linewidth=0.3)
    shown = values if len(values) <= 3 else [values[0], values[len(values) // 2], values[-1]]
    axes.set_xticks(shown)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
