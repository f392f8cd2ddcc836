"""A step rank by rank, with jitter and stragglers: every rank runs its kernels at its pace, and every
collective and message has another.

A pipeline device stands for all ranks of its stage. Here each of its ops has a time for every rank: an array over the
mesh axes inside a stage. A collective over some of these axes begins for its group when the last rank has come;
pipeline messages go from a rank to the rank at the same place of another stage. Between stages of different degrees a
rank waits for the ranks that send to it, and in a collective of heterogeneous stages or replicas all their ranks wait
for the last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember, remembered
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.ir.ops import COMPUTE, Collective, Communication, Exchange, Transfer
from meshcast.simulator.plan.plan import RankGrid
from meshcast.simulator.program.flatten import FlatProgram, flatten
from meshcast.simulator.program.program import Program
from meshcast.simulator.scheduling.schedule import ACTION_KINDS, Action, ScheduleItem, actions_of

WAVE = 16_384
"""Most ranks whose times of an op are in one array: more do not fit into the cache of a core."""

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
    ends: of every op, on the rank that is last [s]; empty where nobody asked for them.
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
    track: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    ends: bool = False,
) -> Unfolded:
    """Plays one of the steps, each of which draws other paces.

    grids: the ranks of every pipeline device.
    flat: the program op by op, where that is known.
    track: shows the progress over the ops that are played at once.
    ends: whether those of all ops are asked for.
    """
    unfolding = _Unfolding(program, grids, pace, step, flat or flatten(program), ends)
    for wave in track(unfolding.waves):
        unfolding.play(wave)
    span = max((float(times.max()) for times in unfolding.ready.values()), default=0.0)
    return Unfolded(span, unfolding.ends, unfolding.busy, unfolding.waited)


class _Piece(NamedTuple):
    """Ops that a device issues one after another: those of an action with its messages, or an op of an update.

    start, stop: the first op, and that past the last.
    owner: the action that their draws belong to.
    traits: pieces of equal traits have the same ops.
    """

    device: int
    start: int
    stop: int
    owner: Key
    traits: Hashable


class _RankOp(NamedTuple):
    """An op of a piece.

    after: places in the piece of the ops that it waits for, but for those that its stream has behind it by then.
    joined: axes along which ranks wait for each other; the first is that of the pieces.
    drawn: its factors among those of the collectives and messages of the piece, and their shape on a rank; None: none
        are drawn.
    computes: whether the pace of the ranks stretches it.
    freed: places of ops for which nothing in the piece waits behind it.
    """

    stream: str
    seconds: float
    latency: float
    issue: float
    after: tuple[int, ...]
    joined: tuple[int, ...]
    drawn: tuple[slice, tuple[int, ...]] | None
    computes: bool
    freed: tuple[int, ...]


class _Unfolding:
    """A step while it is played rank by rank.

    Pieces that wait for none of each other and have the same ops are a wave, and are played at once: an op of all of
    them is an array of its times [pieces, ranks].

    waves: in an order in which each follows those that it waits for.
    ends: of every op, on the rank that is last [s]; empty: nobody asked for them.
    draws: where factors of collectives and messages come from, of actions that have several pieces.
    ready: by device and stream, when it is free on each rank [s].
    readers: by op, how many ops of later pieces still wait for it.
    seen: by op for which later pieces wait, when each rank's result is seen [s].
    clock: by device, when its host has launched all ops so far [s].
    """

    def __init__(
        self, program: Program, grids: Sequence[RankGrid], pace: Pace, step: int, flat: FlatProgram, ends: bool
    ) -> None:
        self.flat, self.grids, self.pace, self.step = flat, grids, pace, step
        self.shapes = [grid.ranks.shape for grid in grids]
        self.always, self.meetings = pace.always(self.shapes, step), Meetings(grids)
        pieces = _cut_into_pieces(program, flat, grids)
        self.outside = [_list_outside(flat, piece) for piece in pieces]
        self.waves = self._gather_waves(pieces)
        self.pieces_of = Counter(piece.owner for piece in pieces)
        self.draws: dict[Key, Callable[[tuple[int, ...]], np.ndarray]] = {}
        self.ops: dict[Hashable, list[_RankOp]] = {}
        self.ready = {key: np.zeros(self.shapes[key[0]]) for key in flat.queues}
        self.readers = Counter(other for waits in self.outside for _, other in waits)
        self.seen: dict[int, np.ndarray] = {}
        self.clock = [0.0] * program.devices
        self.ends = [0.0] * len(flat.ops) if ends else []
        self.busy, self.waited = ([np.zeros(shape) for shape in self.shapes] for _ in range(2))

    def _gather_waves(self, pieces: Sequence[_Piece]) -> list[list[tuple[_Piece, int]]]:
        """Returns the waves: pieces with their numbers. A piece follows those that it waits for, and the piece before
        on its device."""
        numbers = np.repeat(np.arange(len(pieces)), [piece.stop - piece.start for piece in pieces]).tolist()
        level, last = [0] * len(pieces), [-1] * len(self.grids)
        waves: dict[Hashable, list[tuple[_Piece, int]]] = {}
        for number, piece in enumerate(pieces):
            waited = (level[numbers[other]] for _, other in self.outside[number])
            level[number] = last[piece.device] = 1 + max([last[piece.device], *waited])
            if piece.stop - piece.start:
                waves.setdefault((level[number], piece.traits), []).append((piece, number))
        ordered = [wave for _, wave in sorted(waves.items(), key=lambda entry: entry[0][0])]  # type: ignore[index]
        return [part for wave in ordered for part in self._split(wave)]

    def _split(self, wave: list[tuple[_Piece, int]]) -> Iterable[list[tuple[_Piece, int]]]:
        """Yields parts of a wave whose times fit into a cache."""
        size = max(1, WAVE // max(1, self.grids[wave[0][0].device].ranks.size))
        return (wave[i : i + size] for i in range(0, len(wave), size))

    def play(self, wave: list[tuple[_Piece, int]]) -> None:
        """Plays a wave of pieces."""
        pieces = [piece for piece, _ in wave]
        ops = remember(self.ops, pieces[0].traits, partial(self.list_ops, *wave[0]))
        arrivals: dict[int, list[tuple[int, int]]] = {}
        for row, (_, number) in enumerate(wave):
            for place, other in self.outside[number]:
                arrivals.setdefault(place, []).append((row, other))
        playing = _Wave(self, pieces, ops)
        for place in range(len(ops)):
            playing.play(place, arrivals.get(place, ()))
        playing.finish()

    def arrival(self, other: int, device: int) -> np.ndarray:
        """Returns when each rank of a device has what it waits for of an op of an earlier piece [s]."""
        flat, seen = self.flat, self.seen[other]
        self.readers[other] -= 1
        if not self.readers[other]:
            del self.seen[other]
        sender, sent = flat.device[other], flat.ops[other].work
        reshards = isinstance(sent, Transfer) and bool(sent.pairs)
        if sender == device or (self.meetings.are_alike(sender, device) and not reshards):
            return seen
        return self.meetings.arrivals(sent, np.broadcast_to(seen, self.shapes[sender]), sender, device)

    def list_ops(self, piece: _Piece, number: int) -> list[_RankOp]:
        """Returns the ops of a piece."""
        flat, start, axes = self.flat, piece.start, self.grids[piece.device].axes
        after = [self._list_waits(i, start) for i in range(start, piece.stop)]
        last = {other: place for place, others in enumerate(after) for other in (place, *others)}
        meeting = {place for place, other in self.outside[number] if self._meets(other, piece.device)}
        ops, drawn = list[_RankOp](), 0
        for place, i in enumerate(range(start, piece.stop)):
            joined = tuple(range(len(self.shapes[piece.device])))
            joined = joined if place in meeting else _over(flat.ops[i].work, axes)
            factors = self._place_factors(i, joined, drawn)
            drawn = factors[0].stop if factors else drawn
            freed = tuple(other for other in (place, *after[place]) if last[other] == place)
            rows, times = tuple(axis + 1 for axis in joined), (flat.seconds[i], flat.latency[i], flat.issue[i])
            computes = flat.ops[i].stream == COMPUTE and not isinstance(flat.ops[i].work, Communication)
            ops.append(
                _RankOp(flat.ops[i].stream, *times, after[place], rows, factors, computes and times[0] > 0, freed)
            )
        return ops

    def _list_waits(self, i: int, start: int) -> tuple[int, ...]:
        """Returns the places of the ops of a piece that an op waits for. start: the first op of the piece.

        Its stream is free only behind earlier ops on it: those whose results are seen at once need no look.
        """
        flat, stream = self.flat, self.flat.ops[i].stream
        inside = (other for other in flat.after[i] if other >= start)
        return tuple(o - start for o in inside if flat.latency[o] or flat.ops[o].stream != stream)

    def _place_factors(self, i: int, joined: tuple[int, ...], drawn: int) -> tuple[slice, tuple[int, ...]] | None:
        """Returns the place of the factors of an op among those of its piece, and their shape on a device. drawn: of
        ops before."""
        if not (self.pace.communication and self.flat.seconds[i] and isinstance(self.flat.ops[i].work, Communication)):
            return None
        # All ranks of a group are in its collective for as long.
        group = tuple(1 if axis in joined else n for axis, n in enumerate(self.shapes[self.flat.device[i]]))
        return slice(drawn, drawn + math.prod(group)), group

    def _meets(self, other: int, device: int) -> bool:
        """Returns whether all ranks of a device wait for each other where they wait for an op of another."""
        sender, sent = self.flat.device[other], self.flat.ops[other].work
        at_same_place = sender == device or self.meetings.are_alike(sender, device)
        return not at_same_place and not isinstance(sent, Transfer)

    def draw(self, piece: _Piece, count: int) -> np.ndarray:
        """Draws the factors of the collectives and messages of a piece."""
        make = partial(self.pace.transfers, self.step, piece.owner)
        several = self.pieces_of[piece.owner] > 1
        return (remember(self.draws, piece.owner, make) if several else make())((count,))


class _Wave:
    """Pieces of equal ops while they are played: arrays of times [pieces, ranks] [s], with a single entry along axes on
    which all ranks have equal times, as behind a collective over them.

    ready: by stream, when it is free.
    launched: the host has launched all ops before any stream is free.
    seen: by op, when its result is seen; None: nothing in the pieces waits for it any more.
    factor: of kernels; and the time of all of them at a factor of 1.
    drawn: factors of collectives and messages [pieces, factors].
    """

    def __init__(self, step: _Unfolding, pieces: Sequence[_Piece], ops: Sequence[_RankOp]) -> None:
        self.step, self.pieces, self.ops = step, pieces, ops
        self.devices = [piece.device for piece in pieces]
        self.shape = step.shapes[self.devices[0]]
        streams = dict.fromkeys(op.stream for op in ops)
        self.ready = {stream: np.stack([step.ready[device, stream] for device in self.devices]) for stream in streams}
        self.clock = np.array([step.clock[device] for device in self.devices]).reshape(-1, *[1] * len(self.shape))
        # By rounding, the sum of the launches may be less than the clock that adds them one by one.
        latest = self.clock.max() + (1 + 1e-9) * sum(op.issue for op in ops)
        self.launched = all(latest <= times.min() for times in self.ready.values())
        self.waited = np.zeros((len(pieces), *self.shape))
        self.seen: list[np.ndarray | None] = [None] * len(ops)
        self.ends = np.empty((len(pieces), len(ops))) if step.ends else None
        self.seconds = sum(op.seconds for op in ops if op.computes)
        if self.seconds:
            once = (step.pace.once(self.shape, step.step, piece.owner) for piece in pieces)
            self.factor = np.stack([step.always[device] for device in self.devices]) * np.stack([*once])
        if count := max((op.drawn[0].stop for op in ops if op.drawn), default=0):
            self.drawn = np.stack([step.draw(piece, count) for piece in pieces])

    def play(self, place: int, arrivals: Iterable[tuple[int, int]]) -> None:
        """Plays an op of all pieces. arrivals: ops of earlier pieces that it waits for, with the row of its piece."""
        op = self.ops[place]
        end = self._begin(op, arrivals) + self._duration(op)
        self.ready[op.stream] = end
        self.seen[place] = seen = end + op.latency if op.latency else end
        if self.ends is not None:
            self.ends[:, place] = end.reshape(len(self.pieces), -1).max(axis=1)
        for row, piece in enumerate(self.pieces):
            if piece.start + place in self.step.readers:
                self.step.seen[piece.start + place] = seen[row]
        for other in op.freed:
            self.seen[other] = None

    def _begin(self, op: _RankOp, arrivals: Iterable[tuple[int, int]]) -> np.ndarray:
        """Returns when each rank begins an op."""
        begin = self.ready[op.stream]
        for other in op.after:
            begin = np.maximum(begin, self.seen[other])  # type: ignore[arg-type]
        if arrivals:
            begin = np.broadcast_to(begin, self.waited.shape).copy()
            for row, number in arrivals:
                arrived = self.step.arrival(number, self.devices[row])
                np.maximum(begin[row], arrived, out=begin[row, ...])
        if op.issue:
            self.clock = self.clock + op.issue
            if not self.launched:
                begin = np.maximum(begin, self.clock)
        last = _find_last(begin, op.joined)
        if last is not begin:
            self.waited += last - begin
        return last

    def _duration(self, op: _RankOp) -> np.ndarray | float:
        """Returns how long an op takes on each rank."""
        if op.computes:
            return np.asarray(op.seconds * self.factor)
        if op.drawn:
            factors, shape = op.drawn
            return np.asarray(op.seconds * self.drawn[:, factors].reshape(-1, *shape))
        return op.seconds

    def finish(self) -> None:
        """Notes what later pieces find."""
        step = self.step
        ready = {stream: np.broadcast_to(times, self.waited.shape) for stream, times in self.ready.items()}
        for row, piece in enumerate(self.pieces):
            for stream, times in ready.items():
                step.ready[piece.device, stream] = times[row]
            step.clock[piece.device] = float(self.clock[row].reshape(()))
            step.waited[piece.device] += self.waited[row]
            if self.seconds:
                step.busy[piece.device] += self.seconds * self.factor[row]
            if self.ends is not None:
                step.ends[piece.start : piece.stop] = self.ends[row].tolist()


def _find_last(times: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Returns the largest of times over axes, which keep a single entry; the times themselves if that is all they have.

    numpy reduces a short last axis entry by entry: that of the ranks of a node takes longer by far than its halves.
    """
    joined = [axis for axis in axes if times.shape[axis] > 1]
    if times.ndim - 1 in joined:
        while times.shape[-1] % 2 == 0:
            times = np.maximum(times[..., ::2], times[..., 1::2])
        joined = [axis for axis in joined if times.shape[axis] > 1]
    return times.max(axis=tuple(joined), keepdims=True) if joined else times


def _cut_into_pieces(program: Program, flat: FlatProgram, grids: Sequence[RankGrid]) -> list[_Piece]:
    """Cuts the ops of a step into pieces, in the order of their issue."""
    owners, table, sent = _owners(program, flat), program.timetable, {number for number, *_ in flat.sent}
    actions = {start: action for action, start in enumerate(flat.first) if flat.behind[action] > start}
    updating = [number for numbers in flat.updates for number in numbers]
    changes = [number for number, (before, device) in enumerate(pairwise(flat.device), 1) if before != device]
    pieces: list[_Piece] = []
    for start, stop in pairwise([*sorted({0, *actions, *updating, *changes}), len(flat.ops)]):
        device, grid = flat.device[start], grids[flat.device[start]]
        messages = [number for number in range(start, stop) if number in sent]
        prices = [(flat.ops[i].stream, flat.seconds[i], flat.latency[i]) for i in messages]
        task = program.tasks[table.slot[actions[start]]] if start in actions else start
        traits = task, stop - start, tuple(grid.axes), grid.ranks.shape, tuple(prices)
        pieces.append(_Piece(device, start, stop, owners[start], traits))
    return pieces


def _list_outside(flat: FlatProgram, piece: _Piece) -> list[tuple[int, int]]:
    """Returns the ops of earlier pieces that a piece waits for, each behind the place that waits."""
    waits = enumerate(flat.after[piece.start : piece.stop])
    return [(place, other) for place, after in waits for other in after if other < piece.start]


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
