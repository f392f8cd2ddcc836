"""Bars of a pipeline device through a step: passes, waits inside them, recomputation and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.categories import axis_of
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.words import name_device
from meshcast.simulator.scheduling.schedule import ACTIVATION_TRANSFERS, actions_of

WHOLE = 0.0, 1.0
"""Lower and upper end of an action that fills its bar, in shares of the height of a bar."""


def _no_pairs() -> np.ndarray:
    return np.empty((0, 2))


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
    again: np.ndarray = field(default_factory=_no_pairs)
    """Start and end of recomputation within the actions [s] (n, 2)."""
    waits: np.ndarray = field(default_factory=_no_pairs)
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
