"""Sailor: which GPUs of which kinds to use, the stages of each kind, and replicas, for the shortest step.

For every number of micro-batches, stages, replicas and order of kinds, the stages on each kind are tried. Its rules
keep the space small: tensor parallelism stays inside a node and is, for every stage and kind, the least that fits;
layers are divided evenly; nodes may stay unused. A step takes the sum of the stages, (m - 1) x the slowest (the
straggler), messages, and the largest sum of gradients with its update (Strati et al. 2025, arXiv 2504.17096,
section 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

import numpy as np

from meshcast.experiments.planning.clock import is_over
from meshcast.experiments.planning.planner import Planner, Proposal
from meshcast.experiments.planning.pricing.kind_stages import KindStages, propose_cheapest
from meshcast.experiments.planning.pricing.mixed import MixedProblem, PricedNodes, require_kinds
from meshcast.experiments.planning.problem import Changes, Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.ir.scheme import Paper


class Sailor(Planner):
    paper = Paper(
        "arXiv:2504.17096",
        "Sailor: Automating Distributed Training over Dynamic, Heterogeneous, and Geo-distributed Clusters",
        2025,
    )
    restrictions = (
        "use kinds of GPUs side by side in a stage",
        "use more tensor parallelism than a stage needs to fit",
        "leave a part of a node unused, or nodes of a cluster of one kind",
        "recompute",
        "minimise money, or move between zones",
    )

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        mixed = require_kinds(problem)
        best: tuple[float, Changes] | None = None
        visited, whole = 0, True
        for candidate in self._space(mixed):
            if is_over():
                whole = False
                break
            priced = self._price(*candidate)
            visited += 1
            if priced is not None and (best is None or priced[0] < best[0]):
                best = priced
        return propose_cheapest(self, problem, best, visited, whole)

    def _space(
        self, mixed: MixedProblem
    ) -> Iterator[tuple[MixedProblem, Sequence[PricedNodes], Sequence[int], list[int], int]]:
        """Yields candidates as `_price` takes them; many micro-batches first, as their bubbles are small."""
        for count in reversed(list_divisors(mixed.sequences)):
            variant = mixed.with_microbatches(count)
            orders = [order for size in range(len(variant.kinds)) for order in permutations(variant.kinds, size + 1)]
            for order, depth in product(orders, range(1, variant.layers + 1)):
                layers = [len(part) for part in np.array_split(np.arange(variant.layers), depth)]
                for replicas in list_divisors(variant.samples):
                    for shares in _shares(depth, len(order)):
                        yield variant, order, shares, layers, replicas

    def _price(
        self,
        variant: MixedProblem,
        order: Sequence[PricedNodes],
        shares: Sequence[int],
        layers: list[int],
        replicas: int,
    ) -> tuple[float, Changes] | None:
        """Returns the step and the job of stages on the kinds in order, as many on each; None if they do not fit."""
        ends = np.cumsum(layers).tolist()
        degrees: list[int] = []
        used = []
        for kind, share in zip(order, shares, strict=True):
            for stage in range(len(degrees), len(degrees) + share):
                cell = ends[stage] - layers[stage], ends[stage] - 1
                tensor = _least_tensor(kind, replicas, cell, len(layers) - 1 - stage)
                if tensor is None:
                    return None
                degrees.append(tensor)
            count = replicas * sum(degrees[len(degrees) - share :])
            nodes_whole = count % kind.cluster.gpus_per_node == 0 if len(variant.kinds) > 1 else count == kind.gpus
            if count > kind.gpus or not nodes_whole:
                return None
            used.append(kind._replace(gpus=count))
        stages = KindStages(variant, used)
        try:
            choices = stages.choose([(replicas, tensor) for tensor in degrees])
        except PlanError:
            return None
        return stages.step_seconds(choices, layers), stages.write(choices, layers)


def _least_tensor(kind: PricedNodes, replicas: int, cell: tuple[int, int], behind: int) -> int | None:
    """Returns the least tensor parallelism with which a stage of these layers fits before `behind` others."""
    try:
        table = kind.problem.stages(recompute=False)
    except PlanError:  # no degrees suit these micro-batches
        return None
    fitting = [
        int(option.plan["tp"])
        for number, option in enumerate(table.options)
        if option.plan["dp"] == replicas and table.behind[(*cell, number)] >= behind
    ]
    return min(fitting, default=None)


def _shares(depth: int, kinds: int) -> Iterator[tuple[int, ...]]:
    """Yields all ways to give every kind some of the stages."""
    for borders in combinations(range(1, depth), kinds - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *borders, depth)))
