"""A step rank by rank, with jitter and stragglers: every rank runs its kernels at its pace, and every
collective and message has another.

A pipeline device stands for all ranks of its stage. Here each of its ops has a time for every rank: an array over the
mesh axes inside a stage. A collective over some of these axes begins for its group when the last rank has come;
pipeline messages go from a rank to the rank at the same place of another stage. Between stages of different degrees a
rank waits for the ranks that send to it, and in a collective of heterogeneous stages or replicas all their ranks wait
for the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshcast.hardware.records import dataclass
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
        """Draws the factors of the ranks of every device in all actions of a step. shapes: of the ranks of every
        device."""
        draw = np.random.default_rng([self.seed, 0, *([] if self.persistent else [1 + step])])
        return [np.where(draw.random(shape) < self.stragglers, self.slow, 1.0) for shape in shapes]

    def transfers(self, step: int, action: Key) -> Callable[[tuple[int, ...]], np.ndarray]:
        """Draws the factors of the collectives and messages of an action, in the order of their issue, each from its
        shape."""
        draw = np.random.default_rng([self.seed, 1 + step, *action, TRANSFERS])
        return lambda shape: np.asarray(np.exp(self.communication * draw.standard_normal(shape)))

    def once(self, shape: tuple[int, ...], step: int, action: Key) -> np.ndarray:
        """Draws the factors of the ranks in an action of a step, the same in whichever order actions are played."""
        if not self.jitter:
            return np.ones(shape)
        drawn = np.random.default_rng([self.seed, 1 + step, *action]).standard_normal(shape)
        return np.asarray(np.exp(self.jitter * drawn))


@dataclass(frozen=True)
class Unfolded:
    """One step with all its ranks.

    span: from the begin of the first op to the end of the last, on whichever rank [s].
    ends: of every op, on the rank that is last [s].
    busy: of every pipeline device, how long each rank ran its kernels [s]; an array over the axes of its ranks.
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
    """Plays one of the steps, each of which draws other paces.

    grids: the ranks of every pipeline device.
    flat: the program op by op, where that is known.
    track: shows the progress over the ops.
    """
    unfolding = _Unfolding(program, grids, pace, step, flat or flatten(program))
    ends = [unfolding.play(number) for number in track(range(len(unfolding.flat.ops)))]
    return Unfolded(max(ends, default=0.0), ends, unfolding.busy, unfolding.waited)


class _Unfolding:
    """A step while it is played rank by rank.

    owner: by op, the action that it belongs to.
    last: by op, the ops whose results nobody needs behind it.
    shapes: by device, the shape of its ranks.
    always: by device, the factors of its ranks in all actions.
    draws: by action, where the factors of its collectives and messages come from.
    queue: by op, the number of its stream.
    ready: by stream, when it is free on each rank [s].
    seen: by op whose result somebody still needs, when each rank's is seen [s].
    clock: by device, when its host has launched all ops so far [s].
    action, factor: the last action with kernels, and the factors of the ranks in it.
    """

    def __init__(self, program: Program, grids: Sequence[RankGrid], pace: Pace, step: int, flat: FlatProgram) -> None:
        self.flat, self.grids, self.pace, self.step = flat, grids, pace, step
        self.owner, self.last = _owners(program, flat), _last_readers(flat)
        self.shapes = [grid.ranks.shape for grid in grids]
        self.always, self.meetings = pace.always(self.shapes, step), Meetings(grids)
        self.draws: dict[Key, Callable[[tuple[int, ...]], np.ndarray]] = {}
        self.queue: dict[int, int] = {}
        for i, numbers in enumerate(flat.queues.values()):
            self.queue.update(dict.fromkeys(numbers, i))
        self.ready = [np.zeros(self.shapes[device]) for device, _ in flat.queues]
        self.seen: dict[int, np.ndarray] = {}
        self.clock = [0.0] * program.devices
        self.busy, self.waited = ([np.zeros(shape) for shape in self.shapes] for _ in range(2))
        self.action, self.factor = Key(), np.ones(())

    def play(self, number: int) -> float:
        """Plays an op and returns when the last rank ends it [s]."""
        begin, joined = self._begin(number)
        end = begin + self._duration(number, joined)
        self.ready[self.queue[number]] = end
        latency = self.flat.latency[number]
        self.seen[number] = end + latency if latency else end
        for other in self.last[number]:
            del self.seen[other]
        return float(end.max())

    def _begin(self, number: int) -> tuple[np.ndarray, tuple[int, ...]]:
        """Returns when each rank begins an op [s], and the axes along which ranks wait for each other."""
        flat, device = self.flat, self.flat.device[number]
        begin, joined = self.ready[self.queue[number]], _over(flat.ops[number].work, self.grids[device].axes)
        for other in flat.after[number]:
            sender, sent = flat.device[other], flat.ops[other].work
            reshards = isinstance(sent, Transfer) and bool(sent.pairs)
            if sender == device or (self.meetings.are_alike(sender, device) and not reshards):
                begin = np.maximum(begin, self.seen[other])
            else:
                begin = np.maximum(begin, self.meetings.arrivals(sent, self.seen[other], sender, device))
                joined = joined if isinstance(sent, Transfer) else tuple(range(len(self.shapes[device])))
        if flat.issue[number]:
            self.clock[device] += flat.issue[number]
            begin = np.maximum(begin, self.clock[device])
        if joined:
            reached = begin
            begin = np.broadcast_to(reached.max(axis=joined, keepdims=True), self.shapes[device])
            self.waited[device] += begin - reached
        return begin, joined

    def _duration(self, number: int, joined: tuple[int, ...]) -> np.ndarray | float:
        """Returns how long an op takes on each rank [s]."""
        op, seconds = self.flat.ops[number], self.flat.seconds[number]
        device, action = self.flat.device[number], self.owner[number]
        communicates = isinstance(op.work, Communication)
        if seconds and op.stream == COMPUTE and not communicates:
            if action != self.action:
                self.action = action
                self.factor = self.always[device] * self.pace.once(self.shapes[device], self.step, action)
            duration = seconds * self.factor
            self.busy[device] += duration
            return duration
        if self.pace.communication and seconds and communicates:
            if action not in self.draws:
                self.draws[action] = self.pace.transfers(self.step, action)
            # All ranks of a group are in its collective for as long.
            group = tuple(1 if i in joined else n for i, n in enumerate(self.shapes[device]))
            return seconds * self.draws[action](group)
        return seconds


class Meetings:
    """Where ranks of two pipeline devices meet: at the same place if the devices are alike."""

    def __init__(self, grids: Sequence[RankGrid]) -> None:
        self.grids = grids
        self._kinds = [(grid.axes, grid.ranks.shape) for grid in grids]

    def are_alike(self, first: int, second: int) -> bool:
        """Returns whether the ranks of two devices have the same axes of the same sizes."""
        return self._kinds[first] == self._kinds[second]

    def arrivals(self, work: object, done: np.ndarray, sender: int, receiver: int) -> np.ndarray:
        """Returns when each rank of a device has all that it gets of the ranks of another.

        done: when each of those is done [s].
        """
        shape = self.grids[receiver].ranks.shape
        if not isinstance(work, Transfer) or not work.pairs:
            return np.full(shape, done.max())
        sources, targets = self._places_of(work, sender, receiver)
        arrived = np.zeros(shape)
        np.maximum.at(arrived.ravel(), targets, done.ravel()[sources])
        return arrived

    @remembered
    def _places_of(self, work: Transfer, sender: int, receiver: int) -> tuple[list[int], list[int]]:
        """Returns the places of the two ends of every message among the ranks of their devices."""
        ends = (self.grids[device].ranks.ravel().tolist() for device in (sender, receiver))
        sources, targets = ({rank: place for place, rank in enumerate(ranks)} for ranks in ends)
        return [sources[rank] for rank, _, _ in work.pairs], [targets[rank] for _, rank, _ in work.pairs]


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
        slot, device = slots[action], table.stages.devices[action.stage]
        if slot not in known:
            known[slot] = task_seconds(program.tasks[slot], program.host)
        return known[slot] * float((always[device] * pace.once(shapes[device], step, _key(action))).max())

    return lasts


def _key(action: Action) -> Key:
    return action.stage, ACTION_KINDS.index(action.kind), action.microbatch, action.slice


def _over(work: object, axes: Sequence[str]) -> tuple[int, ...]:
    """Returns which of a stage's axes an op joins."""
    joined = work.axes if isinstance(work, Collective | Exchange) else ()
    return tuple(i for i, axis in enumerate(axes) if axis in joined)


def _owners(program: Program, flat: FlatProgram) -> list[Key]:
    """Returns the action that every op belongs to, messages to the action that sends them; an update belongs to its
    device."""
    owners = [Key()] * len(flat.ops)
    for action, first, behind in zip(program.timetable.actions, flat.first, flat.behind, strict=True):
        owners[first:behind] = [_key(action)] * (behind - first)
    for number, _, _ in flat.sent:
        owners[number] = owners[number - 1]
    for device, numbers in enumerate(flat.updates):
        for number in numbers:
            owners[number] = (device,)
    return owners


def _last_readers(flat: FlatProgram) -> list[list[int]]:
    """Returns for every op those whose results nobody needs behind it: their per-rank times are dropped then."""
    reader = list(range(len(flat.ops)))
    for number, after in enumerate(flat.after):
        for other in after:
            reader[other] = number
    read: list[list[int]] = [[] for _ in flat.ops]
    for number, at in enumerate(reader):
        read[at].append(number)
    return read
