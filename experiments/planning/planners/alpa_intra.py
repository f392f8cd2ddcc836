"""Alpa's intra-operator pass: the layout of every operator by an integer program, on every logical mesh of the GPUs.

A binary for each strategy of an operator, linearised costs of resharding, the memory of a rank as a constraint (Zheng
et al. 2022, arXiv 2201.12023, section 4). The GPUs are reshaped to every logical mesh of at most two axes (section
5.2).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh, write_plan
from meshcast.experiments.planning.planner import PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class AlpaIntra(OperatorPlanner):
    paper = Paper("arXiv:2201.12023", "Alpa: Automating Inter- and Intra-Operator Parallelism", 2022)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "use meshes of more than two axes")
    method = "branch and bound"

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        inside = [*physical_mesh(problem).values()][-1]
        yield {"x": problem.gpus}
        for inner in range(2, problem.gpus):
            whole = problem.gpus % inner == 0 and (inside % inner == 0 or inner % inside == 0)
            if whole and problem.gpus // inner > 1:
                yield {"x": problem.gpus // inner, "y": inner}

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        """Returns the best of all meshes; those no better without a limit of memory need no program."""
        tables = [(axes, problem.operators(axes, self.allows)) for axes in self.meshes(problem)]
        free = [(optimum.value if (optimum := eliminate(table)) else math.inf) for _, table in tables]
        best: Proposal | None = None
        visited, bounds = 0, [math.inf]
        for least, (axes, table) in sorted(zip(free, tables, strict=True), key=lambda pair: pair[0]):
            if best is not None and (least >= best.value or is_over()):
                break
            solved = self.solve(table, problem, budget)
            if solved is None:
                continue
            visited += solved.visited
            bounds.append(solved.bound)
            if best is None or solved.value < best.value:
                best = Proposal(write_plan(problem, table, solved.assignment, axes), solved.value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or more micro-batches")
        return best._replace(visited=visited, proof=PlanProof(min(bounds), best.value, self.method))

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        return solve_table(table, problem.memory)
