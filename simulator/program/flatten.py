"""A program op by op: lists with an entry for every op of every action; the ops that an op waits for precede it.

The SimPy engine and the longest-path engine play it; traces and timeline plots show it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import COMPUTE, Op
from meshcast.simulator.program.block import INPUT
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.side_stream import PricedSideOps
from meshcast.simulator.program.task import Send, Task
from meshcast.simulator.scheduling.schedule import ActionKind

MAX_OPS = 20_000_000
"""Maximum number of ops of a flat program: some 10 GiB of memory, a minute or two."""


@dataclass
class FlatProgram:
    """Lists with an entry for each op instance: one execution of an op.

    seconds, latency: see `BlockPrices`.
    issue: time of the host to launch the op [s].
    after: instances that each one waits for.
    queues: instances by device and stream, in issue order.
    first, behind: by action of the timetable, its first instance, and one past its last.
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
        self.ops.append(op)
        self.seconds.append(seconds)
        self.latency.append(latency)
        self.issue.append(issue)
        self.after.append(after)
        self.device.append(device)
        self.queues[device, op.stream].append(len(self.ops) - 1)
        return len(self.ops) - 1


@dataclass
class FlatTask:
    """A task's ops in issue order: (op, seconds, latency, issue, after). A place is an index into `ops`.

    ops: `after` are the places that an op waits for.
    outside: for each port the places of the ops that wait for its input.
    result: for each port the places of the ops that must end before its result exists.
    through: for each port whether its result also waits for its input.
    """

    ops: list[tuple[Op, float, float, float, tuple[int, ...]]]
    outside: list[frozenset[int]]
    result: list[tuple[int, ...]]
    through: list[bool]


def flatten_task(task: Task, host: float) -> FlatTask:
    """Flattens all copies of all parts of a task, and its side ops, which hooks launch without time of the host.

    host: time of the host to launch one op [s].
    """
    ops: list[tuple[Op, float, float, float, tuple[int, ...]]] = []
    outside: list[list[int]] = [[] for _ in range(task.ports)]
    held: dict[int, list[int]] = defaultdict(list)
    for side in task.ahead:
        for number, owner in zip(side.params.tolist(), _owners(side), strict=True):
            held[number].append(len(ops) + owner)
        ops += [
            (op, s, w, 0.0, ()) for op, s, w in zip(side.ops, side.seconds.tolist(), side.latency.tolist(), strict=True)
        ]
    ready: dict[int, tuple[int, ...]] = {}
    result: list[tuple[int, ...]] = [()] * task.ports
    through = [True] * task.ports
    for number, part in enumerate(task.parts):
        block, marks = part.block, task.marks[number] if task.marks else ()
        for copy in range(part.count):
            start, first = len(ops), task.copy_of(number, copy) if marks else 0
            waits: dict[int, list[int]] = defaultdict(list)
            for i, places in enumerate(marks):
                ready[first + i] = tuple(start + j for j in places if j != INPUT)
                if INPUT in places:
                    ready[first + i] += (*result[0], *((INPUT,) if through[0] else ()))
                for place in places:
                    waits[place] += held.get(first + i, ())
            for i, op in enumerate(block.ops):
                after = (*(start + j for j in block.after[i]), *waits.get(i, ()))
                for at, port in enumerate(block.ports):
                    if i in port.entry:
                        after += result[at]
                        if through[at]:
                            outside[at].append(len(ops))
                ops.append((op, part.seconds[i], part.latency[i], host * op.issued, after))
            for at, port in enumerate(block.ports):
                result[at] = (*(result[at] if port.through else ()), *(start + j for j in port.exit))
                through[at] &= port.through
    begins: dict[PricedSideOps, int] = {}
    for side in task.behind:
        begins[side] = len(ops)
        waits_for: list[set[int]] = [set() for _ in side.ops]
        if side.after:
            start = begins[side.after[0]]
            for waits_of, place in zip(waits_for, side.after[1].tolist(), strict=True):
                waits_of |= {start + place} if place >= 0 else set()
        for number, owner in zip(side.params.tolist(), _owners(side), strict=True):
            waits_for[owner].update(ready[number])
        rows = zip(side.ops, side.seconds.tolist(), side.latency.tolist(), waits_for, strict=True)
        outside[0] += [len(ops) + i for i, places in enumerate(waits_for) if INPUT in places]
        ops += [(op, s, w, 0.0, tuple(sorted(places - {INPUT}))) for op, s, w, places in rows]
    return FlatTask(ops, [frozenset(places) for places in outside], result, through)


def _owners(side: PricedSideOps) -> list[int]:
    """Returns for each parameter of side ops the index of the op that it belongs to."""
    return np.repeat(np.arange(len(side.lengths)), side.lengths).tolist()


def flatten(program: Program) -> FlatProgram:
    """Flattens a whole step.

    Raises PlanError for a step of more than `MAX_OPS` ops.
    """
    count = sum(turns * sum(times for _, times in task.count_ops()) for task, turns in program.turns())
    if count > MAX_OPS:
        rule = f"a step is played op by op up to {MAX_OPS:,} ops, this one has {count:,}"
        raise PlanError("batch.global", rule, "Draw, trace or verify a step with fewer micro-batches")
    table, flat = program.timetable, FlatProgram()
    tasks = {task: flatten_task(task, program.host) for task in dict.fromkeys((*program.tasks, *program.updates))}
    flat.first, flat.behind = [0] * len(table.slot), [0] * len(table.slot)
    result: list[tuple[int, ...]] = [()] * table.results
    waiting: list[tuple[int, ...]] = [()] * program.devices
    second_result: dict[int, tuple[int, ...]] = {}

    def send(action: int, at: int, one: Send | None, made: tuple[int, ...]) -> None:
        device, slot = table.device_of[action], table.slots[table.slot[action]]
        result[at] = made
        if one is not None:
            phase = "F" if slot.kind in (ActionKind.F, ActionKind.AHEAD, ActionKind.OUTPUTS) else "B"
            op = Op(f"send {table.actions[action]}", one.stream, one.work, [], phase)
            number = flat.add(op, one.seconds, one.latency, program.host, made, device)
            flat.sent.append((number, device, one.target))
            result[at] = (number,)
            if not program.overlap_sends:
                waiting[device] += (number,)

    def input_of(action: int) -> tuple[int, ...]:
        needs = (table.need[action], *table.further_needs.get(action, ()))
        return tuple(number for need in needs if need >= 0 for number in result[need])

    for action in table.sequence:
        device, slot = table.device_of[action], table.slot[action]
        task = tasks[program.tasks[slot]]
        received = [input_of(action + i) for i in range(len(task.result))]
        start = flat.first[action] = len(flat.ops)
        for i, (op, seconds, latency, issue, after) in enumerate(task.ops):
            waits = tuple(start + j for j in after)
            for port, outside in zip(received, task.outside, strict=True):
                if i in outside:
                    waits += port
            if not after:
                waits += waiting[device]
            flat.add(op, seconds, latency, issue, waits, device)
        flat.behind[action] = len(flat.ops)
        if table.slots[slot].follows:
            made = second_result.pop(action)
        else:
            # An action without computation passes the wait for its sends on to the next action.
            waiting[device] = () if any(op.stream == COMPUTE for op, *_ in task.ops) else waiting[device]
            both = [
                (*(port if through else ()), *(start + j for j in places))
                for port, through, places in zip(received, task.through, task.result, strict=True)
            ]
            made, second_result[action + 1] = both[0], both[-1]
        send(action, action, program.sends[slot], made)
        for at, one in zip(table.extra_results.get(action, ()), program.others.get(slot, ()), strict=False):
            send(action, at, one, made)
    _updates(program, flat, tasks, waiting)
    return flat


def flatten_updates(program: Program) -> FlatProgram:
    """Flattens the updates alone."""
    flat = FlatProgram()
    tasks = {}
    for task in dict.fromkeys(program.updates):
        flatten_one = partial(flatten_task, task, program.host)
        tasks[task] = remember(task.engine_results, ("flat", program.host), flatten_one)
    _updates(program, flat, tasks, [()] * program.devices)
    return flat


def _updates(program: Program, flat: FlatProgram, tasks: dict[Task, FlatTask], waiting: list[tuple[int, ...]]) -> None:
    """Adds the updates to `flat`: each begins when its device has finished all actions, and a collective over the
    pipeline axis when all of its devices have reached it.
    """
    meeting_at = {at: number for number, meeting in enumerate(program.meetings) for at in meeting}
    tails = list(waiting)
    for (owner, _), queue in flat.queues.items():
        tails[owner] += (queue[-1],)
    flat.updates = [[] for _ in program.updates]
    arrived: dict[int, tuple[int, ...]] = {}
    moved = True
    while moved:
        moved = False
        for device, task in enumerate(program.updates):
            done, ops = flat.updates[device], tasks[task].ops
            while len(done) < len(ops):
                waits: tuple[int, ...] = ()
                if (number := meeting_at.get((device, len(done)))) is not None:
                    if number not in arrived:
                        meeting = program.meetings[number]
                        if any(len(flat.updates[d]) < i for d, i in meeting):
                            break
                        arrived[number] = tuple(flat.updates[d][i - 1] for d, i in meeting)
                    waits = arrived[number]
                op, seconds, latency, issue, after = ops[len(done)]
                waits = (*(done[j] for j in after), *waits)
                done.append(flat.add(op, seconds, latency, issue, waits or tails[device], device))
                moved = True
