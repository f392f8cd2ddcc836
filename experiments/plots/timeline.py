"""Plot of the timeline of a step (Gantt chart): a row for every pipeline device, communication below computation.

A bar reaches from the start of the first kernel of an action to the end of its last one, and has the number of the
micro-batch; white is idle. Two overlapped passes share a bar, the forward pass on top. A step of many actions is drawn
whole, without numbers, and its warm-up and cool-down again in panels that are large enough for them.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

from experiments.plots import style
from experiments.plots.sheet import save, text_width, time_unit
from simulator.ir.ops import COMPUTE
from simulator.program.categories import axis_of
from simulator.report.report import Report
from simulator.report.words import describe_plan, format_seconds, name_device

KINDS = {
    "N": ("forward, output alone", style.SKY),
    "Y": ("loss of the batch", style.PURPLE),
    "Z": ("gradients of outputs", style.PURPLE),
    "F": ("forward", style.BLUE),
    "BW": ("backward", style.ORANGE),
    "B": ("backward, inputs", style.ORANGE),
    "W": ("backward, weights", style.GREEN),
    "R": ("recompute", style.ORANGE),
    "O": ("optimizer", style.GREY),
}
RECOMPUTE = style.YELLOW
LANES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline", "copy": "copies"}

ROWS = 32
"""Maximum number of devices that are drawn; if there are more, evenly spaced ones are."""

COLUMNS = 7
"""Maximum number of entries in a line of the legend."""

LETTER = 0.55 * style.SMALL / 72
"""Mean width of a letter of the legend [in]."""

LEFT, RIGHT = 0.62, 0.12
"""Margins left and right of the rows [in]."""

DIGIT = 0.636 * style.SMALL / 72
"""Width of a digit in a bar [in]."""

READABLE = 2.1 * DIGIT
"""Width of a bar that has room for two digits [in]."""

WHOLE = 0.0, 1.0
"""Lower and upper end of an action that fills its bar, in shares of the height of a bar."""

BINS = 1600
"""Columns of a lane of communication: ops are much shorter than print resolves."""


@dataclass
class Row:
    """One device: arrays with an entry for every action, and the busy intervals of its streams by axis."""

    device: int
    name: str
    begin: np.ndarray
    end: np.ndarray
    kind: list[str]
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    part: np.ndarray
    """Lower and upper end of every action in shares of the bar's height (n, 2); the passes of a pair have halves."""
    again: np.ndarray
    """Start and end of recomputation within the actions [s] (n, 2)."""
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]]


@dataclass
class Panel:
    """A window of time [s]. numbers: whether bars have numbers. letter: marks the window in the whole step."""

    start: float
    stop: float
    height: float
    numbers: bool
    letter: str = ""
    words: str = ""


def draw(report: Report, path: str | Path) -> None:
    """Draws the timeline to a .png or .svg file. Raises OSError if it cannot be written."""
    save(lambda: timeline(report), path)


def timeline(report: Report) -> Figure:
    """Returns the plot."""
    program, shape = report.play.program, report.play.plan.shape
    count = min(program.devices, ROWS)
    chosen = sorted({round(i * (program.devices - 1) / max(1, count - 1)) for i in range(count)})
    times = report.play.step.times
    begin, end = np.asarray(times.begin), np.asarray(times.end)
    rows = [device_row(report, device, begin, end) for device in chosen]
    lanes = [axis for axis in LANES if any(axis in row.lanes for row in rows)]
    span = report.play.step.span
    panels = choose_panels(rows, span, max(one.shape.p * one.shape.v for one in report.play.plan.every_pipeline))
    left = left_margin(rows)
    keys = legend_entries(rows, lanes, shape.v)

    head = textwrap.wrap(", ".join(describe_plan(report.play.plan)), 112)
    top = 0.42 + 0.135 * len(head) + (0.12 if len(panels) > 1 else 0)
    gap, foot = 0.36, 0.70 + 0.15 * (math.ceil(len(keys) / legend_columns(keys, shape.v)) - 1)
    above = [0.2 if panel.letter else 0.0 for panel in panels]
    height = top + sum(panel.height * len(rows) for panel in panels) + sum(above) + gap * (len(panels) - 1) + foot
    figure = Figure(figsize=(style.PAGE, height), facecolor="white")

    def place(inches: float) -> float:
        return 1 - inches / height

    width = (style.PAGE - left - RIGHT) / style.PAGE
    share = report.breakdown.parts["bubble"] / report.step_time
    job = report.job
    title = f"{job.model.name} on {job.cluster.name}: {format_seconds(report.step_time)} a step"
    if program.devices > 1:
        title += f", {share:.1%} bubble on {name_device(report.play.plan, report.device)}, the slowest"
    size = style.TITLE * min(1.0, 84 / len(title))
    figure.text(0.08 / style.PAGE, place(0.2), title, fontsize=size, fontweight="bold")
    for i, line in enumerate(head):
        figure.text(0.08 / style.PAGE, place(0.36 + 0.135 * i), line, color=style.FAINT)

    at = top
    for panel, extra in zip(panels, above, strict=True):
        at += extra
        tall = panel.height * len(rows)
        axes = figure.add_axes((left / style.PAGE, place(at + tall), width, tall / height))
        draw_panel(axes, panel, rows, lanes, shape.v, program.devices)
        if not panel.letter:
            for other in panels:
                if other.letter:
                    mark_panel(axes, other, panel)
        at += tall + gap
    busy = sum(float(((row.end - row.begin) * (row.part[:, 1] - row.part[:, 0])).sum()) for row in rows)
    white = 1 - busy / (len(rows) * span) if span else 0.0
    draw_legend(figure, keys, shape.v, white, at - gap + 0.26, height)
    return figure


def left_margin(rows: Sequence[Row]) -> float:
    """Room for the names of devices [in]."""
    return max(LEFT, max(text_width(row.name, style.TEXT) for row in rows) + 0.12)


def choose_panels(rows: Sequence[Row], span: float, stages: int) -> list[Panel]:
    """Chooses the panels: the whole step; also warm-up and cool-down if numbers in its bars would not be readable."""
    count = len(rows)
    tall = min(0.44, max(0.2, 2.8 / count))
    inches = style.PAGE - left_margin(rows) - RIGHT
    widths = np.concatenate([row.end - row.begin for row in rows])
    forward = np.concatenate([np.array([kind == "F" for kind in row.kind], bool) for row in rows])
    usual = float(np.median(widths[forward])) if forward.any() else span
    readable = usual * inches / READABLE
    if span <= 1.25 * readable or usual <= 0:
        return [Panel(0.0, span, tall, True)]
    first = rows[0]
    back = [i for i, kind in enumerate(first.kind) if kind in ("B", "BW")]
    steady = float(first.end[back[min(1, len(back) - 1)]]) if back else readable
    # The window ends in the steady state, unless numbers would then be too small.
    reach = min(readable if steady < 1.15 * readable else min(steady, 1.8 * readable), span)
    low = min(0.24, max(0.085, 1.5 / count))
    drains = "cool-down and optimizer" if "O" in first.kind else "cool-down"
    panels = [
        Panel(0.0, span, low, False),
        Panel(0.0, reach, tall, True, "a", "warm-up" if stages > 1 else "start"),
    ]
    if count <= 16:
        panels.append(
            Panel(
                span - reach,
                span,
                tall,
                True,
                "b",
                drains if stages > 1 else "end",
            )
        )
    return panels


# ---------------------------------------------------------------------------------------------- data


def device_row(report: Report, device: int, begin: np.ndarray, end: np.ndarray) -> Row:
    """Returns actions, recomputation and communication of one device."""
    flat, table, plan = report.play.step.flat, report.play.program.timetable, report.play.plan
    p = plan.every_pipeline[plan.pipeline_of(device)[0]].shape.p
    spans: dict[int, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    first, last, kinds, stages, chunks, microbatches, parts = [], [], [], [], [], [], []
    again: list[tuple[int, int]] = []

    def add_bars(
        kind: str, stage: int, microbatch: int, start: int, pieces: Sequence[tuple[int, int]], part: tuple[float, float]
    ) -> None:
        for head, tail in pieces:
            first.append(start + head)
            last.append(start + tail)
            kinds.append(kind)
            stages.append(stage)
            chunks.append(plan.pipeline_of_stage(stage)[1] // p if kind != "O" else 0)
            microbatches.append(microbatch)
            parts.append(part)

    for action in range(table.starts[device], table.starts[device + 1]):
        start, slot = flat.first[action], table.slot[action]
        if slot not in spans:
            ops = flat.ops[start : flat.behind[action]]
            own = [i for i, op in enumerate(ops) if op.stream == COMPUTE and flat.seconds[start + i] > 0]
            runs: list[tuple[int, int]] = []
            for before, i in zip([-1, *own], own, strict=False):
                if ops[i].phase == "R":
                    joined = runs and runs[-1][1] == before
                    runs[-1:] = [(runs[-1][0], i)] if joined else [*runs[-1:], (i, i)]
            spans[slot] = [(own[0], own[-1])] if own else [], runs
        given, pieces = table.slots[slot], spans[slot][0]
        microbatch = table.actions[action].microbatch
        add_bars(given.kind, given.stage, microbatch, start, pieces, (0.0, 0.5) if given.partner else WHOLE)
        if given.partner:
            # The first action of a pair has the ops of both passes.
            other = table.actions[action + 1]
            add_bars(other.kind, other.stage, other.microbatch, start, pieces, (0.5, 1.0))
        again += [(start + a, start + b) for a, b in spans[slot][1]]
    # The optimizer waits for other devices in between: its kernels are drawn one by one.
    for number in flat.updates[device] if flat.updates else ():
        if flat.ops[number].stream == COMPUTE and flat.seconds[number] > 0:
            add_bars("O", device, 0, number, [(0, 0)], WHOLE)
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for (owner, stream), queue in flat.queues.items():
        if owner == device and stream != COMPUTE:
            numbers = np.asarray(queue)
            numbers = numbers[end[numbers] > begin[numbers]]
            if len(numbers):
                lanes.setdefault(axis_of(flat.ops[queue[0]]), []).append((begin[numbers], end[numbers]))
    pairs = np.asarray(again, dtype=int).reshape(-1, 2)
    return Row(
        device,
        name_device(plan, device),
        begin[np.asarray(first, dtype=int)],
        end[np.asarray(last, dtype=int)],
        kinds,
        np.asarray(stages, dtype=int),
        np.asarray(chunks, dtype=int),
        np.asarray(microbatches, dtype=int),
        np.asarray(parts, dtype=float).reshape(-1, 2),
        np.stack([begin[pairs[:, 0]], end[pairs[:, 1]]], axis=1),
        lanes,
    )


def busy_share(intervals: Sequence[tuple[np.ndarray, np.ndarray]], edges: np.ndarray) -> np.ndarray:
    """Computes the busy share of every column of time.

    intervals: starts and ends of every stream, ordered and without overlap [s]. edges: of the columns [s].
    """
    total = np.zeros(len(edges) - 1)
    for begin, end in intervals:
        knots = np.stack([begin, end], axis=1).ravel()
        done = np.cumsum(np.stack([np.zeros(len(begin)), end - begin], axis=1).ravel())
        total += np.diff(np.interp(edges, knots, done)) / np.diff(edges)
    return np.minimum(total, 1.0)


# ------------------------------------------------------------------------------------------- drawing


def draw_panel(axes: Any, panel: Panel, rows: Sequence[Row], lanes: Sequence[str], chunks: int, devices: int) -> None:
    """Draws one panel."""
    scale, unit = time_unit(panel.stop)
    start, stop = panel.start * scale, panel.stop * scale
    inches = style.PAGE - left_margin(rows) - RIGHT
    thin = 0.105
    tall = 0.86 - thin * len(lanes)  # of a row of height 1, with a small gap below
    edges = np.linspace(panel.start, panel.stop, BINS + 1)
    colours = {kind: style.shades(colour, chunks) for kind, (_, colour) in KINDS.items()}
    polygons, faces, rims, stripes = [], [], [], []
    for y, row in enumerate(rows):
        seen = (row.end > panel.start) & (row.begin < panel.stop)
        for i in np.flatnonzero(seen):
            a, b = max(row.begin[i], panel.start) * scale, min(row.end[i], panel.stop) * scale
            kind = row.kind[i]
            face = style.rgb(style.GREY) if kind == "O" else colours[kind][row.chunk[i]]
            low, high = y + tall * row.part[i]
            polygons.append(((a, low), (b, low), (b, high), (a, high)))
            faces.append(face)
            rims.append(face if kind == "O" else style.rgb("#ffffff"))
            if panel.numbers:
                label = "O" if kind == "O" else str(row.microbatch[i])
                room = (b - a) / (stop - start) * inches
                if room > (len(label) + 0.05) * DIGIT and panel.height * (high - low) > 0.09:
                    axes.text(
                        (a + b) / 2,
                        (low + high) / 2,
                        label,
                        ha="center",
                        va="center_baseline",
                        fontsize=style.SMALL,
                        color=style.ink_on(face),
                    )
        if panel.numbers:
            for begin, end in row.again:
                if end > panel.start and begin < panel.stop:
                    a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                    stripes.append(((a, y + tall * 0.82), (b, y + tall * 0.82), (b, y + tall), (a, y + tall)))
        for k, lane in enumerate(lanes):
            if lane not in row.lanes:
                continue
            share = busy_share(row.lanes[lane], edges)
            image = np.empty((1, BINS, 4))
            image[..., :3] = style.rgb(style.AXES[lane])
            image[0, :, 3] = share
            low = y + tall + 0.015 + thin * k
            axes.imshow(
                image, extent=(start, stop, low + thin * 0.85, low), aspect="auto", interpolation="nearest", zorder=1
            )
    axes.add_collection(
        PolyCollection(polygons, facecolors=faces, edgecolors=rims, linewidths=0.35 if panel.numbers else 0, zorder=2)
    )
    if stripes:
        axes.add_collection(PolyCollection(stripes, facecolors=RECOMPUTE, edgecolors="none", zorder=3))

    axes.set_xlim(start, stop)
    axes.set_ylim(len(rows), -0.06)
    every = max(1, math.ceil(0.115 / panel.height))
    shown = list(range(0, len(rows), every))
    axes.set_yticks([y + tall / 2 for y in shown], [rows[y].name for y in shown])
    axes.tick_params(axis="y", length=0, pad=3)
    axes.tick_params(axis="x", length=2.5, pad=2)
    # A label at the right end would leave the sheet.
    axes.set_xticks([tick for tick in axes.get_xticks() if start <= tick <= stop - 0.025 * (stop - start)])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g} {unit}")
    if panel.letter:
        axes.annotate(
            panel.letter,
            (0, 1),
            (0, 4),
            xycoords="axes fraction",
            textcoords="offset points",
            fontweight="bold",
            fontsize=style.TEXT,
        )
        axes.annotate(
            panel.words, (0, 1), (9, 4), xycoords="axes fraction", textcoords="offset points", color=style.FAINT
        )
    elif len(rows) < devices:
        axes.annotate(
            f"{len(rows)} of {devices} devices",
            (1, 1),
            (0, 3),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            color=style.FAINT,
        )


def mark_panel(axes: Any, panel: Panel, whole: Panel) -> None:
    """Marks on the whole step the window of another panel."""
    scale, _ = time_unit(whole.stop)
    y = -0.06 - 0.045 / whole.height
    axes.plot(
        [panel.start * scale, panel.stop * scale],
        [y, y],
        color=style.INK,
        linewidth=1.2,
        clip_on=False,
        solid_capstyle="butt",
    )
    axes.annotate(
        panel.letter,
        ((panel.start + panel.stop) / 2 * scale, y),
        (0, 1.5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontweight="bold",
        annotation_clip=False,
    )


def legend_entries(rows: Sequence[Row], lanes: Sequence[str], chunks: int) -> list[tuple[str, list[style.RGB]]]:
    """Returns labels and colours of the kinds of actions and communication in the rows."""
    present = {kind for row in rows for kind in row.kind}
    entries = []
    for kind, (words, colour) in KINDS.items():
        if kind in present:
            entries.append((words, [style.rgb(style.GREY)] if kind == "O" else style.shades(colour, chunks)))
    if any(len(row.again) for row in rows):
        entries.append(("recompute (in backward)", [style.rgb(RECOMPUTE)]))
    for lane in lanes:
        entries.append((LANES[lane] if lane == "copy" else f"{LANES[lane]} comm.", [style.rgb(style.AXES[lane])]))
    return entries


def legend_columns(entries: Sequence[tuple[str, list[style.RGB]]], chunks: int) -> int:
    """Returns how many entries of the legend fit a line of the page."""
    beside = ((2.4 if chunks > 1 else 1.4) + 0.5 + 1.1) * style.SMALL / 72

    def wide(columns: int) -> float:
        """Computes the width of a legend with so many columns [in]; entries fill them from top to bottom."""
        words = np.array_split([len(words) for words, _ in entries], columns)
        return sum(float(column.max()) * LETTER + beside for column in words if len(column))

    most = min(len(entries), COLUMNS)
    return next((n for n in range(most, 1, -1) if wide(n) <= style.PAGE), 1)


def draw_legend(
    figure: Figure,
    entries: Sequence[tuple[str, list[style.RGB]]],
    chunks: int,
    white: float,
    at: float,
    height: float,
) -> None:
    """Draws the legend below the panels."""
    handles: Any = [tuple(Patch(facecolor=tone, linewidth=0) for tone in tones) for _, tones in entries]
    labels = [words for words, _ in entries]
    columns = legend_columns(entries, chunks)
    figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - at / height),
        ncols=columns,
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=2.4 if chunks > 1 else 1.4,
        handleheight=0.8,
        columnspacing=1.1,
        handletextpad=0.5,
        borderpad=0.2,
    )
    note = f"Numbers: micro-batch. White: no computation, {white:.1%} of the time of all devices."
    if chunks > 1:
        note += f" Shades: chunk 0 (dark) to chunk {chunks - 1} (light)."
    figure.text(0.08 / style.PAGE, 0.06 / height, note, fontsize=style.SMALL, color=style.FAINT)
