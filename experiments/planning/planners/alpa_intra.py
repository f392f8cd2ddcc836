"""Alpa's intra-operator pass: the layout of every operator by an integer program, on every logical mesh of the GPUs.

One binary for each strategy of an operator, linearised costs of resharding, the memory of a rank as a constraint (Zheng
et al. 2022, arXiv 2201.12023, section 4). The GPUs are reshaped to every logical mesh of one or two axes (section 5.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from experiments.planning.cores.ilp import solve_table
from experiments.planning.operator_planner import OperatorPlanner, Solved, physical_mesh
from experiments.planning.problem import Problem, SearchBudget
from experiments.planning.table import FactorTable
from simulator.ir.scheme import Paper


class AlpaIntra(OperatorPlanner):
    paper = Paper("arXiv:2201.12023", "Alpa: Automating Inter- and Intra-Operator Parallelism", 2022)
    core = "ilp"
    restrictions = ("cut a pipeline", "give layers layouts of their own", "use meshes of more than two axes")
    method = "branch and bound"

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        inside = [*physical_mesh(problem).values()][-1]
        yield {"x": problem.gpus}
        for inner in range(2, problem.gpus):
            whole = problem.gpus % inner == 0 and (inside % inner == 0 or inner % inside == 0)
            if whole and problem.gpus // inner > 1:
                yield {"x": problem.gpus // inner, "y": inner}

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        found = solve_table(table, problem.memory, budget.seconds)
        return found, found.nodes if found else 0, found.bound if found else float("inf")
