"""Galvatron: for every layer its degrees of data and tensor parallelism and whether weights are sharded.

For every depth of the pipeline a decision tree has all ways to divide a stage's GPUs by powers of two among tensor
parallelism and either data parallelism or sharded data parallelism, in both orders (its pruning: the two are never
mixed). Within the memory of a stage, dynamic programming over layers gives each its strategy; stages have equal layers
(Miao et al. 2022, arXiv 2211.13878). On 8 GPUs there are 22 strategies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.cores.partition_dp import LastPiece, PartitionDP
from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal
from meshcast.experiments.planning.pricing.job import require_job
from meshcast.experiments.planning.pricing.layer_strategies import (
    LayerStrategy,
    StrategyPrices,
    price_strategies,
    strategy_plan,
)
from meshcast.experiments.planning.problem import Problem, SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import Paper

MEMORY_UNITS = 1000
"""Parts of the memory of a stage that are told apart; a layer takes whole ones."""


def decision_tree(gpus: int) -> list[LayerStrategy]:
    """Returns the leaves of the tree of a stage of as many GPUs, a power of two."""
    leaves = []
    for power in range(gpus.bit_length()):
        tensor = 2**power
        data = gpus // tensor
        for sharded in (False, True) if data > 1 else (False,):
            for inner in (True, False) if min(tensor, data) > 1 else (True,):
                leaves.append(LayerStrategy(tensor, data, sharded, inner))
    return leaves


class StrategyPath(NamedTuple):
    """A strategy of every layer, with their cost [s] and the number of table entries computed."""

    strategies: list[int]
    cost: float
    visited: int


def choose_strategies(
    costs: np.ndarray, nbytes: np.ndarray, memory: float, units: int = MEMORY_UNITS
) -> StrategyPath | None:
    """Returns the strategies of least cost whose bytes fit into a memory; None if none do (equation 1).

    costs, nbytes: of every layer in every strategy [layers, strategies].
    memory: for all layers [bytes].
    units: parts of it that are told apart.
    """
    if memory < 0:
        return None
    if math.isinf(memory):
        sizes, units = np.zeros(costs.shape, int), 0
    else:
        # A rounding error of the division must not cost a unit.
        sizes = np.ceil(nbytes / max(memory, 1e-300) * units - 1e-9).astype(int)

    def begin(layer: int) -> np.ndarray:
        return np.full((1, units + 1), np.inf if layer else 0.0)

    def end(layer: int) -> Iterator[LastPiece]:
        for strategy in np.flatnonzero(sizes[layer - 1] <= units).tolist() if layer else ():
            yield LastPiece(layer - 1, costs[layer - 1, strategy].reshape(1, 1), strategy, sizes[layer - 1, strategy])

    table = PartitionDP(begin, end, np.add)
    cost = float(table.costs(len(costs))[0, units])
    if not math.isfinite(cost):
        return None
    return StrategyPath([piece.option for piece in table.trace(len(costs))], cost, table.visited)


class Galvatron(Planner):
    paper = Paper(
        "arXiv:2211.13878",
        "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic Parallelism",
        2022,
    )
    restrictions = (
        "use degrees that are no powers of two",
        "mix replicas and shards of one layer's weights",
        "give stages different numbers of layers, or GPUs",
        "recompute",
    )

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        job = require_job(problem)
        if job.gpus & (job.gpus - 1):
            raise PlanError("cluster", "Galvatron's trees divide powers of two", "Use 2, 4, 8, ... GPUs", job.gpus)
        best: Proposal | None = None
        visited, error = 0, None
        for layers in self._pipelines(job.gpus, job.job.model.layers):
            gpus = job.gpus // len(layers)
            if job.samples % gpus:
                continue
            try:
                strategies, prices = price_strategies(job, layers, decision_tree(gpus))
            except PlanError as broken:
                error = broken
                continue
            paths = [self._choose(prices, layers, stage, job.microbatches, job.memory) for stage in range(len(layers))]
            visited += sum(path.visited for path in paths if path)
            stages = [path for path in paths if path]
            if len(stages) < len(layers):
                continue
            seconds = [stage.cost for stage in stages]
            once = max(float(prices.once[stage.strategies].sum()) for stage in stages) + prices.once_rest
            value = sum(seconds) + (job.microbatches - 1) * max(seconds) + once
            if best is None or value < best.value:
                chosen = [strategies[number] for stage in stages for number in stage.strategies]
                best = Proposal(strategy_plan(job, layers, chosen), value, visited)
        if best is None:
            raise error or self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        proof = PlanProof(best.value, best.value, "dynamic programming")
        return best._replace(visited=visited, proof=proof)

    def _pipelines(self, gpus: int, layers: int) -> Iterator[list[int]]:
        depth = 1
        while depth <= min(gpus, layers):
            yield [len(part) for part in np.array_split(np.arange(layers), depth)]
            depth *= 2

    def _choose(
        self, prices: StrategyPrices, layers: list[int], stage: int, microbatches: int, memory: float
    ) -> StrategyPath | None:
        """Returns the strategies of the layers of a stage, with the seconds of a micro-batch; None if nothing fits."""
        first = 1 + sum(layers[:stage])
        rows = slice(first, first + layers[stage])
        flights = min(microbatches, len(layers) - stage)
        seconds = np.stack([units.forward[rows] + units.backward[rows] for units in prices.units], axis=1)
        held = np.stack([units.states[rows] + flights * units.kept[rows] for units in prices.units], axis=1)
        ends = [number for number, here in ((0, stage == 0), (-1, stage == len(layers) - 1)) if here]
        reference = prices.units[0]  # the ends cost the same in all strategies
        fixed = sum(float(reference.states[end] + flights * reference.kept[end]) for end in ends)
        peak = max(float(units.peak[rows].max()) for units in prices.units)
        peak = max([peak, *(float(reference.peak[end]) for end in ends)])
        path = choose_strategies(microbatches * seconds + prices.once[None], held, memory - fixed - peak)
        if path is None:
            return None
        total = float(seconds[np.arange(layers[stage]), path.strategies].sum())
        total += sum(float(reference.forward[end] + reference.backward[end]) for end in ends)
        return path._replace(cost=total)
