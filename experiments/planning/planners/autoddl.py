"""AutoDDL: coordinate descent over the layouts of operators, from several starts.

Sweeps choose the best layout of one operator given those of its neighbours until nothing changes; factorisations of the
number of GPUs are tried one by one (Chen et al. 2024, arXiv 2301.06813).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshcast.experiments.planning.cores.descent import descend_table
from meshcast.experiments.planning.operator_planner import OperatorPlanner, Solved, physical_mesh
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable
from meshcast.simulator.ir.scheme import Paper


class AutoDDL(OperatorPlanner):
    paper = Paper("arXiv:2301.06813", "AutoDDL: Automatic Distributed Deep Learning with Near-Optimal Bandwidth", 2024)
    core = "descent"
    restrictions = ("cut a pipeline", "give layers layouts of their own", "look at memory")

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        yield {"x": problem.gpus}
        if len(physical := physical_mesh(problem)) > 1:
            yield physical

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        found = descend_table(table, restarts=min(30, max(1, budget.steps // 100)), seed=budget.seed)
        return found if found.value < float("inf") else None, found.visited, float("nan")
