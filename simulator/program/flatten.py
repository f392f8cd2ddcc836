"""A program op by op: lists with an entry for every op of every action; the ops that an op waits for precede it.

The SimPy engine and the longest-path engine play it; traces and timeline plots show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import field
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import COMPUTE, Op
from meshcast.simulator.plan.size import YES, accepts_any_size
from meshcast.simulator.program.block import INPUT
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import PricedSideOps, Send, Task
from meshcast.simulator.scheduling.schedule import ActionKind

MAX_OPS = 3_000_000
"""Most ops of a flat program that is built unasked: 0.5 kB and, by the engine, 4 to 7 us each (measured on 845,000 ops:
420 MB, 3.4 s with `sweep`, 5.9 s on SimPy)."""


Meeting = Sequence[tuple[int, int]]
"""Device and place of each of the ops that begin together; see `Program.meetings`."""


@dataclass
class FlatProgram:
    """Lists with an entry for each op instance: one execution of an op.

    seconds, latency: see `BlockPrices`.
    issue: time of the host to launch the op [s].
    after: instances that each waits for.
    queues: instances by device and stream, in issue order.
    first, behind: by action of the timetable, its first instance, and that past its last.
    updates: the instances of every device's update.
    sent: (instance, sender, receiver) of every message.
    """

    ops: list[Op] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    issue: list[float] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    queues: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    first: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)
    updates: list[list[int]] = field(default_factory=list)
    sent: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, op: Op, seconds: float, latency: float, issue: float, after: tuple[int, ...], device: int) -> int:
        """Adds an instance, and returns its number."""
        self.ops.append(op)
        self.seconds.append(seconds)
        self.latency.append(latency)
        self.issue.append(issue)
        self.after.append(after)
        self.device.append(device)
        self.queues[device, op.stream].append(len(self.ops) - 1)
        return len(self.ops) - 1

    def add_task(self, task: FlatTask, device: int) -> list[tuple[int, ...]]:
        """Adds all ops of a task, and returns the instances of the task that each waits for: `after` is still without
        them."""
        start, columns = len(self.ops), task.columns
        self.ops += columns.ops
        self.seconds += columns.seconds
        self.latency += columns.latency
        self.issue += columns.issue
        self.device += [device] * len(columns.ops)
        for stream, places in columns.queues.items():
            self.queues[device, stream] += [start + place for place in places]
        # Most ops wait for a single one, for which no comprehension runs.
        return [
            (start + places[0],) if len(places) == 1 else tuple([start + place for place in places])
            for places in columns.after
        ]


FlatOp = tuple[Op, float, float, float, tuple[int, ...]]
"""An op of a task with its seconds, latency, time of the host to launch it [s], and the places that it waits for."""


@dataclass
class FlatTask:
    """A task's ops in issue order. A place is an index into `ops`.

    outside: for each port the places of the ops that wait for its input.
    result: for each port the places of the ops that must end before its result exists.
    through: for each port whether its result also waits for its input.
    """

    ops: list[FlatOp]
    outside: list[set[int]]
    result: list[tuple[int, ...]]
    through: list[bool]

    @cached_property
    def columns(self) -> TaskColumns:
        """Its ops by column."""
        ops, seconds, latency, issue, after = [*map(list, zip(*self.ops, strict=True))] or [[]] * 5
        queues: dict[str, list[int]] = {}
        for place, op in enumerate(ops):
            queues.setdefault(op.stream, []).append(place)
        roots = [place for place, places in enumerate(after) if not places]
        return TaskColumns(ops, seconds, latency, issue, after, queues, roots, COMPUTE in queues)


class TaskColumns(NamedTuple):
    """The columns of `FlatTask.ops`, which many actions of a step repeat.

    queues: places by stream.
    roots: places of the ops that wait for none of the task.
    computes: whether any op is on the compute stream.
    """

    ops: list[Op]
    seconds: list[float]
    latency: list[float]
    issue: list[float]
    after: list[tuple[int, ...]]
    queues: dict[str, list[int]]
    roots: list[int]
    computes: bool


def flatten_task(task: Task, host: float) -> FlatTask:
    """Flattens all copies of all parts of a task, and its side ops, which hooks launch without time of the host.

    host: time of the host to launch an op [s].
    """
    flattening = _TaskFlattening(task, host)
    for side in task.ahead:
        flattening.add_ahead(side)
    for number, part in enumerate(task.parts):
        for copy in range(part.count):
            flattening.add_copy(number, copy)
    for side in task.behind:
        flattening.add_behind(side)
    return flattening.flat


class _TaskFlattening:
    """A task while it is flattened.

    gathered: by parameter, the places of the side ops that its first use waits for.
    ready: by parameter, the places of the ops that complete its gradient; `INPUT`: the input of the task.
    begins: of the side ops behind the passes, the place of the first.
    """

    def __init__(self, task: Task, host: float) -> None:
        self.task, self.host = task, host
        ports = range(task.ports)
        self.flat = FlatTask([], [set() for _ in ports], [() for _ in ports], [True for _ in ports])
        self.gathered: dict[int, list[int]] = defaultdict(list)
        self.ready: dict[int, tuple[int, ...]] = {}
        self.begins: dict[PricedSideOps, int] = {}

    def add_ahead(self, side: PricedSideOps) -> None:
        """Adds side ops that the first use of parameters waits for."""
        for param, owner in zip(side.params.tolist(), _owners(side), strict=True):
            self.gathered[param].append(len(self.flat.ops) + owner)
        self._add_side(side, [()] * len(side.ops))

    def add_copy(self, number: int, copy: int) -> None:
        """Adds a copy of a part of the task."""
        part, flat, start = self.task.parts[number], self.flat, len(self.flat.ops)
        waits, ports = self._note_parameters(number, copy), part.block.ports
        for i, op in enumerate(part.block.ops):
            after = (*(start + j for j in part.block.after[i]), *waits.get(i, ()))
            for at in (at for at, port in enumerate(ports) if i in port.entry):
                after += flat.result[at]
                if flat.through[at]:
                    flat.outside[at].add(len(flat.ops))
            flat.ops.append((op, part.seconds[i], part.latency[i], self.host * op.issued, after))
        for at, port in enumerate(ports):
            flat.result[at] = (*(flat.result[at] if port.through else ()), *(start + j for j in port.exit))
            flat.through[at] &= port.through

    def _note_parameters(self, number: int, copy: int) -> dict[int, list[int]]:
        """Notes what completes the gradients of a copy's parameters.

        Returns by op of the copy the side ops that have to bring its parameters.
        """
        waits: dict[int, list[int]] = defaultdict(list)
        marks = self.task.marks[number] if self.task.marks else ()
        start, first, flat = len(self.flat.ops), self.task.copy_of(number, copy) if marks else 0, self.flat
        for param, places in enumerate(marks, first):
            self.ready[param] = tuple(start + place for place in places if place != INPUT)
            if INPUT in places:
                self.ready[param] += (*flat.result[0], *((INPUT,) if flat.through[0] else ()))
            for place in places:
                waits[place] += self.gathered.get(param, ())
        return waits

    def add_behind(self, side: PricedSideOps) -> None:
        """Adds side ops that wait for gradients."""
        begin = self.begins[side] = len(self.flat.ops)
        waits: list[set[int]] = [set() for _ in side.ops]
        if side.after:
            others, indices = side.after
            for wait, index in zip(waits, indices.tolist(), strict=True):
                wait |= {self.begins[others] + index} if index >= 0 else set()
        for param, owner in zip(side.params.tolist(), _owners(side), strict=True):
            waits[owner].update(self.ready[param])
        self.flat.outside[0] |= {begin + i for i, places in enumerate(waits) if INPUT in places}
        self._add_side(side, [tuple(sorted(places - {INPUT})) for places in waits])

    def _add_side(self, side: PricedSideOps, waits: Sequence[tuple[int, ...]]) -> None:
        rows = zip(side.ops, side.seconds.tolist(), side.latency.tolist(), waits, strict=True)
        self.flat.ops += [(op, seconds, latency, 0.0, after) for op, seconds, latency, after in rows]


def _owners(side: PricedSideOps) -> list[int]:
    """Returns for each parameter of side ops the index of the op that it belongs to."""
    return np.repeat(np.arange(len(side.lengths)), side.lengths).tolist()


def flatten(program: Program) -> FlatProgram:
    """Flattens a whole step.

    Raises PlanError for a step of more than `MAX_OPS` ops.
    """
    check_ops(program, MAX_OPS, "played op by op")
    flattening, actions = _StepFlattening(program), program.timetable.sequence
    flattening.flat.first, flattening.flat.behind = [0] * len(actions), [0] * len(actions)
    for action in actions:
        flattening.add_action(action)
    flattening.add_updates()
    return flattening.flat


def check_ops(program: Program, most: int, what: str) -> None:
    """Raises PlanError for a step of more than `most` ops, unless any size is accepted. what: is done with them."""
    count = sum(turns * sum(times for _, times in task.count_ops()) for task, turns in program.turns())
    if count > most and not accepts_any_size():
        rule = f"a step is {what} up to {most:,} ops, this one has {count:,}"
        raise PlanError("batch.global", rule, f"Draw, trace or verify a step with fewer micro-batches; {YES}")


def flatten_updates(updates: Sequence[Task], meetings: Sequence[Meeting], host: float) -> FlatProgram:
    """Flattens the updates of all devices alone, once for all programs with the same ones.

    meetings, host: see `Program`.
    """

    def make() -> FlatProgram:
        flattening = _UpdateFlattening(updates, meetings, host)
        flattening.add_updates()
        return flattening.flat

    if not updates:
        return make()
    key = "flat updates", tuple(updates), tuple(map(tuple, meetings)), host
    flat: FlatProgram = remember(updates[0].engine_results, key, make)
    return flat


class _UpdateFlattening:
    """The updates of a step while they are flattened.

    waiting: by device, sends that its next kernel waits for.
    tails: by device, instances that its update waits for.
    """

    def __init__(self, updates: Sequence[Task], meetings: Sequence[Meeting], host: float) -> None:
        self.updates, self.meetings, self.host, self.flat = updates, meetings, host, FlatProgram()
        self.waiting: list[tuple[int, ...]] = [()] * len(updates)
        self.tails: list[tuple[int, ...]] = []

    def add_updates(self) -> None:
        """Adds the updates: each begins when its device has finished all actions, and a collective over the pipeline
        axis when all of its devices have reached it.
        """
        self.tails = list(self.waiting)
        for (device, _), queue in self.flat.queues.items():
            self.tails[device] += (queue[-1],)
        self.flat.updates = [[] for _ in self.updates]
        meeting_at = {at: number for number, meeting in enumerate(self.meetings) for at in meeting}
        while any([self._advance_update(device, meeting_at) for device in range(len(self.updates))]):
            pass

    def _advance_update(self, device: int, meeting_at: dict[tuple[int, int], int]) -> bool:
        """Adds the ops of an update up to a collective that not all of its devices have reached.

        Returns whether there were any.
        """
        task, added, host = self.updates[device], self.flat.updates[device], self.host
        # Flattened once: it is asked for whenever a step is played.
        update = remember(task.engine_results, ("flat", host), partial(flatten_task, task, host))
        begin = len(added)
        for op, seconds, latency, issue, after in update.ops[begin:]:
            number = meeting_at.get((device, len(added)))
            meeting = () if number is None else self.meetings[number]
            if any(len(self.flat.updates[other]) < place for other, place in meeting):
                break
            waits = *(added[place] for place in after), *(self.flat.updates[d][place - 1] for d, place in meeting)
            added.append(self.flat.add(op, seconds, latency, issue, waits or self.tails[device], device))
        return len(added) > begin


class _StepFlattening(_UpdateFlattening):
    """A step while it is flattened.

    result: by number of a result, the instances after which it exists.
    second_result: of the second action of an overlapped pair, those of its result.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.updates, program.meetings, program.host)
        self.program, self.table = program, program.timetable
        self.tasks: dict[Task, FlatTask] = {}
        self.result: list[tuple[int, ...]] = [()] * self.table.results
        self.second_result: dict[int, tuple[int, ...]] = {}
        self.waiting = [()] * program.devices

    def add_action(self, action: int) -> None:
        """Adds the ops of an action and the messages that carry its result."""
        flat, device = self.flat, self.table.device_of[action]
        task = self._flat_task(self.program.tasks[self.table.slot[action]])
        received = [self._input_of(action + port) for port in range(len(task.result))]
        flat.first[action] = len(flat.ops)
        waits = flat.add_task(task, device)
        for instances, outside in zip(received, task.outside, strict=True):
            for place in outside if instances else ():
                waits[place] += instances
        for place in task.columns.roots if self.waiting[device] else ():
            waits[place] += self.waiting[device]
        flat.after += waits
        flat.behind[action] = len(flat.ops)
        self._send_result(action, self._result_of(action, task, received))

    def _result_of(self, action: int, task: FlatTask, received: list[tuple[int, ...]]) -> tuple[int, ...]:
        """Returns the instances after which the result of an action exists. received: its inputs, by port."""
        slot, device, start = self.table.slot[action], self.table.device_of[action], self.flat.first[action]
        if self.table.slots[slot].follows:
            return self.second_result.pop(action)
        # An action without computation passes the wait for its sends on to the next action.
        if task.columns.computes:
            self.waiting[device] = ()
        results = [
            (*(instances if through else ()), *(start + place for place in places))
            for instances, through, places in zip(received, task.through, task.result, strict=True)
        ]
        self.second_result[action + 1] = results[-1]
        return results[0]

    def _send_result(self, action: int, result: tuple[int, ...]) -> None:
        """Sends the result of an action to every stage that needs it."""
        slot = self.table.slot[action]
        self._send(action, action, self.program.sends[slot], result)
        others = self.program.others.get(slot, ())
        for number, send in zip(self.table.extra_results.get(action, ()), others, strict=False):
            self._send(action, number, send, result)

    def _input_of(self, action: int) -> tuple[int, ...]:
        needs = (self.table.need[action], *self.table.further_needs.get(action, ()))
        return tuple(instance for need in needs if need >= 0 for instance in self.result[need])

    def _send(self, action: int, number: int, send: Send | None, result: tuple[int, ...]) -> None:
        """Sends the result of an action, which has a number for each of several receivers."""
        self.result[number] = result
        if send is not None:
            table, device = self.table, self.table.device_of[action]
            kind = table.slots[table.slot[action]].kind
            phase = "F" if kind in (ActionKind.FORWARD, ActionKind.AHEAD, ActionKind.OUTPUTS) else "B"
            op = Op(f"send {table.actions[action]}", send.stream, send.work, [], phase)
            instance = self.flat.add(op, send.seconds, send.latency, self.host, result, device)
            self.flat.sent.append((instance, device, send.target))
            self.result[number] = (instance,)
            if not self.program.overlap_sends:
                self.waiting[device] += (instance,)

    def _flat_task(self, task: Task) -> FlatTask:
        return remember(self.tasks, task, partial(flatten_task, task, self.host))
