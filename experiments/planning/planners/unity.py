"""Unity: parallelisation by rewrites of the graph, jointly with the placement of its operators on axes of the mesh.

In a problem of paper mode the graph of operators itself is rewritten, too: algebraic substitutions (`cores.algebra`),
best-first with the same pruning, each graph at the price of its best partition, so both are chosen together. In a job
the operators are those of its model: no kernel of the engine computes a rewritten graph.

Graphs are searched best-first from data parallelism and from the whole model on every GPU; each has the price of
its best placement. If the fastest plan does not fit, memory gets a share of the objective, by ten bisections (Unger et
al. 2022, "Unity", OSDI 2022; flexflow/FlexFlow, `src/runtime/graph.cc`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.cores.algebra import (
    AlgebraicGraph,
    AlgebraicMachine,
    list_substitutions,
    read_graph,
)
from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.local_search import LocalSearch, Ranked
from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh
from meshcast.experiments.planning.planner import Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget, settings_of
from meshcast.experiments.planning.table import Factor, FactorTable, Optimum
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

ALPHA = 1.2
"""The released code's limit of the price of graphs that are rewritten further, in prices of the best."""

Partition = frozenset[str]
"""The dims along which an operator is partitioned."""

Graph = tuple[Partition, ...]
"""The partition of every operator, in the order of the table."""

T = TypeVar("T")


class Unity(OperatorPlanner):
    title = (
        "Unity: Accelerating DNN Training Through Joint Optimization of Algebraic Transformations and Parallelization"
    )
    paper = Paper("OSDI 2022", title, 2022)
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "fuse or replace operators of a job",
        "place branches on heterogeneous GPUs",
    )
    modes = ("paper", "ours")

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        if problem.mode != "paper":
            return super().choose_plan(problem, budget)
        settings = settings_of(problem)
        if not {"operators", *RATES} <= settings.keys():
            rule = f"Unity needs the operators of a graph, and {', '.join(RATES)} of its devices"
            raise PlanError(f"problem {problem.name}", rule, "Give a graph of operators, see `cores.algebra`")
        machine = AlgebraicMachine(problem.gpus, *(settings[name] for name in RATES))
        best, visited = rewrite_algebra(read_graph(settings["operators"]), machine, max(1, budget.steps // 8))
        operators = {
            name: {"kind": operator.kind, "inputs": [*operator.inputs], "relu": operator.relu, "partition": option}
            for (name, operator), option in zip(best.graph, best.partition, strict=True)
        }
        return Proposal({"operators": operators}, best.seconds, visited, None, "its operators are those of a graph")

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        """Yields nodes and their GPUs; on a single node pairs of neighbours, too, so that a placement has a choice."""
        physical = physical_mesh(problem)
        yield physical
        if len(physical) == 1 and problem.gpus % 2 == 0 and problem.gpus > 2:
            yield {"x": problem.gpus // 2, "y": 2}

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        searches: list[RewriteSearch] = []
        unit = 0.0  # seconds of a byte, in which the fastest plan's time and memory weigh the same

        def search(share: float) -> Optimum | None:
            """Returns the best plan where memory has a share of the objective, and time the rest."""
            rewrites = RewriteSearch(table, unit * share / max(1e-6, 1 - share), max(1, budget.steps // 8))
            searches.append(rewrites)
            data = {name: frozenset("b") for name in table.choices}
            return rewrites.run([rewrites.graph_of(data), rewrites.graph_of({})])

        def fits(plan: Optimum | None) -> bool:
            return plan is not None and table.cost(plan.assignment).nbytes <= problem.memory

        best = search(0.0)
        if best is not None and not fits(best):
            unit = best.value / table.cost(best.assignment).nbytes
            best = bisect_weight(search, fits, 1.0)
        visited = sum(rewrites.visited for rewrites in searches)
        if best is None:
            return Optimum({}, math.inf, visited)
        return Optimum(best.assignment, table.value(best.assignment), visited)


RATES = ("flops", "memory_bandwidth", "link_bandwidth", "launch", "rows", "element")
"""Settings of a problem with a graph of operators; see `AlgebraicMachine`."""


class PartitionedGraph(NamedTuple):
    """A graph of operators with the partition of each, as (layout of inputs, layout of output), and its seconds [s]."""

    graph: AlgebraicGraph
    partition: tuple[tuple[str, str], ...]
    seconds: float


def rewrite_algebra(
    graph: AlgebraicGraph, machine: AlgebraicMachine, most: int, alpha: float = ALPHA
) -> tuple[PartitionedGraph, int]:
    """Returns the best graph that substitutions reach, with its best partition, and the number of graphs priced: those
    of more than `alpha` times the best price are not rewritten further, and at most `most` are priced."""

    def price(candidate: AlgebraicGraph) -> PartitionedGraph:
        table = machine.table(candidate)
        best = eliminate(table)
        if best is None:
            return PartitionedGraph(candidate, (), math.inf)
        options = table.options(best.assignment)
        partition = tuple((options[name].needs, options[name].makes) for name, _ in candidate)  # type: ignore[attr-defined]
        return PartitionedGraph(candidate, partition, best.value)

    best = price(graph)
    queue, seen, visited = [(best.seconds, 0, graph)], {graph}, 1
    while queue and visited < most and not is_over():
        seconds, _, present = heapq.heappop(queue)
        if seconds > alpha * best.seconds:
            break
        for rewritten in list_substitutions(present):
            if rewritten in seen:
                continue
            seen.add(rewritten)
            visited += 1
            tried = price(rewritten)
            best = min(best, tried, key=lambda candidate: candidate.seconds)
            heapq.heappush(queue, (tried.seconds, visited, rewritten))
    return best, visited


class RewriteSearch:
    """The best-first search over the graphs of a table (`src/runtime/substitution.cc`).

    A graph says along which dims every operator is partitioned (its parallel operators), a placement which axes of the
    mesh each of these dims has; placements are exact, by elimination. A rewrite gives an operator, or all operators
    of a tensor, other dims.

    weight: of memory in the objective [s/byte].
    most: graphs that are priced.
    alpha: graphs of more than so many times the best price are not rewritten further.
    visited: graphs that the last run has placed, or pruned by their bound.
    """

    def __init__(self, table: FactorTable, weight: float = 0.0, most: int = 1000, alpha: float = ALPHA) -> None:
        self.alpha, self.names = alpha, list(table.choices)
        self.factors = [(part.scope, table.objective(part) + weight * part.nbytes) for part in table.factors]
        self.options: list[dict[Partition, list[int]]] = []
        for layouts in table.choices.values():
            options: dict[Partition, list[int]] = {}
            for number, layout in enumerate(layouts):
                part = frozenset(dim for _, dim in layout if dim)  # type: ignore[attr-defined]
                options.setdefault(part, []).append(number)
            self.options.append(options)
        self.position = {name: number for number, name in enumerate(self.names)}
        self._restricted: dict[tuple[int, Graph], tuple[Factor, float]] = {}
        scopes = {tuple(sorted({self.position[name] for name in scope})) for scope, _ in self.factors}
        self.patterns = sorted({*scopes, *((number,) for number in range(len(self.names)))})
        self.most, self.visited = most, 0

    def run(self, starts: Sequence[Graph]) -> Optimum | None:
        """Returns the best placement of all graphs that rewrites of `starts` reach; None if none is allowed."""
        queue: list[tuple[float, int, Graph]] = []
        seen = set(starts)

        def rewrite_best(search: LocalSearch[Graph]) -> Iterator[Ranked[Graph]]:
            for number, start in enumerate(starts):
                yield (tried := search.price(start))
                heapq.heappush(queue, (tried.rank, number, start))
            while queue and queue[0][0] <= self.alpha * search.best.rank:
                for rewritten in self.list_rewrites(heapq.heappop(queue)[-1]):
                    if rewritten in seen:
                        continue
                    seen.add(rewritten)
                    if self.bound(rewritten) > self.alpha * search.best.rank:
                        search.visited += 1
                        yield Ranked(rewritten, math.inf)
                        continue
                    yield (tried := search.price(rewritten))
                    if math.isfinite(tried.rank) and tried.rank <= self.alpha * search.best.rank:
                        heapq.heappush(queue, (tried.rank, len(seen), rewritten))

        search = LocalSearch(self._price, rewrite_best, budget=self.most)
        best = search.run()
        self.visited = search.visited
        return self.place(best.state) if math.isfinite(best.rank) else None

    def _price(self, graph: Graph) -> float:
        placed = self.place(graph)
        return placed.value if placed else math.inf

    def bound(self, graph: Graph) -> float:
        """Returns a price that no placement of a graph is below: the least of every factor."""
        return sum(self._restrict(number, graph)[1] for number in range(len(self.factors)))

    def _restrict(self, number: int, graph: Graph) -> tuple[Factor, float]:
        """Returns a factor for the options that a graph leaves, and its least cell."""
        scope, array = self.factors[number]
        key = number, tuple(graph[self.position[name]] for name in scope)
        if key not in self._restricted:
            rows = [self.options[self.position[name]][graph[self.position[name]]] for name in scope]
            part = array[np.ix_(*rows)]
            zero = np.broadcast_to(0.0, part.shape)
            self._restricted[key] = Factor(scope, part, zero, zero), float(part.min())
        return self._restricted[key]

    def place(self, graph: Graph) -> Optimum | None:
        """Returns the best placement of a graph, with the numbers of its options in the whole table."""
        kept = {name: numbers[part] for name, numbers, part in zip(self.names, self.options, graph, strict=True)}
        if all(len(numbers) == 1 for numbers in kept.values()):
            value = self.bound(graph)
            only = {name: numbers[0] for name, numbers in kept.items()}
            return Optimum(only, value, 1) if math.isfinite(value) else None
        factors = [self._restrict(number, graph)[0] for number in range(len(self.factors))]
        best = eliminate(FactorTable(kept, factors))
        if best is None:
            return None
        return best._replace(assignment={name: kept[name][number] for name, number in best.assignment.items()})

    def graph_of(self, wanted: Mapping[str, Partition]) -> Graph:
        """Returns the graph in which operators have these partitions where they may, and no others."""
        parts = (wanted.get(name, frozenset()) for name in self.names)
        return tuple(
            part if part in known else min(known, key=len) for part, known in zip(parts, self.options, strict=True)
        )

    def list_rewrites(self, graph: Graph) -> Iterator[Graph]:
        """Yields all graphs a rewrite away; operators of a tensor get a partition that all of them may have."""
        for pattern in self.patterns:
            common = set.intersection(*({*self.options[position]} for position in pattern))
            for part in sorted(common, key=sorted):
                rewritten = list(graph)
                for position in pattern:
                    rewritten[position] = part
                if tuple(rewritten) != graph:
                    yield tuple(rewritten)


def bisect_weight(solve: Callable[[float], T], fits: Callable[[T], bool], high: float, rounds: int = 10) -> T | None:
    """Returns the solution of the smallest weight of memory that fits; None if that of weight `high` does not.

    solve: solution of the problem at a weight of memory [s/byte]. rounds: of bisection between 0 and `high`.
    """
    if fits(solution := solve(0.0)):
        return solution
    best, low = solve(high), 0.0
    if not fits(best):
        return None
    for _ in range(rounds):
        middle = (low + high) / 2
        if fits(solution := solve(middle)):
            best, high = solution, middle
        else:
            low = middle
    return best
