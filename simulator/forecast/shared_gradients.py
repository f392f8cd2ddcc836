"""Gradients that pipeline devices sum at the end of a step: of tied tables, copies of stages, and heterogeneous
replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from meshcast.simulator.forecast.lowering import make_lowering
from meshcast.simulator.forecast.stage_messages import CrossMeshMessages, choose_messages
from meshcast.simulator.ir.capabilities import ShardsStates, schemes_with
from meshcast.simulator.ir.modules import GradientSum
from meshcast.simulator.ir.ops import BYTES, Param
from meshcast.simulator.lowering.lower import LoweredUnits
from meshcast.simulator.lowering.scope import shards_at_rest
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.program import EveryStageOps, one_of

Holders = tuple[int, ...]
"""The pipeline devices that hold the same weights."""


def count_elements(plan: Plan, params: Iterable[tuple[Param, int]], state: str) -> int:
    """Counts the elements of gradients on a rank, in the shards that hold a state of the trained parameters at rest."""
    sharding = schemes_with(plan.schemes, ShardsStates)
    trained = ((param, n) for param, n in params if param.trained)
    return sum(n * param.size // plan.mesh.size(shards_at_rest(sharding, state, param)) for param, n in trained)


def sum_shared_gradients(
    plan: Plan, stages: EveryStageOps, units: LoweredUnits | None = None
) -> list[tuple[GradientSum, ...]]:
    """Makes the all-reduces of every device, each of the elements of the rank that holds most.

    Weights that are there twice (bidirectional schedules) are reduced by the shards that each rank updates; a tied
    embedding table is reduced whole, and so is what heterogeneous replicas hold.
    """
    width = BYTES[plan.job.framework.gradients]
    sums: list[list[GradientSum]] = [[] for _ in range(plan.ranks.devices)]
    first = stage = 0
    for pipeline in plan.every_pipeline:
        its_stages = stages[stage : stage + pipeline.shape.stages]
        within = _within_pipeline(pipeline, its_stages)
        messages = choose_messages(pipeline)
        for holders, elements in sorted(within.items()):
            for device in holders if elements else ():
                name = f"sum among devices {[first + holder for holder in holders]}"
                sums[first + device].append(GradientSum(name, messages.all_reduce(elements * width, holders)))
        first, stage = first + pipeline.shape.p, stage + pipeline.shape.stages
    if plan.pipelines and plan.on(0).mesh.stage:
        across = CrossMeshMessages(plan)
        for holders, elements in sorted(_across_pipelines(plan, units).items()):
            for device in holders if elements else ():
                name = f"sum among replicas {list(holders)}"
                sums[device].append(GradientSum(name, across.all_reduce(elements * width, holders), replicas=True))
    return [tuple(of_device) for of_device in sums]


def _within_pipeline(plan: Plan, stages: EveryStageOps) -> dict[Holders, int]:
    """Counts the elements of the gradients that devices of a pipeline share, on the rank that holds most."""
    elements: dict[tuple[Holders, int], int] = defaultdict(int)
    for index, stage in enumerate(stages):
        holders = plan.model_parts.holders(plan.model_parts.of_stage(index))
        if len(holders) > 1 and not plan.schedule.sums_early(plan.shape, index):
            device = plan.model_parts.device(index)
            elements[holders, device] += count_elements(plan.on(device), one_of(stage).params(), "optimizer")
    # A tied output layer on another device is a copy of the embedding table.
    if plan.job.model.cross_attention:
        _share_table_of_decoder(plan, stages, elements)
        return _most(elements)
    parts = plan.model_parts
    ends = parts.holders(parts.with_embedding), parts.holders(parts.count - 1)
    if ends[0] != ends[1] and (plan.job.model.tied or not plan.job.model.branches):
        tied = [(param, n) for param, n in one_of(stages[-1]).params() if param.tied]
        both = tuple(sorted({*ends[0], *ends[1]}))
        for device in both:
            device_plan = plan.on(device)
            tables = tied if device_plan is plan.on(ends[1][0]) else _tied_tables(plan, device)
            elements[both, device] += count_elements(device_plan, tables, "gradients")
    return _most(elements)


def _share_table_of_decoder(plan: Plan, stages: EveryStageOps, elements: dict[tuple[Holders, int], int]) -> None:
    """Adds the table that an encoder, its decoder and a tied output layer share, on the devices that hold copies."""
    parts = plan.model_parts.with_embedding, *plan.model_parts.with_table
    devices = tuple(sorted({device for part in parts for device in plan.model_parts.holders(part)}))
    if len(devices) == 1:
        return
    for stage in stages:
        tables = [(param, n) for param, n in one_of(stage).params() if param.tied]
        if tables:
            for device in devices:
                elements[devices, device] = count_elements(plan.on(device), tables[:1], "gradients")
            return


def _tied_tables(plan: Plan, device: int) -> list[tuple[Param, int]]:
    """Returns the tied table as a rank of the first stage holds it: sharded as an output layer would be on its mesh."""
    device_plan = plan.on(device)
    params = make_lowering(device_plan).run(device_plan.model_parts.architecture.stage(range(0), False, True)).params()
    return [(param, n) for param, n in params if param.tied]


def _across_pipelines(plan: Plan, units: LoweredUnits | None) -> dict[Holders, int]:
    """Counts the elements of the gradients that heterogeneous replicas sum, layer by layer, on the rank that holds
    most."""
    ends = {0, every := len(plan.job.model.every_layer)}
    for pipeline in plan.pipelines:
        ends |= {pipeline.model_parts.layers_of(part).start for part in range(pipeline.model_parts.count)}
    borders = sorted(end for end in ends if end <= every)
    pieces = [
        (range(0), True, False),
        *((range(*border), False, False) for border in pairwise(borders)),
        (range(0), False, True),
    ]
    elements: dict[tuple[Holders, int], int] = defaultdict(int)
    for layers, opens, closes in pieces:
        holders = tuple(_holders_of(plan, layers, closes))
        for device in holders:
            device_plan = plan.on(device)
            params = (
                make_lowering(device_plan, units)
                .run(device_plan.model_parts.architecture.stage(layers, opens, closes))
                .params()
            )
            elements[holders, device] += count_elements(device_plan, params, "gradients")
    return _most(elements)


def _holders_of(plan: Plan, layers: range, last: bool) -> Iterator[int]:
    """Yields the device of every pipeline that holds a run of layers, or the embedding, or the output layer."""
    first = 0
    for pipeline in plan.pipelines:
        parts = range(pipeline.model_parts.count)
        part = pipeline.model_parts.count - 1 if last else 0
        if layers:
            part = next(part for part in parts if layers.start in pipeline.model_parts.layers_of(part))
        yield first + pipeline.model_parts.holders(part)[0]
        first += pipeline.shape.p


def _most(elements: dict[tuple[Holders, int], int]) -> dict[Holders, int]:
    most: dict[Holders, int] = defaultdict(int)
    for (holders, _), count in elements.items():
        most[holders] = max(most[holders], count)
    return most
