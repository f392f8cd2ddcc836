"""AutoDDL: coordinate descent over the layouts of operators, from several starts, on all meshes of the GPUs.

Sweeps choose the best layout of each operator beside those of its neighbours until nothing changes; all factorisations
of the number of GPUs are tried, in every order of their factors (Chen et al. 2024, arXiv 2301.06813). Those of fewest
axes come first; on meshes of more than two axes only what a sweep asks for is priced. Where the time of a planner ends
before, meshes of more axes are left out: on 64 GPUs those of four and more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from itertools import permutations

import numpy as np

from meshcast.experiments.planning.clock import OutOfTime, is_over
from meshcast.experiments.planning.cores.local_search import NOISE, LocalSearch, Ranked, accept_all
from meshcast.experiments.planning.level_planner import bound_levels
from meshcast.experiments.planning.operator_planner import LayoutPlanner, write_plan
from meshcast.experiments.planning.planner import Proposal, SpaceOptimum
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, PendingFactor, PendingTable
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper

WHOLE_AXES = 2
"""Axes of meshes up to which tables are priced whole: planners share them."""


class AutoDDL(LayoutPlanner):
    paper = Paper("arXiv:2301.06813", "AutoDDL: Automatic Distributed Deep Learning with Near-Optimal Bandwidth", 2024)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "look at memory")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        restarts = min(30, max(1, budget.steps // 100))
        searches: list[tuple[Mapping[str, int], Descents]] = []
        for axes in self.meshes(problem):
            if searches and is_over():
                break
            try:
                descents = Descents(self._table(problem, axes), budget.seed)
            except OutOfTime:
                if not searches:
                    raise
                break
            searches.append((axes, descents))
            # A descent whose prices are not known yet takes a hundred times as long.
            for _ in range(restarts if len(axes) <= WHOLE_AXES else -(-restarts // 10)):
                if not is_over() or not descents.ends:
                    descents.run()
        axes, best = min(searches, key=lambda search: search[1].best.rank)
        if not math.isfinite(best.best.rank):
            raise self.nothing_fits(problem, "Give more GPUs, or more micro-batches")
        table = FactorTable(best.table.choices, ())
        plan = write_plan(problem, table, best.best.state, axes)
        return Proposal(plan, best.best.rank, sum(descents.visited for _, descents in searches))

    def _table(self, problem: Problem, axes: Mapping[str, int]) -> PendingTable:
        pending = getattr(problem, "pending_operators", None)
        if pending is None or len(axes) <= WHOLE_AXES:
            table = problem.operators(axes, self.allows)
            return PendingTable(table.choices, table.factors, (), table.microbatches)
        return pending(axes, self.allows)  # type: ignore[no-any-return]

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        """Yields all ordered factorisations of the number of GPUs, those of fewest factors first."""
        for widths in sorted(list_factorisations(problem.gpus), key=lambda factors: (len(factors), factors)):
            names = ("x", "y") if len(widths) <= WHOLE_AXES else [f"x{place}" for place in range(len(widths))]
            yield dict(zip(names, widths or (1,), strict=False))

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds by the meshes of prime factors, on which every layout of all others is one, too."""
        most = max(list_factorisations(problem.gpus), key=len)
        bounds = [
            bound_levels(problem, widths, self.allows, proposal.value) for widths in sorted({*permutations(most)})
        ]
        return min((bound for bound in bounds if bound is not None), key=lambda bound: bound.value, default=None)


def list_factorisations(number: int) -> list[tuple[int, ...]]:
    """Returns the factorisations of a number into factors above one, in every order; of 1 the empty one.

    >>> list_factorisations(8)
    [(2, 2, 2), (2, 4), (4, 2), (8,)]
    """
    if number == 1:
        return [()]
    divisors = list_divisors(number)[1:]
    return [(factor, *rest) for factor in divisors for rest in list_factorisations(number // factor)]


class Descents:
    """Coordinate descents over the assignments of a table, from drawn starts.

    best: the best end, with its objective [s]. ends: number of descents. visited: entries that were looked at.
    """

    def __init__(self, table: PendingTable, seed: int = 0) -> None:
        self.table, self.draw, self.visited, self.ends = table, random.Random(seed), 0, 0
        self.best: Ranked[dict[str, int]] = Ranked({}, math.inf)
        self._known = [(factor.scope, factor.objective(table.microbatches)) for factor in table.factors]
        self._rows: dict[tuple[int, str, tuple[int, ...]], np.ndarray] = {}

    def run(self) -> None:
        """Descends once."""
        search = LocalSearch(self.value, self._sweep, accept_all)
        start = {name: self.draw.randrange(len(options)) for name, options in self.table.choices.items()}
        search.run(start)
        end = dict(search.now.state)
        self.visited, self.ends = self.visited + search.visited, self.ends + 1
        if (value := self.value(end)) < self.best.rank or not self.best.state:
            self.best = Ranked(end, value)

    def value(self, assignment: Assignment) -> float:
        """Returns the objective of an assignment [s]."""
        known = sum(array.item(tuple(assignment[name] for name in scope)) for scope, array in self._known)
        pending = (factor.price({name: [assignment[name]] for name in factor.scope}) for factor in self.table.pending)
        return known + sum(cell.objective(self.table.microbatches).item() for cell in pending)

    def _sweep(self, search: LocalSearch[dict[str, int]]) -> Iterator[Ranked[dict[str, int]]]:
        """Yields assignments with a better option of one variable after another, until none has one."""
        changed = True
        while changed:
            changed = False
            for name in self.table.choices:
                now = search.now.state
                costs = self._costs(name, now)
                search.visited += len(costs)
                place = int(costs.argmin())
                if costs[place] < costs[now[name]] * (1 - NOISE):
                    changed, better = True, {**now, name: place}
                    gain = costs[now[name]] - costs[place]
                    yield Ranked(better, search.now.rank - gain if math.isfinite(gain) else self.value(better))

    def _costs(self, name: str, now: Assignment) -> np.ndarray:
        """Returns what every option of a variable costs beside the present options of all others [s]."""
        total = np.zeros(len(self.table.choices[name]))
        for scope, array in self._known:
            if name in scope:
                total += array[tuple(slice(None) if other == name else now[other] for other in scope)]
        for number, factor in enumerate(self.table.pending):
            if name in factor.scope:
                total += self._price_row(number, factor, name, now)
        return total

    def _price_row(self, number: int, factor: PendingFactor, name: str, now: Assignment) -> np.ndarray:
        key = number, name, tuple(now[other] for other in factor.scope if other != name)
        if key not in self._rows:
            options = range(len(self.table.choices[name]))
            row = factor.price({other: options if other == name else [now[other]] for other in factor.scope})
            self._rows[key] = row.objective(self.table.microbatches).ravel()
        return self._rows[key]
