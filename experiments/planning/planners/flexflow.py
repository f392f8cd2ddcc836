"""FlexFlow: a Metropolis walk over the placements of operators, from data parallelism and from another plan, judged by
the simulated execution.

Proposals, acceptance and returns to the best plan are those of Jia et al. 2019 (arXiv 1807.05358, section 6.2) and of
the released optimiser. On a profile an operator is divided along samples and channels over any number of GPUs that
follow each other, from any GPU on, and a proposal is executed by the simulation of tasks, from the first one on that it
moves (`cores.task_simulation`). The authors' simulator was not run: it needs their runtime. In a job, whose operators
are all on all GPUs, a proposal is another layout of an operator, and the engine forecasts the step: some hundred
proposals, so a second walk, whose proposals the additive table prices, finds the other start.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.cores.task_simulation import (
    OperatorPlacement,
    Placements,
    TaskSimulation,
    link_bandwidths,
)
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.operator_planner import OperatorPlanner, write_plan
from meshcast.experiments.planning.planner import Proposal, SpaceOptimum
from meshcast.experiments.planning.pricing.job import require_job
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, Optimum
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

JUDGED = 50
"""Proposals that the table prices for every one that the engine forecasts."""


class FlexFlow(OperatorPlanner):
    paper = Paper("arXiv:1807.05358", "Beyond Data and Model Parallelism for Deep Neural Networks", 2019)
    restrictions = (
        "cut a pipeline",
        "give layers of a job layouts of their own",
        "place operators of a job on subsets of the GPUs",
    )
    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        return self._place(problem, budget) if problem.mode == "paper" else self._lay_out(problem, budget)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns None: no solver knows the optimum of a simulated step."""
        return None

    def _place(self, problem: Problem, budget: SearchBudget) -> Proposal:
        graph, levels = problem.graph(), getattr(problem, "levels", ())
        if not levels or not {"forward", "backward", "parameters", "activations"} <= graph.figures.keys():
            rule = "FlexFlow needs the passes, parameters and outputs of operators, and the levels of the network"
            raise PlanError(f"problem {problem.name}", rule, "Choose a profile of PipeDream and give levels")
        links = link_bandwidths([level.width for level in levels], [level.bandwidth for level in levels])
        walk = PlacementWalk(graph, links, problem.gpus, problem.memory, budget)
        best = walk.run()
        if not math.isfinite(best.seconds):
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        operators = [
            {"node": node, "samples": at.samples, "channels": at.channels, "devices": [*at.devices]}
            for node, at in sorted(best.placements.items())
        ]
        reason = "operators are on GPUs of their own"
        return Proposal({"operators": operators}, best.seconds, walk.visited, None, reason)

    def _lay_out(self, problem: Problem, budget: SearchBudget) -> Proposal:
        (axes,) = self.meshes(problem)
        table, job = problem.operators(axes, self.allows), require_job(problem)
        data = {name: _most_by_samples(options) for name, options in table.choices.items()}
        cheap = walk_table(table, budget.steps, data, budget.seed, problem.memory)
        draw = random.Random(budget.seed)

        def judge(assignment: Assignment) -> float:
            return job.step_seconds(write_plan(problem, table, assignment, axes))

        def propose(search: LocalSearch[Assignment]) -> Iterator[Ranked[Assignment]]:
            names = [name for name, options in table.choices.items() if len(options) > 1]
            steps = budget.steps // JUDGED if names else 0
            for step in range(steps):
                if step % max(1, steps // 10) == 0:
                    search.now = search.best
                name, now = draw.choice(names), search.now.state
                other = draw.randrange(len(table.choices[name]) - 1)
                changed = {**now, name: other + (other >= now[name])}
                yield search.price(changed)

        def accept(tried: Ranked[Assignment], now: Ranked[Assignment]) -> bool:
            if tried.rank <= now.rank:
                return True
            worse = (tried.rank - now.rank) / now.rank
            return draw.random() < math.exp(-20.0 * min(worse, 30.0))

        search = LocalSearch(judge, propose, accept)
        best = search.run(data, cheap.assignment)
        if not math.isfinite(best.rank):
            raise self.nothing_fits(problem, "Give more GPUs, or more micro-batches")
        plan = write_plan(problem, table, best.state, axes)
        return Proposal(plan, best.rank, search.visited + cheap.visited)

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        """Returns the best of the table alone, which is a start of the judged walk."""
        return walk_table(table, budget.steps, None, budget.seed, problem.memory)


class PlacedOperators(NamedTuple):
    """Placements of all operators with the seconds of their step; infinite: they do not fit [s]."""

    placements: Placements
    seconds: float


class PlacementWalk:
    """The Metropolis walk over placements of operators on some GPUs.

    links: bandwidth between every two GPUs [bytes/s]. memory: of a GPU, for weights [bytes].
    visited: placements that were simulated.
    """

    def __init__(
        self,
        graph: LayerGraph,
        links: Mapping[tuple[int, int], float],
        gpus: int,
        memory: float,
        budget: SearchBudget,
    ) -> None:
        self.simulation, self.gpus, self.memory, self.budget = TaskSimulation(graph, links), gpus, memory, budget
        self.draw, self.visited = random.Random(budget.seed), 0
        self.nodes = range(len(graph.names))
        shapes = [(s, c) for s in range(1, gpus + 1) for c in range(1, gpus // s + 1)]
        weights = graph.figures["parameters"].tolist()
        self.shapes = [[shape for shape in shapes if weights[node] or shape[1] == 1] for node in self.nodes]

    def run(self) -> PlacedOperators:
        """Returns the best placements from data parallelism, and from drawn ones."""
        data = dict.fromkeys(self.nodes, OperatorPlacement(self.gpus, 1, tuple(range(self.gpus))))
        drawn = {node: self.draw_placement(node) for node in self.nodes}
        best = PlacedOperators(data, math.inf)
        for start in (data, drawn):
            best = min(best, self._walk(start), key=lambda step: step.seconds)
        return best

    def draw_placement(self, node: int) -> OperatorPlacement:
        samples, channels = self.draw.choice(self.shapes[node])
        first = self.draw.randint(0, self.gpus - samples * channels)
        return OperatorPlacement(samples, channels, tuple(range(first, first + samples * channels)))

    def _price(self, seconds: float) -> float:
        self.visited += 1
        return seconds if self.simulation.weights_nbytes(self.gpus) <= self.memory else math.inf

    def _walk(self, start: Placements) -> PlacedOperators:
        simulation, steps = self.simulation, self.budget.steps // 2
        now = self._price(simulation.simulate(start))
        best = PlacedOperators(dict(start), now)
        cold = 20.0 / simulation.seconds if simulation.seconds else 1.0
        for step in range(steps):
            if is_over():
                break
            if step % max(1, steps // 100) == 0 and best.seconds < now:
                now = self._price(simulation.simulate(best.placements))
            node, before = self.draw.choice(self.nodes), simulation.keep_state()
            tried = self._price(simulation.change(node, self.draw_placement(node)))
            if tried <= now or self.draw.random() < math.exp(-min(700.0, cold * (tried - now))):
                now = tried
                if now < best.seconds:
                    best = PlacedOperators(dict(simulation.placements), now)
            else:
                simulation.restore_state(before)
        return best


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
