"""When every action of a step runs, and how busy communication is meanwhile, without the times of all ops.

A step of 64 stages and 512 micro-batches has millions of ops, but 65 thousand actions. The (max,+) engine knows the
state before every action, from which the times of its ops follow; actions of one task that find equal states run alike
and are computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from meshcast.simulator.engine.maxplus import NEVER, Coordinates
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.engine.task_player import Play, states
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.block import PricedBlock
from meshcast.simulator.program.categories import EXPOSED, axis_of
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import PricedSideOps, Task

UPDATE = "O"
"""Kind of the optimizer update, as that of schedules without a flush."""

DECIMALS = 12
"""Decimals to which states are rounded where equal ones are computed once [s]."""

Intervals = list[tuple[np.ndarray, np.ndarray]]

AxisIntervals = tuple[str, np.ndarray, np.ndarray]
"""Axis of communication, and begins and ends [intervals, columns]."""


@dataclass(frozen=True)
class ActionTimes:
    """The actions of one pipeline device that compute: arrays with an entry for each.

    begin, end: of its first and last kernel [s].
    kinds: of the actions (`ActionKind`), or `UPDATE`.
    stage, microbatch: of the action, stages numbered over all pipelines; -1 of an update.
    paired: 0 of an action that runs alone; 1 and 2 of the first and second of two overlapped passes.
    recomputed: time in which its kernels compute activations again [s].
    busy: by axis of communication, the busy share of every bin of the step; `edges` of the bins [s].
    """

    device: int
    begin: np.ndarray
    end: np.ndarray
    kinds: list[str]
    stage: np.ndarray
    microbatch: np.ndarray
    paired: np.ndarray
    recomputed: np.ndarray
    busy: dict[str, np.ndarray]
    edges: np.ndarray


def action_times(step: ByMatrices, device: int, bins: int = 500) -> ActionTimes:
    """Returns the actions of a device of a step that was played by matrices. bins: of `ActionTimes.busy`."""
    return _DeviceActions(step, device).collect(bins)


class _DeviceActions:
    """Collects the rows of one device.

    rows: begin, end, kind, stage, micro-batch, paired, recomputed of every action.
    sent: intervals of communication by axis [s].
    """

    def __init__(self, step: ByMatrices, device: int) -> None:
        self.program: Program = step.program
        self.play: Play = step.play
        self.coordinates: Coordinates = step.coordinates
        self.span, self.device = step.span, device
        self.rows: list[tuple[float, float, str, int, int, int, float]] = []
        self.sent: dict[str, Intervals] = defaultdict(list)

    def collect(self, bins: int) -> ActionTimes:
        table = self.program.timetable
        groups: dict[Task, list[int]] = {}
        for action in range(table.starts[self.device], table.starts[self.device + 1]):
            groups.setdefault(self.program.tasks[table.slot[action]], []).append(action)
        for task, actions in groups.items():
            if task.parts or task.ahead or task.behind:
                self._add_task(task, actions)
        self._add_sends()
        self._add_update()
        self.rows.sort(key=lambda row: row[:2])
        columns = [*zip(*self.rows, strict=True)] if self.rows else [()] * 7
        begin, end, kinds, stage, microbatch, paired, recomputed = columns
        edges = np.linspace(0.0, self.span, bins + 1)
        return ActionTimes(
            self.device,
            np.array(begin, float),
            np.array(end, float),
            list(kinds),
            np.array(stage, int),
            np.array(microbatch, int),
            np.array(paired, int),
            np.array(recomputed, float),
            {axis: busy_shares(self.sent[axis], edges) for axis in EXPOSED if axis in self.sent},
            edges,
        )

    def _add_task(self, task: Task, actions: list[int]) -> None:
        """Adds all actions of one task: those that find equal states, up to a shift, are computed once."""
        axes = self.coordinates
        before = states(axes, task, self.play, actions)
        if axes.host is not None:
            before[axes.host] = [self.play.host[action] for action in actions]
        if task.behind:
            before[axes.port] = [self.play.arrival[action] for action in actions]
        shift = before[0].copy()
        before = np.where(before > NEVER, before - shift, before)
        _, chosen, which = np.unique(np.round(before, DECIMALS), axis=1, return_index=True, return_inverse=True)
        begin, end, intervals = self._walk(task, before[:, chosen])
        recomputed = sum(part.count * _recompute_seconds(part) for part in task.parts)
        table = self.program.timetable
        for action, column in zip(actions, np.ravel(which).tolist(), strict=True):
            at = float(self.play.entry[action])
            if end[column] > begin[column]:
                slot, scheduled = table.slots[table.slot[action]], table.actions[action]
                both = at + float(begin[column]), at + float(end[column])
                paired = int(slot.partner is not None)
                self.rows.append((*both, scheduled.kind, scheduled.stage, scheduled.microbatch, paired, recomputed))
                if slot.partner is not None:
                    other = table.actions[action + 1]
                    self.rows.append((*both, other.kind, other.stage, other.microbatch, 2, 0.0))
        for axis, first, last in intervals:
            later = shift[None, :]
            columns = np.ravel(which)
            self.sent[axis].append(((first[:, columns] + later).ravel(), (last[:, columns] + later).ravel()))

    def _walk(self, task: Task, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[AxisIntervals]]:
        """Begin and end of computation by column, and the begins and ends of communication [intervals, columns]."""
        begin, end = np.full(before.shape[1], np.inf), np.full(before.shape[1], NEVER)
        intervals: list[AxisIntervals] = []
        for walked in self.coordinates.walk(task, before):
            if isinstance(walked.item, PricedSideOps):
                if (axis := axis_of(walked.item.ops[0])) != COMPUTE:
                    intervals.append((axis, walked.begin, walked.begin + walked.item.lasting[:, None]))
                continue
            part, seconds = walked.item, np.array(walked.item.seconds)
            shift = np.broadcast_to(np.asarray(walked.shift, float), before.shape[1:])
            kernels = [i for i, op in enumerate(part.block.ops) if op.stream == COMPUTE and seconds[i] > 0]
            if kernels:
                begin = np.minimum(begin, walked.begin[0, kernels].min(axis=0))
                last = (walked.begin[-1, kernels] + seconds[kernels, None]).max(axis=0) + walked.repeats * shift
                end = np.maximum(end, last)
            for axis, places in part.block.by_axis.items():
                if axis in EXPOSED:
                    first = walked.begin[:, places].reshape(-1, before.shape[1])
                    lasting = np.tile(part.lasting[places], len(walked.begin))
                    intervals.append((axis, first, first + lasting[:, None]))
                    if walked.repeats:
                        again = walked.begin[-1, places] + np.arange(1, walked.repeats + 1)[:, None, None] * shift
                        again = again.reshape(-1, before.shape[1])
                        lasting = np.tile(part.lasting[places], walked.repeats)
                        intervals.append((axis, again, again + lasting[:, None]))
        return begin, end, intervals

    def _add_sends(self) -> None:
        table = self.program.timetable
        sent, slots = np.array(self.play.sent), table.slot_array
        for slot, send in enumerate(self.program.sends):
            if send is not None and send.source == self.device:
                begin = sent[slots == slot]
                self.sent["pp"].append((begin, begin + send.seconds + send.latency))
        for slot, sends in self.program.others.items():
            for turn, send in enumerate(sends):
                if send is not None and send.source == self.device:
                    actions = np.flatnonzero(slots == slot).tolist()
                    begin = np.array([self.play.sent_extra[table.extra_results[action][turn]] for action in actions])
                    self.sent["pp"].append((begin, begin + send.seconds + send.latency))

    def _add_update(self) -> None:
        """Adds the kernels of the optimizer between which the device does not wait, and its communication."""
        flat, times = self.play.tail_ops, self.play.tail
        for number in flat.updates[self.device] if flat.updates else ():
            op, begin, end = flat.ops[number], float(times.begin[number]), float(times.end[number])
            if end <= begin:
                continue
            if op.stream != COMPUTE:
                axis, last = axis_of(op), end + flat.latency[number]
                if axis in EXPOSED:
                    self.sent[axis].append((np.array([begin]), np.array([last])))
            elif self.rows and self.rows[-1][2] == UPDATE and begin <= self.rows[-1][1] + 1e-12:
                self.rows[-1] = (self.rows[-1][0], end, UPDATE, -1, -1, 0, 0.0)
            else:
                self.rows.append((begin, end, UPDATE, -1, -1, 0, 0.0))


def _recompute_seconds(part: PricedBlock) -> float:
    """Returns time of the recomputing kernels of one copy [s]."""
    ops = zip(part.block.ops, part.seconds, strict=True)
    return sum(seconds for op, seconds in ops if op.phase == "R" and op.stream == COMPUTE)


def busy_shares(intervals: Intervals, edges: np.ndarray) -> np.ndarray:
    """Returns the busy share of every bin, at most 1. intervals: begins and ends in any order [s]. edges: of the bins
    [s]."""

    def sum_elapsed(moments: np.ndarray) -> np.ndarray:
        """Sum over moments of the time since each, at every edge."""
        ordered = np.sort(moments)
        count = np.searchsorted(ordered, edges)
        return count * edges - np.concatenate([[0.0], np.cumsum(ordered)])[count]

    begin, end = (np.concatenate([interval[i].ravel() for interval in intervals]) for i in (0, 1))
    total = sum_elapsed(begin) - sum_elapsed(end)
    return np.clip(np.diff(total) / np.maximum(np.diff(edges), 1e-300), 0.0, 1.0)


def merge_bins(busy: np.ndarray, edges: np.ndarray, levels: int = 8) -> Iterator[tuple[float, float, float]]:
    """Yields begin, end and busy share of runs of bins with equal shares, in steps of 1 / levels; idle ones not."""
    steps = np.ceil(busy * levels - 1e-6).astype(int)
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    for first, last in zip(starts.tolist(), [*starts[1:].tolist(), len(steps)], strict=True):
        if steps[first]:
            yield float(edges[first]), float(edges[last]), float(steps[first]) / levels
