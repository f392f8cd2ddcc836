"""Automap: Monte Carlo tree search over the layouts of a few operators, which propagate to all others.

A decision shards one weight (its operator) along a dim of the axis, or leaves it; the layouts of operators without
weights follow by propagation from their producers, then from their readers (Schaarschmidt et al. 2021, arXiv
2112.02958). The reward falls with the step time, and with memory over the limit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

from meshcast.experiments.planning.cores.propagation import Neighbours, find_neighbours, propagate
from meshcast.experiments.planning.cores.tree_search import search_tree
from meshcast.experiments.planning.operator_planner import OperatorPlanner, Solved
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable
from meshcast.simulator.ir.scheme import Paper


class Automap(OperatorPlanner):
    paper = Paper("arXiv:2112.02958", "Automap: Towards Ergonomic Automated Parallelism for ML Models", 2021)
    core = "tree_search"
    restrictions = ("cut a pipeline", "give layers layouts of their own", "decide operators without weights")

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        near: Neighbours = find_neighbours(table)
        decided = [name for name in table.choices if name in near.with_weights]

        def complete(made: dict[str, int], draw: random.Random) -> dict[str, int]:
            drawn = {name: draw.randrange(len(table.choices[name])) for name in decided}
            return propagate(table, {**drawn, **made}, near)

        def measure(assignment: Mapping[str, int]) -> float:
            cost = table.cost(assignment)
            over = max(0.0, cost.nbytes / problem.memory - 1.0)
            return (table.microbatches * cost.seconds + cost.once) * (1.0 + 10.0 * over)

        found = search_tree(table, budget.steps // 10, decided, complete, seed=budget.seed, value_of=measure)
        value = table.value(found.assignment)
        fits = table.cost(found.assignment).nbytes <= problem.memory and value < float("inf")
        return found._replace(value=value) if fits else None, found.visited, float("nan")
