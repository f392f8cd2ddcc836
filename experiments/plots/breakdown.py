"""Where the time of a step goes: the parts of the slowest device as one bar, and every part in figures.

Several reports stand one under another on one scale, to be compared. Hidden communication takes no time of its own: it
stands beside the parts, pale and hatched, and is not in their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.plots import style
from experiments.plots.sheet import EDGE, LINE, Sheet, clock, fitting, save, unit_of, width_of, wrapped
from simulator.report.figures import parts_of_step
from simulator.report.report import Report
from simulator.report.words import describe_plan, format_seconds

BRIEF = {
    "gemm": "matrix products",
    "memory_bound": "memory-bound",
    "bubble": "bubble",
    "host": "host",
}
"""Names that fit into a bar; other parts are called by their key."""

KERNELS = ("gemm", "attention", "memory_bound")

WHITE: dict[str, Any] = {"facecolor": style.rgb("#ffffff"), "edgecolor": style.FAINT, "linewidth": 0.5, "zorder": 3}
LOOKS: dict[str, dict[str, Any]] = {
    **{kind: {"facecolor": tone} for kind, tone in zip(KERNELS, style.shades(style.BLUE, len(KERNELS)), strict=True)},
    **{axis: {"facecolor": style.rgb(colour)} for axis, colour in style.AXES.items()},
    "bubble": WHITE,
    "optimizer": {"facecolor": style.rgb(style.GREY)},
    "host": {"facecolor": style.lighter(style.GREY, 0.55)},
    "idle": {**WHITE, "hatch": "..."},
}
THIN: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5}
"""What parts the parts of a bar."""

ROW = 0.165
"""Height of a row of figures [in]."""

LABELS = 2.16
"""Where the names of the parts end and their bars or figures begin [in]."""

WHOLE, SHARES = 3, 8
"""Up to so many reports have all figures in columns of their own; up to so many their shares of the step."""


@dataclass(frozen=True)
class Part:
    """A part of a step [s]. hidden: communication of the same axis that takes no time of its own."""

    took: float
    hidden: float = 0.0


Named = Sequence[tuple[str, Report]]


def draw(reports: Report | Named, path: str | Path) -> None:
    """Draws one report, or several with their names, into `path`, a .png or .svg file.

    Raises OSError where it cannot be written.
    """
    named = [("", reports)] if isinstance(reports, Report) else list(reports)
    save(lambda: breakdown(named), path)


def parts_of(report: Report) -> dict[str, Part]:
    """The parts of a step, sorted as on the page. They add up to it; what is less than a rounding error is nothing."""
    hidden, least = report.breakdown.hidden, 1e-9 * report.step_time

    def clean(seconds: float) -> float:
        return float(seconds) if seconds > least else 0.0

    return {
        key: Part(clean(figure.compute(report) or 0.0), clean(hidden.get(key, 0.0)))
        for key, figure in parts_of_step().items()
    }


# ------------------------------------------------------------------------------------------- drawing


def breakdown(named: Named) -> Figure:
    """The figure: a bar for each report, and below them a row for each part."""
    accounts = [parts_of(report) for _, report in named]
    steps = [report.step_time for _, report in named]
    keys = [key for key in parts_of_step() if any(account[key] != Part(0.0) for account in accounts)]
    alone = len(named) == 1
    head, title = [], f"Where the time of a step goes: {len(named)} forecasts"
    if alone:
        report = named[0][1]
        head = wrapped(describe_plan(report.play.plan))
        title = (
            f"{report.job.model.name} on {report.job.cluster.name}: where the {format_seconds(steps[0])} of a step go"
        )
        if report.play.program.devices > 1:
            title += f" on device {report.device}, the slowest"

    bar, above = (0.4, 0.08) if alone else (0.42, 0.24)
    first = 0.36 + LINE * len(head)
    table = first + (bar + above) * len(named) + (0.46 if alone else 0.62)
    foot = table + ROW * (len(keys) + 1.4)
    sheet = Sheet(foot + 0.24)
    sheet.head(title, head)

    longest = max(*steps, *(sum(part.hidden for part in account.values()) for account in accounts))
    scale, unit = unit_of(longest)
    top = first
    for number, ((name, _), account, step) in enumerate(zip(named, accounts, steps, strict=True), 1):
        top += above
        if not alone:
            sheet.text(EDGE, top - 0.04, str(number), fontweight="bold")
            sheet.text(EDGE + 0.2, top - 0.04, fitting(name, style.PAGE - 1.3))
            sheet.text(style.PAGE - EDGE, top - 0.04, format_seconds(step), ha="right", fontweight="bold")
        axes = sheet.axes(EDGE, top, style.PAGE - 2 * EDGE, bar)
        clock(axes, longest, scale, unit)
        stack(axes, account, step, longest, scale)
        if not alone:
            beside(axes, account, scale)
        axes.set_ylim(-0.5 if alone else -1.0, 0.5)
        axes.set_yticks([])
        axes.get_xticklabels()[0].set_horizontalalignment("left")  # it would stick out of the paper
        if number < len(named):
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        top += bar

    rows(sheet, accounts, steps, keys, table)
    if any(part.hidden > 0 for account in accounts for part in account.values()):
        note = (
            "Hatched: hidden communication. It runs beside computation, takes no time of its own and is not in the sum."
        )
        sheet.text(EDGE, foot + 0.14, note, fontsize=style.SMALL, color=style.FAINT)
    return sheet.figure


def stack(axes: Any, account: dict[str, Part], step: float, longest: float, scale: float) -> None:
    """The parts of one step side by side, with as much of their names as there is room for."""
    inches = (style.PAGE - 2 * EDGE) / longest
    at = 0.0
    for key, part in account.items():
        looks = THIN | LOOKS[key]
        axes.barh(0, part.took * scale, 0.94, at * scale, **looks)
        name, share = BRIEF.get(key, key), f"{part.took / step:.1%}"
        for words in (f"{name} {share}", f"{name}\n{share}", share, name):
            if max(map(width_of, words.split("\n"))) < part.took * inches - 0.08:
                middle, ink = (at + part.took / 2) * scale, style.ink_on(looks["facecolor"])
                axes.text(middle, 0, words, ha="center", va="center", fontsize=style.SMALL, color=ink)
                break
        at += part.took


def beside(axes: Any, account: dict[str, Part], scale: float) -> None:
    """Hidden communication, in a thin bar below that of the step."""
    at = 0.0
    for key, part in account.items():
        axes.barh(-0.7, part.hidden * scale, 0.3, at * scale, **hidden_looks(key))
        at += part.hidden
    if at:
        words = f"{format_seconds(at)} hidden"
        axes.annotate(
            words,
            (at * scale, -0.7),
            (4, 0),
            textcoords="offset points",
            va="center_baseline",
            fontsize=style.SMALL,
            color=style.FAINT,
        )


def hidden_looks(key: str) -> dict[str, Any]:
    tone = LOOKS[key]["facecolor"]
    return {"facecolor": [part + (1 - part) * 0.7 for part in tone], "edgecolor": tone, "hatch": "////", "linewidth": 0}


def columns(count: int) -> list[dict[str, float]]:
    """Where the columns of `count` reports end [in]."""
    right = style.PAGE - EDGE
    if count > SHARES:
        return []
    wide = (right - LABELS) / count
    ends = [LABELS + wide * (i + 1) for i in range(count)]
    return [{"ms": end - 1.06, "%": end - 0.66, "hidden ms": end} if count <= WHOLE else {"%": end} for end in ends]


def rows(
    sheet: Sheet, accounts: Sequence[dict[str, Part]], steps: Sequence[float], keys: Sequence[str], top: float
) -> None:
    """Every part in figures, with the step below; a single report has bars, too."""
    alone, places = len(accounts) == 1, columns(len(accounts))
    hides = any(part.hidden for account in accounts for part in account.values())

    def tell(x: float, y: float, words: str, **looks: Any) -> None:
        sheet.text(x, y, words, **{"fontsize": style.SMALL, "va": "center_baseline", **looks})

    for number, place in enumerate(places, 1):
        if not alone:
            tell(max(place.values()), top - 0.2, str(number), ha="right", fontweight="bold")
        for head, x in place.items():
            if hides or head != "hidden ms":
                tell(x, top - 0.06, head, ha="right", color=style.FAINT)

    if alone:
        room = places[0]["ms"] - 0.62 - LABELS
        axes = sheet.axes(LABELS, top, room, ROW * len(keys))
        axes.set_axis_off()
        longest = max(part.took + part.hidden for part in accounts[0].values())
        axes.set_xlim(0, longest)
        axes.set_ylim(len(keys) - 0.5, -0.5)
        for y, key in enumerate(keys):
            part = accounts[0][key]
            seen = max(part.took, longest / 400) if part.took else 0.0  # what is there can be seen
            axes.barh(y, seen, 0.66, **{"linewidth": 0, **LOOKS[key]})
            axes.barh(y, part.hidden, 0.66, seen, **hidden_looks(key))
    for i, key in enumerate(keys):
        middle = top + ROW * (i + 0.5)
        swatch = {"linewidth": 0, **LOOKS[key]}
        sheet.patch(EDGE, middle - 0.05, 0.2, 0.1, **swatch)
        tell(EDGE + 0.28, middle, parts_of_step()[key].part)
        for account, step, place in zip(accounts, steps, places, strict=False):
            part = account[key]
            told = {
                "ms": f"{part.took * 1e3:,.1f}" if part.took else "",
                "%": f"{part.took / step:.1%}"[:-1] if part.took else "",
                "hidden ms": f"{part.hidden * 1e3:,.1f}" if part.hidden else "",
            }
            for head, x in place.items():
                tell(x, middle, told[head], ha="right", color=style.FAINT if head == "hidden ms" else style.INK)
    if 0 < len(places) <= WHOLE:
        below = top + ROW * (len(keys) + 0.75)
        tell(EDGE + 0.28, below, "step", fontweight="bold")
        for step, place in zip(steps, places, strict=True):
            told = {"ms": f"{step * 1e3:,.1f}", "%": "100.0"}
            for head in told.keys() & place.keys():
                tell(place[head], below, told[head], ha="right", fontweight="bold")
