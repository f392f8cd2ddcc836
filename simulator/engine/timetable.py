"""The timetable of a schedule: who does what in which order, checked, with the dependencies between devices.

Everything is a flat array over actions, device by device. An action's *slot* says which task it runs: stage, kind, and
whether it is the first or the last of its kind there.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from hardware.errors import ScheduleError
from simulator.schedule import Action, Schedule, Shape, table


class Slot(NamedTuple):
    """What actions of one task have in common."""

    stage: int
    kind: str
    first: bool
    last: bool


@dataclass(frozen=True)
class Rounds:
    """`count` rounds of `length` actions a device, the same in each but for the micro-batches.

    first: the number of every device's first action of the first round. All that a round needs lies in it or before it.
    waiting: results made before the first round and needed in it or later; each round leaves the same, `length` on.
    """

    first: list[int]
    length: int
    count: int
    waiting: list[int]


@dataclass(frozen=True)
class Timetable:
    """Actions numbered device by device, in the order of each device.

    starts: number of the first action of every device, and the end. slot: index into `slots`. need: the action on
    another stage whose result is needed, or -1. sequence: all actions so that each comes after what it needs.
    """

    shape: Shape
    orders: list[list[Action]]
    starts: list[int]
    slots: list[Slot]
    slot: list[int]
    need: list[int]
    sequence: list[int]
    stage_device: list[int]

    @cached_property
    def slot_array(self) -> np.ndarray:
        return np.asarray(self.slot)

    @cached_property
    def turns(self) -> list[int]:
        """How often every slot runs."""
        return np.bincount(self.slot_array, minlength=len(self.slots)).tolist()

    @cached_property
    def actions(self) -> list[Action]:
        """All actions, device by device."""
        return [action for order in self.orders for action in order]

    @cached_property
    def device_of(self) -> list[int]:
        """The device of every action."""
        return [d for d in range(self.shape.p) for _ in range(self.starts[d], self.starts[d + 1])]

    @cached_property
    def rounds(self) -> Rounds | None:
        """The part of the timetable that repeats, if there is one."""
        return _rounds(self)

    def device(self, stage: int) -> int:
        return self.stage_device[stage]

    def receiver(self, slot: Slot) -> int | None:
        """The device that gets the result of a slot's actions; None where it stays or there is none."""
        target = slot.stage + 1 if slot.kind == "F" else slot.stage - 1
        if slot.kind == "W" or not 0 <= target < self.shape.stages:
            return None
        device = self.device(target)
        return None if device == self.device(slot.stage) else device


def timetable(schedule: Schedule, shape: Shape) -> Timetable:
    """The timetable of `schedule`.

    Raises PlanError for a shape that it does not have, and ScheduleError, with the rank-by-step table, for an order
    that lacks or repeats an action or in which actions wait for each other.
    """
    schedule.check(shape)
    orders = [schedule.order(shape, device) for device in range(shape.p)]
    devices = [schedule.device(shape, stage) for stage in range(shape.stages)]
    kinds = ["F", *schedule.backward.split()]
    starts = [0, *np.cumsum([len(order) for order in orders]).tolist()]
    columns = list(zip(*chain.from_iterable(orders), strict=True)) or [(), (), ()]
    code = {kind: i for i, kind in enumerate(kinds)}
    stage, microbatch = np.array(columns[0], int), np.array(columns[2], int)
    kind = np.array([code.get(name, -1) for name in columns[1]], int)
    owner = np.repeat(np.arange(shape.p), np.diff(starts))
    m, last = shape.m, shape.stages - 1
    known = (kind >= 0) & (stage >= 0) & (stage <= last) & (microbatch >= 0) & (microbatch < m)
    if not known.all() or (np.array(devices)[stage] != owner).any():
        raise _incomplete(schedule, shape, orders)
    # Where every action stands, by (stage, kind, micro-batch).
    turn = stage * len(kinds) + kind
    keys, step = turn * m + microbatch, len(kinds) * m
    where = np.full(shape.stages * step, -1)
    where[keys] = np.arange(len(keys))
    if len(keys) != len(where) or where.min() < 0:
        raise _incomplete(schedule, shape, orders)
    own = np.where(kind > 0, where[keys - m], -1)
    before = np.where(stage > 0, where[keys - step], -1)
    behind = np.where(stage < last, where[(keys + step) % len(where)], -1)
    need_array = np.select([kind == 0, kind == 1], [before, behind], -1)

    # Of what is written twice to one place, the last stays.
    numbers = np.arange(len(keys))
    first_of, last_of = np.zeros((2, shape.stages * len(kinds)), int)
    first_of[turn[::-1]], last_of[turn] = numbers[::-1], numbers
    first, final = first_of[turn] == numbers, last_of[turn] == numbers
    variant = turn * 4 + first * 2 + final
    chosen = np.full(4 * shape.stages * len(kinds), -1)
    chosen[variant] = numbers
    slot_array = (np.cumsum(chosen >= 0) - 1)[variant]
    chosen = chosen[chosen >= 0]
    slots = [Slot(int(stage[i]), kinds[kind[i]], bool(first[i]), bool(final[i])) for i in chosen.tolist()]
    slot, need, waits = slot_array.tolist(), need_array.tolist(), own.tolist()

    done = bytearray(len(keys) + 1)
    done[-1] = 1  # nothing is needed: number -1
    sequence: list[int] = []
    at, ends = starts[:-1], starts[1:]
    moved = True
    while moved:
        moved = False
        for device, end in enumerate(ends):
            i = begin = at[device]
            while i < end and done[need[i]] and done[waits[i]]:
                done[i] = 1
                i += 1
            if i > begin:
                sequence.extend(range(begin, i))
                at[device] = i
                moved = True
    if len(sequence) < len(keys):
        stuck = {d: at[d] - starts[d] for d in range(shape.p) if at[d] < ends[d]}
        raise ScheduleError(
            schedule.use,
            "the order stands still: the marked actions wait for each other",
            f"Order:\n{table(orders, stuck)}",
        )
    return Timetable(shape, orders, starts, slots, slot, need, sequence, devices)


def _incomplete(schedule: Schedule, shape: Shape, orders: list[list[Action]]) -> ScheduleError:
    """What is wrong with orders in which not every action stands exactly once, on the device of its stage."""
    counts = Counter(action for order in orders for action in order)
    for device, order in enumerate(orders):
        wanted = [
            Action(stage, kind, microbatch)
            for stage in range(shape.stages)
            if schedule.device(shape, stage) == device
            for kind in ("F", *schedule.backward.split())
            for microbatch in shape.microbatches
        ]
        own = set(wanted)
        wrong = [action for action in wanted if counts[action] != 1] + [action for action in order if action not in own]
        if wrong:
            break
    return ScheduleError(
        f"{schedule.use} on device {device}",
        f"every action of its stages runs exactly once there; {wrong[0]} occurs {counts[wrong[0]]} times",
        f"Order:\n{table(orders, {device: len(order)})}",
    )


def _rounds(table: Timetable) -> Rounds | None:
    """Looks for rounds of one, p, or p v micro-batches: actions, slots and needs repeat one round later.

    A round begins where every device has done what the last action of some micro-batch needs, so nothing in an earlier
    round needs anything in it.
    """
    shape = table.shape
    need, slot = np.asarray(table.need), table.slot_array
    bounds = table.starts
    per_microbatch = (bounds[1] - bounds[0]) // shape.m
    for step in dict.fromkeys((1, shape.p, shape.p * shape.v)):
        length = per_microbatch * step
        if length * 3 > bounds[1] - bounds[0]:
            continue
        same = slot[length:] == slot[:-length]
        same &= np.where(need[:-length] >= 0, need[:-length] + length, -1) == need[length:]
        spans = []
        for begin, end in itertools.pairwise(bounds):
            # The longest run of actions that stand again one round later.
            breaks = np.flatnonzero(~same[begin : end - length])
            edges = np.concatenate([[-1], breaks, [end - length - begin]])
            widest = int(np.argmax(np.diff(edges)))
            spans.append((begin + int(edges[widest]) + 1, begin + int(edges[widest + 1]) + length))
        if any(stop - start < 2 * length for start, stop in spans):
            continue
        # What the last action of a round on device 0 needs, near and far, is a border that no need crosses.
        reached = table.starts[:-1]
        for at in range(spans[0][0], spans[0][0] + length):
            _reach(table, at, reached)
            if all(begin >= start for begin, (start, _) in zip(reached, spans, strict=True)):
                count = min((stop - begin) // length for begin, (_, stop) in zip(reached, spans, strict=True))
                if count < 2:
                    break
                made = np.concatenate([np.arange(b, r) for b, r in zip(bounds[:-1], reached, strict=True)])
                later = np.ones(len(need), bool)
                later[made] = False
                wanted = np.unique(need[later & (need >= 0)])
                return Rounds(list(reached), length, count, wanted[~later[wanted]].tolist())
    return None


def _reach(table: Timetable, action: int, reached: list[int]) -> None:
    """Moves `reached`, for every device the number behind its last action that counts, to hold all that `action` needs,
    near and far, and itself."""
    left = [action]
    while left:
        at = left.pop()
        device = table.device_of[at]
        if at >= reached[device]:
            left += [need for need in table.need[reached[device] : at + 1] if need >= 0]
            reached[device] = at + 1
