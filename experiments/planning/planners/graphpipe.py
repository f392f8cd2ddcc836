"""GraphPipe: stages of a series-parallel graph, whose branches run at the same time, each on separate replicas.

The bottleneck of all stages is minimised, and of plans of the least bottleneck the depth: micro-batches in flight, and
with them activations and the bubble, grow along the longest path alone. For a limit of the seconds of a stage, dynamic
programming finds the stages whose first ones have fewest micro-batches in flight: a stage has 1 + the most of its
successors, so that branches do not count each other. The least limit with stages results from bisection (Jeon et al.
2024, arXiv 2406.17145, section 5).
A stage of d replicas takes (T + 4 (d - 1) W / (d B)) / d, or 2 x bytes / (d B) for what it receives or sends, if
that is longer, as in PipeDream's formula; of its k micro-batches in flight each replica keeps an equal share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple, Union

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.hardware.errors import PlanError
from meshcast.hardware.remembered import remembered
from meshcast.simulator.ir.scheme import Paper

Nodes = tuple[int, ...]
"""Nodes of a graph, ascending."""

Series = tuple[Union[int, "Parallel"], ...]
"""Nodes and parallel parts, in order."""


class Parallel(NamedTuple):
    """Branches between the same nodes that do not depend on each other."""

    branches: tuple[Series, ...]


def decompose(graph: LayerGraph) -> Series:
    """Returns the graph as a series. Raises ValueError, with the nodes, if it is not series-parallel."""
    count = len(graph.names)
    before = [{node} for node in range(count)]
    for node in graph.order:
        for source in graph.predecessors[node]:
            before[node] |= before[source]
    linked: list[set[int]] = [set() for _ in range(count)]
    for source, target in graph.edges:
        linked[source].add(target)
        linked[target].add(source)
    return _series(frozenset(range(count)), before, linked)


def _series(nodes: frozenset[int], before: list[set[int]], linked: list[set[int]]) -> Series:
    """Returns nodes as a series: those ordered with all others cut the graph; what lies between cuts is parallel."""
    ordered = sorted(nodes, key=lambda node: len(before[node] & nodes))
    cuts = [cut for cut in ordered if all(cut in before[node] or node in before[cut] for node in nodes)]
    items: list[int | Parallel] = []
    left = set(nodes)
    for cut in [*cuts, None]:
        between = left if cut is None else {node for node in left if node in before[cut] and node != cut}
        if between:
            parts = _components(between, linked)
            if len(parts) == 1:
                raise ValueError(f"nodes {sorted(between)} are neither a series nor parallel branches")
            items.append(Parallel(tuple(_series(part, before, linked) for part in parts)))
        left -= between
        if cut is not None:
            items.append(cut)
            left.discard(cut)
    return tuple(items)


def _components(nodes: set[int], linked: list[set[int]]) -> list[frozenset[int]]:
    left, components = set(nodes), []
    while left:
        part, front = set(), {min(left)}
        while front:
            part |= front
            front = {other for node in front for other in linked[node] if other in nodes} - part
        components.append(frozenset(part))
        left -= part
    return components


@cache
def nodes_of(part: int | Series | Parallel | tuple[Series, ...]) -> Nodes:
    return (part,) if isinstance(part, int) else tuple(sorted(node for item in part for node in nodes_of(item)))


class GraphStage(NamedTuple):
    """A stage: its nodes, its devices, and the micro-batches that it has in flight."""

    nodes: Nodes
    devices: int
    in_flight: int


class GraphPlan(NamedTuple):
    """Stages with the largest of their seconds, the depth of the pipeline, and the states that were computed."""

    stages: tuple[GraphStage, ...]
    value: float
    depth: int
    visited: int


Cost = Callable[[Nodes, int], float]
"""Returns the seconds of a stage of nodes on some devices."""

Fits = Callable[[Nodes, int, int], bool]
"""Returns whether nodes on some devices fit with so many micro-batches in flight."""


def plan_graph(series: Series, devices: int, cost: Cost, fits: Fits) -> GraphPlan | None:
    """Returns the stages of least bottleneck, then depth, on at most so many devices; None if none fit."""
    cost = cache(cost)
    seconds = {cost(nodes, count) for nodes in {*_possible_stages(series)} for count in range(1, devices + 1)}
    limits = sorted(limit for limit in seconds if math.isfinite(limit))
    best: GraphPlan | None = None
    low, high = 0, len(limits) - 1
    while low <= high:
        middle = (low + high) // 2
        search = _BoundedStages(cost, fits, limits[middle])
        part = search.shorten(series, devices, 0)
        if part is None:
            low = middle + 1
        else:
            value = max(cost(stage.nodes, stage.devices) for stage in part.stages)
            best, high = GraphPlan(part.stages, value, part.depth, len(search.known)), middle - 1
    return best


def _possible_stages(part: Series | Parallel) -> Iterator[Nodes]:
    """Yields neighbouring items of a series, or branches."""
    items = part.branches if isinstance(part, Parallel) else part
    yield from (nodes_of(items[begin : end + 1]) for end in range(len(items)) for begin in range(end + 1))
    for item in items:
        if not isinstance(item, int):
            yield from _possible_stages(item)


class _Part(NamedTuple):
    """Stages of a part of the graph, and the micro-batches in flight at its beginning."""

    depth: int
    stages: tuple[GraphStage, ...]


class _BoundedStages:
    """Stages none of which exceeds a limit of seconds, with fewest micro-batches in flight at their beginning.

    known: of parts of the graph on at most so many devices, before stages with so many micro-batches in flight.
    """

    def __init__(self, cost: Cost, fits: Fits, limit: float) -> None:
        self.cost, self.fits, self.limit = cost, fits, limit
        self.known: dict[tuple[Series | Parallel, int, int], _Part | None] = {}

    def shorten(self, part: Series | Parallel, devices: int, after: int) -> _Part | None:
        """Returns the stages of a series or of branches.

        Their last piece is a stage of its last items (neighbouring branches may share a stage), or the stages of the
        last item. Of equal parts that with fewest devices of the last piece counts.
        """
        key = part, devices, after
        if key in self.known:
            return self.known[key]
        check_time()
        branches = isinstance(part, Parallel)
        items: tuple[Any, ...] = part.branches if isinstance(part, Parallel) else part
        if not items:
            return _Part(after, ())
        lasts = [(begin, self._stage(nodes_of(items[begin:]), devices, after)) for begin in range(len(items))]
        ends = [(last.stages[0].devices, begin, begin, last) for begin, last in lasts if last]
        if not isinstance(items[-1], int):
            rank = -1 if branches else len(items)
            inner = [(used, self.shorten(items[-1], used, after)) for used in range(1, devices + 1)]
            ends += [(used, rank, len(items) - 1, last) for used, last in inner if last]
        parts = []
        for used, rank, begin, last in ends:
            rest = Parallel(items[:begin]) if branches else items[:begin]
            if others := self.shorten(rest, devices - used, after if branches else last.depth):
                depth = max(others.depth, last.depth)
                parts.append((depth, used, rank, _Part(depth, (*others.stages, *last.stages))))
        self.known[key] = min(parts)[-1] if parts else None
        return self.known[key]

    def _stage(self, nodes: Nodes, devices: int, after: int) -> _Part | None:
        """Returns a single stage on as few of the devices as it needs."""
        for count in range(1, devices + 1):
            if self.cost(nodes, count) <= self.limit and self.fits(nodes, count, after + 1):
                return _Part(after + 1, (GraphStage(nodes, count, after + 1),))
        return None


class GraphPrices:
    """Prices of the stages of a graph over links of a bandwidth [bytes/s], on devices of a memory [bytes].

    copies: weights, gradients and moments, as often as `parameters` says.
    """

    def __init__(self, graph: LayerGraph, bandwidth: float, memory: float, copies: int) -> None:
        self.graph, self.bandwidth, self.memory, self.copies = graph, bandwidth, memory, copies

    @remembered
    def _total(self, nodes: Nodes) -> tuple[float, float, float, float]:
        """Returns the seconds of nodes, bytes of their parameters, of their outputs, and of the longer message."""
        figures, inside = self.graph.figures, np.zeros(len(self.graph.names), bool)
        inside[[*nodes]] = True
        received = {source for source, target in self.graph.edges if inside[target] and not inside[source]}
        sent = {source for source, target in self.graph.edges if inside[source] and not inside[target]}
        messages = (float(figures["activations"][[*side]].sum()) for side in (received, sent) if side)
        seconds = (figures["forward"] + figures["backward"])[inside].sum()
        parameters, outputs = figures["parameters"][inside].sum(), figures["activations"][inside].sum()
        return float(seconds), float(parameters), float(outputs), max(messages, default=0.0)

    def cost(self, nodes: Nodes, devices: int) -> float:
        """Returns the seconds of a stage of nodes on some devices."""
        seconds, parameters, _, message = self._total(nodes)
        gradients = 4 * (devices - 1) / devices * parameters / self.bandwidth
        return max((seconds + gradients) / devices, 2 * message / self.bandwidth / devices)

    def fits(self, nodes: Nodes, devices: int, in_flight: int) -> bool:
        """Returns whether nodes on some devices fit with so many micro-batches in flight."""
        _, parameters, outputs, _ = self._total(nodes)
        return self.copies * parameters + in_flight * outputs / devices <= self.memory


class GraphPipePlanner(Planner):
    paper = Paper(
        "arXiv:2406.17145",
        "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
        2024,
    )
    restrictions = (
        "shard tensors",
        "give a stage branches that are no neighbours in their list",
        "use micro-batches of different sizes",
    )
    modes = ("paper",)
    copies = 4
    """Weights, gradients and two moments of Adam, as often as `parameters` says."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        levels: tuple[NetworkLevel, ...] = tuple(getattr(problem, "levels", ()))
        if len(levels) != 1:
            rule = "GraphPipe needs one level of the network"
            raise PlanError(f"problem {problem.name}", rule, "Give levels=[NetworkLevel(devices, bandwidth)]")
        graph = problem.graph()
        try:
            series = decompose(graph)
        except ValueError as error:
            raise PlanError(f"problem {problem.name}", str(error), "Give a series-parallel graph") from None
        prices = GraphPrices(graph, levels[0].bandwidth, problem.memory, self.copies)
        plan = plan_graph(series, problem.gpus, prices.cost, prices.fits)
        if plan is None:
            raise self.nothing_fits(problem, "Give more devices, or more memory")
        stages = [
            {"nodes": [*stage.nodes], "replicas": stage.devices, "in_flight": stage.in_flight} for stage in plan.stages
        ]
        proof = PlanProof(plan.value, plan.value, "bisection over dynamic programs")
        reason = "layers of a graph are placed on subsets of devices, and only models with branches are jobs"
        return Proposal({"stages": stages, "depth": plan.depth}, plan.value, plan.visited, proof, reason)
