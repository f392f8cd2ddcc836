"""A step rank by rank, with jitter and stragglers: every rank runs its kernels at a pace of its own, and every
collective and message has one.

A pipeline device stands for all ranks of its stage. Here each of its ops has one time for every rank: an array over the
mesh axes inside a stage. A collective over some of these axes begins for its group when the last rank has come;
pipeline messages go from a rank to the rank at the same place of another stage. Between stages of unlike degrees a rank
waits for the ranks that send to it, and in a collective of unlike stages or replicas all their ranks wait for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshcast.hardware.remembered import remembered
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.ir.ops import COMPUTE, Collective, Communication, Exchange, Transfer
from meshcast.simulator.plan.plan import RankGrid
from meshcast.simulator.program.flatten import FlatProgram, flatten
from meshcast.simulator.program.program import Program
from meshcast.simulator.scheduling.schedule import ACTION_KINDS, Action, ScheduleItem, actions_of

TRANSFERS = 10
"""Last number of the seed of collectives and messages, which tells their draws from those of kernels."""


@dataclass(frozen=True)
class Pace:
    """How the paces of ranks are drawn.

    jitter: standard deviation of log(duration) of kernels, drawn for every rank and action.
    stragglers: share of the ranks that are slow in every action of a step.
    slow: factor of the durations of their kernels.
    seed: of all draws.
    communication: standard deviation of log(duration) of collectives and messages, drawn for each of them.
    persistent: the same ranks are stragglers in all steps.
    """

    jitter: float = 0.0
    stragglers: float = 0.0
    slow: float = 1.0
    seed: int = 0
    communication: float = 0.0
    persistent: bool = False

    def always(self, shapes: Sequence[tuple[int, ...]], step: int = 0) -> list[np.ndarray]:
        """Factors of the ranks of every device in all actions of one step. shapes: of the ranks of every device."""
        draw = np.random.default_rng([self.seed, 0, *([] if self.persistent else [1 + step])])
        return [np.where(draw.random(shape) < self.stragglers, self.slow, 1.0) for shape in shapes]

    def transfers(self, step: int, action: Key) -> Callable[[tuple[int, ...]], np.ndarray]:
        """Factors of the collectives and messages of one action, in the order of their issue, each from its shape."""
        draw = np.random.default_rng([self.seed, 1 + step, *action, TRANSFERS])
        return lambda shape: np.asarray(np.exp(self.communication * draw.standard_normal(shape)))

    def once(self, shape: tuple[int, ...], step: int, action: Key) -> np.ndarray:
        """Factors of the ranks in one action of one step, the same in whichever order actions are played."""
        if not self.jitter:
            return np.ones(shape)
        drawn = np.random.default_rng([self.seed, 1 + step, *action]).standard_normal(shape)
        return np.asarray(np.exp(self.jitter * drawn))


@dataclass(frozen=True)
class Unfolded:
    """One step with all its ranks.

    span: from the begin of the first op to the end of the last, on whichever rank [s].
    ends: of every op, on the rank that is last [s].
    busy: of every pipeline device, how long each rank ran kernels of its own [s]; an array over the axes of its ranks.
    waited: how long it waited for others in collectives that it had reached [s].
    """

    span: float
    ends: Sequence[float]
    busy: Sequence[np.ndarray]
    waited: Sequence[np.ndarray]


Key = tuple[int, ...]
"""An action by numbers: the draw of its paces depends on nothing else."""


def unfold(
    program: Program,
    grids: Sequence[RankGrid],
    pace: Pace,
    step: int = 0,
    flat: FlatProgram | None = None,
    track: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> Unfolded:
    """Plays one of the steps, each of which draws paces of its own.

    grids: the ranks of every pipeline device.
    flat: the program op by op, where that is known.
    track: shows the progress over the ops.
    """
    flat = flat or flatten(program)
    owner = _owners(program, flat)
    last = _last_readers(flat)
    shapes = [grid.ranks.shape for grid in grids]
    always = pace.always(shapes, step)
    meetings = Meetings(grids)
    draws: dict[Key, Callable[[tuple[int, ...]], np.ndarray]] = {}
    queue: dict[int, int] = {}
    for i, numbers in enumerate(flat.queues.values()):
        queue.update(dict.fromkeys(numbers, i))
    ready = [np.zeros(shapes[device]) for device, _ in flat.queues]
    seen: dict[int, np.ndarray] = {}
    clock = [0.0] * program.devices
    busy, waited = ([np.zeros(shape) for shape in shapes] for _ in range(2))
    ends: list[float] = []
    action, factor = Key(), np.ones(())
    rows = zip(
        track(range(len(flat.ops))),
        flat.ops,
        flat.seconds,
        flat.latency,
        flat.issue,
        flat.after,
        flat.device,
        strict=True,
    )
    for number, op, seconds, latency, issue, after, device in rows:
        at, shape = ready[queue[number]], shapes[device]
        joined = _over(op.work, grids[device].axes)
        for other in after:
            sender, sent = flat.device[other], flat.ops[other].work
            if sender == device or (meetings.are_alike(sender, device) and not _is_resharding(sent)):
                at = np.maximum(at, seen[other])
            else:
                at = np.maximum(at, meetings.arrivals(sent, seen[other], sender, device))
                joined = joined if isinstance(sent, Transfer) else tuple(range(len(shape)))
        if issue:
            clock[device] += issue
            at = np.maximum(at, clock[device])
        if joined:
            come, at = at, np.broadcast_to(at.max(axis=joined, keepdims=True), shape)
            waited[device] += at - come
        if seconds and op.stream == COMPUTE and not isinstance(op.work, Communication):
            if owner[number] != action:
                action = owner[number]
                factor = always[device] * pace.once(shape, step, action)
            own = seconds * factor
            busy[device] += own
            end = at + own
        elif pace.communication and seconds and isinstance(op.work, Communication):
            key = owner[number]
            if key not in draws:
                draws[key] = pace.transfers(step, key)
            # All ranks of a group are in its collective for as long.
            group = tuple(1 if i in joined else n for i, n in enumerate(shape))
            end = at + seconds * draws[key](group)
        else:
            end = at + seconds
        ready[queue[number]] = end
        seen[number] = end + latency if latency else end
        ends.append(float(end.max()))
        for other in last[number]:
            del seen[other]
    return Unfolded(max(ends, default=0.0), ends, busy, waited)


class Meetings:
    """Where ranks of two pipeline devices meet: at the same place if the devices are alike."""

    def __init__(self, grids: Sequence[RankGrid]) -> None:
        self.grids = grids
        self._kinds = [(grid.axes, grid.ranks.shape) for grid in grids]

    def are_alike(self, one: int, other: int) -> bool:
        """Whether the ranks of two devices have the same axes of the same sizes."""
        return self._kinds[one] == self._kinds[other]

    def arrivals(self, work: object, done: np.ndarray, sender: int, receiver: int) -> np.ndarray:
        """When each rank of a device has all that it gets of the ranks of another.

        done: when each of those is done [s].
        """
        shape = self.grids[receiver].ranks.shape
        if not isinstance(work, Transfer) or not work.pairs:
            return np.full(shape, done.max())
        sources, targets = self._places_of(work, sender, receiver)
        found = np.zeros(shape)
        np.maximum.at(found.ravel(), targets, done.ravel()[sources])
        return found

    @remembered
    def _places_of(self, work: Transfer, sender: int, receiver: int) -> tuple[list[int], list[int]]:
        """Places of the two ends of every message among the ranks of their devices."""
        ends = (self.grids[device].ranks.ravel().tolist() for device in (sender, receiver))
        sources, targets = ({rank: place for place, rank in enumerate(ranks)} for ranks in ends)
        return [sources[rank] for rank, _, _ in work.pairs], [targets[rank] for _, rank, _ in work.pairs]


def _is_resharding(work: object) -> bool:
    return isinstance(work, Transfer) and bool(work.pairs)


def stretch_passes(
    program: Program, grids: Sequence[RankGrid], pace: Pace, step: int
) -> Callable[[ScheduleItem], float]:
    """Durations of the passes of a step on the slowest rank of their stage, each as if it were alone [s]."""
    table = program.timetable
    shapes = [grid.ranks.shape for grid in grids]
    always = pace.always(shapes, step)
    known: dict[int, float] = {}
    slots = {action: slot for action, slot in zip(table.actions, table.slot, strict=True)}

    def lasts(turn: ScheduleItem) -> float:
        action = actions_of([turn])[0]
        slot, device = slots[action], table.device(action.stage)
        if slot not in known:
            known[slot] = task_seconds(program.tasks[slot], program.host)
        return known[slot] * float((always[device] * pace.once(shapes[device], step, _key(action))).max())

    return lasts


def _key(action: Action) -> Key:
    return action.stage, ACTION_KINDS.index(action.kind), action.microbatch, action.slice


def _over(work: object, axes: Sequence[str]) -> tuple[int, ...]:
    """Which of a stage's axes an op joins."""
    joined = work.axes if isinstance(work, Collective | Exchange) else ()
    return tuple(i for i, axis in enumerate(axes) if axis in joined)


def _owners(program: Program, flat: FlatProgram) -> list[Key]:
    """The action that every op belongs to, messages to the action that sends them; an update belongs to its device."""
    found = [Key()] * len(flat.ops)
    for action, first, behind in zip(program.timetable.actions, flat.first, flat.behind, strict=True):
        found[first:behind] = [_key(action)] * (behind - first)
    for number, _, _ in flat.sent:
        found[number] = found[number - 1]
    for device, numbers in enumerate(flat.updates):
        for number in numbers:
            found[number] = (device,)
    return found


def _last_readers(flat: FlatProgram) -> list[list[int]]:
    """For every op, those whose results nobody needs behind it: their per-rank times are dropped then."""
    reader = list(range(len(flat.ops)))
    for number, after in enumerate(flat.after):
        for other in after:
            reader[other] = number
    found: list[list[int]] = [[] for _ in flat.ops]
    for number, at in enumerate(reader):
        found[at].append(number)
    return found
