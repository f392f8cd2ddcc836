"""Breakdown of a step: the parts of the slowest device as a stacked bar, and a table of all parts.

Several reports are drawn below each other on a common scale. Hidden communication is overlapped and takes no time of
its own: it is drawn pale and hatched after the parts, and is not in their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    Sheet,
    draw_bar,
    format_time_axis,
    make_heading,
    note_height,
    text_width,
    truncate_words,
    write_beside,
    write_on,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.breakdown import BreakdownPart, step_parts
from meshcast.experiments.views.timeline import time_unit
from meshcast.simulator.report.figures import parts_of_step
from meshcast.simulator.report.formatting import describe_plan, format_seconds, name_device
from meshcast.simulator.report.report import Report

ROW = 0.165
"""Height of a row of the table [in]."""

LABELS = 2.16
"""Position where bars and numbers start, after the names of the parts [in]."""

WHOLE, SHARE = 1.5, 0.42
"""Minimum width of the columns of a report with all numbers, and with its shares of the step only [in]."""

MIN_BARS = 0.5
"""Minimum width of the bars beside the numbers of a single report [in]."""


Named = Sequence[tuple[str, Report]]


# ------------------------------------------------------------------------------------------- drawing


def breakdown(named: Named) -> Figure:
    """Returns the plot: a stacked bar for every report, and below them a table row for every part."""
    accounts = [step_parts(report) for _, report in named]
    steps = [report.step_time for _, report in named]
    keys = [key for key in parts_of_step() if any(not account[key].is_empty for account in accounts)]
    alone = len(named) == 1
    plan: list[str] = []
    models, clusters = ({getattr(report.job, key).name for _, report in named} for key in ("model", "cluster"))
    subject = models.pop() if len(models) == 1 else f"{len(named)} jobs"
    subject += f" on {clusters.pop()}" if len(clusters) == 1 else ""
    title = f"{subject}: where the time of a step goes"
    if alone:
        report = named[0][1]
        plan = describe_plan(report.play.plan)
        title = (
            f"{report.job.model.name} on {report.job.cluster.name}: where the {format_seconds(steps[0])} of a step go"
        )
        if report.play.program.devices > 1:
            title += f" on {name_device(report.play.plan, report.device)}, the slowest"

    bar, above = (0.4, 0.08) if alone else (0.42, 0.24)
    heading = make_heading(title, plan)
    first = heading.bottom - 0.06
    table = first + (bar + above) * len(named) + (0.46 if alone else 0.62)
    hides = any(part.hidden > 0 for account in accounts for part in account.values())
    drawn = not alone or _room_for_bars(column_ends(1)[0]) >= MIN_BARS
    note = "Hidden communication is overlapped by computation and not part of the sum."
    note = f"Hatched and pale: hidden communication. {note.replace('Hidden communication', 'It')}" if drawn else note
    foot = table + ROW * (len(keys) + 1.4)
    sheet = Sheet(foot + 0.1 + (note_height(note) if hides else 0.0))
    sheet.head(heading)

    longest = max(*steps, *(sum(part.hidden for part in account.values()) for account in accounts))
    scale, unit = time_unit(longest)
    top = first
    for number, ((name, _), account, step) in enumerate(zip(named, accounts, steps, strict=True), 1):
        top += above
        if not alone:
            sheet.text(EDGE, top - 0.04, ascii_uppercase[number - 1], fontweight="bold")
            sheet.text(EDGE + 0.2, top - 0.04, truncate_words(name, sheet.width - 1.0, style.TEXT))
            sheet.text(sheet.right, top - 0.04, format_seconds(step), ha="right", fontweight="bold")
        axes = sheet.axes(EDGE, top, sheet.width - 2 * EDGE, bar)
        format_time_axis(axes, longest, scale, unit)
        draw_stack(axes, account, step, longest, scale)
        if not alone:
            draw_hidden(axes, account, scale)
        axes.set_ylim(-0.5 if alone else -1.0, 0.5)
        axes.set_yticks([])
        if axes.get_xticks()[0] == 0:
            axes.get_xticklabels()[0].set_horizontalalignment("left")  # centred, it would leave the sheet
        if number < len(named):
            axes.set_xticks([])
            axes.spines["bottom"].set_visible(False)
        top += bar

    draw_rows(sheet, accounts, steps, keys, table)
    if hides:
        sheet.note(foot + 0.12, note)
    return sheet.figure


def draw_stack(axes: Any, account: dict[str, BreakdownPart], step: float, longest: float, scale: float) -> None:
    """Stacks the parts of a step along a bar, with as much of their names as fits."""
    inches = (style.layout_width() - 2 * EDGE) / longest
    for key, part in account.items():
        looks = part_fill(key) | {"linewidth": 0.5}
        draw_bar(axes, 0, part.took * scale, 0.94, part.begin * scale, **looks)
        name, share = palette.PARTS[key].words, f"{part.took / step:.1%}"
        for words in (f"{name} {share}", f"{name}\n{share}", share, name):
            if max(map(text_width, words.split("\n"))) < part.took * inches - 0.08:
                middle = (part.begin + part.took / 2) * scale
                write_on(axes, words, (middle, 0), looks["facecolor"], 0.8, va="center")
                break


def draw_hidden(axes: Any, account: dict[str, BreakdownPart], scale: float) -> None:
    """Draws hidden communication as a thin bar below that of the step."""
    at = 0.0
    for key, part in account.items():
        draw_bar(axes, -0.7, part.hidden * scale, 0.3, at * scale, **hidden_fill(key))
        at += part.hidden
    if at:
        words = f"{format_seconds(at)} hidden"
        write_beside(axes, words, (at * scale, -0.7), (4, 0), va="center_baseline", color=palette.FAINT)


def part_fill(key: str) -> dict[str, Any]:
    """Returns the area of a part; a white part has a rim."""
    looks = palette.PARTS[key]
    rim: dict[str, Any] = {"linewidth": 0.5, "zorder": 3} if looks.edge != "white" else {"linewidth": 0.0}
    return style.fill(looks) | rim


def hidden_fill(key: str) -> dict[str, Any]:
    """Returns the area of the hidden communication of an axis."""
    colour = palette.PARTS[key].colour
    return {"facecolor": palette.lighten(colour, 0.7), "edgecolor": colour, "hatch": "////", "linewidth": 0}


def column_ends(count: int) -> list[dict[str, float]]:
    """Returns the right ends of the columns of every report [in]; none for more reports than have room."""
    right, left = style.layout_width() - EDGE, min(LABELS, 1.72)
    wide = (right - left) / count
    if wide < SHARE:
        return []
    ends = [left + wide * (i + 1) for i in range(count)]
    return [{"ms": end - 1.06, "%": end - 0.66, "hidden ms": end} if wide >= WHOLE else {"%": end} for end in ends]


def _room_for_bars(place: dict[str, float]) -> float:
    """Computes the width between names of parts and numbers of a single report [in]. place: their right ends [in]."""
    return place["ms"] - 0.62 - LABELS


def draw_rows(
    sheet: Sheet, accounts: Sequence[dict[str, BreakdownPart]], steps: Sequence[float], keys: Sequence[str], top: float
) -> None:
    """Writes the table of all parts, with the step below; a single report has bars too."""
    alone, places = len(accounts) == 1, column_ends(len(accounts))
    hides = any(part.hidden for account in accounts for part in account.values())

    def write(x: float, y: float, words: str, **looks: Any) -> None:
        sheet.text(x, y, words, **{"fontsize": style.SMALL, "va": "center_baseline", **looks})

    for number, place in enumerate(places, 1):
        if not alone:
            write(max(place.values()), top - 0.2, ascii_uppercase[number - 1], ha="right", fontweight="bold")
        for head, x in place.items():
            if hides or head != "hidden ms":
                write(x, top - 0.06, head, ha="right", color=palette.FAINT)

    if alone:
        room = _room_for_bars(places[0])
    if alone and room >= MIN_BARS:
        axes = sheet.axes(LABELS, top, room, ROW * len(keys))
        axes.set_axis_off()
        longest = max(part.took + part.hidden for part in accounts[0].values())
        axes.set_xlim(0, longest)
        axes.set_ylim(len(keys) - 0.5, -0.5)
        for y, key in enumerate(keys):
            part = accounts[0][key]
            seen = max(part.took, longest / 400) if part.took else 0.0  # a short part stays visible
            draw_bar(axes, y, seen, 0.66, **part_fill(key))
            draw_bar(axes, y, part.hidden, 0.66, seen, **hidden_fill(key))
    for i, key in enumerate(keys):
        middle = top + ROW * (i + 0.5)
        sheet.patch(EDGE, middle - 0.05, 0.2, 0.1, **part_fill(key))
        write(EDGE + 0.28, middle, parts_of_step()[key].part)
        for account, step, place in zip(accounts, steps, places, strict=False):
            part = account[key]
            cells = {
                "ms": f"{part.took * 1e3:,.1f}" if part.took else "",
                "%": f"{part.took / step:.1%}"[:-1] if part.took else "",
                "hidden ms": f"{part.hidden * 1e3:,.1f}" if part.hidden else "",
            }
            for head, x in place.items():
                write(x, middle, cells[head], ha="right", color=palette.FAINT if head == "hidden ms" else palette.INK)
    if places:
        below = top + ROW * (len(keys) + 0.75)
        write(EDGE + 0.28, below, "step", fontweight="bold")
        for step, place in zip(steps, places, strict=True):
            cells = {"ms": f"{step * 1e3:,.1f}", "%": "100.0"}
            for head in cells.keys() & place.keys():
                write(place[head], below, cells[head], ha="right", fontweight="bold")
