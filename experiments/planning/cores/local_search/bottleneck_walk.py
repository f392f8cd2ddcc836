"""Aceso's search: find the bottleneck stage, relieve it by a trade of resources, repeat; several trades make a hop.

The bottleneck is the stage that lacks most memory, or else the slowest. Primitives, each with a sign for the seconds,
the memory and the collectives of the bottleneck, change it at the cost of partners; groups of them are tried in the
order of what makes the stage slow: work, efficiency lost to collectives, or recomputation. If no primitive of a group
improves on the plan, the search goes on from the plans that it made, up to `HOPS` deep; if that fails, from the best
plan that it has passed by (Liu et al. 2024, "Aceso", EuroSys 2024; microsoft/SuperScaler, `search/`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.stages import PlannedStage, StageSequence, StageTable

HOPS = 7
"""Primitives that one trial may apply one after another."""
KEPT = 1.2
"""Plans of at most so many times the best seconds are kept, to start from later."""
GOALS = (0.4, 0.2, 0.0)
"""Shares of the gap to a partner that layers moved there leave."""


class Shape(NamedTuple):
    """A way to use GPUs, whatever is recomputed: their number, and degrees of tensor and data parallelism."""

    gpus: int
    tensor: int
    data: int


class StageState(NamedTuple):
    """A stage of a plan: its layers, first and past the last, and its shape."""

    first: int
    stop: int
    shape: Shape


State = tuple[StageState, ...]


class Primitive(NamedTuple):
    """A change of the bottleneck, with what it does to it: more (+1), less (-1) or the same (0).

    apply: the plans that it makes of a plan and the place of the bottleneck.
    """

    name: str
    seconds: int
    memory: int
    collectives: int
    apply: Callable[[State, int], Iterator[State]]


class PricedState(NamedTuple):
    """A plan with its stages' options, their seconds, the micro-batches that each lacks memory for, and the objective:
    the sum of the stages and m - 1 times the slowest [s]."""

    options: tuple[int, ...]
    seconds: tuple[float, ...]
    lacking: tuple[int, ...]
    value: float

    @property
    def rank(self) -> tuple[int, float]:
        """Plans that fit first, the fastest first of all."""
        return max(self.lacking), self.value


class StageWalk:
    """The search, whatever prices the stages: for one number of stages after another.

    layers: their number. shapes: in which stages may use GPUs. gpus: all of them are used. most: plans priced for a
    number of stages. seconds: CPU time after which no other number of stages is tried, once a plan fits [s].

    Customise by: choose_option, split_seconds, layers_to_move.
    """

    def __init__(
        self,
        layers: int,
        shapes: Collection[Shape],
        gpus: int,
        microbatches: int,
        most: int,
        seconds: float = math.inf,
    ) -> None:
        self.layers, self.shapes, self.gpus, self.microbatches, self.most = layers, shapes, gpus, microbatches, most
        self._end = time.process_time() + seconds
        self.visited, self._limit = 0, 0
        self.known: dict[State, PricedState] = {}
        self.primitives = (
            Primitive("move layers", -1, -1, 0, self._move_layers),
            Primitive("more replicas", -1, -1, 1, lambda state, at: self._grow(state, at, "data")),
            Primitive("more tensor parallelism", -1, -1, 1, lambda state, at: self._grow(state, at, "tensor")),
            Primitive("fewer replicas", 1, 1, -1, lambda state, at: self._shrink(state, at, "data")),
            Primitive("less tensor parallelism", 1, 1, -1, lambda state, at: self._shrink(state, at, "tensor")),
            Primitive("replicas for tensor parallelism", 0, 1, -1, lambda state, at: self._trade(state, at, "data")),
            Primitive("tensor parallelism for replicas", 0, -1, 1, lambda state, at: self._trade(state, at, "tensor")),
        )

    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """What a stage lacks of memory before `behind` others (0: it fits), its seconds and its option."""
        raise NotImplementedError

    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        """Seconds of a stage for its work alone, lost to collectives and small kernels, and of recomputation."""
        raise NotImplementedError

    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        """The fewest layers without which a stage fits and takes no longer than wanted; one if none are enough, none if
        it has no other. step: 1 if they leave at its end, -1 at its begin."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ search

    def run(self) -> StageSequence | None:
        """The best plan of all numbers of stages; None if none that was met fits."""
        best: State | None = None
        for number in range(1, min(self.layers, self.gpus) + 1):
            if time.process_time() > self._end and best is not None and max(self.price(best).lacking) <= 0:
                break
            start = self.start(number)
            if start is None:
                continue
            self._limit = self.visited + self.most
            found = self._improve(start)
            if best is None or self.price(found).rank < self.price(best).rank:
                best = found
        if best is None or max(self.price(best).lacking) > 0 or not math.isfinite(self.price(best).value):
            return None
        priced = self.price(best)
        stages = tuple(
            PlannedStage(range(one.first, one.stop), option) for one, option in zip(best, priced.options, strict=True)
        )
        return StageSequence(stages, priced.value, self.visited)

    def start(self, number: int) -> State | None:
        """Equal numbers of layers, and GPUs by halving the largest stage until there are enough; None if no shape has
        such GPUs."""
        sizes = [self.gpus]
        while len(sizes) < number:
            largest = max(sizes)
            if largest % 2:
                return None
            sizes.remove(largest)
            sizes += [largest // 2] * 2
        layers = self.layers
        borders = [round(place * layers / number) for place in range(number + 1)]
        stages = []
        for place, size in enumerate(sorted(sizes)):
            shapes = [shape for shape in self.shapes if shape.gpus == size]
            if not shapes:
                return None
            first, stop = borders[place], borders[place + 1]
            stages.append(
                min((StageState(first, stop, one) for one in shapes), key=lambda one: self._seconds(one, number, place))
            )
        return tuple(stages)

    def price(self, state: State) -> PricedState:
        """The price of a plan; every stage recomputes only if it must, and as the fastest option that fits does."""
        if state not in self.known:
            self.visited += 1
            chosen = [self.choose_option(one, len(state) - 1 - place) for place, one in enumerate(state)]
            seconds = tuple(one[1] for one in chosen)
            value = sum(seconds) + (self.microbatches - 1) * max(seconds)
            options, lacking = tuple(one[2] for one in chosen), tuple(one[0] for one in chosen)
            self.known[state] = PricedState(options, seconds, lacking, value)
        return self.known[state]

    def _seconds(self, stage: StageState, number: int, place: int) -> tuple[int, float]:
        lacking, seconds, _ = self.choose_option(stage, number - 1 - place)
        return lacking, seconds

    def _improve(self, start: State) -> State:
        """The best plan of repeated trials."""
        best = now = start
        passed: dict[State, float] = {}
        entered: set[State] = set()
        while self.visited < self._limit:
            found = self._hop(now, best, 0, entered, passed)
            found = self._tune_shapes(found) if found is not None else None
            if found is not None and self.price(found).rank < self.price(best).rank:
                best = now = found
                continue
            limit = KEPT * self.price(best).value
            left = [one for one, value in passed.items() if one not in entered and value <= limit]
            if not left:
                break
            now = min(left, key=lambda one: self.price(one).rank)
        return best

    def _hop(
        self, state: State, best: State, depth: int, entered: set[State], passed: dict[State, float]
    ) -> State | None:
        """A plan better than the best, at most `HOPS` primitives away; None if none is found."""
        if depth == HOPS or self.visited >= self._limit:
            return None
        entered.add(state)
        priced = self.price(state)
        order = priced.lacking if max(priced.lacking) else priced.seconds
        at = max(range(len(state)), key=lambda place: order[place])
        for group in self.groups(state, at):
            made = [one for primitive in group for one in primitive.apply(state, at) if one not in entered]
            passed |= {one: self.price(one).value for one in made}
            made.sort(key=lambda one: self.price(one).rank)
            if made and self.price(made[0]).rank < self.price(best).rank:
                return made[0]
            for one in made:
                if one not in entered and (found := self._hop(one, best, depth + 1, entered, passed)) is not None:
                    return found
        return None

    def groups(self, state: State, at: int) -> list[list[Primitive]]:
        """The primitives in the order in which they are tried at a bottleneck."""
        priced = self.price(state)
        if max(priced.lacking):
            return [[one for one in self.primitives if one.memory < 0]]
        parts = np.array([self.split_seconds(one, seconds) for one, seconds in zip(state, priced.seconds, strict=True)])
        totals = parts.sum(axis=0)
        shares = np.divide(parts[at], totals, out=np.zeros(3), where=totals > 0)
        left = list(self.primitives)
        groups = []
        for kind in np.argsort(-shares, kind="stable"):
            sign = ("seconds", "collectives", "memory")[kind]
            first = [one for one in left if getattr(one, sign) < 0]
            if parts[at][2] > 0 and kind != 2:  # a stage that recomputes should not need more memory
                first = [one for one in first if one.memory <= 0]
            groups.append(first)
            left = [one for one in left if one not in first]
        return [group for group in (*groups, left) if group]

    # -------------------------------------------------------------------------------------- primitives

    def _move_layers(self, state: State, at: int) -> Iterator[State]:
        """Layers leave for a partner, the stage of least seconds first; stages in between pass them on."""
        priced = self.price(state)
        for partner in sorted((one for one in range(len(state)) if one != at), key=lambda one: priced.seconds[one]):
            step = 1 if partner > at else -1
            for goal in GOALS:
                wanted = priced.seconds[at] - (priced.seconds[at] - priced.seconds[partner]) * (1 - goal)
                moved = list(state)
                for place in range(at, partner, step):
                    count = self.layers_to_move(moved[place], len(state) - 1 - place, step, wanted)
                    if not count:
                        break
                    one, other = moved[place], moved[place + step]
                    if step > 0:
                        border = one.stop - count
                        moved[place], moved[place + 1] = one._replace(stop=border), other._replace(first=border)
                    else:
                        border = one.first + count
                        moved[place], moved[place - 1] = one._replace(first=border), other._replace(stop=border)
                if tuple(moved) != state:
                    yield tuple(moved)

    def _scale(self, shape: Shape, degree: str, up: bool) -> Shape | None:
        """A shape with twice or half a degree, and as many GPUs; None if no option has it."""
        size = getattr(shape, degree)
        if not up and size % 2:
            return None
        new, gpus = (size * 2, shape.gpus * 2) if up else (size // 2, shape.gpus // 2)
        changed = shape._replace(**{degree: new, "gpus": gpus})
        return changed if changed in self.shapes else None

    def _grow(self, state: State, at: int, degree: str) -> Iterator[State]:
        """The bottleneck doubles a degree; others halve one of theirs until they have given as many GPUs."""
        grown = self._scale(state[at].shape, degree, True)
        if grown is not None:
            yield from self._balance(state, at, grown, up=False)

    def _shrink(self, state: State, at: int, degree: str) -> Iterator[State]:
        """The bottleneck halves a degree; others double one of theirs until they have taken its GPUs."""
        shrunk = self._scale(state[at].shape, degree, False)
        if shrunk is not None:
            yield from self._balance(state, at, shrunk, up=True)

    def _balance(self, state: State, at: int, shape: Shape, up: bool) -> Iterator[State]:
        """The plan in which partners make up for a change of a stage's GPUs, those of least seconds after it first."""
        moved = list(state)
        moved[at] = state[at]._replace(shape=shape)
        left = abs(shape.gpus - state[at].shape.gpus)
        changed = {at}
        while left:
            partners = [
                (self._seconds(StageState(one.first, one.stop, other), len(state), place), place, other)
                for place, one in enumerate(moved)
                if place not in changed
                for degree in ("tensor", "data")
                if (other := self._scale(one.shape, degree, up)) is not None
                and abs(other.gpus - one.shape.gpus) <= left
            ]
            if not partners:
                return
            _, place, other = min(partners)
            left -= abs(other.gpus - moved[place].shape.gpus)
            moved[place] = moved[place]._replace(shape=other)
            changed.add(place)
        yield tuple(moved)

    def _trade(self, state: State, at: int, degree: str) -> Iterator[State]:
        """The bottleneck doubles one degree and halves the other."""
        shape = state[at].shape
        other = {"tensor": "data", "data": "tensor"}[degree]
        if getattr(shape, other) % 2 == 0:
            traded = shape._replace(**{degree: getattr(shape, degree) * 2, other: getattr(shape, other) // 2})
            if traded in self.shapes:
                yield self._with_shape(state, at, traded)

    def _with_shape(self, state: State, at: int, shape: Shape) -> State:
        return (*state[:at], state[at]._replace(shape=shape), *state[at + 1 :])

    def _tune_shapes(self, state: State) -> State:
        """The plan in which every stage has the best degrees for its GPUs."""
        tuned: Sequence[StageState] = [
            min(
                (one._replace(shape=shape) for shape in self.shapes if shape.gpus == one.shape.gpus),
                key=lambda tried, place=place: self._seconds(tried, len(state), place),  # type: ignore[misc]
            )
            for place, one in enumerate(state)
        ]
        return tuple(tuned)


class BottleneckWalk(StageWalk):
    """The search over the stages of a table."""

    def __init__(self, table: StageTable, gpus: int, microbatches: int, most: int, seconds: float = math.inf) -> None:
        self.table = table
        self.options: dict[Shape, list[int]] = {}
        for number, option in enumerate(table.options):
            tensor = int(option.plan.get("tp", 1))
            shape = Shape(option.gpus, tensor, int(option.plan.get("dp", option.gpus // tensor)))
            self.options.setdefault(shape, []).append(number)
        self.work = (table.seconds * np.array([one.gpus for one in table.options])).min(axis=-1)
        super().__init__(table.layers, self.options, gpus, microbatches, most, seconds)

    def choose_option(self, stage: StageState, behind: int) -> tuple[int, float, int]:
        """Micro-batches that do not fit, seconds and option of a stage before `behind` others."""
        cells = [(stage.first, stage.stop - 1, option) for option in self.options[stage.shape]]
        behinds = [max(0, behind - int(self.table.behind[one])) for one in cells]
        return min(
            (lacking, float(self.table.seconds[one]), one[2]) for lacking, one in zip(behinds, cells, strict=True)
        )

    def split_seconds(self, stage: StageState, seconds: float) -> tuple[float, float, float]:
        """Seconds of a stage for its work alone, lost to collectives and small kernels, and of recomputation."""
        cells = [(stage.first, stage.stop - 1, option) for option in self.options[stage.shape]]
        ideal = float(self.work[stage.first, stage.stop - 1]) / stage.shape.gpus
        plain = min(float(self.table.seconds[one]) for one in cells)
        return ideal, max(0.0, plain - ideal), max(0.0, seconds - plain)

    def layers_to_move(self, stage: StageState, behind: int, step: int, wanted: float) -> int:
        """The fewest layers without which a stage fits and takes no longer than wanted; one if none are enough, none if
        it has no other."""
        first, last, options = stage.first, stage.stop - 1, self.options[stage.shape]
        both = self.table.seconds, self.table.behind
        if step > 0:  # what is left: the ranges from `first` on, by their last layer
            seconds, most = (array[first, first:last][:, options] for array in both)
        else:  # the ranges that end with `last`, by their first layer
            seconds, most = (array[first + 1 : last + 1, last][:, options] for array in both)
        enough = np.flatnonzero(((most >= behind) & (seconds <= wanted)).any(axis=1))
        if len(enough):
            return int(last - first - enough[-1] if step > 0 else enough[0] + 1)
        return min(1, stage.stop - stage.first - 1)
