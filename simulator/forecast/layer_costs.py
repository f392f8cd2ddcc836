"""Durations that a plan is resolved with: of the model's layers (`partition: by-cost`) and of slices of a sequence.

A layer's cost is the duration of its passes, forward and backward, of a micro-batch, alone on the GPU that has the
stage, at the prices of the forecast. The embedding and everything behind the layers have costs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from meshcast.hardware.cluster import Cluster
from meshcast.hardware.remembered import remembered
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.ir.ops import Transfer, Work
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.lowering.lower import LoweredUnits
from meshcast.simulator.lowering.scatter_gather import scatter_gather
from meshcast.simulator.plan.partition import LayerCosts
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import FREE, CompiledBlocks, Price
from meshcast.simulator.program.task import make_task
from meshcast.simulator.scheduling.schedule import ActionKind


def stage_layer_costs(plan: Plan, price_on: Callable[[Plan, Cluster], Price]) -> list[LayerCosts]:
    """Measures layer costs on the device of every part of the model [s].

    Schemes that treat a stage as a whole (recompute of some layers, gathering of weights) are counted for each layer as
    if it were a stage.
    price_on: prices of ops of the ranks of a stage, on its cluster.
    """
    known: dict[Hashable, LayerCosts] = {}
    costs = []
    for part in range(plan.model_parts.count):
        device = plan.model_parts.device(part)
        cluster, device_plan = plan.ranks.clusters[device], plan.on(device)
        if (key := (cluster, device_plan)) not in known:
            known[key] = _layer_costs(device_plan, _leave_out_meetings(device_plan, price_on(device_plan, cluster)))
        costs.append(known[key])
    return costs


def _leave_out_meetings(plan: Plan, price: Price) -> Price:
    """Returns prices without the collectives of heterogeneous replicas, in which all of them are equally long."""
    if plan.positions is None:
        return price
    axis, _ = plan.positions

    def price_alone(work: Work) -> tuple[float, float, float]:
        return FREE if axis in getattr(work, "axes", ()) else price(work)

    return price_alone


def _layer_costs(plan: Plan, price: Price) -> LayerCosts:
    model, host = plan.job.model, hidden_launch_s(plan.job.framework)
    lowering, blocks = make_lowering(plan), CompiledBlocks()
    known: dict[Hashable, float] = {}

    def stage_cost(layers: range, first: bool = False, last: bool = False) -> float:
        stage_ops = lowering.run(plan.model_parts.architecture.stage(layers, first, last))
        tasks = (make_task(stage_ops, kind, price, again=False, blocks=blocks) for kind in _passes(plan))
        return sum(task_seconds(task, host) for task in tasks)

    def layer_cost(layer: int) -> float:
        units = plan.model_parts.architecture.stage(range(layer, layer + 1), False, False).units
        key = tuple(unit.lowering_key for unit in units), plan.model_parts.architecture.group_start(layer)
        if key not in known:
            known[key] = stage_cost(range(layer, layer + 1))
        return known[key]

    layers = [layer_cost(layer) for layer in model.every_layer]
    # The branches of a model begin with their first layers.
    begin = 0.0 if model.branches else stage_cost(range(0), first=True)
    # A contrastive loss runs once a batch.
    return LayerCosts(begin, layers, stage_cost(range(0), last=True) if model.layers else 0.0)


def _passes(plan: Plan) -> list[ActionKind]:
    """Returns the passes of a micro-batch through a stage."""
    return [ActionKind.FORWARD] if plan.job.forward_only else [ActionKind.FORWARD, ActionKind.BACKWARD]


class SliceTimes:
    """Duration of a slice on a stage in the middle of the pipeline, with the messages that carry it there and back [s].

    For slices of equal length the duration grows linearly with the tokens before them, up to the attention window if
    there is one: it is forecast at the ends of that range and interpolated. With chunked attention it grows within a
    chunk, until the slice ends in the next, and begins anew with each chunk.
    """

    def __init__(self, plan: Plan, prices: Sequence[Price], units: LoweredUnits, host: float) -> None:
        self.part = plan.model_parts.count // 2
        self.plan, self.host = plan.on(plan.model_parts.device(self.part)), host
        self.lowering = make_lowering(self.plan, units)
        self.price = prices[plan.model_parts.device(self.part)]

    def __call__(self, tokens: int, before: int) -> float:
        """Returns the seconds of a slice of so many tokens behind `before` others."""
        return float(np.interp(before, *self._forecast_places(tokens)))

    @remembered
    def _forecast_places(self, tokens: int) -> tuple[list[int], list[float]]:
        """Returns places in the sequence between which the seconds of a slice grow linearly, and its seconds there."""
        model, seq = self.plan.job.model, self.plan.model_parts.architecture.seq
        most, chunk = seq - tokens, model.attention_chunk or seq
        turns = {end - back for end in range(chunk, most, chunk) for back in (tokens % chunk, 1, 0)}
        places = sorted({0, min(model.window or 0, most), most, *turns})
        return places, [self._forecast(tokens, place) for place in places]

    def _forecast(self, tokens: int, before: int) -> float:
        architecture = self.plan.model_parts.architecture.slice(before, before + tokens)
        stage = self.plan.model_parts.stage(self.part, architecture)
        shares = self.plan.shape.p > 1 and self.plan.job.framework.scatter_gather_tensors_in_pipeline
        stage_ops = scatter_gather(self.lowering, stage, self.lowering.run(stage), shares, shares)
        blocks = CompiledBlocks()
        tasks = [make_task(stage_ops, kind, self.price, again=False, blocks=blocks) for kind in _passes(self.plan)]
        seconds = sum(task_seconds(task, self.host) for task in tasks)
        if self.plan.shape.p > 1:
            work = Transfer(stage_ops.message_nbytes, self.plan.ranks.pipeline_axis, 0, 1)
            seconds += len(tasks) * sum(self.price(work)[::2])
        return seconds
