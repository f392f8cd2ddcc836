"""Gantt charts: the bars of a device through a step, windows of time in which they are drawn, and their legend.

A bar reaches from the first kernel of a pass to the end of its last one, and has the number of its micro-batch where
there is room for it. A wait inside it that is long enough to be seen is white and dotted, so that only work has the
colour of work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from meshcast.experiments.plots import style
from meshcast.experiments.plots.sheet import EDGE, Sheet, text_width, time_unit
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.categories import axis_of
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.report import Report
from meshcast.simulator.scheduling.schedule import ACTIVATION_TRANSFERS, actions_of

WHOLE = 0.0, 1.0
"""Lower and upper end of an action that fills its bar, in shares of the height of a bar."""


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
    again: np.ndarray = field(default_factory=lambda: np.empty((0, 2)))
    """Start and end of recomputation within the actions [s] (n, 2)."""
    waits: np.ndarray = field(default_factory=lambda: np.empty((0, 2)))
    """Start and end of the times within the actions when no kernel computes [s] (n, 2), in their order."""
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    @property
    def is_paired(self) -> bool:
        """Whether two passes share a bar."""
        return bool(len(self.part)) and bool((self.part != WHOLE).any())

    @property
    def in_bars(self) -> float:
        """Time that the bars cover [s]."""
        return float(((self.end - self.begin) * (self.part[:, 1] - self.part[:, 0])).sum())

    @property
    def in_waits(self) -> float:
        """Time of the waits inside the bars [s]."""
        return float((self.waits[:, 1] - self.waits[:, 0]).sum())


class Occupation(NamedTuple):
    """Shares of the time of all devices: kernels compute, passes wait, nothing is between passes. They add up to 1."""

    computing: float
    waiting: float
    between: float


def measure_occupation(rows: Sequence[Row], span: float) -> Occupation:
    """Shares of a step's time. span: of the step [s]."""
    total = len(rows) * span
    bars, waits = sum(row.in_bars for row in rows), sum(row.in_waits for row in rows)
    return Occupation((bars - waits) / total, waits / total, 1 - bars / total) if total else Occupation(1.0, 0.0, 0.0)


def choose_rows(devices: int, most: int) -> list[int]:
    """At most `most` devices, evenly spaced, with the first and the last."""
    count = min(devices, max(2, most))
    return sorted({round(i * (devices - 1) / max(1, count - 1)) for i in range(count)})


def usual_pass(rows: Sequence[Row]) -> float:
    """Median duration of forward passes [s], of those that share no bar if there are any; 0 if none is drawn."""
    alone, paired = [], []
    for row in rows:
        forward = np.array([kind == "F" for kind in row.kind], bool)
        half = row.part[:, 1] - row.part[:, 0] < 1
        durations = row.end - row.begin
        alone.append(durations[forward & ~half])
        paired.append(durations[forward & half])
    own = next((found for found in map(np.concatenate, (alone, paired)) if len(found)), np.zeros(1))
    return float(np.median(own))


class _Pieces(NamedTuple):
    """Places of ops among those of an action of one slot of the timetable.

    bar: first and last kernel. waits: kernels before and behind each place where another op stands. again: first and
    last kernel of each run of recomputation.
    """

    bar: list[tuple[int, int]]
    waits: np.ndarray
    again: list[tuple[int, int]]


def _find_pieces(ops: Any, seconds: Any) -> _Pieces:
    """Finds the kernels among the ops of an action. seconds: how long every op lasts."""
    own = [i for i, op in enumerate(ops) if op.stream == COMPUTE and seconds[i] > 0]
    runs: list[tuple[int, int]] = []
    for before, i in zip([-1, *own], own, strict=False):
        if ops[i].phase == "R":
            joined = runs and runs[-1][1] == before
            runs[-1:] = [(runs[-1][0], i)] if joined else [*runs[-1:], (i, i)]
    gaps = np.array([*pairwise(own)], dtype=int).reshape(-1, 2)
    return _Pieces([(own[0], own[-1])] if own else [], gaps, runs)


def device_row(report: Report, device: int, begin: np.ndarray, end: np.ndarray) -> Row:
    """Returns actions, waits, recomputation and communication of one device. begin, end: of all ops [s]."""
    flat, table, plan = report.play.step.flat, report.play.program.timetable, report.play.plan
    p = plan.every_pipeline[plan.ranks.pipeline_of(device)[0]].shape.p
    found: dict[int, _Pieces] = {}
    first, last, kinds, stages, chunks, microbatches, parts = [], [], [], [], [], [], []
    again: list[tuple[int, int]] = []
    gaps = [np.empty((0, 2), dtype=int)]

    def add_bars(
        kind: str, stage: int, microbatch: int, start: int, pieces: Sequence[tuple[int, int]], part: tuple[float, float]
    ) -> None:
        for head, tail in pieces:
            first.append(start + head)
            last.append(start + tail)
            kinds.append(kind)
            stages.append(stage)
            chunks.append(plan.model_parts.pipeline_of(stage)[1] // p if kind != "O" else 0)
            microbatches.append(microbatch)
            parts.append(part)

    for action in range(table.starts[device], table.starts[device + 1]):
        start, slot = flat.first[action], table.slot[action]
        if slot not in found:
            stop = flat.behind[action]
            found[slot] = _find_pieces(flat.ops[start:stop], flat.seconds[start:stop])
        given, pieces = table.slots[slot], found[slot]
        microbatch = table.actions[action].microbatch
        add_bars(given.kind, given.stage, microbatch, start, pieces.bar, (0.0, 0.5) if given.partner else WHOLE)
        if given.partner:
            # The first action of a pair has the ops of both passes.
            other = table.actions[action + 1]
            add_bars(other.kind, other.stage, other.microbatch, start, pieces.bar, (0.5, 1.0))
        again += [(start + a, start + b) for a, b in pieces.again]
        gaps.append(start + pieces.waits)
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
    between = np.concatenate(gaps)
    waits = np.stack([end[between[:, 0]], begin[between[:, 1]]], axis=1)
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
        waits[waits[:, 1] - waits[:, 0] > 1e-9 * max(float(end.max(initial=0.0)), 1e-9)],
        lanes,
    )


def report_rows(report: Report, devices: Sequence[int]) -> list[Row]:
    """Rows of some devices of a forecast."""
    times = report.play.step.times
    begin, end = np.asarray(times.begin), np.asarray(times.end)
    return [device_row(report, device, begin, end) for device in devices]


def replay_rows(run: Any, unit: float, devices: Sequence[int]) -> list[Row]:
    """Rows of some devices of a schedule that was played with given times, a `ScheduleReplay`.

    unit: what becomes 1 on the axis of time [s].
    """
    table = run.table
    rows = []
    for device in devices:
        own = [stage for stage, owner in enumerate(table.stage_device) if owner == device]
        actions = list(actions_of(table.orders[device]))
        kept = [i for i, action in enumerate(actions) if action.kind not in ACTIVATION_TRANSFERS]
        parts = [WHOLE] * len(actions)
        for i in kept:
            if table.slots[table.slot[table.starts[device] + i]].follows:  # a pair, of equal begin and end
                parts[i - 1], parts[i] = (0.0, 0.5), (0.5, 1.0)
        rows.append(
            Row(
                device,
                f"device {device}",
                np.asarray([run.begin[device][i] / unit for i in kept]),
                np.asarray([run.end[device][i] / unit for i in kept]),
                [str(actions[i].kind) for i in kept],
                np.asarray([actions[i].stage for i in kept], dtype=int),
                np.asarray([own.index(actions[i].stage) for i in kept], dtype=int),
                np.asarray([actions[i].microbatch for i in kept], dtype=int),
                np.asarray([parts[i] for i in kept], dtype=float).reshape(-1, 2),
            )
        )
    return rows


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


# ---------------------------------------------------------------------------------------------- bars


class KindLooks(NamedTuple):
    """Name, hue and hatch of a kind of action."""

    words: str
    colour: str
    hatch: str


KINDS = {
    "N": KindLooks("forward, output alone", "#6a8caf", "oo"),
    "Y": KindLooks("loss of the batch", "#a50026", "++++"),
    "Z": KindLooks("gradients of outputs", style.STONE, "----"),
    "F": KindLooks("forward", style.BLUE, ""),
    "BW": KindLooks("backward", style.ORANGE, "////"),
    "B": KindLooks("backward, inputs", style.OCHRE, "\\\\\\\\"),
    "W": KindLooks("backward, weights", style.ROSE, "xxxx"),
    "R": KindLooks("recompute", style.WINE, "||||"),
    "O": KindLooks("optimizer", style.GREY, ""),
}
AGAIN = KindLooks("recompute, inside a pass", style.WINE, "||||")
WAIT: dict[str, Any] = {"facecolor": "white", "edgecolor": style.FAINT, "hatch": "......", "linewidth": 0.0}
LANES = {"tp": "tensor", "cp": "context", "ep": "expert", "dp": "data", "pp": "pipeline", "copy": "copies"}

DIGIT = 0.636 * style.SMALL / 72
"""Width of a digit in a bar [in]."""

NUMBER = 0.085
"""Least height of a bar, or of half a bar, with a number [in]."""

SEEN = 0.015
"""Least width of a wait that is drawn [in]."""

LANE, GAP = 0.032, 0.05
"""Height of a lane of communication, and distance of rows [in]."""

LEFT, RIGHT = 0.62, 0.12
"""Margins left and right of the rows [in]."""

BINS = 1600
"""Columns of a lane of communication: ops are much shorter than print resolves."""

FAINTEST = 0.3
"""Opacity of a column in which communication is hardly busy; less would not be seen in print."""


@dataclass
class Panel:
    """A window of time [s], with the rows that are drawn in it.

    bar: height of a bar [in]. numbers: whether bars have numbers. letter: marks the window in the whole step.
    """

    start: float
    stop: float
    rows: Sequence[Row]
    bar: float
    numbers: bool
    lanes: Sequence[str] = ()
    letter: str = ""
    words: str = ""

    @property
    def row(self) -> float:
        """Distance of rows [in]."""
        return self.bar + LANE * len(self.lanes) + (GAP if self.bar > 0.08 else 0.3 * self.bar)

    @property
    def height(self) -> float:
        """Height of all rows [in]."""
        return self.row * len(self.rows)


def left_margin(rows: Sequence[Row]) -> float:
    """Room for the names of devices [in]."""
    return max(LEFT, max(text_width(row.name, style.TEXT) for row in rows) + 0.12)


def bar_height(rows: Sequence[Row]) -> float:
    """Least height of bars with numbers [in]: two passes of a pair have one above the other."""
    return NUMBER * (2 if any(row.is_paired for row in rows) else 1) + 0.02


def number_width(number: int) -> float:
    """Least width of a bar with the number of a micro-batch [in]."""
    return (len(str(number)) + 0.05) * DIGIT


def computing_pieces(begin: float, end: float, waits: np.ndarray, least: float) -> list[tuple[float, float]]:
    """Splits a bar at its waits of at least some length. waits: of its device, in their order (n, 2) [s]."""
    inside = waits[np.searchsorted(waits[:, 0], begin) : np.searchsorted(waits[:, 0], end)]
    pieces, at = [], begin
    for first, last in inside[inside[:, 1] - inside[:, 0] >= least]:
        pieces.append((at, float(first)))
        at = float(last)
    return [*pieces, (at, end)]


def draw_panel(axes: Any, panel: Panel, chunks: int, unit: tuple[float, str] | None = None) -> None:
    """Draws one panel. unit: units of the axis per second, and their name; those of the time if None."""
    scale = (unit or time_unit(panel.stop))[0]
    start, stop, rows = panel.start * scale, panel.stop * scale, panel.rows
    inches = axes.get_position().width * axes.figure.get_size_inches()[0]
    tall = panel.bar / panel.row
    second = (panel.stop - panel.start) / inches  # seconds an inch
    faces = {kind: style.shades(looks.colour, chunks) for kind, looks in KINDS.items()}
    polygons: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    tones: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    waiting, stripes = [], []
    for y, row in enumerate(rows):
        for i in np.flatnonzero((row.end > panel.start) & (row.begin < panel.stop)):
            a, b = max(row.begin[i], panel.start), min(row.end[i], panel.stop)
            low, high = y + tall * row.part[i]
            kind = row.kind[i]
            face = faces[kind][0 if kind == "O" else row.chunk[i]]
            polygons[kind].append(_box(a * scale, b * scale, low, high))
            tones[kind].append(face)
            if panel.numbers and panel.row * (high - low) >= NUMBER and kind != "O":
                label, pieces = str(row.microbatch[i]), computing_pieces(a, b, row.waits, SEEN * second)
                least = number_width(row.microbatch[i]) * second
                c, d = max(pieces, key=lambda piece: piece[1] - piece[0])
                if d - c > least:
                    _write_number(axes, (c + d) / 2 * scale, (low + high) / 2, label, face)
                elif b - a > least:  # between its waits no piece has room
                    _write_number(axes, (a + b) / 2 * scale, (low + high) / 2, label, (1.0, 1.0, 1.0))
        for begin, end in row.waits[row.waits[:, 1] - row.waits[:, 0] >= SEEN * second]:
            if end > panel.start and begin < panel.stop:
                a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                waiting.append(_box(a, b, y + 0.08 * tall, y + 0.92 * tall))
        if panel.numbers:
            for begin, end in row.again:
                if end > panel.start and begin < panel.stop:
                    a, b = max(begin, panel.start) * scale, min(end, panel.stop) * scale
                    stripes.append(_box(a, b, y + tall * 0.84, y + tall))
        _draw_lanes(axes, panel, row, y + tall, (start, stop))
    rim = 0.35 if panel.numbers else 0.0
    for kind, boxes in polygons.items():
        if boxes:
            looks: dict[str, Any] = {"facecolors": tones[kind], "edgecolors": "white", "linewidths": rim, "zorder": 2}
            if panel.numbers:
                looks["hatch"] = KINDS[kind].hatch
            axes.add_collection(PolyCollection(boxes, label=kind, **looks))
    if waiting:
        hatch = WAIT["hatch"] if panel.numbers else ""
        axes.add_collection(
            PolyCollection(
                waiting, facecolors="white", edgecolors=WAIT["edgecolor"], linewidths=0.0, hatch=hatch, zorder=3,
                label="wait",
            )
        )  # fmt: skip
    if stripes:
        axes.add_collection(
            PolyCollection(stripes, facecolors=AGAIN.colour, edgecolors="none", zorder=4, label="again")
        )
    axes.set_xlim(start, stop)
    axes.set_ylim(len(rows), -0.06)
    every = max(1, math.ceil(0.115 / panel.row))
    shown = list(range(0, len(rows), every))
    axes.set_yticks([y + tall / 2 for y in shown], [rows[y].name for y in shown])
    axes.tick_params(axis="y", length=0, pad=3)


def _box(left: float, right: float, low: float, high: float) -> tuple[tuple[float, float], ...]:
    return ((left, low), (right, low), (right, high), (left, high))


def _write_number(axes: Any, x: float, y: float, label: str, face: style.RGB) -> None:
    """Writes a number on a patch of its bar's colour, which keeps the hatch away from it."""
    axes.text(
        x, y, label, ha="center", va="center_baseline", fontsize=style.SMALL, color=style.ink_on(face), zorder=5,
        bbox={"facecolor": face, "edgecolor": "none", "pad": 0.2},
    )  # fmt: skip


def _draw_lanes(axes: Any, panel: Panel, row: Row, top: float, ends: tuple[float, float]) -> None:
    edges = np.linspace(panel.start, panel.stop, BINS + 1)
    thin = LANE / panel.row
    for k, lane in enumerate(panel.lanes):
        if lane in row.lanes:
            image = np.empty((1, BINS, 4))
            image[..., :3] = style.rgb(style.AXES[lane])
            share = busy_share(row.lanes[lane], edges)
            image[0, :, 3] = np.where(share > 0, FAINTEST + (1 - FAINTEST) * share, 0.0)
            low = top + thin * k
            axes.imshow(
                image, extent=(*ends, low + 0.8 * thin, low + 0.1 * thin), aspect="auto", interpolation="nearest",
                zorder=1,
            )  # fmt: skip


# -------------------------------------------------------------------------------------------- legend

LEGEND_LINE = 0.15
"""Height of a line of the legend [in]."""
PADDING = 0.4 * style.SMALL / 72
"""Room that matplotlib leaves around the entries [in]."""
SHOWN_SHADES = 5
"""Most shades of chunks in an entry."""


class LegendEntry(NamedTuple):
    """Words beside swatches of one hue. edge: colour of their hatch. strip: whether it is a strip, not a bar."""

    words: str
    tones: list[style.RGB]
    hatch: str = ""
    edge: Any = "white"
    strip: bool = False


def legend_entries(rows: Sequence[Row], lanes: Sequence[str], chunks: int, waits: bool = False) -> list[LegendEntry]:
    """Returns the kinds of actions and communication in the rows. waits: whether waits inside passes are drawn."""
    present = {kind for row in rows for kind in row.kind}
    entries = []
    for kind, looks in KINDS.items():
        if kind in present:
            tones = style.shades(looks.colour, 1 if kind == "O" else chunks)
            shown = [tones[round(i * (len(tones) - 1) / max(1, SHOWN_SHADES - 1))] for i in range(SHOWN_SHADES)]
            entries.append(LegendEntry(looks.words, tones if len(tones) <= SHOWN_SHADES else shown, looks.hatch))
    if any(len(row.again) for row in rows):
        entries.append(LegendEntry(AGAIN.words, [style.rgb(AGAIN.colour)], AGAIN.hatch))
    if waits:
        entries.append(LegendEntry("wait inside a pass", [(1.0, 1.0, 1.0)], WAIT["hatch"], WAIT["edgecolor"]))
    for lane in lanes:
        words = LANES[lane] if lane == "copy" else f"{LANES[lane]} comm."
        entries.append(LegendEntry(words, [style.rgb(style.AXES[lane])], strip=True))
    return entries


def legend_columns(entries: Sequence[LegendEntry]) -> int:
    """Returns how many entries of the legend fit a line of the layout."""
    beside = (swatch_length(entries) + 0.5 + 1.1) * style.SMALL / 72

    def wide(columns: int) -> float:
        """Computes the width of a legend with so many columns [in]; entries fill them from top to bottom."""
        lines = math.ceil(len(entries) / columns)
        full = len(entries) - (lines - 1) * columns  # as matplotlib fills them: the first columns are longer
        at, width = 0, 0.0
        for column in range(columns):
            count = lines if column < full else lines - 1
            width += max((text_width(entry.words) for entry in entries[at : at + count]), default=0.0) + beside
            at += count
        return width

    room = style.layout_width() - 2 * EDGE + PADDING
    return next((n for n in range(len(entries), 1, -1) if wide(n) <= room), 1)


def legend_height(entries: Sequence[LegendEntry]) -> float:
    """Height of the legend [in]."""
    return LEGEND_LINE * math.ceil(len(entries) / legend_columns(entries)) + 0.06


def swatch_length(entries: Sequence[LegendEntry]) -> float:
    """Length of a swatch in type sizes: all shades of a hue have room."""
    return max(1.8, 0.7 * max(len(entry.tones) for entry in entries))


def draw_legend(sheet: Sheet, entries: Sequence[LegendEntry], top: float) -> Any:
    """Draws the legend with its upper end at `top` [in]."""
    handles: Any = [
        Line2D([], [], color=entry.tones[0], linewidth=2.4, solid_capstyle="butt")
        if entry.strip
        else tuple(Patch(facecolor=tone, edgecolor=entry.edge, hatch=entry.hatch, linewidth=0) for tone in entry.tones)
        for entry in entries
    ]
    return sheet.figure.legend(
        handles,
        [entry.words for entry in entries],
        loc="upper left",
        bbox_to_anchor=((EDGE - PADDING) / sheet.width, 1 - top / sheet.height),
        ncols=legend_columns(entries),
        frameon=False,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        handlelength=swatch_length(entries),
        handleheight=0.9,
        columnspacing=1.1,
        handletextpad=0.5,
        borderpad=0.2,
        borderaxespad=0.2,
    )
