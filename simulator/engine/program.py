"""The program of a step: every op of every device, in flat lists, ready to be played.

A fragment is compiled once per kind of action into a *task* (ops in issue order, their dependencies, their prices); the
orders of the devices say which task runs when. One device stands for all ranks that execute the same thing. Transfers
between stages and the meeting of devices in one collective are put in here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from simulator.ops import Collective, Fragment, Op, Touch, Transfer, Work
from simulator.schedule import Action, Schedule, Shape, requires

Price = Callable[[Work], tuple[float, float]]
"""Seconds that an op occupies its stream, and the further latency until others see its result."""

Event = tuple[int, bool, float, str]
"""An op's place in its task, at its end (or begin), bytes more or less, category."""


@dataclass
class StageProgram:
    """A stage as the schedule sees it: its fragment, the tensors at its ends, and the bytes that go on to the next."""

    fragment: Fragment
    entry: str | None = None
    exit: str | None = None
    message: int = 0


@dataclass
class Task:
    """The compiled ops of one action. `outside` are ops that wait for what the action receives; `result`: the op after
    which the action's result exists, as places in `ops`."""

    ops: list[Op]
    seconds: list[float]
    latency: list[float]
    after: list[tuple[int, ...]]
    outside: list[int]
    result: tuple[int, ...]
    events: list[Event]
    free: list[int]
    """Ops that depend on nothing in the task."""


@dataclass
class Program:
    """Flat lists over op instances; `queues` maps (device, stream) to instances in issue order."""

    devices: int
    ops: list[Op] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    queues: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(list))
    actions: list[list[tuple[Action, int, Task]]] = field(default_factory=list)
    """Per device: the actions, each with its first instance and its task."""
    transfers: list[tuple[int, int, int]] = field(default_factory=list)
    """(instance, sender, receiver)."""

    def turns(self) -> list[tuple[int, Task, int]]:
        """Every task of every device, with the number of times that it runs."""
        found: dict[tuple[int, int], tuple[int, Task, int]] = {}
        for device, actions in enumerate(self.actions):
            for _, _, task in actions:
                _, _, count = found.get((device, id(task)), (device, task, 0))
                found[device, id(task)] = (device, task, count + 1)
        return list(found.values())

    def add(self, op: Op, seconds: float, latency: float, after: tuple[int, ...], device: int) -> int:
        self.ops.append(op)
        self.seconds.append(seconds)
        self.latency.append(latency)
        self.after.append(after)
        self.queues[device, op.stream].append(len(self.ops) - 1)
        return len(self.ops) - 1


def compile_task(
    ops: list[Op], price: Price, events: Iterable[tuple[Op, bool, float, str]], entry: Op | None, result: Op | None
) -> Task:
    """Flattens `ops`: marks are replaced by what they wait for; `entry` is the mark of what comes from outside."""
    place = {id(op): i for i, op in enumerate(ops)}
    found: dict[int, tuple[frozenset[int], bool]] = {}

    def sources(op: Op) -> tuple[frozenset[int], bool]:
        """Places that stand behind an op of this task or a mark, and whether the outside does too."""
        if id(op) in place:
            return frozenset((place[id(op)],)), False
        if op is entry:
            return frozenset(), True
        if op.work is not None:
            return frozenset(), False
        if id(op) not in found:
            parts = [sources(other) for other in op.after]
            found[id(op)] = frozenset().union(*(p for p, _ in parts)), any(o for _, o in parts)
        return found[id(op)]

    after: list[tuple[int, ...]] = []
    outside: list[int] = []
    for i, op in enumerate(ops):
        parts = [sources(other) for other in op.after]
        after.append(tuple(sorted(frozenset().union(*(p for p, _ in parts)))))
        if any(o for _, o in parts):
            outside.append(i)
    prices = [price(op.work) if op.work is not None else (0.0, 0.0) for op in ops]
    return Task(
        ops,
        [s for s, _ in prices],
        [w for _, w in prices],
        after,
        outside,
        tuple(sorted(sources(result)[0])) if result is not None else (),
        [(place[id(op)], at_end, nbytes, category) for op, at_end, nbytes, category in events if id(op) in place],
        [i for i, deps in enumerate(after) if not deps],
    )


def memory_events(touches: Iterable[Touch], forward: list[Op], backward: list[Op]) -> list[tuple[Op, bool, float, str]]:
    """When memory comes and goes: from the begin of the first op that touches a key to the end of the last one."""
    place = {id(op): i for i, op in enumerate([*forward, *backward])}
    spans: dict[str, list[Touch]] = defaultdict(list)
    for touch in touches:
        if id(touch.op) in place and touch.nbytes:
            spans[touch.key].append(touch)
    events: list[tuple[Op, bool, float, str]] = []
    for members in spans.values():
        first = min(members, key=lambda t: place[id(t.op)]).op
        last = max(members, key=lambda t: place[id(t.op)]).op
        nbytes = max(t.nbytes for t in members)
        category = next((t.category for t in members if t.category != "workspace"), "workspace")
        if category == "workspace" and place[id(first)] < len(forward) <= place[id(last)]:
            category = "activations"
        events += [(first, False, nbytes, category), (last, True, -nbytes, category)]
    return events


class Builder:
    """Puts the tasks of all stages into the orders of a schedule.

    overlap_sends: a device goes on while it sends; otherwise its next action waits for the send.
    updates: per device, the fragment that runs when all its actions are done.
    """

    def __init__(
        self,
        shape: Shape,
        schedule: Schedule,
        stages: Sequence[StageProgram],
        price: Price,
        axis: str = "pp",
        overlap_sends: bool = True,
        updates: Sequence[Fragment] = (),
    ) -> None:
        self.shape, self.schedule, self.stages, self.price = shape, schedule, stages, price
        self.axis, self.overlap_sends, self.updates = axis, overlap_sends, updates
        self.split = len(schedule.backward.split()) > 1
        self._tasks: dict[tuple[int, str, bool, bool], Task] = {}
        self._events: dict[int, list[tuple[Op, bool, float, str]]] = {}

    def build(self) -> Program:
        """The program of one step.

        Raises what the schedule raises for an impossible shape or order.
        """
        orders = self.schedule.orders(self.shape)
        program = Program(self.shape.p)
        base: dict[Action, int] = {}
        sent: dict[Action, int] = {}
        tasks: dict[Action, Task] = {}
        plans: list[list[tuple[Action, Task]]] = []
        count = 0
        # Numbers are given out first, for an action may wait for one of a device that comes later.
        for order in orders:
            plan = []
            final = {(action.stage, action.kind): action for action in order}
            seen: set[tuple[int, str]] = set()
            for action in order:
                turn = (action.stage, action.kind)
                task = self._task(action, turn not in seen, final[turn] is action)
                seen.add(turn)
                plan.append((action, task))
                tasks[action] = task
                base[action] = count
                count += len(task.ops)
                if self._receiver(action) is not None:
                    sent[action] = count
                    count += 1
            plans.append(plan)
            if self.updates:
                count += len(self._update(len(plans) - 1).ops)

        meetings: dict[tuple[Collective, int], list[int]] = defaultdict(list)
        for device, plan in enumerate(plans):
            program.actions.append([])
            waiting: tuple[int, ...] = ()
            for action, task in plan:
                received = self._received(action, base, sent, tasks)
                start = self._place(program, device, action, task, received, waiting)
                waiting = ()
                if action in sent:
                    receiver = self._receiver(action)
                    assert receiver is not None
                    stream = "pipeline-forward" if action.kind == "F" else "pipeline-backward"
                    work = Transfer(self._message(action), self.axis, device, receiver)
                    seconds, latency = self.price(work)
                    after = tuple(start + i for i in task.result)
                    number = program.add(Op(f"send {action}", stream, work), seconds, latency, after, device)
                    program.transfers.append((number, device, receiver))
                    if not self.overlap_sends:
                        waiting = (number,)
            if self.updates:
                tails = tuple(queue[-1] for (d, _), queue in program.queues.items() if d == device)
                task = self._update(device)
                start = self._place(program, device, Action(device, "O", 0), task, (), (*tails, *waiting))
                ordinal: dict[Collective, int] = defaultdict(int)
                for i, op in enumerate(task.ops):
                    if isinstance(op.work, Collective) and self.axis in op.work.axes and self.shape.p > 1:
                        meetings[op.work, ordinal[op.work]].append(start + i)
                        ordinal[op.work] += 1
        for members in meetings.values():
            # A collective begins when all members have come: each waits for the mark in front of every other.
            arrived = tuple(number - 1 for number in members)
            for number in members:
                program.after[number] = (*program.after[number], *arrived)
        return program

    # ---------------------------------------------------------------------------------------- inside

    def _place(
        self,
        program: Program,
        device: int,
        action: Action,
        task: Task,
        received: tuple[int, ...],
        waiting: tuple[int, ...],
    ) -> int:
        start = len(program.ops)
        outside = set(task.outside) if received else set()
        free = set(task.free) if waiting else set()
        for i, op in enumerate(task.ops):
            after = tuple(start + j for j in task.after[i])
            if i in outside:
                after = (*after, *received)
            if i in free:
                after = (*after, *waiting)
            program.add(op, task.seconds[i], task.latency[i], after, device)
        program.actions[device].append((action, start, task))
        return start

    def _received(
        self, action: Action, base: dict[Action, int], sent: dict[Action, int], tasks: dict[Action, Task]
    ) -> tuple[int, ...]:
        """Instances that bring what `action` needs from another stage."""
        numbers: list[int] = []
        for need in requires(action, self.shape, self.split):
            if need.stage == action.stage:
                continue
            if need in sent:
                numbers.append(sent[need])
            else:
                numbers += [base[need] + i for i in tasks[need].result]
        return tuple(numbers)

    def _receiver(self, action: Action) -> int | None:
        """The device that needs the result of `action`; None when it stays on its own."""
        target = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind == "W" or not 0 <= target < self.shape.stages:
            return None
        device = self.schedule.device(self.shape, target)
        return None if device == self.schedule.device(self.shape, action.stage) else device

    def _message(self, action: Action) -> int:
        """Bytes of an activation, or of its gradient, between this stage and the next it goes to."""
        return self.stages[action.stage if action.kind == "F" else action.stage - 1].message

    def _task(self, action: Action, first: bool, last: bool) -> Task:
        stage = self.stages[action.stage]
        fragment = stage.fragment
        ops = fragment.forward if action.kind == "F" else fragment.backward
        variants = {op.when for op in ops}
        key = (id(fragment), action.kind, first and "first" in variants, last and "last" in variants)
        if key not in self._tasks:
            if action.kind in ("B", "W"):
                ops = [op for op in ops if (op.phase == "W") == (action.kind == "W")]
            turns = {"every"} | ({"first"} if first else set()) | ({"last"} if last else set())
            ops = [op for op in ops if op.when in turns]
            if id(fragment) not in self._events:
                backward = (
                    sorted(fragment.backward, key=lambda op: op.phase == "W") if self.split else fragment.backward
                )
                self._events[id(fragment)] = memory_events(fragment.touches, fragment.forward, backward)
            if action.kind == "F":
                entry, result = fragment.entry.get(stage.entry or ""), fragment.exit.get(stage.exit or "")
            else:
                entry, result = fragment.grad_entry.get(stage.exit or ""), fragment.grad_exit.get(stage.entry or "")
            self._tasks[key] = compile_task(ops, self.price, self._events[id(fragment)], entry, result)
        return self._tasks[key]

    def _update(self, device: int) -> Task:
        key = (device, "O", False, False)
        if key not in self._tasks:
            ops: list[Op] = []
            own: dict[int, Op] = {}
            for op in self.updates[device].forward:
                after = [own.get(id(other), other) for other in op.after]
                if isinstance(op.work, Collective) and self.axis in op.work.axes and self.shape.p > 1:
                    # The mark stays in the stream: its end is the moment at which this device has come.
                    ops.append(Op(f"arrive {op.name}", op.stream, None, after, op.phase))
                    after = ops[-1:]
                ops.append(Op(op.name, op.stream, op.work, after, op.phase))
                own[id(op)] = ops[-1]
            self._tasks[key] = compile_task(ops, self.price, (), None, None)
        return self._tasks[key]
