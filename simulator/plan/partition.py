"""Partitions the layers of a model over virtual pipeline stages: evenly, by a list, or so that the largest cost of a
stage is minimal (`balance`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.models.model import Model

Partition = str | tuple[int, ...]

WORDS = "even, ends-as-layers, by-cost, by-memory, or a list of layers"


class LayerCosts(NamedTuple):
    """Costs of the parts of a model on the device of one stage, in any unit.

    begin: cost of the embedding.
    layers: cost of every layer.
    end: cost of final norm, output layer and loss.
    """

    begin: float
    layers: Sequence[float]
    end: float


AskLayerCosts = Callable[[], Sequence[LayerCosts]]
"""Returns the layer costs on every stage; called only for `partition: by-cost`."""


def layers_of_graph(
    partition: Partition, model: Model, before: Sequence[tuple[int, ...]], use: str, costs: AskLayerCosts
) -> list[int]:
    """Returns the number of layers of every virtual stage. The stages are a chain, or a chain per branch of the model
    that has layers, joined by the trunk.

    partition: the partition of the job.
    model: the shape of the model.
    before: for every stage the stages whose output it receives.
    use: name of the schedule, for error messages.
    costs: returns the layer costs.
    Raises PlanError if branches do not match the graph, or the layers do not fit the stages.
    """
    branches = [one for one in model.branches if one.layers]
    begins = [stage for stage, others in enumerate(before) if others != (stage - 1,)]
    lines = [range(*ends) for ends in zip(begins, [*begins[1:], len(before)], strict=True)]
    if len(before) == 1 or (len(lines) == 1 and len(branches) <= 1):
        return layers_of_stages(partition, len(model.every_layer), len(before), costs)
    trunk = [tuple(line[-1] for line in lines[:-1])] if model.layers else []
    joined = [before[line.start] for line in lines] == [*[()] * len(branches), *trunk]
    if len(branches) <= 1 or not joined:
        joins = any(len(others) > 1 for others in before)
        ways = f"joins {len(lines) - 1} branches of stages" if joins else f"has {len(lines)} branches of stages"
        stages = "is a chain of stages" if len(lines) == 1 else ways
        several = len(branches) > 1
        has = f"has {len(branches)} branches of layers" if several else "is a chain of layers"
        graph = "pipeline/graphpipe" if model.layers else "pipeline/distmm"
        graph += f" with branches: {len(branches)}, or one stage"
        remedy = f"Use {graph if several else 'pipeline/1f1b'}"
        raise PlanError("plan.schemes", f"{use} {stages}, and {model.name} {has}", remedy, use)
    counts = [*(one.layers for one in branches), *([model.layers] if model.layers else [])]
    names = [*(f"branch {one.name}" for one in branches), *(["the trunk"] if model.layers else [])]
    if partition == "even":
        for layers, line, whose in zip(counts, lines, names, strict=True):
            if layers % len(line):
                rule = f"the {layers} layers of {whose} must divide evenly over its {len(line)} stages"
                near = max(1, round(layers / len(line))) * len(line)
                raise PlanError("plan.partition", rule, f"{near} layers would work, or a list of layers", partition)
        return [layers // len(line) for layers, line in zip(counts, lines, strict=True) for _ in line]
    if isinstance(partition, str):
        rule = "branches are partitioned evenly, or by a list"
        raise PlanError("plan.partition", rule, "Use even, or a list of layers", partition)
    found = [sum(partition[line.start : line.stop]) for line in lines]
    if len(partition) != len(before) or found != counts or min(*partition[:-1], partition[-1] + bool(model.layers)) < 1:
        whole = ", ".join(f"{layers} on {len(line)}" for layers, line in zip(counts, lines, strict=True))
        behind, last = (" and then of the trunk", " but the last") if model.layers else ("", "")
        rule = f"a list gives the layers of each stage, branch by branch{behind} ({whole} stages)"
        rule += f", and no stage{last} is without"
        raise PlanError("plan.partition", rule, "Correct the list, or use even", list(partition))
    return list(partition)


def layers_of_stages(partition: Partition, layers: int, stages: int, costs: AskLayerCosts = tuple) -> list[int]:
    """Returns the number of transformer layers of every virtual stage of a chain, first to last.

    ``even``: equal numbers. ``ends-as-layers``: embedding and output layer count as one layer each. ``by-cost``: the
    largest cost of a stage is minimal. A list states the numbers.

    Raises PlanError if the layers do not fit the stages.
    """
    if partition == "even":
        if layers % stages:
            near = max(1, round(layers / stages)) * stages
            divisors = [n for n in range(1, layers + 1) if layers % n == 0]
            below = max((n for n in divisors if n <= stages), default=1)
            rule = f"{layers} layers must divide evenly over pp x chunks = {stages} stages"
            ends = (layers + 2) % stages == 0 and stages > 1
            remedy = (
                f"{below} stage{'s' * (below > 1)} would work, or {near} layers, or a list of layers in plan.partition"
            )
            remedy += ", or by-cost" if layers + 2 >= stages else ""
            remedy = f"partition: ends-as-layers would work; {remedy}" if ends else remedy
            raise PlanError("plan.partition", rule, remedy, partition)
        return [layers // stages] * stages
    if partition == "ends-as-layers":
        places = layers + 2
        if stages < 2 or places % stages or places // stages < 1:
            rule = f"{layers} layers and 2 ends must divide evenly over {stages} stages (at least 2)"
            near = max(1, round(places / stages)) * stages - 2
            remedy = f"{near} layers would work; or " if stages > 1 and near > 0 else ""
            raise PlanError("plan.partition", rule, f"{remedy}use even, by-cost or a list of layers", partition)
        each = places // stages
        return [each - 1, *[each] * (stages - 2), each - 1]
    if partition == "by-cost":
        if layers + 2 < stages:
            rule = f"with {layers} layers on {stages} stages one inside the pipeline would be without"
            raise PlanError("plan.partition", rule, f"At most {layers + 2} stages would work", partition)
        return balance(costs())
    if isinstance(partition, str):
        raise PlanError("plan.partition", "no such partition", f"Valid: {WORDS}", partition)
    if len(partition) != stages or sum(partition) != layers or min(partition) < 0:
        rule = f"a list gives the layers of each of the {stages} stages and sums to {layers}"
        rule += f"; this one has {len(partition)} entries with the sum {sum(partition)}"
        raise PlanError("plan.partition", rule, "Correct the list, or use even", list(partition))
    if min(partition[1:-1], default=1) < 1:
        rule = "a stage inside the pipeline has at least one layer"
        raise PlanError("plan.partition", rule, "Use fewer stages, or another list", list(partition))
    return list(partition)


def balance(layer_costs: Sequence[LayerCosts]) -> list[int]:
    """Returns the number of layers of every stage that minimises the largest cost of a stage, then the sum of squared
    costs.

    layer_costs: by stage, the layer costs on its device.
    """
    return minimise_largest([stage_costs(one, stage, len(layer_costs)) for stage, one in enumerate(layer_costs)])


def stage_costs(costs: LayerCosts, stage: int, stages: int) -> np.ndarray:
    """Returns the cost of a stage with the layers from one (row) up to another (column); infinite for too few layers.

    The first and the last stage may have no layer, because they have the embedding and the output layer.
    """
    reached, layers = np.array([0.0, *accumulate(costs.layers)]), np.arange(len(costs.layers) + 1)
    found = reached[None] - reached[:, None]
    found += costs.begin * (stage == 0) + costs.end * (stage == stages - 1)
    found[layers[None] - layers[:, None] < int(0 < stage < stages - 1)] = np.inf
    return found


def minimise_largest(costs: Sequence[np.ndarray]) -> list[int]:
    """Returns the number of layers of every stage for the least largest cost, then the least sum of squared costs.

    costs: by stage, as `stage_costs` gives them.
    """
    worst = _best(costs, np.maximum)[0]
    squares = [np.where(cost <= worst * (1 + 1e-12), cost, np.inf) ** 2 for cost in costs]
    return _best(squares, np.add)[1]


def is_reachable(costs: Sequence[np.ndarray]) -> bool:
    """Returns whether there is a partition of finite cost."""
    return bool(np.isfinite(_best(costs, np.maximum)[0]))


def minimise_step(costs: Sequence[np.ndarray], microbatches: int) -> list[int]:
    """Returns the number of layers of every stage for which a step of 1F1B is shortest: a micro-batch's way through all
    stages, and one less than the micro-batches times the slowest stage."""
    every = np.unique(np.concatenate([cost[np.isfinite(cost)] for cost in costs]))
    least, best, found = _best(costs, np.maximum)[0], np.inf, minimise_largest(costs)
    for largest in every[every >= least * (1 - 1e-12)].tolist():
        if (microbatches - 1) * largest >= best:
            break
        total, layers = _best([np.where(cost <= largest * (1 + 1e-12), cost, np.inf) for cost in costs], np.add)
        if total + (microbatches - 1) * largest < best:
            best, found = total + (microbatches - 1) * largest, layers
    return found


def _best(costs: Sequence[np.ndarray], combine: np.ufunc) -> tuple[float, list[int]]:
    """Finds the partition of least total cost by dynamic programming; returns that cost and the layers by stage.

    costs: by stage, the cost of the layers from one (row) up to another (column).
    combine: how costs of stages make up the total (sum or maximum).
    """
    reached, starts = costs[0][0], []
    for cost in costs[1:]:
        totals = combine(reached[:, None], cost)
        starts.append(totals.argmin(axis=0))
        reached = totals.min(axis=0)
    ends = [len(reached) - 1]
    for begin in reversed(starts):
        ends.append(int(begin[ends[-1]]))
    return float(reached[-1]), np.diff([0, *reversed(ends)]).tolist()
