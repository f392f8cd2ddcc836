"""OneFlow: the SBP signature of every operator, by eliminations, merges, and greedy steps over neighbourhoods of four.

A signature says for each axis of the mesh whether a tensor is split, broadcast, or a partial sum; the layouts of an
operator imply those of its tensors (Yuan et al. 2021, arXiv 2110.15032; Oneflow-Inc/oneflow, `core/auto_parallel`). The
released code counts bytes and a ratio for computation, here the step time of the table counts. Signatures that the user
has set are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.cores.elimination import LARGEST, join_arrays
from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked, accept_all, improve_options
from meshcast.experiments.planning.operator_planner import OperatorPlanner
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class OneFlow(OperatorPlanner):
    """signatures: dims by axis that the user has set for an operator."""

    paper = Paper("arXiv:2110.15032", "OneFlow: Redesign the Distributed Deep Learning Framework from Scratch", 2021)
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "carry partial sums through an operator",
        "look at memory",
    )

    def __init__(self, signatures: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.signatures = dict(signatures or {})

    def allows(self, name: str, layout: Dims) -> bool:
        wanted = self.signatures.get(name)
        return wanted is None or all(wanted.get(axis, "") == dim for axis, dim in layout)

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        return search_neighbourhoods(table)


Group = tuple[str, ...]
Message = tuple[tuple[str, ...], np.ndarray]


class Eliminated(NamedTuple):
    """An eliminated group: the variables that its choice depends on, and the best combination for each of theirs."""

    group: Group
    scope: tuple[str, ...]
    best: np.ndarray


class ReducedTable:
    """What eliminations and merges leave of a table.

    Groups with at most two neighbours are eliminated exactly. Where none is left, two neighbours of at most `most`
    combinations are merged, those with the most common neighbours first (Oneflow-Inc/oneflow,
    `core/auto_parallel/sbp_graph.cpp`).

    groups: of variables that are left.
    messages: arrays over variables.
    steps: eliminated groups, in order.
    """

    def __init__(self, table: FactorTable, most: int = 100) -> None:
        self.table, self.most, self.visited = table, most, 0
        self.groups: list[Group] = [(name,) for name in table.choices]
        self.messages: list[Message] = [(factor.scope, table.objective(factor)) for factor in table.factors]
        self.steps: list[Eliminated] = []
        while self._eliminate_group() or self._merge_groups():
            pass

    def count_options(self, group: Group) -> int:
        return math.prod(len(self.table.choices[name]) for name in group)

    def list_neighbours(self, group: Group) -> list[Group]:
        """Lists the groups that share a factor with a group."""
        near = {name for scope, _ in self.touching(group) for name in scope}
        return [other for other in self.groups if other != group and near & set(other)]

    def touching(self, names: Group) -> list[Message]:
        """Returns the arrays over any of some variables."""
        return [message for message in self.messages if set(message[0]) & set(names)]

    def complete(self, assignment: Mapping[str, int]) -> dict[str, int]:
        """Returns an assignment of all groups that are left, with the options of the eliminated ones."""
        whole = dict(assignment)
        for group, scope, best in reversed(self.steps):
            shape = [len(self.table.choices[name]) for name in group]
            place = np.unravel_index(int(best[tuple(whole[name] for name in scope)]), shape)
            whole |= dict(zip(group, map(int, place), strict=True))
        return whole

    def find_start(self) -> dict[str, int] | None:
        """Returns an allowed assignment of the groups that are left: the first options, or the first depth first."""
        names = [name for group in self.groups for name in group]
        first = dict.fromkeys(names, 0)
        return first if _are_allowed(self.messages, first) else self._extend(names, {})

    def _extend(self, names: list[str], options: dict[str, int]) -> dict[str, int] | None:
        if len(options) == len(names):
            return options
        check_time()
        name = names[len(options)]
        for option in reversed(range(len(self.table.choices[name]))):
            tried = {**options, name: option}
            ready = [message for message in self.touching((name,)) if set(message[0]) <= tried.keys()]
            self.visited += 1
            if _are_allowed(ready, tried) and (whole := self._extend(names, tried)) is not None:
                return whole
        return None

    def _eliminate_group(self) -> bool:
        for group in self.groups:
            touching = self.touching(group)
            scope = tuple(sorted({name for names, _ in touching for name in names} - set(group)))
            entries = self.count_options((*scope, *group))
            if len(self.list_neighbours(group)) <= 2 and entries <= LARGEST:
                joined = join_arrays(touching, (*scope, *group), self.table)
                self.visited += joined.size
                flat = joined.reshape(*joined.shape[: len(scope)], -1)
                self.steps.append(Eliminated(group, scope, flat.argmin(axis=-1)))
                self.messages = [message for message in self.messages if not set(message[0]) & set(group)]
                self.messages.append((scope, flat.min(axis=-1)))
                self.groups.remove(group)
                return True
        return False

    def _merge_groups(self) -> bool:
        if len(self.groups) < 4:
            return False
        near = {group: {group, *self.list_neighbours(group)} for group in self.groups}
        pairs = [
            (-len(common), entries, first, second)
            for first, second in combinations(self.groups, 2)
            if (entries := self.count_options(first + second)) <= self.most and (common := near[first] & near[second])
        ]
        if not pairs:
            return False
        *_, first, second = min(pairs)
        self.groups = [group for group in self.groups if group not in (first, second)] + [first + second]
        return True


def _are_allowed(messages: list[Message], options: Mapping[str, int]) -> bool:
    return all(math.isfinite(array[tuple(options[name] for name in scope)]) for scope, array in messages)


def search_neighbourhoods(table: FactorTable, ring: int = 4, most: int = 100) -> Optimum | None:
    """Returns the assignment at which no neighbourhood of at most `ring` groups improves; None if no start is allowed.

    Every neighbourhood is enumerated with all other groups fixed. Where eliminations end with a single group, the
    result is the optimum. most: combinations of a merged group.
    """
    reduced = ReducedTable(table, most)
    start = reduced.find_start()
    if start is None:
        return None

    def improve_rings(search: LocalSearch[Mapping[str, int]]) -> Iterator[Ranked[Mapping[str, int]]]:
        queue = list(reduced.groups)
        while queue:
            group = queue.pop(0)
            near = reduced.list_neighbours(group)
            for first in range(0, max(1, len(near)), ring - 1):
                names = tuple(name for other in (group, *near[first : first + ring - 1]) for name in other)
                options, entries = improve_options(table, reduced.messages, names, search.now.state)
                reduced.visited += entries
                if options is not None:
                    yield search.price({**search.now.state, **options})
                    queue += [other for other in (group, *near) if other not in queue]

    search = LocalSearch(lambda state: table.value(reduced.complete(state)), improve_rings, accept_all)
    search.run(start)
    assignment = reduced.complete(search.now.state)
    value = table.value(assignment)
    return Optimum(assignment, value, reduced.visited) if math.isfinite(value) else None
