"""OptCNN: the layout of every operator that minimises the sum of operators, transfers and gradient sums, exactly.

Node and edge elimination on the graph of operators (Jia et al. 2018, "Exploring Hidden Dimensions in Accelerating
Convolutional Neural Networks", arXiv 1802.04924, sections 4 and 5); memory does not count.
"""

from __future__ import annotations

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.operator_planner import OperatorPlanner
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class OptCNN(OperatorPlanner):
    paper = Paper("arXiv:1802.04924", "Exploring Hidden Dimensions in Accelerating Convolutional Neural Networks", 2018)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "look at memory")
    method = "elimination"

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        return eliminate(table)
