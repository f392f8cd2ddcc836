"""Partitions the layers of a model over virtual pipeline stages: evenly, by a list, or so that the largest cost of a
stage is minimal (`balance`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.models.model import Model
from meshcast.simulator.scheduling.schedule import nearest_multiple

Partition = str | tuple[int, ...]

WORDS = "even, ends-as-layers, by-cost, by-memory, or a list of layers"


class LayerCosts(NamedTuple):
    """Costs of the parts of a model on the device of a stage, in any unit.

    begin: cost of the embedding.
    layers: cost of every layer.
    end: cost of final norm, output layer and loss.
    """

    begin: float
    layers: Sequence[float]
    end: float


AskLayerCosts = Callable[[], Sequence[LayerCosts]]
"""Returns the layer costs on every stage; called only for `partition: by-cost`."""


class LayerChain(NamedTuple):
    """A chain of layers, a branch of a model or its trunk, and the chain of stages that holds it."""

    name: str
    layers: int
    stages: range


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
    branches = sum(1 for branch in model.branches if branch.layers)
    lines = _chains_of_stages(before)
    if len(before) == 1 or (len(lines) == 1 and branches <= 1):
        return layers_of_stages(partition, len(model.every_layer), len(before), costs)
    _check_graph(model, branches, before, lines, use)
    layers = [(f"branch {branch.name}", branch.layers) for branch in model.branches if branch.layers]
    layers += [("the trunk", model.layers)] if model.layers else []
    chains = [LayerChain(*item, stages) for item, stages in zip(layers, lines, strict=True)]
    if partition == "even":
        return [count for chain in chains for count in _spread_chain(chain)]
    if isinstance(partition, str):
        rule = "branches are partitioned evenly, or by a list"
        raise PlanError("plan.partition", rule, "Use even, or a list of layers", partition)
    _check_listed_chains(partition, chains, bool(model.layers))
    return list(partition)


def _chains_of_stages(before: Sequence[tuple[int, ...]]) -> list[range]:
    """Returns the stages of every chain: a chain begins where a stage does not receive from the stage before it
    alone."""
    begins = [stage for stage, others in enumerate(before) if others != (stage - 1,)]
    return [range(*ends) for ends in zip(begins, [*begins[1:], len(before)], strict=True)]


def _check_graph(
    model: Model, branches: int, before: Sequence[tuple[int, ...]], lines: Sequence[range], use: str
) -> None:
    """Raises PlanError unless there is a chain of stages for every branch of layers, and a chain that joins them."""
    trunk = [tuple(line[-1] for line in lines[:-1])] if model.layers else []
    if branches > 1 and [before[line.start] for line in lines] == [*[()] * branches, *trunk]:
        return
    joins = any(len(others) > 1 for others in before)
    stages = f"joins {len(lines) - 1} branches of stages" if joins else f"has {len(lines)} branches of stages"
    stages = "is a chain of stages" if len(lines) == 1 else stages
    graph = f"{'pipeline/graphpipe' if model.layers else 'pipeline/distmm'} with branches: {branches}, or one stage"
    layers, remedy = f"has {branches} branches of layers", f"Use {graph}"
    if branches <= 1:
        layers, remedy = "is a chain of layers", "Use pipeline/1f1b"
    raise PlanError("plan.schemes", f"{use} {stages}, and {model.name} {layers}", remedy, use)


def _spread_chain(chain: LayerChain) -> list[int]:
    """Returns equal numbers of layers. Raises PlanError where there are none."""
    count = len(chain.stages)
    if chain.layers % count:
        rule = f"the {chain.layers} layers of {chain.name} must divide evenly over its {count} stages"
        near = nearest_multiple(chain.layers, count)
        raise PlanError("plan.partition", rule, f"{near} layers would work, or a list of layers", "even")
    return [chain.layers // count] * count


def _check_listed_chains(partition: tuple[int, ...], chains: Sequence[LayerChain], has_trunk: bool) -> None:
    """Raises PlanError unless a list has the layers of every chain, and no stage without any but the last of a trunk,
    which has the output layer."""
    last = chains[-1].stages.stop
    fits = len(partition) == last and min(*partition[:-1], partition[-1] + has_trunk) >= 1
    if fits and all(sum(partition[chain.stages.start : chain.stages.stop]) == chain.layers for chain in chains):
        return
    whole = ", ".join(f"{chain.layers} on {len(chain.stages)}" for chain in chains)
    behind, but_last = (" and then of the trunk", " but the last") if has_trunk else ("", "")
    rule = f"a list gives the layers of each stage, branch by branch{behind} ({whole} stages)"
    rule += f", and no stage{but_last} is without"
    raise PlanError("plan.partition", rule, "Correct the list, or use even", list(partition))


def layers_of_stages(partition: Partition, layers: int, stages: int, costs: AskLayerCosts = tuple) -> list[int]:
    """Returns the number of transformer layers of every virtual stage of a chain, first to last.

    ``even``: equal numbers. ``ends-as-layers``: embedding and output layer count as a layer each. ``by-cost``: the
    largest cost of a stage is minimal. A list states the numbers.

    Raises PlanError if the layers do not fit the stages.
    """
    if partition == "even":
        return _spread_evenly(layers, stages)
    if partition == "ends-as-layers":
        return _spread_with_ends(layers, stages)
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


def _spread_evenly(layers: int, stages: int) -> list[int]:
    """Returns equal numbers of layers. Raises PlanError where there are none."""
    if layers % stages == 0:
        return [layers // stages] * stages
    below = max(n for n in list_divisors(layers) if n <= stages)
    near = nearest_multiple(layers, stages)
    remedy = f"{below} stage{'s' * (below > 1)} would work, or {near} layers, or a list of layers in plan.partition"
    remedy += ", or by-cost" if layers + 2 >= stages else ""
    if (layers + 2) % stages == 0:
        remedy = f"partition: ends-as-layers would work; {remedy}"
    rule = f"{layers} layers must divide evenly over pp x chunks = {stages} stages"
    raise PlanError("plan.partition", rule, remedy, "even")


def _spread_with_ends(layers: int, stages: int) -> list[int]:
    """Returns equal numbers of layers, the embedding and the output layer counted. Raises PlanError where there are
    none."""
    places = layers + 2
    if stages < 2 or places % stages:
        rule = f"{layers} layers and 2 ends must divide evenly over {stages} stages (at least 2)"
        near = nearest_multiple(places, stages) - 2
        remedy = f"{near} layers would work; or " if stages > 1 and near > 0 else ""
        remedy += "use even, by-cost or a list of layers"
        raise PlanError("plan.partition", rule, remedy, "ends-as-layers")
    each = places // stages
    return [each - 1, *[each] * (stages - 2), each - 1]


def balance(layer_costs: Sequence[LayerCosts]) -> list[int]:
    """Returns the number of layers of every stage that minimises the largest cost of a stage, then the sum of squared
    costs.

    layer_costs: by stage, the layer costs on its device.
    """
    return minimise_largest([stage_costs(costs, stage, len(layer_costs)) for stage, costs in enumerate(layer_costs)])


def stage_costs(costs: LayerCosts, stage: int, stages: int) -> np.ndarray:
    """Returns the cost of a stage with the layers from that of the row up to that of the column; infinite for too few
    layers.

    The first and the last stage may have no layer, because they have the embedding and the output layer.
    """
    reached, layers = np.array([0.0, *accumulate(costs.layers)]), np.arange(len(costs.layers) + 1)
    table = reached[None] - reached[:, None]
    table += costs.begin * (stage == 0) + costs.end * (stage == stages - 1)
    table[layers[None] - layers[:, None] < int(0 < stage < stages - 1)] = np.inf
    return table


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
    stages, and 1 less than the micro-batches times the slowest stage."""
    every = np.unique(np.concatenate([cost[np.isfinite(cost)] for cost in costs]))
    least, best, partition = _best(costs, np.maximum)[0], np.inf, minimise_largest(costs)
    for largest in every[every >= least * (1 - 1e-12)].tolist():
        if (microbatches - 1) * largest >= best:
            break
        total, layers = _best([np.where(cost <= largest * (1 + 1e-12), cost, np.inf) for cost in costs], np.add)
        if total + (microbatches - 1) * largest < best:
            best, partition = total + (microbatches - 1) * largest, layers
    return partition


def _best(costs: Sequence[np.ndarray], combine: np.ufunc) -> tuple[float, list[int]]:
    """Finds the partition of least total cost by dynamic programming; returns that cost and the layers by stage.

    costs: by stage, the cost of the layers from that of the row up to that of the column.
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
