"""TensorOpt: the whole frontier of step time and memory of all layouts; of it the fastest plan that fits.

Frontier tracking is elimination over Pareto sets (Cai et al. 2020, arXiv 2004.10856). Intermediate frontiers
keep `most` points, the paper's cap of a set; the ends of the frontier stay.
"""

from __future__ import annotations

import math

from meshcast.experiments.planning.cores.elimination import FrontierPoint, trace_frontier
from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class TensorOpt(OperatorPlanner):
    paper = Paper("arXiv:2004.10856", "TensorOpt: Exploring the Tradeoffs in Distributed DNN Training", 2020)
    restrictions = ("cut a pipeline", "give layers layouts of their own")
    method = "frontier tracking"
    most = 0
    """Points that an intermediate frontier keeps; 0: all, and the frontier is exact."""

    def frontier(self, problem: Problem) -> list[FrontierPoint]:
        """Returns step time and memory of a rank of every plan that no other beats in both, by ascending memory."""
        return trace_frontier(problem.operators(physical_mesh(problem), self.allows), self.most)

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        front = trace_frontier(table, self.most)
        fitting = [point for point in front if point.nbytes <= problem.memory]
        if not fitting:
            return None
        value, _, assignment = fitting[-1]
        return Optimum(assignment, value, len(front), math.nan if self.most else value)
