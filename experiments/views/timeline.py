"""Timelines of pipeline devices through a step: their actions, waits, recomputation, and communication by axis.

A timeline is made of the times of all ops of a step, or of a schedule that was played with stated times; of a step with
millions of ops, which was played by matrices, `matrix_timeline` makes it without the times of all ops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.categories import axis_of
from meshcast.simulator.report.device_ops import device_ops
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.metrics import Metrics
from meshcast.simulator.scheduling.schedule import BETWEEN_PASSES, actions_of

if TYPE_CHECKING:
    from meshcast.validation.pipelines.cases import ScheduleReplay

UPDATE = "O"
"""Kind of the optimizer update, as that of schedules without a flush."""

WHOLE = 0.0, 1.0
"""Lower and upper end of an action that fills its bar, in shares of the height of a bar."""
FIRST, SECOND = (0.0, 0.5), (0.5, 1.0)
"""The same of the two passes of a pair."""

MIN_SHARE = 1e-6
"""Busy share below which a bin is idle: sums of many moments are rounded."""

Intervals = list[tuple[np.ndarray, np.ndarray]]
"""Begins and ends of several streams [s]."""


@dataclass
class DeviceTimeline:
    """The actions of a pipeline device that compute: arrays with an entry for each.

    begin, end: of its first and last kernel [s].
    kind: of the action (`ActionKind`), or `UPDATE`.
    stage, chunk, microbatch: of the action, stages numbered over all pipelines; -1, 0 and -1 of an update.
    part: lower and upper end in shares of the height of a bar [actions, 2]; the passes of a pair have halves.
    recomputed: time in which its kernels compute activations again [s].
    again: begin and end of recomputation within the actions [runs, 2] [s]; none without the times of all ops.
    waits: begin and end of times within the actions when no kernel computes, in their order [waits, 2] [s]; likewise.
    lanes: communication by axis.
    """

    device: int
    name: str
    begin: np.ndarray
    end: np.ndarray
    kind: list[str]
    stage: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    part: np.ndarray
    recomputed: np.ndarray
    again: np.ndarray = field(default_factory=lambda: np.empty((0, 2)))
    waits: np.ndarray = field(default_factory=lambda: np.empty((0, 2)))
    lanes: Mapping[str, Intervals] = field(default_factory=dict)

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

    def bin_lanes(self, edges: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the busy share of every bin by axis of communication. edges: of the bins [s]."""
        return {axis: busy_shares(intervals, edges) for axis, intervals in self.lanes.items()}


def time_unit(span: float) -> tuple[float, str]:
    """Chooses units per second, and the name of the unit, for times up to `span` [s]."""
    return (1.0, "s") if span >= 2 else (1e3, "ms")


class TimelineRow(NamedTuple):
    """One action, with the fields of `DeviceTimeline`."""

    begin: float
    end: float
    kind: str
    stage: int
    chunk: int
    microbatch: int
    part: tuple[float, float]
    recomputed: float = 0.0


def make_timeline(device: int, name: str, rows: Sequence[TimelineRow], **more: Any) -> DeviceTimeline:
    """Makes the timeline of a device of its actions. more: the fields of `DeviceTimeline` with a default."""
    begin, end, kind, *numbers, part, recomputed = zip(*rows, strict=True) if rows else [()] * len(TimelineRow._fields)
    times = np.asarray(begin, float), np.asarray(end, float)
    stage, chunk, microbatch = (np.asarray(column, int) for column in numbers)
    parts = np.asarray(part, float).reshape(-1, 2)
    seconds = np.asarray(recomputed, float)
    return DeviceTimeline(device, name, *times, list(kind), stage, chunk, microbatch, parts, seconds, **more)


def chunk_of(plan: Plan, stage: int) -> int:
    """Finds which of the chunks of its device a stage is."""
    pipeline, place = plan.model_parts.pipeline_of(stage)
    return place // plan.every_pipeline[pipeline].shape.p


# ------------------------------------------------------------------------------------------- of all ops


class _Pieces(NamedTuple):
    """Places of ops among those of an action of a slot of the timetable.

    bar: first and last kernel.
    waits: kernels before and behind each place where another op stands.
    again: first and last kernel of each run of recomputation.
    recomputed: time of these kernels [s].
    """

    bar: list[tuple[int, int]]
    waits: np.ndarray
    again: list[tuple[int, int]]
    recomputed: float


def _find_pieces(ops: Any, seconds: Any) -> _Pieces:
    """Finds the kernels among the ops of an action. seconds: how long every op lasts."""
    kernels = [i for i, op in enumerate(ops) if op.stream == COMPUTE and seconds[i] > 0]
    runs: list[tuple[int, int]] = []
    for before, i in zip([-1, *kernels], kernels, strict=False):
        if ops[i].phase == "R":
            joined = runs and runs[-1][1] == before
            runs[-1:] = [(runs[-1][0], i)] if joined else [*runs[-1:], (i, i)]
    gaps = np.array([*pairwise(kernels)], dtype=int).reshape(-1, 2)
    recomputed = float(sum(seconds[i] for i in kernels if ops[i].phase == "R"))
    return _Pieces([(kernels[0], kernels[-1])] if kernels else [], gaps, runs, recomputed)


def step_timelines(metrics: Metrics, devices: Sequence[int]) -> list[DeviceTimeline]:
    """Returns the timelines of some devices of a forecast, from the times of all their ops."""
    return [_step_timeline(metrics, device) for device in devices]


def _step_timeline(metrics: Metrics, device: int) -> DeviceTimeline:
    """Makes the timeline of a device."""
    table, plan = metrics.play.program.timetable, metrics.play.plan
    flat, times = device_ops(metrics.play.step, device)
    begin, end = np.asarray(times.begin), np.asarray(times.end)
    pieces_of: dict[int, _Pieces] = {}
    rows: list[TimelineRow] = []
    again: list[tuple[int, int]] = []
    gaps = [np.empty((0, 2), dtype=int)]
    for action in range(table.starts[device], table.starts[device + 1]):
        start, slot = flat.first[action], table.slot[action]
        if slot not in pieces_of:
            stop = flat.behind[action]
            pieces_of[slot] = _find_pieces(flat.ops[start:stop], flat.seconds[start:stop])
        pieces, is_paired = pieces_of[slot], table.slots[slot].partner is not None
        # The first action of a pair has the ops of both passes.
        passes = [(table.actions[action], FIRST if is_paired else WHOLE, pieces.recomputed)]
        if is_paired:
            passes.append((table.actions[action + 1], SECOND, 0.0))
        for head, tail in pieces.bar:
            ends = float(begin[start + head]), float(end[start + tail])
            rows += [
                TimelineRow(*ends, turn.kind, turn.stage, chunk_of(plan, turn.stage), turn.microbatch, part, seconds)
                for turn, part, seconds in passes
            ]
        again += [(start + a, start + b) for a, b in pieces.again]
        gaps.append(start + pieces.waits)
    # The optimizer waits for other devices in between: its kernels are drawn apart.
    for number in flat.updates[device] if flat.updates else ():
        if flat.ops[number].stream == COMPUTE and flat.seconds[number] > 0:
            rows.append(TimelineRow(float(begin[number]), float(end[number]), UPDATE, -1, 0, -1, WHOLE))
    lanes: dict[str, Intervals] = {}
    for (owner, stream), queue in flat.queues.items():
        if owner == device and stream != COMPUTE:
            numbers = np.asarray(queue)
            numbers = numbers[end[numbers] > begin[numbers]]
            if len(numbers):
                lanes.setdefault(axis_of(flat.ops[queue[0]]), []).append((begin[numbers], end[numbers]))
    runs = np.asarray(again, dtype=int).reshape(-1, 2)
    between = np.concatenate(gaps)
    waits = np.stack([end[between[:, 0]], begin[between[:, 1]]], axis=1)
    least = 1e-9 * max(float(end.max(initial=0.0)), 1e-9)
    return make_timeline(
        device,
        name_device(plan, device),
        rows,
        again=np.stack([begin[runs[:, 0]], end[runs[:, 1]]], axis=1),
        waits=waits[waits[:, 1] - waits[:, 0] > least],
        lanes=lanes,
    )


def replay_timelines(run: ScheduleReplay, devices: Sequence[int]) -> list[DeviceTimeline]:
    """Returns the timelines of some devices of a schedule that was played with stated times."""
    table = run.table
    timelines = []
    for device in devices:
        stages = [stage for stage, owner in enumerate(table.stages.devices) if owner == device]
        actions = list(actions_of(table.orders[device]))
        parts = [WHOLE] * len(actions)
        for i in range(len(actions)):
            if table.slots[table.slot[table.starts[device] + i]].follows:  # a pair, of equal begin and end
                parts[i - 1], parts[i] = FIRST, SECOND
        begin, end = run.begin[device], run.end[device]
        rows = [
            TimelineRow(begin[i], end[i], str(kind), stage, stages.index(stage), microbatch, parts[i])
            for i, (stage, kind, microbatch, *_) in enumerate(actions)
            if kind not in BETWEEN_PASSES
        ]
        timelines.append(make_timeline(device, f"device {device}", rows))
    return timelines


# ------------------------------------------------------------------------------------ shares of the time


class Occupation(NamedTuple):
    """Shares of the time of all devices: kernels compute, passes wait, nothing is between passes. They add up to 1."""

    computing: float
    waiting: float
    between: float


def measure_occupation(timelines: Sequence[DeviceTimeline], span: float) -> Occupation:
    """Measures shares of a step's time. span: of the step [s]."""
    total = len(timelines) * span
    bars, waits = sum(row.in_bars for row in timelines), sum(row.in_waits for row in timelines)
    return Occupation((bars - waits) / total, waits / total, 1 - bars / total) if total else Occupation(1.0, 0.0, 0.0)


def usual_pass(timelines: Sequence[DeviceTimeline]) -> float:
    """Returns the median duration of forward passes [s], of those that share no bar if any; 0 if none is drawn."""
    alone, paired = [], []
    for row in timelines:
        forward = np.array([kind == "F" for kind in row.kind], bool)
        half = row.part[:, 1] - row.part[:, 0] < 1
        durations = row.end - row.begin
        alone.append(durations[forward & ~half])
        paired.append(durations[forward & half])
    durations = next((some for some in map(np.concatenate, (alone, paired)) if len(some)), np.zeros(1))
    return float(np.median(durations))


def count_busy(intervals: Intervals, edges: np.ndarray) -> np.ndarray:
    """Computes how many intervals run on average in every bin; they come in any order [s]. edges: of the bins [s]."""

    def sum_elapsed(moments: np.ndarray) -> np.ndarray:
        """Sums over moments the time since each, at every edge."""
        ordered = np.sort(moments)
        count = np.searchsorted(ordered, edges)
        return count * edges - np.concatenate([[0.0], np.cumsum(ordered)])[count]

    begin, end = (np.concatenate([ends[i].ravel() for ends in intervals]) for i in (0, 1))
    elapsed: np.ndarray = sum_elapsed(begin) - sum_elapsed(end)
    return np.diff(elapsed) / np.maximum(np.diff(edges), 1e-300)


def busy_shares(intervals: Intervals, edges: np.ndarray) -> np.ndarray:
    """Computes the busy share of every bin, at most 1.

    intervals: in any order [s].
    edges: of the bins [s].
    """
    shares = np.clip(count_busy(intervals, edges), 0.0, 1.0)
    return np.where(shares > MIN_SHARE, shares, 0.0)


def merge_bins(busy: np.ndarray, edges: np.ndarray, levels: int = 8) -> Iterator[tuple[float, float, float]]:
    """Yields begin, end and busy share of runs of bins with equal shares, in steps of 1 / levels; idle ones not."""
    steps = np.ceil(busy * levels - 1e-6).astype(int)
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
        if steps[first]:
            yield float(edges[first]), float(edges[last]), float(steps[first]) / levels
