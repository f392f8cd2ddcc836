"""FlexFlow: a Metropolis walk over the layouts of operators, from data parallelism and from a random plan.

Proposals, acceptance and returns to the best plan are those of Jia et al. 2019 (arXiv 1807.05358, section 6.2) and of
the released optimiser. Here a proposal is priced by the table, not by a task graph; the best plan is forecast as a
whole.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.operator_planner import OperatorPlanner
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, Optimum
from meshcast.simulator.ir.scheme import Paper


class FlexFlow(OperatorPlanner):
    paper = Paper("arXiv:1807.05358", "Beyond Data and Model Parallelism for Deep Neural Networks", 2019)
    restrictions = ("cut a pipeline", "give layers layouts of their own", "place operators on subsets of the GPUs")

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        data = {name: _most_by_samples(options) for name, options in table.choices.items()}
        walks = [walk_table(table, budget.steps, start, budget.seed, problem.memory) for start in (data, None)]
        best = min(walks, key=lambda walk: (table.cost(walk.assignment).nbytes > problem.memory, walk.value))
        return self.price_fitting(table, problem, best.assignment, sum(walk.visited for walk in walks))


def _most_by_samples(options: Sequence[Any]) -> int:
    """Returns the option in which most axes shard samples."""
    return max(range(len(options)), key=lambda place: sum(dim == "b" for _, dim in options[place]))


OptionCosts = tuple[tuple[str, ...], np.ndarray, np.ndarray]
"""The variables of a factor, and seconds of a step and bytes of every combination of their options."""


class WalkState(NamedTuple):
    """An assignment with its objective [s] and memory [bytes]."""

    assignment: Assignment
    value: float
    nbytes: float


class MetropolisWalk:
    """Proposals of a walk over the assignments of a table, and which of them it accepts.

    cold: inverse of the temperature, so that an increase of 5 % of the objective of the start passes once in e [1/s].
    """

    def __init__(self, table: FactorTable, steps: int, draw: random.Random, start: float) -> None:
        self.table, self.steps, self.draw = table, steps, draw
        self.cold = 20.0 / start if math.isfinite(start) and start > 0 else 1.0
        self.costs: dict[str, list[OptionCosts]] = {
            name: [(factor.scope, table.objective(factor), factor.nbytes) for factor in factors]
            for name, factors in table.touching().items()
        }

    def propose(self, search: LocalSearch[WalkState]) -> Iterator[Ranked[WalkState]]:
        """Yields assignments with another option of a drawn variable, whose factors alone are evaluated again."""
        names = [name for name, options in self.table.choices.items() if len(options) > 1]
        for step in range(self.steps if names else 0):
            if step % max(1, self.steps // 100) == 0:
                search.now = search.best
            name, state = self.draw.choice(names), search.now.state
            before, other = state.assignment[name], self.draw.randrange(len(self.table.choices[name]) - 1)
            changed = _change_option(self.table, self.costs[name], state, name, other + (other >= before))
            yield search.price(changed)

    def accept(self, tried: Ranked[WalkState], now: Ranked[WalkState]) -> bool:
        """Accepts what is not worse, else what needs no more memory with probability exp(- cold x increase)."""
        (over, value), (excess, present) = tried.rank, now.rank
        if tried.rank <= now.rank or (math.isinf(present) and math.isfinite(value)):
            return True
        return over <= excess and self.draw.random() < math.exp(-min(700.0, self.cold * (value - present)))


def walk_table(
    table: FactorTable, steps: int, start: Assignment | None = None, seed: int = 0, memory: float = math.inf
) -> Optimum:
    """Returns the best assignment that a walk of so many proposals meets.

    The walk returns to the best assignment 100 times, as FlexFlow's released optimiser does (`mcmc_optimize`).

    start: None: drawn at random.
    memory: assignments of more bytes are worse than all that fit.
    """
    draw = random.Random(seed)
    chosen = start or {name: draw.randrange(len(options)) for name, options in table.choices.items()}
    first = WalkState(chosen, table.value(chosen), table.cost(chosen).nbytes)
    walk = MetropolisWalk(table, steps, draw, first.value)
    search = LocalSearch(lambda state: (max(0.0, state.nbytes - memory), state.value), walk.propose, walk.accept)
    best = dict(search.run(first).state.assignment)
    return Optimum(best, table.value(best), search.visited - 1)


def _change_option(
    table: FactorTable, costs: Iterable[OptionCosts], state: WalkState, name: str, option: int
) -> WalkState:
    """Returns an assignment with another option of a variable, of whose factors these are the costs."""
    assignment = {**state.assignment, name: option}
    old, old_nbytes = _sum_costs(costs, state.assignment)
    new, nbytes = _sum_costs(costs, assignment)
    value = state.value - old + new if math.isfinite(old) else table.value(assignment)
    return WalkState(assignment, value, state.nbytes - old_nbytes + nbytes)


def _sum_costs(costs: Iterable[OptionCosts], assignment: Assignment) -> tuple[float, float]:
    seconds = nbytes = 0.0
    for scope, objective, memory in costs:
        place = tuple([assignment[name] for name in scope])
        seconds += objective.item(place)
        nbytes += memory.item(place)
    return seconds, nbytes
