"""AutoDDL: coordinate descent over the layouts of operators, from several starts.

Sweeps choose the best layout of each operator beside those of its neighbours until nothing changes; all factorisations
of the number of GPUs are tried (Chen et al. 2024, arXiv 2301.06813).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked, accept_all, improve_options
from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class AutoDDL(OperatorPlanner):
    paper = Paper("arXiv:2301.06813", "AutoDDL: Automatic Distributed Deep Learning with Near-Optimal Bandwidth", 2024)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "look at memory")

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        yield {"x": problem.gpus}
        if len(physical := physical_mesh(problem)) > 1:
            yield physical

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        return descend_table(table, restarts=min(30, max(1, budget.steps // 100)), seed=budget.seed)


def descend_table(table: FactorTable, restarts: int = 10, seed: int = 0) -> Optimum:
    """Returns the best of the assignments at which sweeps from so many drawn ones end."""
    draw = random.Random(seed)
    touching = {
        name: [(factor.scope, table.objective(factor)) for factor in factors]
        for name, factors in table.touching().items()
    }

    def sweep(search: LocalSearch[Assignment]) -> Iterator[Ranked[Assignment]]:
        changed = True
        while changed:
            changed = False
            for name in table.choices:
                options, entries = improve_options(table, touching[name], (name,), search.now.state)
                search.visited += entries
                if options is not None:
                    changed, assignment = True, {**search.now.state, **options}
                    yield Ranked(assignment, table.value(assignment))

    best: Optimum | None = None
    visited = 0
    for _ in range(restarts):
        search = LocalSearch(table.value, sweep, accept_all)
        search.run({name: draw.randrange(len(options)) for name, options in table.choices.items()})
        visited += search.visited - 1
        end = dict(search.now.state)
        if best is None or table.value(end) < best.value:
            best = Optimum(end, table.value(end), visited)
    assert best is not None
    return best._replace(visited=visited)
