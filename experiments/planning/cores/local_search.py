"""Local search: from plan to plan by moves, over the assignments of a factor table or over stages in order.

A planner writes its moves as a generator. It reads where the search is (`now`, `best`, `visited`) and yields plans with
their ranks; the search decides whether to go on from them, remembers the best, and ends with the moves or the budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.elimination import join_arrays
from meshcast.experiments.planning.table import Assignment, FactorTable

State = TypeVar("State")

NOISE = 1e-12
"""Share of a rank below which a gain is rounding."""


class Ranked(NamedTuple, Generic[State]):
    """A plan with its rank, the lower the better: its objective [s], or what it lacks of memory before that."""

    state: State
    rank: Any


def is_better(tried: Ranked[Any], now: Ranked[Any]) -> bool:
    """Returns whether a plan has a lower rank than the present plan."""
    return bool(tried.rank < now.rank)


def accept_all(tried: Ranked[Any], now: Ranked[Any]) -> bool:
    """Goes on from every plan: the moves themselves choose."""
    return True


class LocalSearch(Generic[State]):
    """A search from plan to plan.

    price: the rank of a plan.
    moves: yields ranked plans until there are none to try; reads the search, and counts in `visited` what it prices by
        other means than `price`.
    accept: whether the search goes on from a plan instead of the present plan.
    budget: plans after which it ends; it ends, too, when its time is over.

    now: the present plan.
    best: the best plan so far.
    visited: plans, or entries of tables, that were priced.
    """

    def __init__(
        self,
        price: Callable[[State], Any],
        moves: Callable[[LocalSearch[State]], Iterator[Ranked[State]]],
        accept: Callable[[Ranked[State], Ranked[State]], bool] = is_better,
        budget: float = math.inf,
    ) -> None:
        self._price, self.moves, self.accept, self.budget = price, moves, accept, budget
        self.visited = 0
        self.now: Ranked[State]
        self.best: Ranked[State]

    def price(self, state: State) -> Ranked[State]:
        self.visited += 1
        return Ranked(state, self._price(state))

    def run(self, *starts: State) -> Ranked[State]:
        """Returns the best plan from the best of some starts; from none, the moves begin."""
        nothing: Ranked[Any] = Ranked(None, math.inf)
        self.now = self.best = min(map(self.price, starts), key=lambda start: start.rank, default=nothing)
        for tried in self.moves(self):
            if self.accept(tried, self.now):
                self.now = tried
            if self.best.state is None or tried.rank < self.best.rank:
                self.best = tried
            if self.visited >= self.budget or is_over():
                break
        return self.best


# ------------------------------------------------------------------------------------ assignments of tables


def improve_options(
    table: FactorTable, messages: Iterable[tuple[tuple[str, ...], np.ndarray]], names: Sequence[str], now: Assignment
) -> tuple[dict[str, int] | None, int]:
    """Returns the best options of some variables with all others fixed, or None if those of `now` are as good, and the
    number of their combinations.

    messages: seconds over the options of variables; those that hold none of `names` do not count.
    """
    fixed = [
        (
            tuple(name for name in scope if name in names),
            array[tuple(slice(None) if name in names else now[name] for name in scope)],
        )
        for scope, array in messages
        if any(name in names for name in scope)
    ]
    joined = join_arrays(fixed, tuple(names), table)
    place = np.unravel_index(int(joined.argmin()), joined.shape)
    if not joined[place] < joined[tuple(now[name] for name in names)] * (1 - NOISE):
        return None, joined.size
    return dict(zip(names, map(int, place), strict=True)), joined.size


# ------------------------------------------------------------------------------------------ stages in order


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


def pass_layers(
    stages: Sequence[StageState], source: int, target: int, count: Callable[[StageState, int], int]
) -> tuple[StageState, ...]:
    """Returns the stages after layers have moved from `source` to `target`, through all stages in between.

    count: layers that leave a stage at a place; 0: there the moves end.
    """
    moved, step = list(stages), 1 if target > source else -1
    for place in range(source, target, step):
        here, near = moved[place], moved[place + step]
        number = count(here, place)
        if not number:
            break
        border = here.stop - number if step > 0 else here.first + number
        left, right = (here, near) if step > 0 else (near, here)
        first = min(place, place + step)
        moved[first : first + 2] = left._replace(stop=border), right._replace(first=border)
    return tuple(moved)
