"""GraphPipe's partition: stages of a series-parallel graph, of the least bottleneck and then of the least depth.

A graph is a series of nodes and of parallel parts, each part branches that are series again. For a limit of the seconds
of a stage, dynamic programming finds the stages whose first ones have fewest micro-batches in flight: a stage has one
more than the most of its successors, so that branches do not count each other. The least limit with stages is found by
bisection (Jeon et al. 2024, arXiv 2406.17145, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Union

from meshcast.experiments.planning.graph import LayerGraph

Series = tuple[Union[int, "Parallel"], ...]
"""Nodes and parallel parts, one after another."""


class Parallel(NamedTuple):
    """Branches between the same nodes that do not depend on each other."""

    branches: tuple[Series, ...]


class GraphStage(NamedTuple):
    """A stage: its nodes, ascending, its devices, and the micro-batches that it has in flight."""

    nodes: tuple[int, ...]
    devices: int
    in_flight: int


class GraphPlan(NamedTuple):
    """Stages with the largest of their seconds, the depth of the pipeline, and the states that were computed."""

    stages: tuple[GraphStage, ...]
    value: float
    depth: int
    visited: int


Cost = Callable[[tuple[int, ...], int], float]
"""Seconds of a stage of nodes on some devices."""

Fits = Callable[[tuple[int, ...], int, int], bool]
"""Whether nodes on some devices fit with so many micro-batches in flight."""


def decompose(graph: LayerGraph) -> Series:
    """The graph as a series.

    Raises ValueError for a graph that is not series-parallel, with the nodes in question.
    """
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
    """A node that comes before or after each other one cuts the graph; what lies between two cuts is parallel."""
    ordered = sorted(nodes, key=lambda node: len(before[node] & nodes))
    cuts = [one for one in ordered if all(one in before[other] or other in before[one] for other in nodes)]
    found: list[int | Parallel] = []
    left = set(nodes)
    for cut in [*cuts, None]:
        between = left if cut is None else {node for node in left if node in before[cut] and node != cut}
        if between:
            parts = _components(between, linked)
            if len(parts) == 1:
                raise ValueError(f"nodes {sorted(between)} are neither a series nor parallel branches")
            found.append(Parallel(tuple(_series(part, before, linked) for part in parts)))
        left -= between
        if cut is not None:
            found.append(cut)
            left.discard(cut)
    return tuple(found)


def _components(nodes: set[int], linked: list[set[int]]) -> list[frozenset[int]]:
    left, found = set(nodes), []
    while left:
        part, front = set(), {min(left)}
        while front:
            part |= front
            front = {other for node in front for other in linked[node] if other in nodes} - part
        found.append(frozenset(part))
        left -= part
    return found


@cache
def nodes_of(series: Series) -> tuple[int, ...]:
    """All nodes of a series, ascending."""
    found: list[int] = []
    for item in series:
        found += [item] if isinstance(item, int) else [node for one in item.branches for node in nodes_of(one)]
    return tuple(sorted(found))


def plan_graph(series: Series, devices: int, cost: Cost, fits: Fits) -> GraphPlan | None:
    """The stages of least bottleneck, of these the ones of least depth, on at most so many devices; None: none fits."""
    cost, fits = cache(cost), cache(fits)
    times = {cost(nodes, count) for nodes in _possible_stages(series) for count in range(1, devices + 1)}
    limits = sorted(time for time in times if math.isfinite(time))
    best: GraphPlan | None = None
    low, high = 0, len(limits) - 1
    while low <= high:
        middle = (low + high) // 2
        found = _BoundedStages(cost, fits, limits[middle]).plan(series, devices)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle - 1
    return best


def _possible_stages(series: Series) -> set[tuple[int, ...]]:
    found = {nodes_of(series[i:j]) for i in range(len(series)) for j in range(i + 1, len(series) + 1)}
    for item in series:
        if isinstance(item, Parallel):
            branches = item.branches
            for i in range(len(branches)):
                found |= _possible_stages(branches[i])
                found |= {_nodes_of_branches(branches[i:j]) for j in range(i + 1, len(branches) + 1)}
    return found


def _nodes_of_branches(branches: Sequence[Series]) -> tuple[int, ...]:
    return tuple(sorted(node for one in branches for node in nodes_of(one)))


Partial = tuple[int, tuple[GraphStage, ...]]
"""Micro-batches in flight at the beginning of some stages, and these."""


class _BoundedStages:
    """Stages none of which exceeds a limit of seconds."""

    def __init__(self, cost: Cost, fits: Fits, limit: float) -> None:
        self.cost, self.fits, self.limit = cost, fits, limit
        self._known: dict[tuple[Series | Parallel, int, int], Partial | None] = {}

    def plan(self, series: Series, devices: int) -> GraphPlan | None:
        found = self._chain(series, devices, 0)
        if found is None:
            return None
        depth, stages = found
        return GraphPlan(stages, max(self.cost(one.nodes, one.devices) for one in stages), depth, len(self._known))

    def _stage(self, nodes: tuple[int, ...], devices: int, after: int) -> Partial | None:
        """One stage on all of the devices or fewer, before stages with so many micro-batches in flight."""
        for count in range(1, devices + 1):
            if self.cost(nodes, count) <= self.limit and self.fits(nodes, count, after + 1):
                return after + 1, (GraphStage(nodes, count, after + 1),)
        return None

    def _chain(self, series: Series, devices: int, after: int) -> Partial | None:
        """The stages of a series that begin with fewest micro-batches in flight.

        Its last piece is a stage of its last items, or the branches of its last item.
        """
        if not series:
            return after, ()
        key = series, devices, after
        if key not in self._known:
            found: list[Partial | None] = []
            for used in range(1, devices + 1):
                for begin in range(len(series)):
                    last = self._stage(nodes_of(series[begin:]), used, after)
                    found.append(self._prepend(series[:begin], devices - used, last))
                if isinstance(series[-1], Parallel):
                    last = self._branches(series[-1], used, after)
                    found.append(self._prepend(series[:-1], devices - used, last))
            self._known[key] = min((one for one in found if one), key=lambda one: one[0], default=None)
        return self._known[key]

    def _prepend(self, series: Series, devices: int, last: Partial | None) -> Partial | None:
        if last is None:
            return None
        first = self._chain(series, devices, last[0])
        return first and (first[0], (*first[1], *last[1]))

    def _branches(self, parallel: Parallel, devices: int, after: int) -> Partial | None:
        """The stages of branches; neighbouring branches may share a stage."""
        branches = parallel.branches
        if not branches:
            return after, ()
        key = parallel, devices, after
        if key not in self._known:
            found = []
            for used in range(1, devices + 1):
                last = [(len(branches) - 1, self._chain(branches[-1], used, after))]
                for begin in range(len(branches) - 1):
                    last.append((begin, self._stage(_nodes_of_branches(branches[begin:]), used, after)))
                for begin, stages in last:
                    others = stages and self._branches(Parallel(branches[:begin]), devices - used, after)
                    if stages and others:
                        found.append((max(stages[0], others[0]), (*others[1], *stages[1])))
            self._known[key] = min(found, key=lambda one: one[0], default=None)
        return self._known[key]
