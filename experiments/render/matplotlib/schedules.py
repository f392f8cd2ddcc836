"""Plot of pipeline schedules below each other on a common axis of time: with equal times of passes, or of whole
forecasts.

Each has its bubble in its caption. The rows of all have a common scale, so a shorter schedule ends earlier; white
behind the end of a schedule is not idle time, which a line marks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.gantt import (
    GAP,
    LANE,
    SEEN,
    Panel,
    bar_height,
    draw_legend,
    draw_panel,
    left_margin,
    legend_entries,
    legend_height,
)
from meshcast.experiments.render.matplotlib.sheet import (
    EDGE,
    LINE,
    Sheet,
    make_heading,
    note_height,
    space_ticks,
    text_width,
    wrap_text,
    write_beside,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.timeline import (
    DeviceTimeline,
    measure_occupation,
    replay_timelines,
    step_timelines,
    time_unit,
    usual_pass,
)
from meshcast.simulator.report.formatting import describe_plan, format_seconds
from meshcast.simulator.report.report import Report
from meshcast.validation.pipelines.cases import ScheduleReplay

BAR = 0.26
"""Largest height of a bar [in]."""
MIN_BAR = 0.05
"""Minimum height of a bar, without a number [in]."""
SEEN_PASS = 0.04
"""Least width of a usual pass that has a rim, a hatch and a number [in]; all of narrower ones would be rim."""
NUMBERS = "Numbers, where there is room: micro-batch. "
AXIS = 0.28
"""Height of the labels of the axis of time [in]."""


class ShownSchedule(NamedTuple):
    """A schedule with its rows.

    span: from its begin to its end, in slots or [s].
    notes: what stands beside its name.
    devices: number of all, of which some have rows.
    cells: its figures for a table, by their heading.
    noun: what a row is.
    """

    name: str
    rows: list[DeviceTimeline]
    span: float
    notes: str
    devices: int
    cells: dict[str, str]
    noun: str = "device"


def show_replay(name: str, run: ScheduleReplay, most: int = 32) -> ShownSchedule:
    """Makes what is shown of a schedule that was played with F, B and W of a slot each. most: largest number of rows.

    A slot is a forward pass of 1/p of the layers, so schedules of several chunks a device have the same work as others.
    """
    shape, bubble = run.table.shape, 1 - sum(run.busy) / len(run.busy) / run.makespan
    held = max(run.in_flight("B")) * (run.end[0][0] - run.begin[0][0])  # the first pass is a forward pass of a chunk
    rows = replay_timelines(run, choose_devices(shape.p, most))
    notes = f"{shape.v} chunks a device, " if shape.v > 1 else ""
    notes += f"{run.makespan:,.6g} slots, bubble {bubble:.1%}, activations of {held:,.6g} micro-batches held"
    cells = {"chunks": f"{shape.v}", "slots": f"{run.makespan:,.6g}", "bubble %": f"{100 * bubble:.1f}"}
    cells["activations held"] = f"{held:,.6g}"
    return ShownSchedule(name, rows, run.makespan, notes, shape.p, cells)


def show_report(name: str, report: Report, most: int = 32) -> ShownSchedule:
    """Makes what is shown of the schedule of a forecast."""
    devices, span = report.play.program.devices, report.play.step.span
    rows = step_timelines(report, choose_devices(devices, most))
    occupation, share = measure_occupation(rows, span), report.breakdown.parts["bubble"] / report.step_time
    step, constant = format_seconds(report.step_time), report.job.framework.step_overhead_s
    behind = f" ({1e3 * constant:,.4g} ms of the framework behind it, not drawn)" if constant else ""
    notes = [f"{step} a step{behind}"]
    notes += [f"bubble of the slowest stage {share:.1%}"]
    notes += [f"{occupation.waiting + occupation.between:.1%} of all stages' time has no kernel"]
    notes += describe_plan(report.play.plan)
    cells = {"chunks": f"{report.play.plan.shape.v}", "step": step, "bubble of slowest stage %": f"{100 * share:.1f}"}
    cells["no kernel, all stages %"] = f"{100 * (occupation.waiting + occupation.between):.1f}"
    return ShownSchedule(name, rows, span, ", ".join(notes), devices, cells, "stage")


def schedules(shown: Sequence[ShownSchedule], title: str, slots: bool) -> Figure:
    """Returns the plot."""
    span = max(schedule.span for schedule in shown)
    rows = [row for schedule in shown for row in schedule.rows]
    lanes = [axis for axis in palette.AXES if any(axis in row.lanes for row in rows)]
    chunks = max(int(row.chunk.max(initial=0)) + 1 for row in rows)
    wide = style.layout_width() - left_margin(rows) - 0.12
    waits = any((row.waits[:, 1] - row.waits[:, 0]).max(initial=0.0) >= SEEN * span / wide for row in rows)
    entries = legend_entries(rows, lanes, chunks, waits)
    heading = make_heading(title)
    note = NUMBERS + "White: idle, up to the line at the end of the schedule."
    if slots:
        note += " A slot is a forward pass of 1/p of the layers (p devices); backward takes one for inputs and one "
        note += "for weights. Activations: of 1/p of the layers each. Bubble: idle time of all devices up to the end."
    if chunks > 1:
        note += f" Shades: chunks of a {shown[0].noun}, the first one dark."
    captions = [_break_caption(schedule, 1) for schedule in shown]  # with room for the number of rows that are drawn
    above = [LINE * len(lines) + 0.1 for lines in captions]
    foot = AXIS + legend_height(entries) + note_height(note) + 0.12
    room = style.layout_height() - heading.bottom - foot - sum(above)
    wide_passes = [usual_pass(schedule.rows) / span * wide >= SEEN_PASS for schedule in shown]
    numbers, counts, bar = _choose_bars(shown, room, lanes, any(wide_passes))
    if not numbers:  # bars alone: no lanes, no parts of a pass, no hatch
        plain = {looks.words for looks in palette.ACTIONS.values()}
        entries = [entry._replace(hatch="") for entry in entries if entry.words in plain]
        note = note.removeprefix(NUMBERS)
        foot = AXIS + legend_height(entries) + note_height(note) + 0.12
    panels = [
        Panel(
            0.0, span, [schedule.rows[i] for i in choose_devices(len(schedule.rows), count)], bar,
            numbers and has_numbers,
            lanes if numbers else (),
        )
        for schedule, count, has_numbers in zip(shown, counts, wide_passes, strict=True)
    ]  # fmt: skip
    height = heading.bottom + sum(above) + sum(panel.height for panel in panels) + foot
    sheet = Sheet(height - 0.1)
    sheet.head(heading)
    at = heading.bottom - 0.1
    unit = (1.0, "") if slots else time_unit(span)
    for schedule, panel, lines, extra in zip(shown, panels, captions, above, strict=True):
        caption = _break_caption(schedule, len(panel.rows))
        _write_caption(sheet, at + 0.16 + LINE * (len(lines) - len(caption)), caption, schedule)
        at += extra
        axes = sheet.axes(left_margin(rows), at, wide, panel.height)
        draw_panel(axes, panel, chunks, unit)
        at += panel.height
        axes.axvline(schedule.span * unit[0], color=palette.INK, linewidth=0.7, zorder=6)
        space_ticks(axes, lambda value: f"{value:,.10g} {unit[1]}".strip())
        axes.set_xlim(0, span * unit[0] * 1.003)
        if schedule is not shown[-1]:
            axes.set_xticklabels([])
        elif slots:
            write_beside(axes, "slots", (1, 0), (0, -20), xycoords="axes fraction", ha="right", color=palette.FAINT)
    draw_legend(sheet, entries, at + AXIS)
    sheet.note(at + AXIS + legend_height(entries) + LINE - 0.03, note)
    return sheet.figure


def _break_caption(schedule: ShownSchedule, drawn: int) -> list[str]:
    """Breaks name and notes of a schedule into lines. drawn: rows that are drawn, named if they are not all."""
    more = f" ({drawn} of {schedule.devices} {schedule.noun}s)" if drawn != schedule.devices else ""
    wider = text_width(schedule.name, style.SMALL, True) - text_width(schedule.name)  # in bold
    return wrap_text(f"{schedule.name}: {schedule.notes}{more}", style.layout_width() - 2 * EDGE - wider, style.SMALL)


def _choose_bars(
    shown: Sequence[ShownSchedule], room: float, lanes: Sequence[str], wide_passes: bool
) -> tuple[bool, list[int], float]:
    """Chooses whether bars have numbers, how many rows each schedule has, and the height of bars [in].

    All devices are drawn if there is room; else as many as have room for bars without numbers, which passes that are
    too narrow for them never have.
    """
    rows = sum(len(schedule.rows) for schedule in shown)
    least = max(bar_height(schedule.rows) for schedule in shown)
    more = LANE * len(lanes) + GAP
    if wide_passes and room / rows >= least + more:
        return (
            True,
            [len(schedule.rows) for schedule in shown],
            min(BAR if least < 0.15 else 1.3 * BAR, room / rows - more),
        )
    bar = min(BAR, room / rows - GAP)
    if bar <= 0.08:  # then rows lie closer, see `Panel.row`
        bar = min(0.08, max(MIN_BAR, room / rows / 1.3))
    each = max(2, math.floor(room / len(shown) / (bar + (GAP if bar > 0.08 else 0.3 * bar))))
    return False, [min(len(schedule.rows), each) for schedule in shown], bar


def _write_caption(sheet: Sheet, y: float, lines: Sequence[str], schedule: ShownSchedule) -> None:
    """Writes the name of a schedule in bold, and its notes behind it."""
    looks: dict[str, Any] = {"fontsize": style.SMALL}
    for i, line in enumerate(lines):
        if i == 0 and line.startswith(schedule.name):
            sheet.text(EDGE, y, schedule.name, fontweight="bold", **looks)
            x = EDGE + text_width(schedule.name, style.SMALL, True)
            sheet.text(x, y, line.removeprefix(schedule.name), color=palette.FAINT, **looks)
        else:
            sheet.text(EDGE, y, line, color=palette.FAINT, **looks)
        y += LINE
