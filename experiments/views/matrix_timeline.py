"""Timelines of the devices of a step that was played by matrices, without the times of all ops.

A step of 64 stages and 512 micro-batches has millions of ops, but 65 thousand actions. The (max,+) engine knows the
state before every action, from which the times of its ops follow; actions of a task that begin with equal states run
alike and are computed once.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from meshcast.experiments.views.timeline import (
    FIRST,
    SECOND,
    UPDATE,
    WHOLE,
    DeviceTimeline,
    Intervals,
    TimelineRow,
    chunk_of,
    make_timeline,
)
from meshcast.simulator.engine.maxplus import NEVER, Coordinates
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.engine.task_player import Play, states
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import PricedBlock
from meshcast.simulator.program.categories import EXPOSED, axis_of
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import PricedSideOps, Task
from meshcast.simulator.report.formatting import name_device
from meshcast.simulator.report.metrics import Metrics

DECIMALS = 12
"""Decimals to which states are rounded where equal ones are computed once [s]."""

AxisIntervals = tuple[str, np.ndarray, np.ndarray]
"""Axis of communication, and begins and ends [intervals, columns]."""


def matrix_timeline(metrics: Metrics, device: int) -> DeviceTimeline:
    """Returns the timeline of a device; communication has its latency, too."""
    step = metrics.play.step
    assert isinstance(step, ByMatrices)
    plan = metrics.play.plan
    actions = _DeviceActions(plan, step, device)
    actions.collect()
    lanes = {axis: actions.sent[axis] for axis in EXPOSED if axis in actions.sent}
    rows = sorted(actions.rows, key=lambda row: row[:2])
    return make_timeline(device, name_device(plan, device), rows, lanes=lanes)


class _DeviceActions:
    """Collects the rows of a device.

    sent: intervals of communication by axis [s].
    """

    def __init__(self, plan: Plan, step: ByMatrices, device: int) -> None:
        self.plan = plan
        self.program: Program = step.program
        self.play: Play = step.play
        self.coordinates: Coordinates = step.coordinates
        self.device = device
        self.rows: list[TimelineRow] = []
        self.sent: dict[str, Intervals] = defaultdict(list)

    def collect(self) -> None:
        """Adds all actions, and all communication."""
        table = self.program.timetable
        groups: dict[Task, list[int]] = {}
        for place, slot in enumerate(table.slot[table.starts[self.device] : table.starts[self.device + 1]]):
            groups.setdefault(self.program.tasks[slot], []).append(place)
        for task, places in groups.items():
            if task.parts or task.ahead or task.behind:
                self._add_task(task, np.array(places))
        self._add_sends()
        self._add_update()

    def _add_task(self, task: Task, places: np.ndarray) -> None:
        """Adds all actions of a task: those that begin with equal states, up to a shift, are computed once. places: in
        the order of the device."""
        axes, times = self.coordinates, self.play.of_device(self.device)
        before = states(axes, task, self.play, self.device, places)
        if axes.host is not None:
            before[axes.host] = times.host[places]
        if task.behind:
            before[axes.port] = times.arrival[places]
        shift = before[0].copy()
        before = np.where(before > NEVER, before - shift, before)
        _, chosen, which = np.unique(np.round(before, DECIMALS), axis=1, return_index=True, return_inverse=True)
        begin, end, sent = self._walk(task, before[:, chosen])
        recomputed = sum(part.count * _recompute_seconds(part) for part in task.parts)
        table = self.program.timetable
        for place, column in zip(places.tolist(), np.ravel(which).tolist(), strict=True):
            at, action = float(times.entry[place]), times.first + place
            if end[column] > begin[column]:
                is_paired = table.slots[table.slot[action]].partner is not None
                both = at + float(begin[column]), at + float(end[column])
                passes = [(table.actions[action], FIRST if is_paired else WHOLE, recomputed)]
                if is_paired:
                    passes.append((table.actions[action + 1], SECOND, 0.0))
                for turn, part, seconds in passes:
                    chunk = chunk_of(self.plan, turn.stage)
                    self.rows.append(TimelineRow(*both, turn.kind, turn.stage, chunk, turn.microbatch, part, seconds))
        for axis, first, last in sent:
            later = shift[None, :]
            columns = np.ravel(which)
            self.sent[axis].append(((first[:, columns] + later).ravel(), (last[:, columns] + later).ravel()))

    def _walk(self, task: Task, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[AxisIntervals]]:
        """Returns begin and end of computation by column, and those of communication [intervals, columns].

        before: states before the task [coordinates, columns].
        """
        begin, end = np.full(before.shape[1], np.inf), np.full(before.shape[1], NEVER)
        sent: list[AxisIntervals] = []
        for walked in self.coordinates.walk(task, before):
            if isinstance(walked.item, PricedSideOps):
                if (axis := axis_of(walked.item.ops[0])) != COMPUTE:
                    sent.append((axis, walked.begin, walked.begin + walked.item.lasting[:, None]))
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
                    later = np.arange(1, walked.repeats + 1)[:, None, None] * shift
                    copies = np.concatenate([walked.begin[:, places], walked.begin[-1, places] + later])
                    first = copies.reshape(-1, before.shape[1])
                    sent.append((axis, first, first + np.tile(part.lasting[places], len(copies))[:, None]))
        return begin, end, sent

    def _add_sends(self) -> None:
        table = self.program.timetable
        slots = table.slot_array[table.starts[self.device] : table.starts[self.device + 1]]
        for slot, send in enumerate(self.program.sends):
            if send is not None and send.source == self.device:
                begin = self.play.of_device(self.device).sent[slots == slot]
                self.sent["pp"].append((begin, begin + send.seconds + send.latency))
        for slot, sends in self.program.others.items():
            for turn, send in enumerate(sends):
                if send is not None and send.source == self.device:
                    actions = np.flatnonzero(table.slot_array == slot).tolist()
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
            elif self.rows and self.rows[-1].kind == UPDATE and begin <= self.rows[-1].end + 1e-12:
                self.rows[-1] = self.rows[-1]._replace(end=end)
            else:
                self.rows.append(TimelineRow(begin, end, UPDATE, -1, 0, -1, WHOLE))


def _recompute_seconds(part: PricedBlock) -> float:
    """Sums the time of the recomputing kernels of a copy [s]."""
    ops = zip(part.block.ops, part.seconds, strict=True)
    return sum(seconds for op, seconds in ops if op.phase == "R" and op.stream == COMPUTE)
