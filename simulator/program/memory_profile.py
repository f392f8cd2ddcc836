"""Memory as it was played: peaks per device, by category.

An allocator serves the host, which takes and gives memory back in the order in which it issues ops, however far behind
the GPU is. So memory follows the issue order: what an op makes is there from its issue; what it was the last to need
is free once it is issued, or, where it runs on a stream beside the computation, once somebody has waited for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from simulator.ir.ops import COMPUTE, Op, TensorUse, UnitRun
from simulator.scheduling.schedule import MOVES

if TYPE_CHECKING:
    from simulator.engine.longest_path import OpTimes
    from simulator.program.build import Program
    from simulator.program.flatten import FlatProgram

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "workspace", "buffers", "logits", "other")

Event = tuple[int, bool, float, str]
"""An op's place (-1: before the first), at its end (or begin), bytes more or less, category."""


@dataclass(frozen=True)
class Peak:
    """The largest sum of all categories on one device, and its parts at that moment [bytes].

    left: what was not given back by the end of the step.
    """

    total: float
    by: dict[str, float]
    left: float


@dataclass(frozen=True)
class Profile:
    """What a run of ops does to memory, by `CATEGORIES` [bytes]: `net` from its begin to its end, `top` at its peak.

    The peak is never below what was there before.
    """

    net: np.ndarray
    top: np.ndarray

    @cached_property
    def grown(self) -> float:
        """The sum of `net`."""
        return float(self.net.sum())

    @cached_property
    def peak(self) -> float:
        """The sum of `top`."""
        return float(self.top.sum())

    @classmethod
    def of(cls, events: Iterable[Event]) -> Profile:
        """From events; at one place memory is taken before it is given back."""
        level, highest = [0.0] * len(CATEGORIES), 0.0
        total, top = 0.0, list(level)
        for _, _, nbytes, category in sorted(events, key=lambda event: event[:2]):
            level[CATEGORIES.index(category)] += nbytes
            total += nbytes
            if total > highest:
                top, highest = list(level), total
        return cls(np.array(level), np.array(top))

    @classmethod
    def step(cls, nbytes: float, category: str) -> Profile:
        """Memory taken (or, below zero, given back) at once."""
        return cls.of([(0, False, nbytes, category)])

    @classmethod
    def in_series(cls, parts: Iterable[tuple[Profile, int]]) -> Profile:
        """Of profiles one after another, each so many times."""
        level = top = np.zeros(len(CATEGORIES))
        held = highest = 0.0
        for part, count in parts:
            # What grows from copy to copy is highest in the last one.
            before = count - 1 if part.grown > 0 else 0
            if held + before * part.grown + part.peak > highest:
                top = level + before * part.net + part.top
                highest = held + before * part.grown + part.peak
            level = level + count * part.net
            held += count * part.grown
        return cls(level, top)


def memory_events(
    tensor_uses: Iterable[TensorUse], forward: list[Op], backward: list[Op], unit_run: UnitRun
) -> dict[int, list[Event]]:
    """When memory comes and goes, by the identity of the op: from the first op that touches a key to the last one.

    What comes in from the unit before was taken there and is given back here; what goes out is taken here. So it is
    with what the link finds, and leaves to others.
    """
    place = {id(op): i for i, op in enumerate([*forward, *backward])}
    spans: dict[str, list[TensorUse]] = defaultdict(list)
    for tensor_use in tensor_uses:
        if id(tensor_use.op) in place and tensor_use.nbytes:
            spans[tensor_use.key].append(tensor_use)
    taken, given = unit_run.keys
    found: dict[int, list[Event]] = defaultdict(list)
    for key, members in spans.items():
        first = min(members, key=lambda t: place[id(t.op)]).op
        last = max(members, key=lambda t: place[id(t.op)]).op
        nbytes = float(max(t.nbytes for t in members))
        category = next((t.category for t in members if t.category != "workspace"), "workspace")
        if key in (taken, given) or (category == "workspace" and place[id(first)] < len(forward) <= place[id(last)]):
            category = "activations"
        if key not in (taken, f"d:{given}", *unit_run.found):
            found[id(first)].append((0, False, nbytes, category))
        if key not in (given, f"d:{taken}", *unit_run.left):
            found[id(last)].append((0, True, -nbytes, category))
    return found


def block_events(ops: Sequence[Op], after: Sequence[Sequence[int]], by_op: dict[int, list[Event]]) -> list[Event]:
    """The events of `ops`, issued in this order, each at its place."""
    last = len(ops) - 1
    waiter: dict[int, int] = {}
    for i, places in enumerate(after):
        for j in places:
            waiter.setdefault(j, i)
    found: list[Event] = []
    for i, op in enumerate(ops):
        end = i if op.stream == COMPUTE else max(i, waiter.get(i, last + 1) - 1)
        found += [(end if at_end else i, at_end, n, category) for _, at_end, n, category in by_op.get(id(op), ())]
    return found


def peaks(program: Program, static: Sequence[dict[str, float]]) -> list[Peak]:
    """The peak of every device; `static` holds what lives through the whole step, by category [bytes]."""
    table = program.timetable
    # What runs beside the parts takes no memory of its own.
    known = {id(task.parts): task.memory for task in {id(task.parts): task for task in program.tasks}.values()}
    profiles = [known[id(task.parts)] for task in program.tasks]
    nets, tops = np.array([p.net for p in profiles]), np.array([p.top for p in profiles])
    net, top = nets.sum(axis=1), tops.sum(axis=1)
    buffers = CATEGORIES.index("buffers")
    found = []
    for device in range(program.devices):
        slots = table.slot_array[table.starts[device] : table.starts[device + 1]]
        flying = in_flight(program, device)
        before = np.cumsum(net[slots]) - net[slots]
        at = int(np.argmax(before + top[slots] + flying))
        played = np.bincount(slots[:at], minlength=len(nets)) @ nets + tops[slots[at]]
        played[buffers] += flying[at]
        by = dict(static[device])
        for category, nbytes in zip(CATEGORIES, played.tolist(), strict=True):
            if nbytes:
                by[category] = by.get(category, 0.0) + nbytes
        found.append(Peak(sum(by.values()), by, float(net[slots].sum())))
    return found


def in_flight(program: Program, device: int) -> np.ndarray:
    """Bytes of buffers in flight beside every action of a device.

    Where a device goes on while it sends, what it has sent lives through its next action, and what it is about to
    receive through the one before. What moves to another device lives through the next action that computes.
    """
    table = program.timetable
    slots = table.slot_array[table.starts[device] : table.starts[device + 1]]
    flying = np.zeros(len(slots))
    if program.overlap_sends:
        sent, coming = np.zeros(len(program.sends)), np.array(program.received, float)
        for slot, send in program.sent:
            sent[slot] += send.work.nbytes
        flying[1:] += sent[slots[:-1]]
        flying[:-1] += coming[slots[1:]]
    kinds = [table.slots[slot].kind for slot in slots.tolist()]
    for i in [i for i, kind in enumerate(kinds) if kind in ("E", "G")]:
        computes = next((j for j in range(i + 1, len(kinds)) if kinds[j] not in MOVES), i)
        flying[i + 1 : computes + 1] += sum(nbytes for nbytes, _ in program.tasks[slots[i]].goes)
    return flying


def over_time(
    program: Program, flat: FlatProgram, times: OpTimes, device: int, static: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The memory of a device through the step: moments [s], and from each on the bytes of every category
    [moments, categories]. It peaks where `peaks` says.

    Memory follows the issue order, so a moment is never before that of an op issued earlier.
    """
    table = program.timetable
    actions = range(table.starts[device], table.starts[device + 1])
    moments, changes = [np.zeros(1)], [np.array([[static.get(category, 0.0) for category in CATEGORIES]])]
    begin, end = np.array(times.begin), np.array(times.end)
    buffers = CATEGORIES.index("buffers")

    def note(moment: float, flying: float, flows: Iterable[tuple[float, str]], sign: int) -> None:
        row = np.zeros((1, len(CATEGORIES)))
        row[0, buffers] = flying
        for nbytes, category in flows:
            row[0, CATEGORIES.index(category)] += sign * nbytes
        moments.append(np.array([moment]))
        changes.append(row)

    own = slice(0)
    for action, flying in zip(actions, in_flight(program, device).tolist(), strict=True):
        task, start = program.tasks[table.slot[action]], flat.first[action]
        # What follows in a pair is played with the action before.
        own = slice(start, flat.behind[action]) if task.parts else own
        note(begin[own.start], flying, task.comes, 1)
        place = start + sum(len(side.ops) for side in task.ahead)
        for part in task.parts:
            at, at_end, rows = part.block.event_rows
            numbers = (place + np.arange(part.count)[:, None] * len(part.block.ops) + at).ravel()
            moments.append(np.where(np.tile(at_end, part.count), end[numbers], begin[numbers]))
            changes.append(np.tile(rows, (part.count, 1)))
            place += part.count * len(part.block.ops)
        note(end[own].max(), -flying, task.goes, -1)
    return np.maximum.accumulate(np.concatenate(moments)), np.cumsum(np.concatenate(changes), axis=0)
