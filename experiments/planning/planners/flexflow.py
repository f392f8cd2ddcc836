"""FlexFlow: a Metropolis walk over the layouts of operators, from data parallelism and from a random plan.

Proposals, acceptance and returns to the best plan are those of Jia et al. 2019 (arXiv 1807.05358, section 6.2) and of
the released optimiser. Here a proposal is priced by the table, not by a task graph; the found plan is forecast as a
whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshcast.experiments.planning.cores.mcmc import walk_table
from meshcast.experiments.planning.operator_planner import OperatorPlanner, Solved
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable
from meshcast.simulator.ir.scheme import Paper


class FlexFlow(OperatorPlanner):
    paper = Paper("arXiv:1807.05358", "Beyond Data and Model Parallelism for Deep Neural Networks", 2019)
    core = "mcmc"
    restrictions = ("cut a pipeline", "give layers layouts of their own", "place operators on subsets of the GPUs")

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> tuple[Solved | None, int, float]:
        data = {name: _most_by_samples(options) for name, options in table.choices.items()}
        found = min(
            (
                walk_table(table, budget.steps, starts, seed=budget.seed, memory=problem.memory)
                for starts in ([data], [])
            ),
            key=lambda one: (table.cost(one.assignment).nbytes > problem.memory, one.value),
        )
        fits = table.cost(found.assignment).nbytes <= problem.memory and found.value < float("inf")
        return found if fits else None, 2 * budget.steps, float("nan")


def _most_by_samples(options: Sequence[Any]) -> int:
    """The option in which most axes shard samples."""
    return max(range(len(options)), key=lambda place: sum(dim == "b" for _, dim in options[place]))
