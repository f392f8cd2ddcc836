"""Intervals in which a device computes, communicates along each mesh axis (tp, cp, ep, dp, pp), copies or waits for the
host; the breakdown and the plots are drawn from them.

The intervals of an axis may include those of what precedes it in the breakdown (computation, earlier axes of
`EXPOSED`): its exposed time is what it adds to the union of those before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.engine.maxplus import ALIKE, NEVER, Coordinates, Walked
from meshcast.simulator.engine.task_player import Play, states
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.block import PricedBlock
from meshcast.simulator.program.categories import EXPOSED, HOST, axis_of
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import PricedSideOps, Send, Task

INSTANT = 1e-12
"""Gap between intervals that is taken for rounding [s]."""

ROUNDING = 4e-16
"""Rounding error of a time that is the end of a sum, over the time."""

DECIMALS = 13
"""Decimals to which the states before copies of a part are rounded where intervals are kept for equal ones [s]."""

MAX_KEPT = 200
"""Maximum number of states of a part for which the intervals of a copy are kept."""

Spans = list[tuple[np.ndarray, np.ndarray]]
"""Pairs of arrays: begins and ends of intervals [s], in any order."""

Occupied = Mapping[str, Spans]
"""Busy intervals of a device by axis; `COMPUTE`: computation, `HOST`: waits for the host."""


def measure(spans: Spans) -> float:
    """Computes the length of the union of intervals [s]."""
    begin, end = (np.concatenate([span[i].ravel() for span in spans]) for i in (0, 1))
    order = np.argsort(begin)
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    return float((reached[-1] - begin[0]) - np.maximum(begin[1:] - reached[:-1], 0.0).sum())


def op_occupancy(flat: FlatProgram, times: OpTimes, device: int) -> dict[str, Spans]:
    """Returns the busy intervals of `device` from the times of all ops."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for (owner, _), queue in flat.queues.items():
        if owner == device and queue:
            numbers[axis_of(flat.ops[queue[0]])] += queue
    numbers["pp"] += [number for number, _, receiver in flat.sent if receiver == device]
    begin, arrival = np.array(times.begin), np.array(times.arrival)
    busy = {axis: [(begin[ops], arrival[ops])] for axis, ops in numbers.items() if ops}
    sent = {number for number, _, _ in flat.sent}
    late = [number for number in times.unissued if flat.device[number] == device and number not in sent]
    if late:
        busy[HOST] = [(np.array([times.unissued[number] for number in late]), begin[late])]
    return busy


def task_occupancy(program: Program, coordinates: Coordinates, play: Play, device: int) -> dict[str, Spans]:
    """Returns the busy intervals of `device` from the state before every action, without the times of all ops.

    Actions of a task that find the same state, up to a shift, run alike: each such situation is computed once, and
    its intervals are merged before they are repeated.
    """
    spans, groups = defaultdict[str, Spans](list), _group_actions(program, device)
    for axis, begin, end in _intervals_behind(program, coordinates, play, device):
        spans[axis].append((begin, end))
    present = {axis for task, _ in groups for part in task.parts for axis in part.block.by_axis}
    levels = [axis for axis in (*EXPOSED, HOST) if axis in present]
    if not {"tp", "cp", "ep"} & {*levels}:
        # The intervals of side ops (dp and later axes) do not include those of earlier axes.
        levels = [COMPUTE, *levels]
    for task, places in groups:
        alone = replace(task, behind=[])
        before = states(coordinates, alone, play, device, places)
        launched = play.of_device(device).host[places] if coordinates.host is not None else None
        for axis, begin, end in _situations(alone, coordinates, before, launched, levels):
            spans[axis].append((begin, end))
    for begin, send in _sends(program, play, device):
        spans["pp"].append((begin, begin + send.seconds + send.latency))
    for axis, of_updates in op_occupancy(play.tail_ops, play.tail, device).items():
        spans[axis] += of_updates
    return spans


def _group_actions(program: Program, device: int) -> list[tuple[Task, np.ndarray]]:
    """Returns the places of the actions of a device whose parts run alike, each with a task of such actions."""
    groups: dict[tuple[tuple[PricedBlock, ...], Task | None], tuple[Task, list[np.ndarray]]] = {}
    for task, places in _places_of_tasks(program, device):
        # Side ops after the parts do not change when the parts run.
        key = task.parts, task if task.ahead else None
        groups.setdefault(key, (task, []))[1].append(places)
    return [(task, np.sort(np.concatenate(each))) for task, each in groups.values()]


def _places_of_tasks(program: Program, device: int) -> Iterator[tuple[Task, np.ndarray]]:
    """Yields by slot of a device its task, and the places of its actions in the order of the device."""
    table = program.timetable
    slots = table.slot_array[table.starts[device] : table.starts[device + 1]]
    # `numpy.unique` would import `numpy.ma`, a fiftieth of the time of a forecast.
    yield from ((program.tasks[slot], np.flatnonzero(slots == slot)) for slot in sorted({*slots.tolist()}))


def _intervals_behind(
    program: Program, coordinates: Coordinates, play: Play, device: int
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields by axis the begins and ends of the side ops after the parts of all actions [s]."""
    for task, places in _places_of_tasks(program, device):
        for place in places.tolist() if task.behind else ():
            for item, begin, *_ in _walk_behind(task, coordinates, play, device, place):
                assert isinstance(item, PricedSideOps)
                yield axis_of(item.ops[0]), begin, begin + item.lasting[:, None]


def _walk_behind(task: Task, coordinates: Coordinates, play: Play, device: int, place: int) -> Iterator[Walked]:
    """Plays the side ops after the parts of an action. place: in the order of its device."""
    state, times = states(coordinates, task, play, device, np.array([place])), play.of_device(device)
    # They may wait for the input and for the host even where the parts do not.
    state[coordinates.port] = times.arrival[place]
    if (whole := play.full.get(times.first + place)) is not None:
        state[coordinates.ports, 0] = whole[coordinates.ports]
    if coordinates.host is not None:
        state[coordinates.host] = times.host[place]
    return coordinates.walk(task, state, side_ops_alone=True)


def _sends(program: Program, play: Play, device: int) -> Iterator[tuple[np.ndarray, Send]]:
    """Yields the times at which the messages from or to a device begin, slot by slot [s]."""
    table = program.timetable
    for slot, send in enumerate(program.sends):
        if send is not None and device in (send.source, send.target):
            sender = program.device_of(slot)
            slots = table.slot_array[table.starts[sender] : table.starts[sender + 1]]
            yield play.of_device(sender).sent[slots == slot], send
    for slot, sends in program.others.items():
        for turn, send in enumerate(sends):
            if send is not None and device in (send.source, send.target):
                actions = np.flatnonzero(table.slot_array == slot).tolist()
                yield np.array([play.sent_extra[table.extra_results[action][turn]] for action in actions]), send


def _situations(
    task: Task, coordinates: Coordinates, before: np.ndarray, launched: np.ndarray | None, levels: list[str]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields by axis of `levels` the begins and ends of the intervals of all actions of a task [s].

    before: the states before them [coordinates, actions].
    launched: when the host begins to launch each, if that takes time.
    """
    if not task.ahead:
        before[coordinates.beside] = NEVER
    host = np.full(before.shape[1], NEVER) if launched is None else launched - before[0]
    shift = before[0].copy()
    before -= shift
    rounding = INSTANT + ROUNDING * float(shift.max())
    chosen, which = _distinct(before, rounding)
    order = np.lexsort((-host, which))
    groups = np.split(order, np.cumsum(np.bincount(which))[:-1])
    for column, group in zip(chosen.tolist(), groups, strict=True):
        yield from _of_state(task, coordinates, before[:, column], levels, host[group], shift[group], rounding)


def _of_state(
    task: Task,
    coordinates: Coordinates,
    state: np.ndarray,
    levels: list[str],
    host: np.ndarray,
    shift: np.ndarray,
    rounding: float,
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields the same of all actions that find the same state, up to a shift.

    host: when the host begins to launch each, the latest first [s].
    rounding: by which equal times may differ [s].
    """
    first, before = 0, -host
    while first < len(host):
        # If even the latest host time delays no op, no host time does.
        covers, matters = _covers(task, coordinates, state, float(host[first]), levels)
        behind = int(np.searchsorted(before, before[first] + rounding, "right")) if matters else len(host)
        for axis, begin, end in covers:
            yield axis, begin[:, None] + shift[first:behind], end[:, None] + shift[first:behind]
        first = behind


Covers = list[tuple[str, np.ndarray, np.ndarray]]
"""Axis, begins and ends [s]: intervals of the axis and of those before it in the breakdown."""


def _covers(
    task: Task, coordinates: Coordinates, state: np.ndarray, host: float, levels: list[str]
) -> tuple[Covers, bool]:
    """Computes the intervals of a task from the state before it, and whether any op waits for the host.

    host: when the host begins to launch the task [s].
    """
    covers: Covers = []
    if task.ahead:
        # Side ops ahead delay each copy differently, so that no copy repeats another.
        if coordinates.host is not None:
            state = state.copy()
            state[coordinates.host] = host
        for walked in coordinates.walk(task, state[:, None]):
            if isinstance(walked.item, PricedSideOps):
                begin = walked.begin[:, 0]
                covers.append((axis_of(walked.item.ops[0]), begin, begin + walked.item.lasting))
            else:
                covers += _cover(walked, coordinates, levels)
        return covers, coordinates.host is not None
    mattered = False
    for part in task.parts:
        left, took = part.count, coordinates.issue(part)
        while left:
            matters = coordinates.host_matters(part, state, host)
            mattered |= matters
            if matters:
                state = state.copy()
                state[coordinates.host] = host
            copy, now = _copy(part, coordinates, state, levels), state[0]
            once = copy.steady is None or (not matters and copy.steady < took)
            times, later = (1, 0.0) if once else (left, copy.steady or 0.0)
            covers += [
                (axis, *_repeat_intervals(begin + now, end + now, times, later)) for axis, begin, end in copy.covers
            ]
            state = copy.after + now + (times - 1) * later
            if coordinates.host is not None:
                state[coordinates.host] = NEVER
            host += times * took
            left -= times
    return covers, mattered


class Copy(NamedTuple):
    """Intervals of a copy of a part; times are from when the compute stream becomes free [s].

    covers: the intervals.
    after: the state after the copy.
    steady: the shift, if `after` is the state before, shifted; otherwise None.
    """

    covers: Covers
    after: np.ndarray
    steady: float | None


def _copy(part: PricedBlock, coordinates: Coordinates, state: np.ndarray, levels: list[str]) -> Copy:
    """Computes the intervals of a copy, once for states that are equal up to rounding; keeps them with the prices."""
    state = np.round(state - state[0], DECIMALS)
    copies = part.prices.results.setdefault("copies", {})
    assert isinstance(copies, dict)
    key = coordinates.key, tuple(levels), state.tobytes()
    known = copies.get(key)
    if known is None:
        if len(copies) >= MAX_KEPT:
            copies.clear()
        table = coordinates.table(part)
        begin, after = (np.maximum.reduce(matrix + state, axis=1) for matrix in (table.begin, table.out))
        covers = list(_cover(Walked(part, begin[None, :, None], state[None, :, None]), coordinates, levels))
        real = after > NEVER
        moved = after[real] - state[real] if np.array_equal(real, state > NEVER) else np.array([0.0, np.inf])
        rounding = ALIKE * after[real].max() + 10.0**-DECIMALS
        steady = float(moved[0]) if np.ptp(moved) <= rounding else None
        known = copies[key] = Copy(covers, after, steady)
    assert isinstance(known, Copy)
    return known


def _repeat_intervals(begin: np.ndarray, end: np.ndarray, times: int, later: float) -> tuple[np.ndarray, np.ndarray]:
    """Repeats intervals `times` times, each time shifted by `later` [s]."""
    if times == 1:
        return begin, end
    if len(begin) == 1 and end[0] - begin[0] >= later - INSTANT:
        return begin, end + (times - 1) * later
    steps = np.arange(times)[:, None] * later
    return (begin + steps).ravel(), (end + steps).ravel()


def _cover(walked: Walked, coordinates: Coordinates, levels: list[str]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields by axis of `levels` the intervals of a part on it and the axes before it, and the waits for the host."""
    part, begin = walked.item, walked.begin[..., 0]
    assert isinstance(part, PricedBlock)
    end = begin + part.lasting
    rows: list[int] = []
    joined: tuple[np.ndarray, np.ndarray] | None = None
    for axis in (COMPUTE, *EXPOSED, HOST):
        if more := part.block.by_axis.get(axis):
            rows, joined = rows + more, None
        if axis in levels and rows:
            joined = joined or _join_copies(walked, begin[:, rows].T, end[:, rows].T)
            yield axis, *joined
    if coordinates.host is not None and walked.states[0, coordinates.host, 0] > NEVER:
        yield from _host_waits(walked, coordinates, end)


def _join_copies(walked: Walked, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges the intervals of all copies of a part. begin, end: of the copies that are listed, a column each [s]."""
    joined = _merge_intervals(begin, end)
    if begin.shape[1] + walked.repeats > 1:
        # The last copy listed stands for `repeats` further ones.
        steps = np.arange(1, walked.repeats + 1) * walked.shift
        starts, ends = (np.concatenate([times, times[:, -1:] + steps], axis=1).reshape(-1, 1) for times in joined)
        joined = _merge_intervals(starts, ends)
    starts, ends = joined
    return starts[:, 0], ends[:, 0]


def _host_waits(
    walked: Walked, coordinates: Coordinates, end: np.ndarray
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields for each op that begins at its launch the interval from when it could have begun without the host."""
    part, begin, states = walked.item, walked.begin[..., 0], walked.states[..., 0]
    assert isinstance(part, PricedBlock) and coordinates.host is not None
    block, launched = part.block, np.cumsum([op.issued for op in part.block.ops])
    issued = states[:, coordinates.host, None] + coordinates.launch * launched
    late = np.abs(begin - issued) <= INSTANT
    some = np.asarray(late.any(axis=0)).tolist()
    before: dict[str, int] = {}
    for i, op in enumerate(block.ops):
        if some[i] and op.issued:
            copies = np.flatnonzero(late[:, i])
            waits = [end[copies, j] for j in block.after[i]]
            place = before.get(op.stream)
            last = states[copies, coordinates.at[op.stream]] if place is None else end[copies, place]
            arrival = [states[copies, coordinates.port + at] for at, port in enumerate(block.ports) if i in port.entry]
            could = np.maximum.reduce([last, *waits, *arrival])
            # Where that time is unknown, the interval is empty.
            could = np.where(could > NEVER, could, begin[copies, i])
            yield HOST, could, begin[copies, i]
        before[op.stream] = i


def _distinct(states: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of a column of each distinct state, and for every column the number of its state."""
    if states.shape[1] == 1:
        return np.zeros(1, int), np.zeros(1, int)
    varied = [row for row in states[1:] if (row > NEVER).any() and np.ptp(row) > rounding]
    if not varied:
        return np.zeros(1, int), np.zeros(states.shape[1], int)
    # Nearly always only a single row varies: the arrival of the input.
    keys = np.round((varied[0] if len(varied) == 1 else np.array(varied)) / rounding)
    _, chosen, which = np.unique(keys, axis=-1, return_index=True, return_inverse=True)
    return chosen, which


def _merge_intervals(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merges overlapping intervals of each column; columns with fewer intervals are filled with empty ones."""
    order = np.argsort(begin, axis=0)
    columns = np.arange(begin.shape[1])
    begin, reached = begin[order, columns], end[order, columns]
    np.maximum.accumulate(reached, axis=0, out=reached)
    gap = begin[1:] > reached[:-1] + INSTANT
    if not gap.any():
        return begin[:1], reached[-1:]
    most = int(gap.sum(axis=0).max()) + 1
    begins, ends = np.repeat(reached[-1:], most, axis=0), np.repeat(reached[-1:], most, axis=0)
    for column in columns:
        breaks = np.flatnonzero(gap[:, column])
        begins[: len(breaks) + 1, column] = begin[[0, *(breaks + 1)], column]
        ends[: len(breaks), column] = reached[breaks, column]
    return begins, ends
