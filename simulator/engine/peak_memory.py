"""Peak memory of every device by category, and memory over time, of a played program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import sub

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.longest_path import OpTimes
from meshcast.simulator.ir.ops import HostCopy
from meshcast.simulator.program.flatten import FlatProgram
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import Task
from meshcast.simulator.scheduling.schedule import ACTIVATION_TRANSFERS, HOST_COPIES, MEETINGS, ActionKind

GRADIENTS = CATEGORIES.index("gradients")


@dataclass(frozen=True)
class Peak:
    """The largest sum of all categories on a device, and its parts at that moment [bytes].

    left: what was not freed by the end of the step.
    passes: the largest sum in forward and backward passes.
    update: the largest sum in the update behind them; 0 without an update.
    cached: of gradients that are not there at that moment, which the allocator has since the step before.
    """

    total: float
    by: dict[str, float]
    left: float
    passes: float
    update: float = 0.0
    cached: float = 0.0


def peaks(program: Program, static: Sequence[dict[str, float]]) -> list[Peak]:
    """Returns the peak of every device. static: bytes that live through the whole step, by category, for every
    device."""
    table, flying, devices = program.timetable, in_flight(program), program.timetable.device_array
    tasks, (nets, tops) = program.task_numbers[table.slot_array], _task_profiles(program)
    places = _find_peaks(table.starts, nets.sum(axis=1)[tasks], tops.sum(axis=1)[tasks], flying)
    highest = np.array(table.starts[:-1]) + places
    before = np.arange(len(tasks)) < highest[devices]
    held = _add_up(devices[before], tasks[before], nets, program.devices) + tops[tasks[highest]]
    held[:, CATEGORIES.index("buffers")] += flying[highest]
    left = _add_up(devices, tasks, nets, program.devices)
    updates: Sequence[Task | None] = program.updates or [None] * program.devices
    return [find_peak(*of_device) for of_device in zip(held, left, static, updates, strict=True)]


def _add_up(devices: np.ndarray, tasks: np.ndarray, nets: np.ndarray, count: int) -> np.ndarray:
    """Returns what actions leave, by device and category [bytes].

    devices, tasks: by action, the numbers of its device and of its task.
    nets: what each task leaves.
    count: number of devices.
    """
    runs = np.bincount(devices * len(nets) + tasks, minlength=count * len(nets))
    return np.asarray(runs.reshape(count, len(nets)) @ nets)


def find_peak(held: np.ndarray, left: np.ndarray, static: dict[str, float], update: Task | None) -> Peak:
    """Returns the peak of a device.

    held: by category, what its passes hold at their peak.
    left: what they leave at their end.
    static: see `peaks`.
    """
    by = _add_held(static, held.tolist())
    total, cached = sum(by.values()), max(0.0, float(left[GRADIENTS] - held[GRADIENTS]))
    return _include_update(Peak(total, by, float(left.sum()), total, cached=cached), static, left, update)


def _include_update(peak: Peak, static: dict[str, float], left: np.ndarray, update: Task | None) -> Peak:
    """Returns the peak of a device with that of its update behind all passes. left: bytes that these leave, by
    category."""
    if update is None:
        return peak
    height = float(sum(static.values()) + left.sum() + update.memory.peak)
    if height <= peak.total:
        return replace(peak, update=height)
    by = _add_held(static, (left + update.memory.top).tolist())
    return Peak(sum(by.values()), by, peak.left, peak.passes, height)


def _add_held(static: dict[str, float], held: Sequence[float]) -> dict[str, float]:
    """Returns bytes by category, those held in a pass or an update included."""
    by = dict(static)
    for category, nbytes in zip(CATEGORIES, held, strict=True):
        if nbytes:
            by[category] = by.get(category, 0.0) + nbytes
    return by


def _task_profiles(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Returns by task and category what each of `Program.distinct` leaves, and holds at its peak [bytes]."""
    # What runs beside the parts takes no further memory.
    first = {(task.parts, task.inputs, task.results): task for task in reversed(program.distinct)}
    profiles = [first[task.parts, task.inputs, task.results].memory for task in program.distinct]
    return np.array([profile.net for profile in profiles]), np.array([profile.top for profile in profiles])


def _find_peaks(starts: Sequence[int], grown: np.ndarray, high: np.ndarray, flying: np.ndarray) -> list[int]:
    """Returns, by device, the number among its actions of the first action with the highest peak.

    starts: the first action of every device.
    grown, high, flying: by action, what it leaves, its peak, and communication buffers beside it [bytes].
    """
    if len({*map(sub, starts[1:], starts)}) > 1:
        ends = (slice(*pair) for pair in pairwise(starts))
        return [
            at
            for actions in ends
            for at in _find_peaks((0, actions.stop - actions.start), grown[actions], high[actions], flying[actions])
        ]
    # Devices with equally many actions at once.
    grows, tops, beside = (values.reshape(len(starts) - 1, -1) for values in (grown, high, flying))
    peaks: list[int] = np.argmax(np.cumsum(grows, axis=1) - grows + tops + beside, axis=1).tolist()
    return peaks


def offloaded_activations(program: Program) -> list[dict[str, float]]:
    """Returns the most saved activations of every device in host memory (``cpu``) and on disks (``nvme``) [bytes].

    They take space from the begin of the pass that copies them out to the end of the pass that copies them back.
    """
    copies: dict[Task, list[tuple[HostCopy, int]]] = {}
    for task in dict.fromkeys(program.tasks):
        host_copies = [(work, count) for work, count in task.host_works if isinstance(work, HostCopy)]
        if of_activations := [(work, count) for work, count in host_copies if work.activations]:
            copies[task] = of_activations
    most: list[dict[str, float]] = [{} for _ in range(program.devices)]
    table = program.timetable
    for device in range(program.devices) if copies else ():
        slots = table.slot_array[table.starts[device] : table.starts[device + 1]]
        for place in ("cpu", "nvme"):
            changes = np.zeros((2, len(program.tasks)))  # out and back
            for slot in set(slots.tolist()):
                for work, count in copies.get(program.tasks[slot], ()):
                    changes[int(work.back), slot] += count * work.nbytes * (work.to == place)
            out, back = changes[:, slots]
            most[device][place] = float((np.cumsum(out - back) + back).max(initial=0.0))
    return most


def in_flight(program: Program) -> np.ndarray:
    """Counts the bytes of communication buffers beside every action of the timetable.

    Where sends overlap, a sent buffer lives through the next action of its device, and a receive buffer through the
    action before. Evicted activations live through the next action that computes.
    """
    table = program.timetable
    slots, device_of = table.slot_array, table.device_array
    flying, present = np.zeros(len(slots)), {slot.kind for slot in table.slots}

    def are_of(kinds: Sequence[str]) -> np.ndarray:
        """Returns by slot whether its actions are of some kinds."""
        return np.array([slot.kind in kinds for slot in table.slots], bool)

    if program.overlap_sends:
        between = (*MEETINGS, *HOST_COPIES)  # actions beside the passes
        some = present.intersection(between)
        numbers = np.flatnonzero(~are_of(between)[slots]) if some else np.arange(len(slots))
        before, behind = numbers[:-1], numbers[1:]
        follows = device_of[before] == device_of[behind]
        before, behind = before[follows], behind[follows]
        sent = np.zeros(len(program.sends))
        np.add.at(sent, program.sent_slots, [send.work.nbytes for _, send in program.sent])
        flying[behind] += sent[slots[before]]
        flying[before] += np.array(program.received, float)[slots[behind]]
    if not present.intersection(ACTIVATION_TRANSFERS):
        return flying
    transfers = are_of(ACTIVATION_TRANSFERS)
    for i in np.flatnonzero(are_of((ActionKind.EVICT, ActionKind.GIVE_BACK))[slots]).tolist():
        computing = np.flatnonzero(~transfers[slots[i + 1 : table.starts[device_of[i] + 1]]])
        computes = i + 1 + int(computing[0]) if len(computing) else i
        flying[i + 1 : computes + 1] += sum(nbytes for nbytes, _ in program.tasks[slots[i]].results)
    return flying


def over_time(
    program: Program, flat: FlatProgram, times: OpTimes, device: int, static: dict[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the memory of a device through the step: moments [s], and from each on the bytes of every category.

    Returns arrays [moments] and [moments, categories]. Memory follows the issue order, so a moment is never before that
    of an op issued earlier; the peak is that of `peaks`.
    """
    table = program.timetable
    actions = range(table.starts[device], table.starts[device + 1])
    begin, end = np.array(times.begin), np.array(times.end)
    start_row = np.array([[static.get(category, 0.0) for category in CATEGORIES]])
    changes = [(np.zeros(1), start_row)]
    ops = slice(0)
    for action, flying in zip(actions, in_flight(program)[actions.start : actions.stop].tolist(), strict=True):
        if table.slots[table.slot[action]].kind in MEETINGS:
            continue  # They may end after later actions, and leave nothing in memory.
        task = program.tasks[table.slot[action]]
        # What follows in a pair is played with the action before.
        ops = slice(flat.first[action], flat.behind[action]) if task.parts else ops
        changes.append((begin[ops][:1], _flow_row(flying, task.inputs)))
        start = flat.first[action] + sum(len(side.ops) for side in task.ahead)
        changes += _changes_inside(task, range(start, flat.behind[action]), begin, end)
        changes.append((end[ops].max(keepdims=True), _flow_row(-flying, task.results, -1)))
    for update, instances in zip(program.updates[device : device + 1], flat.updates[device : device + 1], strict=True):
        changes += _changes_inside(update, instances, begin, end)
    moments = np.concatenate([moment for moment, _ in changes])
    return np.maximum.accumulate(moments), np.cumsum(np.concatenate([rows for _, rows in changes]), axis=0)


def _flow_row(flying: float, flows: Iterable[tuple[float, str]], sign: int = 1) -> np.ndarray:
    """Returns the change of every category by communication buffers, and by buffers that come or leave [bytes]."""
    row = np.zeros((1, len(CATEGORIES)))
    row[0, CATEGORIES.index("buffers")] = flying
    for nbytes, category in flows:
        row[0, CATEGORIES.index(category)] += sign * nbytes
    return row


def _changes_inside(
    task: Task, instances: Sequence[int], begin: np.ndarray, end: np.ndarray
) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yields moments and changes of the parts of a task. Arguments as in `moments_inside`."""
    for part, moments in zip(task.parts, moments_inside(task, instances, begin, end), strict=True):
        yield moments, np.tile(part.block.event_rows[2], (part.count, 1))


def moments_inside(task: Task, instances: Sequence[int], begin: np.ndarray, end: np.ndarray) -> Iterable[np.ndarray]:
    """Yields by part of a task when the tensors of its copies are allocated and freed [s].

    instances: of the ops of the task.
    begin, end: of all ops [s].
    """
    numbered, place = np.array(instances, int), 0
    for part in task.parts:
        at, at_end, _ = part.block.event_rows
        numbers = numbered[(place + np.arange(part.count)[:, None] * len(part.block.ops) + at).ravel()]
        yield np.where(np.tile(at_end, part.count), end[numbers], begin[numbers])
        place += part.count * len(part.block.ops)
