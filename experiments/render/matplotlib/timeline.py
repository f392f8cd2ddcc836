"""Plot of the timeline of a step (Gantt chart): a row for every pipeline device, communication below computation.

A bar has the number of its micro-batch; two overlapped passes share a bar, the forward pass on top. A step of many
actions is drawn whole, without numbers, and its warm-up and cool-down again in panels that are large enough for them;
of many devices the panels show as many, evenly spaced, as have room for numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from meshcast.experiments.render.matplotlib import style
from meshcast.experiments.render.matplotlib.gantt import (
    GAP,
    LANE,
    RIGHT,
    SEEN,
    Panel,
    bar_height,
    draw_legend,
    draw_panel,
    left_margin,
    legend_entries,
    legend_height,
    number_width,
)
from meshcast.experiments.render.matplotlib.sheet import (
    LINE,
    Sheet,
    make_heading,
    note_height,
    space_ticks,
    write_beside,
)
from meshcast.experiments.views import palette
from meshcast.experiments.views.devices import choose_devices
from meshcast.experiments.views.timeline import (
    UPDATE,
    DeviceTimeline,
    Occupation,
    measure_occupation,
    step_timelines,
    time_unit,
    usual_pass,
)
from meshcast.simulator.report.formatting import describe_plan, format_seconds, name_device
from meshcast.simulator.report.report import Report

ROWS = 32
"""Maximum number of devices that are drawn; if there are more, evenly spaced ones are."""

BAR = 0.36
"""Largest height of a bar [in]."""

WHOLE_SHARE = 0.22
"""Share of the height that the whole step takes if its warm-up and cool-down are drawn too."""

AXIS, CAPTION = 0.25, 0.2
"""Height of the labels below a panel, and of its letter and words above it [in]."""


def timeline(report: Report) -> Figure:
    """Returns the plot."""
    program = report.play.program
    rows = step_timelines(report, choose_devices(program.devices, ROWS))
    lanes = [axis for axis in palette.AXES if any(axis in row.lanes for row in rows)]
    span = report.play.step.span
    chunks = max(report.play.plan.shape.v, *(int(row.chunk.max(initial=0)) + 1 for row in rows))
    job = report.job
    heading = make_heading(
        f"{job.model.name} on {job.cluster.name}: {format_seconds(report.step_time)} a step",
        describe_plan(report.play.plan),
        *describe_bubble(report),
    )
    entries = legend_entries(rows, lanes, chunks, waits=True)
    stages = max(pipeline.shape.p * pipeline.shape.v for pipeline in report.play.plan.every_pipeline)
    notes = describe_idle(measure_occupation(rows, span), chunks)
    foot = legend_height(entries) + sum(map(note_height, notes)) + 0.12
    panels = choose_panels(rows, span, stages, lanes, style.layout_height() - heading.bottom - foot)
    least = SEEN * seconds_an_inch(panels)
    if not any((row.waits[:, 1] - row.waits[:, 0] >= least).any() for row in rows):
        entries = legend_entries(rows, lanes, chunks)

    beside = is_beside(panels)
    top = heading.bottom + (0.12 if len(panels) > 1 else 0.0)
    tops, at = [], top
    for i, panel in enumerate(panels):
        if not (beside and i == 2):
            at += CAPTION if panel.letter else 0.0
            tops.append(at)
            at += panel.height + AXIS
        else:
            tops.append(tops[-1])
    sheet = Sheet(at + foot)
    sheet.head(heading)
    margin = left_margin(rows)
    drawn = []
    for i, (panel, high) in enumerate(zip(panels, tops, strict=True)):
        left, wide = margin, sheet.width - margin - RIGHT
        if beside and i:
            wide = zoom_width(margin, True)
            left += (i - 1) * (wide + margin + RIGHT)
        axes = sheet.axes(left, high, wide, panel.height)
        draw_panel(axes, panel, chunks)
        _label_panel(axes, panel, program.devices)
        drawn.append(axes)
    for panel in panels[1:]:
        mark_panel(drawn[0], panel, panels[0])
    draw_legend(sheet, entries, at)
    y = at + legend_height(entries) + LINE - 0.03
    for note in notes:
        y = sheet.note(y, note)
    return sheet.figure


def describe_bubble(report: Report) -> list[str]:
    """Writes a sentence on the bubble, if there are several devices."""
    if report.play.program.devices == 1:
        return []
    share = report.breakdown.parts["bubble"] / report.step_time
    name = name_device(report.play.plan, report.device)
    return [
        f"Pipeline bubble {share:.1%} of the step: {name}, the slowest, then runs no kernel, no communication and no "
        "work of the host."
    ]


def describe_idle(occupation: Occupation, chunks: int) -> list[str]:
    """Writes notes below the legend: how the time of all devices is divided, and what numbers and shades are."""
    shares = (
        f"Time of all stages: {occupation.computing:.1%} kernels compute, {occupation.waiting:.1%} waits inside passes "
        f"(the short ones are not drawn), {occupation.between:.1%} between passes (white). Unlike the bubble, waits "
        "and white include exposed communication, and the time in which faster stages wait."
    )
    shades = f" Shades: chunk 0 (dark) to chunk {chunks - 1} (light)." if chunks > 1 else ""
    return [f"Numbers, where there is room: micro-batch.{shades}", shares]


# ------------------------------------------------------------------------------------------- panels


def is_beside(panels: Sequence[Panel]) -> bool:
    """Says whether warm-up and cool-down stand beside each other: on slides, which are low and wide."""
    return len(panels) == 3 and style.layout_height() < 6


def zoom_width(margin: float, beside: bool) -> float:
    """Returns the width of the rows of warm-up or cool-down [in]."""
    room = style.layout_width() - margin - RIGHT
    return (room - margin - RIGHT) / 2 if beside else room


def seconds_an_inch(panels: Sequence[Panel]) -> float:
    """Returns the scale of the panel that shows most [s/in]."""
    last = panels[-1]
    return (last.stop - last.start) / zoom_width(left_margin(last.rows), is_beside(panels))


def choose_panels(
    rows: Sequence[DeviceTimeline], span: float, stages: int, lanes: Sequence[str], room: float
) -> list[Panel]:
    """Chooses the panels: the whole step; also warm-up and cool-down if numbers in its bars would not be readable.

    span: of the step [s].
    room: height of all panels [in].
    """
    least, more = bar_height(rows), LANE * len(lanes) + GAP
    beside = style.layout_height() < 6
    usual = usual_pass(rows) or span
    largest = max(int(row.microbatch.max(initial=0)) for row in rows)
    readable = usual * zoom_width(left_margin(rows), False) / number_width(largest)
    fitting = int((room - AXIS) / (least + more))
    if span <= 1.25 * readable:
        shown = [rows[i] for i in choose_devices(len(rows), fitting)]
        return [Panel(0.0, span, shown, _tall(room - AXIS, len(shown), more), True, lanes)]
    readable *= zoom_width(left_margin(rows), beside) / zoom_width(left_margin(rows), False)
    first = rows[0]
    back = [i for i, kind in enumerate(first.kind) if kind in ("B", "BW")]
    steady = float(first.end[back[min(1, len(back) - 1)]]) if back else readable
    # The window ends in the steady state, unless numbers would then be too small. The two windows stay apart.
    reach = min(readable, 1.15 * steady, 0.47 * span)
    low = min(0.2, max(0.03, WHOLE_SHARE * room / len(rows) - 0.03))
    whole = Panel(0.0, span, rows, low, False)
    left = (room - whole.height - AXIS - 0.15) / (1 if beside else 2) - AXIS - CAPTION
    most = int(left / (least + more))
    begin, end = choose_busy(rows, 0.0, reach, most), choose_busy(rows, span - reach, span, most)
    bar = max(least, _tall(left, max(len(begin), len(end)), more))
    drains = "cool-down and optimizer" if UPDATE in first.kind else "cool-down"
    begins, ends = ("warm-up", drains) if stages > 1 else ("start", "end")
    return [
        whole,
        Panel(0.0, reach, begin, bar, True, lanes, "a", begins),
        Panel(span - reach, span, end, bar, True, lanes, "b", ends),
    ]


def choose_busy(rows: Sequence[DeviceTimeline], start: float, stop: float, most: int) -> list[DeviceTimeline]:
    """Chooses at most `most` rows for a window of time [s], evenly spaced among those with a pass in it, or all."""
    if len(rows) <= most:
        return list(rows)
    busy = [
        row
        for row in rows
        if any(
            kind != UPDATE and a < stop and b > start for kind, a, b in zip(row.kind, row.begin, row.end, strict=True)
        )
    ]
    chosen = busy if len(busy) > 1 else list(rows)
    return [chosen[i] for i in choose_devices(len(chosen), most)]


def _tall(room: float, rows: int, more: float) -> float:
    """Returns the height of bars for `rows` rows in a room [in]. more: height of a row beside its bar."""
    return min(BAR, room / rows - more)


def _label_panel(axes: Any, panel: Panel, devices: int) -> None:
    """Writes the axis of time, letter and words of a panel, and how many devices it shows."""
    unit = time_unit(panel.stop)[1]
    low, high = axes.get_xlim()
    axes.tick_params(axis="x", length=2.5, pad=2)
    space_ticks(axes, lambda value: f"{value:,.10g} {unit}")
    axes.set_xlim(low, high)
    more = f"{len(panel.rows)} of {devices} stages" if len(panel.rows) < devices else ""
    if panel.letter:
        words = f"{panel.words}, {more}" if more else panel.words
        for x, text, looks in ((0, panel.letter, {"fontweight": "bold"}), (9, words, {"color": palette.FAINT})):
            write_beside(axes, text, (0, 1), (x, 4), xycoords="axes fraction", fontsize=style.TEXT, **looks)
    elif more:
        write_beside(axes, more, (1, 0), (0, -20), xycoords="axes fraction", ha="right", color=palette.FAINT)


def mark_panel(axes: Any, panel: Panel, whole: Panel) -> None:
    """Marks on the whole step the window of another panel."""
    scale, _ = time_unit(whole.stop)
    y = -0.06 - 0.045 / whole.row
    looks: dict[str, Any] = {"color": palette.INK, "linewidth": 1.2, "clip_on": False, "solid_capstyle": "butt"}
    axes.plot([panel.start * scale, panel.stop * scale], [y, y], gid=f"window {panel.letter}", **looks)
    looks = {"ha": "center", "va": "bottom", "fontsize": style.TEXT, "fontweight": "bold", "annotation_clip": False}
    write_beside(axes, panel.letter, ((panel.start + panel.stop) / 2 * scale, y), (0, 1.5), **looks)
