"""Blocks and tasks as (max,+) matrices, which map the state of a device before them to its state after them.

A state is a vector of times [s]. Its coordinates: for every stream, compute first, when it becomes free; if launches
take time, when the host has launched all so far; for each of up to two overlapped passes, when its input arrives (after
the task: when its result exists).

Without contention an op begins at the latest of several times, each a coordinate of the state plus a fixed sum of
durations: a row of a matrix over (max, +). A longest-path pass over the ops of a block, with such a row in place of
each time, gives the matrix of the block. The matrix of consecutive blocks is the product of theirs, that of equal
blocks a power. So a task is a small matrix, however many layers it has, and is exact although its streams overlap
with those of the tasks before and after it.

Baccelli, Cohen, Olsder, Quadrat 1992, "Synchronization and Linearity", chapters 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, partial, reduce
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.block import INPUT, Block, BlockPrices, PricedBlock
from meshcast.simulator.program.task import PricedSideOps, Task

NEVER = -np.inf
"""The zero of (max,+): no path."""

MAX_SUMS = 1_200
"""Sums of a product up to which an array of all of them takes less time than an array for each j: of a few coordinates
a sixth, of 96 copies of a layer more than three times as long."""

ALIKE = 1e-14
"""Relative difference below which two times are equal up to rounding."""

T = TypeVar("T")

Marks = tuple[tuple[int, ...], ...]
"""For each parameter of a block, the places of the ops that first use it or complete its gradient."""


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Computes the (max,+) product [..., i, k] of [..., i, j] and [..., j, k]."""
    if max(a.size * b.shape[-1], b.size * a.shape[-2]) > MAX_SUMS:
        best: np.ndarray = a[..., 0, None] + b[..., None, 0, :]
        for j in range(1, a.shape[-1]):
            np.maximum(best, a[..., j, None] + b[..., None, j, :], out=best)
        return best
    return np.maximum.reduce(a[..., None] + b[..., None, :, :], axis=-2)


def ahead(late: np.ndarray, usual: np.ndarray) -> float:
    """Returns how much earlier than `usual` the coordinate of `late` must be so that its paths are never the longest.

    late, usual: the columns of two coordinates in a matrix.
    """
    real = late > NEVER
    return float(np.max(late[real] - usual[real], initial=NEVER))


@dataclass(frozen=True, slots=True)
class CompactMatrix:
    """The entries of a task's matrix that matter if a device has at most two streams [s].

    lead: how long after the host's first launch the compute stream must become free for the host to delay nothing.
    second: the entries of a second stream, if there is any.
    free_after_free: from the compute stream to the compute stream.
    free_after_arrival: from the arrival of the input to the compute stream.
    result_after_free: from the compute stream to the result.
    result_after_arrival: from the arrival of the input to the result.
    """

    lead: float
    second: SecondStream | None
    free_after_free: float
    free_after_arrival: float
    result_after_free: float
    result_after_arrival: float


@dataclass(frozen=True, slots=True)
class SecondStream:
    """The entries of a second stream in a task's matrix [s].

    free_after: from it to the compute stream.
    result_after: from it to the result.
    after_free: from the compute stream to it.
    after_arrival: from the arrival of the input to it.
    after_itself: from it to itself.
    """

    free_after: float
    result_after: float
    after_free: float
    after_arrival: float
    after_itself: float


@dataclass(frozen=True)
class BlockMatrices:
    """The matrices of a block at its prices, with a column for each coordinate of the state before the block.

    begin: a row for each op: when it begins.
    out: a row for each coordinate of the state after the block.
    """

    begin: np.ndarray
    out: np.ndarray

    @cached_property
    def _alone(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Masks of the coordinates that depend on themselves alone (the host, an idle stream) and of those among them
        that others depend on; the shift of the former by a copy [s]; and the matrix of the other coordinates."""
        finite = self.out > NEVER
        lonely = (finite.sum(axis=1) == 1) & finite.diagonal()
        rates = np.where(lonely, self.out.diagonal(), 0.0)
        return lonely, lonely & (finite.sum(axis=0) > 1), rates, self.out[~lonely][:, ~lonely]

    def orbit(self, state: np.ndarray, count: int) -> Orbit:
        """Computes the states before and after each of `count` copies, the first of which finds `state`.

        state: [coordinates, columns], each column a state.

        As soon as a copy shifts all coordinates of a column by the same amount, every further copy shifts them by the
        same amount. A coordinate that depends on itself alone may shift by less, as long as no op waits for it.
        """
        states = [state]
        lonely, active, rates, inner = self._alone
        while len(states) <= count:
            states.append(now := product(self.out, states[-1]))
            if not 2 < len(states) <= count:
                continue
            with np.errstate(invalid="ignore"):
                moved = (now - states[-2])[~lonely]  # NaN where both states are NEVER
            top, low = np.fmax.reduce(moved), np.fmin.reduce(moved)
            shift = np.where(np.isnan(top), 0.0, top)
            if not (shift < np.inf).all() or (top - low > ALIKE * np.maximum.reduce(now, axis=None)).any():
                continue
            if active.any() and not (
                np.array_equal(product(inner, states[-2][~lonely]), now[~lonely])
                and ((rates[active, None] <= shift) | (now[active] == NEVER)).all()
            ):
                continue
            return Orbit(np.array(states), np.where(lonely[:, None], rates[:, None], shift), count)
        return Orbit(np.array(states), np.zeros_like(state), count)


@dataclass(frozen=True)
class Orbit:
    """The states before the first and after each of `count` copies of a block.

    states: the first [states, coordinates, columns]; each later is that before shifted by `moves`.
    moves: shift of a state by a copy [coordinates, columns].
    """

    states: np.ndarray
    moves: np.ndarray
    count: int

    @property
    def repeats(self) -> int:
        """Number of copies after the last of `states`, whose states are that state, shifted."""
        return self.count + 1 - len(self.states)

    def of(self, count: int) -> Orbit:
        """Returns the orbit of another number of copies: any if states repeat, otherwise at most `self.count`."""
        return Orbit(self.states[: count + 1], self.moves, count)

    @property
    def last(self) -> np.ndarray:
        return np.asarray(self.states[-1] + self.repeats * self.moves)

    @property
    def before(self) -> np.ndarray:
        """The states before every copy [copies, coordinates, columns]."""
        if not self.repeats:
            return self.states[:-1]
        steps = np.arange(1, self.repeats)[:, None, None]
        return np.concatenate([self.states, self.states[-1] + steps * self.moves])


class Walked(NamedTuple):
    """When the ops of a part of a task, or a list of its side ops, begin (see `Coordinates.walk`).

    item: the part, or the side ops.
    begin: times [s], for a part [copies, ops, columns], for side ops [ops, columns].
    states: for a part, the states before its copies [copies, coordinates, columns].
    repeats, shift: further copies that are not listed; each runs like the last listed, but `shift` [columns] later
        than the copy before.
    """

    item: PricedBlock | PricedSideOps
    begin: np.ndarray
    states: np.ndarray
    repeats: int = 0
    shift: np.ndarray | float = 0.0


class Coordinates:
    """The coordinates of the matrices of some tasks, and the matrices; those of blocks are kept with their prices.

    every_task: the tasks, equal ones any number of times.
    host: time of the host to launch an op [s].
    """

    def __init__(self, every_task: Iterable[Task], host: float = 0.0) -> None:
        tasks = dict.fromkeys(every_task)
        blocks = dict.fromkeys(part.block for task in tasks for part in task.parts)
        inside = set[str]().union(*(block.streams for block in blocks))
        beside = {side.stream for task in tasks for side in (*task.ahead, *task.behind)}
        self.streams = [COMPUTE, *sorted((inside | beside) - {COMPUTE})]
        self.inside = [i for i, stream in enumerate(self.streams) if stream in inside and i]
        """Coordinates of the streams, other than the compute stream, that blocks use."""
        self.beside = [i for i, stream in enumerate(self.streams) if stream not in inside and i]
        """Coordinates of the streams that only side ops use."""
        self._own: dict[tuple[BlockPrices, int, str], np.ndarray] = {}
        self.at = {stream: i for i, stream in enumerate(self.streams)}
        self.launch = host
        self.host = len(self.streams) if host else None
        self.port = len(self.streams) + bool(host)
        self.ports = slice(self.port, self.port + max((task.ports for task in tasks), default=1))
        self.size = self.ports.stop
        self.key = tuple(self.streams), self.launch, self.size

    def _once(self, part: PricedBlock, what: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns a large result for all copies of a part, computed once for this program."""
        return remember(self._own, (part.prices, part.count, what), make)

    def _cached_result(self, part: PricedBlock, what: Hashable, make: Callable[[], T]) -> T:
        """Returns a result for a block at its prices, computed once and kept with the prices."""
        return remember(part.prices.results, (self.key, what), make)

    def table(self, part: PricedBlock) -> BlockMatrices:
        """Returns the matrices of a copy of a part."""
        return self._cached_result(part, "table", lambda: self.sweep(part.block, part.seconds, part.latency))

    def _hold_columns(self, part: PricedBlock, marks: Marks) -> BlockMatrices:
        """Makes matrices of a copy with a column for each of `marks`: a time before which its ops cannot begin."""
        table = self._cached_result(part, marks, lambda: self.sweep(part.block, part.seconds, part.latency, marks))
        return BlockMatrices(table.begin[:, self.size :], table.out[:, self.size :])

    def _powers(self, part: PricedBlock) -> Orbit:
        """Computes the matrices of no copy, of a copy, and so on to all copies."""
        key = self.key, "powers"
        known = part.prices.results.get(key)
        if not isinstance(known, Orbit) or (known.count < part.count and not known.repeats):
            identity = np.full((self.size, self.size), NEVER)
            np.fill_diagonal(identity, 0.0)
            known = part.prices.results[key] = self.table(part).orbit(identity, part.count)
        return known.of(part.count)

    def _orbit(self, part: PricedBlock, state: np.ndarray) -> Orbit:
        """Computes the orbit of `state` over all copies of a part."""
        powers = self._powers(part)
        moves = powers.moves[:, (state > NEVER).any(axis=1)]
        if not powers.repeats or (moves == moves[:, :1]).all():
            # All columns move alike, so every state does.
            return Orbit(product(powers.states, state), np.repeat(moves[:, :1], state.shape[1], axis=1), part.count)
        return self.table(part).orbit(state, part.count)

    def power(self, part: PricedBlock) -> np.ndarray:
        """Returns the matrix of all copies of a part."""
        return self._cached_result(part, ("power", part.count), lambda: self._powers(part).last)

    def _ready(self, part: PricedBlock, marks: Marks) -> np.ndarray:
        """Returns when the ops at the places of each of `marks` have ended [copies, marks, coordinates]."""

        def rows() -> np.ndarray:
            rows = np.full((len(marks), self.size), NEVER)
            ends = self.table(part).begin + part.lasting[:, None]
            for row, places in zip(rows, marks, strict=True):
                for place in places:
                    if place == INPUT:
                        row[self.port] = 0.0
                    else:
                        np.maximum(row, ends[place], out=row)
            return product(rows, self._powers(part).before)

        return self._once(part, "ready", rows)

    def _push(self, part: PricedBlock, marks: Marks) -> np.ndarray:
        """Returns how delaying the ops at the places of `marks` in each copy delays the state after the last copy.

        Its shape is [copies, coordinates, marks].
        """
        return self._once(
            part, "pushed", lambda: product(self._powers(part).before[::-1], self._hold_columns(part, marks).out)
        )

    def sweep(
        self,
        block: Block,
        seconds: Sequence[float | np.ndarray],
        latency: Sequence[float | np.ndarray],
        marks: Marks = (),
        prices: tuple[int, ...] = (),
    ) -> BlockMatrices:
        """Computes the matrices of a block, with a column for each of `marks` behind those of the state.

        seconds, latency: of its ops, each as an array of shape `prices` where there are several: the last axes of the
            matrices.
        """
        now = np.full((self.size, self.size + len(marks), *prices), NEVER)
        now[np.diag_indices(self.size)] = 0.0
        begin, seen = np.full((2, len(block.ops), *now.shape[1:]), NEVER)
        for i, places in enumerate(marks):
            begin[[place for place in places if place != INPUT], self.size + i] = 0.0
        arrivals = now[self.ports].copy()
        entries = [(arrival, set(port.entry)) for arrival, port in zip(arrivals, block.ports, strict=False)]
        for i, op in enumerate(block.ops):
            stream, row = self.at[op.stream], begin[i]
            np.maximum(row, now[stream], out=row)
            if self.host is not None and op.issued:
                now[self.host] += self.launch * op.issued
                np.maximum(row, now[self.host], out=row)
            for j in block.after[i]:
                np.maximum(row, seen[j], out=row)
            for arrival, entry in entries:
                if i in entry:
                    np.maximum(row, arrival, out=row)
            now[stream] = row + seconds[i]
            seen[i] = now[stream] + latency[i]
        for row, arrival, port in zip(now[self.port :], arrivals, block.ports, strict=False):
            row[:] = arrival if port.through else NEVER
            for j in port.exit:
                np.maximum(row, seen[j], out=row)
        return BlockMatrices(begin, now)

    def parts_follow(self, parts: Sequence[PricedBlock], s: int) -> bool:
        """Returns whether stream `s` is never free later than the compute stream after `parts`, nor delays more in
        them, if so before them."""
        state: np.ndarray | None = None
        for part in parts:
            table = self.table(part)
            first = table.begin if state is None else product(table.begin, state)
            if (first[:, s] > first[:, 0]).any():
                return False
            # Between copies of a part the same must hold as between tasks.
            if part.count > 1 and not self._cached_result(part, ("follows", s), partial(self._follows, table, s)):
                return False
            if part.count > 1 and state is not None and self._late_end(state, s):
                return False
            state = self.power(part) if state is None else product(self.power(part), state)
        return state is None or not (self._late_end(state, s) or self._late_begin(state, s))

    def _follows(self, table: BlockMatrices, s: int) -> bool:
        """Returns the same of a copy of a part behind another."""
        ops_wait = bool((table.begin[:, s] > table.begin[:, 0]).any())
        return not (ops_wait or self._late_begin(table.out, s) or self._late_end(table.out, s))

    def _late_begin(self, matrix: np.ndarray, s: int) -> bool:
        """Returns whether another stream is delayed more by stream `s` than by the compute stream."""
        later = matrix[:, s] > matrix[:, 0]
        later[s] = False
        return bool(later.any())

    def _late_end(self, matrix: np.ndarray, s: int) -> bool:
        """Returns whether stream `s` ends later than the compute stream."""
        later = matrix[s] > matrix[0]
        later[s] = matrix[s, s] > matrix[0, 0]
        return bool(later.any())

    # ------------------------------------------------------------------------------------------- tasks

    def ignores_early_arrivals(self, task: Task) -> bool:
        """Returns whether an input that arrives before the compute stream is free delays no op of a task."""
        begins = [self.table(part).begin for part in task.parts[:1]]
        return all(bool((begin[:, self.ports] <= begin[:, :1]).all()) for begin in begins)

    def issue(self, part: PricedBlock) -> float:
        """Returns the time in which the host launches a copy of a part [s]."""
        return 0.0 if self.host is None else float(self.table(part).out[self.host, self.host])

    def host_matters(self, part: PricedBlock, state: np.ndarray, host: float) -> bool:
        """Returns whether some op of a copy that finds `state` (its host left out) waits for a host that begins at
        `host`."""
        if self.host is None or host == NEVER:
            return False
        begin = self.table(part).begin
        return bool((begin[:, self.host] + host > np.maximum.reduce(begin + state, axis=1)).any())

    def matrix(self, task: Task) -> np.ndarray:
        """Returns the matrix of a whole task, computed once and kept with the task."""
        return remember(task.engine_results, ("matrix", self.key), lambda: self._matrix(task))

    def _matrix(self, task: Task) -> np.ndarray:
        state = np.full((self.size, self.size), NEVER)
        np.fill_diagonal(state, 0.0)
        if not (task.ahead or task.behind):
            return reduce(lambda a, b: product(b, a), [self.power(part) for part in task.parts] or [state])
        holding = self._releases(task, lambda stream: np.zeros(1))
        ready: list[tuple[int, np.ndarray]] = []
        for i, part in enumerate(task.parts):
            marks = task.marks[i]
            if task.behind and marks:
                complete = self._ready(part, marks)
                ready.append((i, product(complete, state) if i else complete))
            # The first part finds the state before the task.
            state = product(self.power(part), state) if i else self.power(part).copy()
            for stream, times in holding.items() if marks else ():
                pushed = self._push(part, marks) + self._of_copies(task, i, times)[..., 0][:, None]
                np.maximum(state[:, stream], pushed.max(axis=(0, 2)), out=state[:, stream])
        for stream in holding:
            state[stream, stream] += sum(side.ends[-1] for side in task.ahead if self.at[side.stream] == stream)
        for stream, _, ends in self._behind(task, state, ready):
            state[stream] = ends[-1]
        return state

    def _releases(self, task: Task, free: Callable[[int], np.ndarray]) -> dict[int, np.ndarray]:
        """Returns by stream when its side ops make each parameter available [parameters, columns].

        free: when a stream is free [columns].
        """
        total = sum(part.count * len(marks) for part, marks in zip(task.parts, task.marks, strict=True))
        releases: dict[int, np.ndarray] = {}
        at: dict[int, np.ndarray] = {}
        for side in task.ahead:
            stream = self.at[side.stream]
            if stream not in releases:
                at[stream] = free(stream)
                releases[stream] = np.full((total, len(at[stream])), NEVER)
            seen = at[stream] + (side.ends + side.latency)[:, None]
            releases[stream][side.params] = np.repeat(seen, side.lengths, axis=0)
            at[stream] = at[stream] + side.ends[-1]
        return releases

    def _of_copies(self, task: Task, part: int, values: np.ndarray) -> np.ndarray:
        """Reshapes values by parameter number to [copies, parameters of a copy, ...], in the order of execution."""
        start, count, width = task.numbers[part], task.parts[part].count, len(task.marks[part])
        of_part = values[start : start + count * width].reshape(count, width, *values.shape[1:])
        return of_part if task.forward else of_part[::-1]

    def _behind(
        self, task: Task, state: np.ndarray, ready: list[tuple[int, np.ndarray]]
    ) -> list[tuple[int, PricedSideOps, np.ndarray]]:
        """Returns the side ops after the parts, each list with its stream and the ends of its ops [ops, columns].

        An op waits for the gradients of its parameters.
        ready: by part, when these are complete.
        """
        total = sum(part.count * len(marks) for part, marks in zip(task.parts, task.marks, strict=True))
        complete = np.full((total, state.shape[1]), NEVER)
        for part, times in ready:
            self._of_copies(task, part, complete)[:] = times
        ended: list[tuple[int, PricedSideOps, np.ndarray]] = []
        free = dict(enumerate(state))
        for side in task.behind:
            stream = self.at[side.stream]
            slack = np.maximum.reduceat(complete[side.params], side.starts, axis=0)
            if side.after:
                others, places = side.after
                earlier = next(ends for _, priced, ends in ended if priced is others) + others.latency[:, None]
                slack = np.maximum(slack, np.where(places[:, None] < 0, NEVER, earlier[places]))
            slack -= (side.ends - side.seconds)[:, None]
            slack[0] = np.maximum(slack[0], free[stream])
            ends = np.maximum.accumulate(slack, axis=0) + side.ends[:, None]
            ended.append((stream, side, ends))
            free[stream] = ends[-1]
        return ended

    def walk(self, task: Task, state: np.ndarray, side_ops_alone: bool = False) -> Iterator[Walked]:
        """Plays a task from `state` [coordinates, columns], each column a state.

        side_ops_alone: whether to leave out when the ops of parts begin.
        """
        yield from self._walk_ahead(task, state)
        holding = self._releases(task, state.__getitem__) if task.ahead else {}
        ready: list[tuple[int, np.ndarray]] = []
        for i, part in enumerate(task.parts):
            if holding and task.marks[i]:
                held = self._hold_columns(part, task.marks[i])
                times = reduce(np.maximum, [self._of_copies(task, i, values) for values in holding.values()])
                states = np.concatenate([state[None], product(held.out, times)])
                for now, after in pairwise(states):
                    np.maximum(product(self.table(part).out, now), after, out=after)
                state = states[-1]
                if not side_ops_alone:
                    begin = np.maximum(product(self.table(part).begin, states[:-1]), product(held.begin, times))
                    yield Walked(part, begin, states[:-1])
                continue
            if task.behind and task.marks[i]:
                ready.append((i, product(self._ready(part, task.marks[i]), state)))
            orbit = self._orbit(part, state)
            if not side_ops_alone:
                yield self._walk_orbit(part, orbit)
            state = orbit.last
        for _, side, ends in self._behind(task, state, ready) if task.behind else ():
            yield Walked(side, ends - side.seconds[:, None], state)

    def _walk_ahead(self, task: Task, state: np.ndarray) -> Iterator[Walked]:
        """Plays the side ops before the parts of a task."""
        free = {self.at[side.stream]: state[self.at[side.stream]] for side in task.ahead}
        for side in task.ahead:
            stream = self.at[side.stream]
            yield Walked(side, free[stream] + (side.ends - side.seconds)[:, None], state)
            free[stream] = free[stream] + side.ends[-1]

    def _walk_orbit(self, part: PricedBlock, orbit: Orbit) -> Walked:
        """Returns when the ops of the copies of a part begin, whose states are known."""
        table = self.table(part)
        states, repeats = (orbit.states, orbit.repeats - 1) if orbit.repeats else (orbit.states[:-1], 0)
        begin = product(table.begin, states)
        if repeats and self.host is not None:
            # An op that nothing else waits for may wait for the host less and less.
            without = states[-1].copy()
            without[self.host] = NEVER
            if not np.array_equal(product(table.begin, without), begin[-1]):
                states, repeats = orbit.before, 0
                begin = product(table.begin, states)
        return Walked(part, begin, states, repeats, orbit.moves[0])

    def choose_entries(self, matrix: np.ndarray, second: int | None, sends: bool) -> CompactMatrix:
        """Returns the entries of a task's matrix that matter to a device of the compute stream and another, `second`,
        if there is any. sends: whether the result of the task is sent."""
        lead = NEVER
        if self.host is not None:
            rows = [0, self.port] if second is None else [0, self.port, second]
            lead = ahead(matrix[rows, self.host], matrix[rows, 0])
            if sends:
                lead = max(lead, matrix[self.host, self.host] + self.launch - matrix[self.port, 0])
        port, other = self.port, None
        if second is not None:
            rows, columns = [0, port, second, second, second], [second, second, 0, port, second]
            other = SecondStream(*matrix[rows, columns].tolist())
        return CompactMatrix(float(lead), other, *matrix[[0, 0, port, port], [0, port, 0, port]].tolist())
