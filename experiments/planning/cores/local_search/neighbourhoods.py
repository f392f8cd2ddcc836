"""OneFlow's search: eliminations while variables have few neighbours, merges, then greedy steps over neighbourhoods.

Variables with at most two neighbours are eliminated exactly. Where none is left, two neighbours of at most `most`
combinations become one, those with the most common neighbours first. On what remains every neighbourhood of at most
`ring` groups is enumerated with all others fixed, until nothing changes (Oneflow-Inc/oneflow,
`core/auto_parallel/sbp_graph.cpp`, of arXiv 2110.15032). On tables whose eliminations end with one group the result is
the optimum.
"""

from __future__ import annotations

import math
from itertools import combinations
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.elimination import LARGEST, Optimum, join_arrays
from meshcast.experiments.planning.table import FactorTable

Group = tuple[str, ...]
Message = tuple[tuple[str, ...], np.ndarray]


class Eliminated(NamedTuple):
    """An eliminated group: the variables that its choice depends on, and the best combination for each of theirs."""

    group: Group
    scope: tuple[str, ...]
    best: np.ndarray


class ReducedTable:
    """What eliminations and merges leave of a table.

    groups: of variables that are left. messages: arrays over variables. steps: eliminated groups, in order.
    exact: whether nothing is left to search.
    """

    def __init__(self, table: FactorTable, most: int = 100) -> None:
        self.table, self.most, self.visited = table, most, 0
        self.groups: list[Group] = [(name,) for name in table.choices]
        self.messages: list[Message] = [(factor.scope, table.objective(factor)) for factor in table.factors]
        self.steps: list[Eliminated] = []
        while self._eliminate_one() or self._merge_two():
            pass

    @property
    def exact(self) -> bool:
        """Whether all groups are eliminated."""
        return not self.groups

    def size(self, group: Group) -> int:
        """The number of combinations of a group."""
        return math.prod(len(self.table.choices[name]) for name in group)

    def neighbours(self, group: Group) -> list[Group]:
        """The groups that share a factor with a group."""
        scopes = [set(scope) for scope, _ in self.messages if set(scope) & set(group)]
        near: set[str] = set().union(*scopes) - set(group)
        return [other for other in self.groups if set(other) & near]

    def touching(self, names: set[str]) -> list[Message]:
        """The arrays over any of some variables."""
        return [one for one in self.messages if set(one[0]) & names]

    def complete(self, assignment: dict[str, int]) -> dict[str, int]:
        """An assignment of all groups that are left, with the options of the eliminated ones."""
        found = dict(assignment)
        for group, scope, best in reversed(self.steps):
            shape = [len(self.table.choices[name]) for name in group]
            place = np.unravel_index(int(best[tuple(found[name] for name in scope)]), shape)
            found |= dict(zip(group, map(int, place), strict=True))
        return found

    def _eliminate_one(self) -> bool:
        for group in self.groups:
            near = self.neighbours(group)
            scope = tuple(sorted({name for own, _ in self.touching(set(group)) for name in own} - set(group)))
            if len(near) <= 2 and self.size(scope) * self.size(group) <= LARGEST:
                joined = join_arrays(self.touching(set(group)), (*scope, *group), self.table)
                self.visited += joined.size
                flat = joined.reshape(*joined.shape[: len(scope)], -1)
                self.steps.append(Eliminated(group, scope, flat.argmin(axis=-1)))
                self.messages = [one for one in self.messages if not set(one[0]) & set(group)]
                self.messages.append((scope, flat.min(axis=-1)))
                self.groups.remove(group)
                return True
        return False

    def _merge_two(self) -> bool:
        if len(self.groups) < 4:
            return False
        near = {group: {group, *self.neighbours(group)} for group in self.groups}
        pairs = [
            (-len(near[one] & near[other]), self.size(one) * self.size(other), one, other)
            for one, other in combinations(self.groups, 2)
            if self.size(one) * self.size(other) <= self.most and near[one] & near[other]
        ]
        if not pairs:
            return False
        *_, one, other = min(pairs)
        self.groups = [group for group in self.groups if group not in (one, other)] + [one + other]
        return True


def search_neighbourhoods(table: FactorTable, ring: int = 4, most: int = 100) -> Optimum | None:
    """The assignment at which no neighbourhood of at most `ring` groups improves; None if no start is allowed.

    most: combinations of a merged group.
    """
    reduced = ReducedTable(table, most)
    start = {} if reduced.exact else _find_start(reduced)
    if start is None:
        return None
    queue = list(reduced.groups)
    while queue:
        group = queue.pop(0)
        near = reduced.neighbours(group)
        width = ring - 1
        parts = [near[first : first + width] for first in range(0, max(1, len(near)), width)]
        for part in parts:
            names = tuple(name for one in (group, *part) for name in one)
            better = _best_inside(reduced, names, start)
            if better is not None:
                start |= better
                queue += [one for one in (group, *near) if one not in queue]
    found = reduced.complete(start)
    value = table.value(found)
    return Optimum(found, value, reduced.visited) if math.isfinite(value) else None


def _best_inside(reduced: ReducedTable, names: tuple[str, ...], now: dict[str, int]) -> dict[str, int] | None:
    """The options of some variables that improve on theirs, all others fixed; None if none do."""
    fixed = [
        (
            tuple(name for name in scope if name in names),
            array[tuple(slice(None) if name in names else now[name] for name in scope)],
        )
        for scope, array in reduced.touching(set(names))
    ]
    joined = join_arrays(fixed, names, reduced.table)
    reduced.visited += joined.size
    own = float(joined[tuple(now[name] for name in names)])
    best = np.unravel_index(int(joined.argmin()), joined.shape)
    if not joined[best] < own * (1 - 1e-12):
        return None
    return dict(zip(names, map(int, best), strict=True))


def _find_start(reduced: ReducedTable) -> dict[str, int] | None:
    """An allowed assignment of the groups that are left: the first options, else the first found depth first."""
    names = [name for group in reduced.groups for name in group]
    first = dict.fromkeys(names, 0)
    if all(math.isfinite(float(array[tuple(first[name] for name in scope)])) for scope, array in reduced.messages):
        return first

    def extend(place: int, made: dict[str, int]) -> dict[str, int] | None:
        if place == len(names):
            return made
        for option in reversed(range(len(reduced.table.choices[names[place]]))):
            tried = {**made, names[place]: option}
            ready = [one for one in reduced.touching({names[place]}) if set(one[0]) <= tried.keys()]
            reduced.visited += 1
            allowed = all(math.isfinite(float(array[tuple(tried[name] for name in scope)])) for scope, array in ready)
            if allowed and (found := extend(place + 1, tried)) is not None:
                return found
        return None

    return extend(0, {})
