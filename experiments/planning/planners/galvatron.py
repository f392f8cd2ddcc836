"""Galvatron: for every layer its degrees of data and tensor parallelism and whether weights are sharded.

For every depth of the pipeline a decision tree has all ways to divide a stage's GPUs by powers of two among tensor
parallelism and either data parallelism or sharded data parallelism, in both orders (its pruning: the two are never
mixed). Within the memory of a stage, dynamic programming over layers gives each its strategy; stages have equal layers
(Miao et al. 2022, arXiv 2211.13878). On 8 GPUs there are 22 strategies.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshcast.experiments.planning.certificate import PlanProof
from meshcast.experiments.planning.cores.pipelines.layer_paths import choose_strategies
from meshcast.experiments.planning.planner import Planner, Proposal
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


def decision_tree(gpus: int) -> list[LayerStrategy]:
    """The leaves of the tree of a stage of as many GPUs, a power of two."""
    found = []
    for power in range(gpus.bit_length()):
        tensor = 2**power
        data = gpus // tensor
        for sharded in (False, True) if data > 1 else (False,):
            for inner in (True, False) if min(tensor, data) > 1 else (True,):
                found.append(LayerStrategy(tensor, data, sharded, inner))
    return found


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

    def plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
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
            paths = []
            for stage in range(len(layers)):
                path = self._choose(prices, layers, stage, job.microbatches, job.memory)
                visited += path[2]
                paths.append(path)
            if any(not path[0] for path in paths):
                continue
            own = [seconds for _, seconds, _ in paths]
            once = max(float(prices.once[[*chosen]].sum()) for chosen, _, _ in paths) + prices.once_rest
            value = sum(own) + (job.microbatches - 1) * max(own) + once
            if best is None or value < best.value:
                chosen = [strategies[one] for path in paths for one in path[0]]
                best = Proposal(strategy_plan(job, layers, chosen), value, visited)
        if best is None:
            raise error or self.nothing_fits(problem, "Give more GPUs, smaller micro-batches, or GPUs of more memory")
        proof = PlanProof(best.value, best.value, "dynamic programming")
        return best._replace(visited=visited, proof=proof)

    def _pipelines(self, gpus: int, layers: int) -> Iterator[list[int]]:
        """Layers of the stages of every depth."""
        depth = 1
        while depth <= min(gpus, layers):
            yield [len(part) for part in np.array_split(np.arange(layers), depth)]
            depth *= 2

    def _choose(
        self, prices: StrategyPrices, layers: list[int], stage: int, microbatches: int, memory: float
    ) -> tuple[tuple[int, ...], float, int]:
        """Strategies of the layers of a stage, seconds of one of its micro-batches, and table entries; no strategies
        where nothing fits."""
        first = 1 + sum(layers[:stage])
        rows = slice(first, first + layers[stage])
        flights = min(microbatches, len(layers) - stage)
        units = prices.units
        seconds = np.stack([one.forward[rows] + one.backward[rows] for one in units], axis=1)
        held = np.stack([one.states[rows] + flights * one.kept[rows] for one in units], axis=1)
        ends = [number for number, here in ((0, stage == 0), (-1, stage == len(layers) - 1)) if here]
        one = units[0]  # the ends are alike in all strategies
        fixed = sum(float(one.states[end] + flights * one.kept[end]) for end in ends)
        peak = max(float(each.peak[rows].max()) for each in units)
        peak = max([peak, *(float(one.peak[end]) for end in ends)])
        weights = microbatches * seconds + prices.once[None]
        none = np.zeros((len(units), len(units)))
        path = choose_strategies(weights, held, none, memory - fixed - peak)
        if path is None:
            return (), np.inf, 0
        chosen = [*path.strategies]
        own = float(seconds[np.arange(layers[stage]), chosen].sum())
        own += sum(float(one.forward[end] + one.backward[end]) for end in ends)
        return path.strategies, own, path.visited
