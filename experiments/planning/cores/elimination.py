"""Variable elimination: the optimum of an additive table, exactly, by dynamic programming over its variables.

OptCNN's node and edge elimination (Jia et al. 2018, arXiv 1802.04924, section 5) are its steps for a variable with two
neighbours and for two factors of the same pair; eliminating a variable with more neighbours replaces the enumeration of
the irreducible rest. Over the semiring of Pareto frontiers it is TensorOpt's frontier tracking (Cai et al. 2020, arXiv
2004.10856).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.table import FactorTable, Kept, Optimum, PendingTable

LARGEST = 200_000_000
"""Entries of the largest table that elimination makes."""

ROUNDING = 1e-9
"""Share by which sums in another order differ."""


class FrontierPoint(NamedTuple):
    """A point of a Pareto frontier: objective [s], memory [bytes], and the option of every variable."""

    value: float
    nbytes: float
    assignment: dict[str, int]


def eliminate(table: FactorTable) -> Optimum | None:
    """Minimises the objective of a table; None if no assignment is allowed. Raises ValueError, see `LARGEST`."""
    messages = [(factor.scope, table.objective(factor)) for factor in table.factors]
    steps: list[tuple[str, tuple[str, ...], np.ndarray]] = []
    visited = 0
    for name, scope in _elimination_order(table):
        joined = join_arrays([message for message in messages if name in message[0]], (*scope, name), table)
        visited += joined.size
        steps.append((name, scope, joined.argmin(axis=-1)))
        messages = [message for message in messages if name not in message[0]] + [(scope, joined.min(axis=-1))]
    value = float(sum(array.sum() for _, array in messages))
    if not math.isfinite(value):
        return None
    assignment: dict[str, int] = {}
    for name, scope, best in reversed(steps):
        assignment[name] = int(best[tuple(assignment[other] for other in scope)])
    return Optimum(assignment, value, visited, value)


def trace_frontier(table: FactorTable, most: int = 0) -> list[FrontierPoint]:
    """Returns the Pareto frontier of objective and memory, by ascending memory; empty if no assignment is allowed.

    most: points that an intermediate frontier keeps, evenly over its memory; 0: all, and the frontier is exact.
    Raises ValueError if the table is too entangled, see `LARGEST`.
    """
    names = list(table.choices)
    plain = [(factor.scope, (table.objective(factor), factor.nbytes)) for factor in table.factors]
    frontiers: list[tuple[tuple[str, ...], Any]] = []  # arrays of frontiers
    for name, scope in _elimination_order(table):
        full = (*scope, name)
        touching = [costs for costs in plain if name in costs[0]]
        seconds, nbytes = (
            join_arrays([(variables, arrays[part]) for variables, arrays in touching], full, table) for part in (0, 1)
        )
        parts = [(tuple(map(full.index, variables)), array) for variables, array in frontiers if name in variables]
        left = np.empty(seconds.shape[:-1], dtype=object)
        for place in np.ndindex(*left.shape):
            check_time()
            empty = Frontier(np.zeros((0, 2)), np.zeros((0, len(names)), int))
            ways = [empty, *_sum_frontiers(seconds, nbytes, place, parts, names.index(name), len(names))]
            left[place] = Frontier(*(np.concatenate(part) for part in zip(*ways, strict=True))).prune(most)
        plain = [costs for costs in plain if name not in costs[0]]
        frontiers = [message for message in frontiers if name not in message[0]] + [(scope, left)]
    # Every part of the table that shares no variable with the others has left a separate frontier.
    whole = Frontier(np.zeros((1, 2)), np.full((1, len(names)), -1))
    for _, array in frontiers:
        whole = whole.plus(array[()]).prune(most)
    return [
        FrontierPoint(float(value), float(nbytes), dict(zip(names, map(int, row), strict=True)))
        for (value, nbytes), row in zip(*whole, strict=True)
    ]


def _sum_frontiers(
    seconds: np.ndarray,
    nbytes: np.ndarray,
    place: tuple[int, ...],
    parts: Sequence[tuple[tuple[int, ...], Any]],
    column: int,
    variables: int,
) -> Iterator[Frontier]:
    """Yields, for every allowed option of the last variable, its point plus the frontiers of eliminated neighbours."""
    for option in np.flatnonzero(np.isfinite(seconds[place])).tolist():
        cell, options = (*place, option), np.full((1, variables), -1)
        options[0, column] = option
        alone = Frontier(np.array([[seconds[cell], nbytes[cell]]]), options)
        yield reduce(Frontier.plus, (array[tuple(cell[axis] for axis in axes)] for axes, array in parts), alone)


def least_objectives(table: FactorTable) -> dict[str, np.ndarray]:
    """Returns the least objective of all assignments that have an option, for every option of every variable [s].

    Min-marginals, by a forward and a backward pass over the eliminated variables. Raises ValueError as `eliminate`.
    """
    order = _elimination_order(table)
    # The last of a message: the step that sent it, -1 of a factor.
    messages = [(factor.scope, table.objective(factor), -1) for factor in table.factors]
    joined, sent, read_by = [], [], [-1] * len(order)
    for step, (name, scope) in enumerate(order):
        mine = [message for message in messages if name in message[0]]
        for *_, sender in mine:
            if sender >= 0:
                read_by[sender] = step
        joined.append(join_arrays([message[:2] for message in mine], (*scope, name), table))
        sent.append(joined[-1].min(axis=-1))
        messages = [message for message in messages if name not in message[0]] + [(scope, sent[-1], step)]
    total = sum(float(sent[step]) for step, reader in enumerate(read_by) if reader < 0)
    if not math.isfinite(total):
        return {name: np.full(len(options), math.inf) for name, options in table.choices.items()}
    beliefs: list[np.ndarray] = [np.empty(0)] * len(order)
    for step in reversed(range(len(order))):
        scope, reader = order[step][1], read_by[step]
        if reader < 0:
            rest = total - sent[step]
        else:
            full = (*order[reader][1], order[reader][0])
            least = beliefs[reader].min(axis=tuple(place for place, other in enumerate(full) if other not in scope))
            kept = [other for other in full if other in scope]
            least = least.transpose([kept.index(other) for other in scope])
            rest = least - np.where(np.isfinite(sent[step]), sent[step], 0.0)
        beliefs[step] = joined[step] + rest[..., None]
    return {name: beliefs[step].min(axis=tuple(range(len(scope)))) for step, (name, scope) in enumerate(order)}


class LeastObjective(NamedTuple):
    """What no assignment of a table is below.

    value: [s].
    exact: whether it is the optimum.
    kept: numbers of the options that may be part of it.
    """

    value: float
    exact: bool
    kept: Kept


def bound_objective(table: PendingTable, known: float, cells: int) -> LeastObjective:
    """Returns the least objective of a table of which most is never priced.

    Costs that are not priced yet count as zero, so the least objective with an option is a lower bound of it. Options
    whose bound is above the known objective go; then the smallest factor that is left is priced, and so on
    (reduced-cost fixing).

    known: the objective of some assignment [s]. cells: combinations of options that are priced at most; factors for
    which they do not suffice count as zero.

    Raises ValueError as `eliminate`, or if no assignment is as good as `known`.
    """
    kept: Kept = {name: range(len(options)) for name, options in table.choices.items()}
    priced, pending = FactorTable(table.choices, table.factors, table.microbatches), list(table.pending)
    while True:
        least = least_objectives(priced)
        places = {name: np.flatnonzero(bounds <= known * (1 + ROUNDING)) for name, bounds in least.items()}
        if empty := [name for name, numbers in places.items() if not len(numbers)]:
            raise ValueError(f"no option of {empty[0]} is part of an assignment of {known} s")
        kept = {name: [kept[name][int(place)] for place in numbers] for name, numbers in places.items()}
        priced = priced.take({name: numbers.tolist() for name, numbers in places.items()})
        sizes = [(math.prod(len(kept[name]) for name in factor.scope), place) for place, factor in enumerate(pending)]
        size, place = min(sizes, default=(0, -1))
        if not pending or size > cells:
            break
        cells -= size
        factors = [*priced.factors, pending.pop(place).price(kept)]
        priced = FactorTable(priced.choices, factors, priced.microbatches)
    best = eliminate(priced)
    assert best is not None  # the options that are kept are part of an assignment
    return LeastObjective(best.value, not pending, kept)


class Frontier(NamedTuple):
    """A Pareto set: points [n, 2] of objective and memory; options [n, variables], -1 of variables that are left."""

    points: np.ndarray
    options: np.ndarray

    def plus(self, other: Frontier) -> Frontier:
        """Returns all sums of a point of either set."""
        sums = (self.points[:, None] + other.points[None]).reshape(-1, 2)
        options = np.maximum(self.options[:, None], other.options[None])
        return Frontier(sums, options.reshape(-1, options.shape[-1]))

    def prune(self, most: int) -> Frontier:
        """Returns the points that no other beats in both, by ascending memory; at most so many of them, 0: all."""
        order = np.lexsort((self.points[:, 0], self.points[:, 1]))
        points, options = self.points[order], self.options[order]
        before = np.minimum.accumulate(np.concatenate([[np.inf], points[:-1, 0]]))
        kept = np.flatnonzero(points[:, 0] < before[: len(points)])
        if most and len(kept) > most:
            kept = kept[np.unique(np.linspace(0, len(kept) - 1, most).round().astype(int))]
        return Frontier(points[kept], options[kept])


def _elimination_order(table: FactorTable) -> list[tuple[str, tuple[str, ...]]]:
    """Returns variables with the neighbours that their elimination joins, the smallest table first."""
    scopes = [set(factor.scope) for factor in table.factors]
    sizes = {name: len(options) for name, options in table.choices.items()}
    order = []
    left = dict.fromkeys(table.choices)
    while left:
        neighbours = {name: set().union(*(scope for scope in scopes if name in scope)) - {name} for name in left}
        entries = {name: sizes[name] * math.prod(sizes[other] for other in near) for name, near in neighbours.items()}
        name = min(left, key=entries.__getitem__)
        if entries[name] > LARGEST:
            raise ValueError(
                f"eliminating {name} takes a table of {entries[name]:.1e} entries, over {LARGEST:.0e}: restrict the "
                f"options of {', '.join(sorted(neighbours[name]))}, or solve the table as an integer program"
            )
        near = neighbours[name]
        scopes = [scope for scope in scopes if name not in scope] + [near]
        order.append((name, tuple(sorted(near))))
        del left[name]
    return order


def join_arrays(
    messages: Sequence[tuple[tuple[str, ...], np.ndarray]], scope: tuple[str, ...], table: FactorTable
) -> np.ndarray:
    """Returns the sum of arrays over parts of a scope, over the whole scope. Raises OutOfTime."""
    check_time()
    total = np.zeros([len(table.choices[name]) for name in scope])
    for names, array in messages:
        order = sorted(range(len(names)), key=lambda place: scope.index(names[place]))
        shape = [len(table.choices[name]) if name in names else 1 for name in scope]
        total += array.transpose(order).reshape(shape)
    return total
