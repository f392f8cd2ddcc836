"""Prices of layers under strategies: degrees of data and tensor parallelism, in two orders, with or without shards.

All GPUs of a stage are axes of two ranks. A strategy gives some of them, innermost or outermost, to the heads and
feed-forward columns of a layer, and the others to its sequences; between layers every rank has different sequences, so
a layer's price has its conversions, and prices of layers add up. A job executes any mixture of them with
[`tensor/annotated`], whose tables are for ranges of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.stage_prices import UnitCosts
from meshcast.hardware.errors import PlanError

BY_HEADS = ("qkv", "core", "proj")
BY_COLUMNS = ("up", "act", "down")
WEIGHTED = ("qkv", "proj", "up", "down")
"""Operators of a layer that Megatron shards by heads, by feed-forward columns, and those whose weights rest sharded."""

BETWEEN = ("norm1", "residual1", "norm2", "residual2")


class LayerStrategy(NamedTuple):
    """How the GPUs of a stage share a layer.

    tensor, data: degrees.
    sharded: whether weights rest sharded over the data-parallel ranks.
    inner: whether ranks of a tensor group are neighbours.
    """

    tensor: int
    data: int
    sharded: bool
    inner: bool = True


class StrategyPrices(NamedTuple):
    """Prices of strategies in a pipeline of equal stages.

    units: costs of the units of the model in every strategy.
    once: seconds of a step besides its micro-batches, of a layer in every strategy [strategies], and of all else.
    """

    units: tuple[UnitCosts, ...]
    once: np.ndarray
    once_rest: float


def strategy_plan(problem: JobProblem, layers: Sequence[int], strategies: Sequence[LayerStrategy]) -> Mapping[str, Any]:
    """Returns the ``plan`` and ``batch`` of a job of stages of as many layers, with a strategy for each layer."""
    gpus = strategies[0].tensor * strategies[0].data
    axes = [f"x{place}" for place in range(max(1, gpus.bit_length() - 1))]
    split = dict.fromkeys(axes, "b")
    tables: list[dict[str, Any]] = [{"divide": {"all": split}}]
    first = 0
    for strategy, run in groupby(strategies):
        count = len(list(run))
        tables.append({"layers": f"{first}-{first + count - 1}", **_table_of(strategy, axes)})
        first += count
    schemes: list[dict[str, Any]] = [
        {"use": "data/ddp", "over": axes},
        {"use": "tensor/annotated", "over": axes, "stream": split, "tables": tables},
    ]
    mesh: dict[str, int] = dict.fromkeys(axes, min(2, gpus))
    plan: dict[str, Any] = {}
    if len(layers) > 1:
        mesh = {"pp": len(layers), **mesh}
        schemes = [{"use": "pipeline/1f1b", "over": ["pp"]}, *schemes]
        plan = {"partition": list(layers)}
    batch = {"global": problem.sequences, "micro": problem.samples // gpus}
    return {"plan": {"mesh": mesh, **plan, "schemes": schemes}, "batch": batch}


def _table_of(strategy: LayerStrategy, axes: Sequence[str]) -> dict[str, Any]:
    count = strategy.tensor.bit_length() - 1
    tensor = axes[len(axes) - count :] if strategy.inner else axes[:count]
    data = [axis for axis in axes if axis not in tensor]
    by_batch = dict.fromkeys(data, "b")
    divide = {"all": by_batch}
    divide |= {name: {**by_batch, **dict.fromkeys(tensor, "a")} for name in BY_HEADS}
    divide |= {name: {**by_batch, **dict.fromkeys(tensor, "f")} for name in BY_COLUMNS}
    divide |= {name: dict.fromkeys(axes, "b") for name in BETWEEN}
    rest = {"rest": {name: dict.fromkeys(data, "h") for name in WEIGHTED}} if strategy.sharded else {}
    return {"divide": divide, **rest}


def price_strategies(
    problem: JobProblem, layers: Sequence[int], strategies: Sequence[LayerStrategy]
) -> tuple[list[LayerStrategy], StrategyPrices]:
    """Prices the strategies that the model allows, in stages of as many layers; returns them with their prices.

    What a layer takes once a step is told from forecasts of plans whose layers are alike, less their micro-batches, as
    a profiler tells it from runs. Raises the last PlanError if the model allows none.
    """
    if problem.expert_ranks > 1:
        raise PlanError("model", "strategies of layers shard dense layers", "Choose a model without experts")
    kept, units, rest = [], [], []
    error: PlanError | None = None
    for strategy in strategies:
        check_time()
        plan = strategy_plan(problem, layers, [strategy] * sum(layers))
        try:
            step = problem.forecast(plan).step_time
            costs = problem.units_of_plan(plan)
        except PlanError as broken:
            error = broken
            continue
        alone = stage_seconds(costs.forward + costs.backward, layers)
        kept.append(strategy)
        units.append(costs)
        rest.append(step - sum(alone) - (problem.microbatches - 1) * max(alone))
    if not kept:
        assert error is not None
        raise error
    # Layers that share all weights over tensor ranks, or over shards, exchange least: the rest is of all else.
    least = max(0.0, min(rest))
    once = np.maximum(0.0, np.array(rest) - least) / max(layers)
    return kept, StrategyPrices(tuple(units), once, least)


def stage_seconds(figure: np.ndarray, layers: Sequence[int]) -> list[float]:
    """Returns the sums of a figure of embedding, layers and output layer over stages of as many layers."""
    ends = np.cumsum([0, *layers])
    sums = [float(figure[1 + first : 1 + end].sum()) for first, end in pairwise(ends.tolist())]
    sums[0] += float(figure[0])
    sums[-1] += float(figure[-1])
    return sums
