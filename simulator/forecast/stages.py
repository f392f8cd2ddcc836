"""Lowers every distinct stage of a plan, and the optimizer update of every device."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from hardware.errors import PlanError
from simulator.forecast.lowering import make_lowering
from simulator.forecast.shared_gradients import count_elements, sum_shared_gradients
from simulator.ir.modules import GradientSum, Update
from simulator.ir.ops import BYTES, Collective, Exchange, Fragment, Op, Param, StageOps
from simulator.lowering.lower import LoweredUnits
from simulator.lowering.scatter_gather import scatter_gather
from simulator.plan.plan import Plan
from simulator.program.program import EveryStageOps, one_of, variants_of
from simulator.scheduling.batch_loss import coupled_stages

LoweredStages = dict[Hashable, StageOps | Sequence[StageOps]]
"""The ops of stages by what they depend on, in all variants."""


def lower_stages(plan: Plan, units: LoweredUnits | None = None) -> tuple[EveryStageOps, list[Fragment]]:
    """The ops of every virtual stage, equal stages once, and the optimizer update of every device, if there is one.

    units: units that were lowered before, for this plan or another.
    """
    on_one_mesh: LoweredStages = {}
    stages = [
        one
        for pipeline in plan.every_pipeline
        for one in _lower_pipeline(pipeline, units, on_one_mesh if pipeline.positions else {})
    ]
    _check_meetings(plan, stages)
    if plan.job.forward_only:
        return stages, []
    known: dict[Hashable, Fragment] = {}
    sums, updates = sum_shared_gradients(plan, stages, units), []
    every = zip(_held_stages(plan, stages), device_params(plan, stages), strict=True)
    for device, (held, params) in enumerate(every):
        own = plan.on(device)
        if (key := (*held, sums[device], own if own.mesh.stage else None)) not in known:
            known[key] = make_lowering(own, units).lower(_update(plan, device, params, sums[device]))
        updates.append(known[key])
    return stages, updates


def _lower_pipeline(plan: Plan, units: LoweredUnits | None, known: LoweredStages) -> EveryStageOps:
    """The ops of every virtual stage of one pipeline. known: stages that were lowered before, on the same mesh."""
    last = plan.parts - 1
    gathers, ends = _received_shares(plan), coupled_stages(plan.schedule, plan.shape)
    stages = []
    for index in range(plan.shape.stages):
        part, own = plan.part(index), plan.on(plan.device(index))
        embeds = part == last and plan.device(index) in plan.holders(0)
        slices = [own.stage(part, blocks) for blocks in own.slices]
        idle = plan.schedule.unused_roles(plan.shape, index)
        early = plan.schedule.sums_early(plan.shape, index)
        units_of = tuple((unit.children, unit.count) for unit in slices[0].units)
        schemes = tuple(scheme.lowering_key for scheme in own.schemes) if plan.positions else ()
        repeats = own.microbatches_of_unit
        key = (units_of, embeds, idle, gathers[index], early, own if plan.stage_plans else None, schemes, repeats)
        if key not in known:
            lowering = make_lowering(own, units, idle)
            # Classes of micro-batches that differ in padding alone have the same ops.
            lowered = {
                blocks: scatter_gather(lowering, stage, lowering.run(stage, embeds), *gathers[index])
                for blocks, stage in dict(zip(own.slices, slices, strict=True)).items()
            }
            if index in ends:
                for one in lowered.values():
                    one.batch_loss = lowering.run_batch_loss(own.batch_loss(part))
            stage_ops = [lowered[blocks] for blocks in own.slices]
            if early:
                for one in lowered.values():
                    elements = count_elements(own, one.params(), "optimizer")
                    one.shared_gradients = elements * BYTES[plan.job.framework.gradients]
            known[key] = stage_ops if len(stage_ops) > 1 else stage_ops[0]
        stages.append(known[key])
    return stages


def _check_meetings(plan: Plan, stages: EveryStageOps) -> None:
    """Raises PlanError if unlike replicas meet in every micro-batch, and run unlike numbers of them or bring unlike
    buffers."""
    if not plan.pipelines or plan.pipelines[0].positions is None:
        return
    axis, _ = plan.pipelines[0].positions
    found = list[list[Op]]()
    for number, pipeline in enumerate(plan.pipelines):
        own = [stage for index, stage in enumerate(stages) if plan.pipeline_of_stage(index)[0] == number]
        passes = [[variants_of(stage)[which] for stage in own] for which in pipeline.shape.classes or (0,)]
        found.append([op for one in passes for op in _meeting_ops(one, axis)])
    if any(found) and len({one.shape.m for one in plan.pipelines}) > 1:
        rule = f"all replicas meet in every micro-batch ({found[0][0].name}), of which they run unlike numbers"
        remedy = "Use data/zero-1 or data/ddp, experts within a replica, or equal numbers"
        raise PlanError("plan.replicas", rule, remedy)
    for op, *others in zip(*found, strict=True):
        if any(other.work != op.work for other in others):
            rule = f"all replicas meet in every micro-batch ({op.name}), and bring unlike buffers"
            raise PlanError("plan.replicas", rule, "Use experts within a replica, or equal micro-batches")


def _meeting_ops(stages: Sequence[StageOps], axis: str) -> Iterator[Op]:
    """The collectives along an axis in one pass through some stages."""
    for unit_run in (unit_run for stage in stages for unit_run in stage.unit_runs):
        for op in (*unit_run.fragment.forward, *unit_run.fragment.backward):
            if isinstance(op.work, Collective | Exchange) and axis in op.work.axes:
                yield op


def _received_shares(plan: Plan) -> list[tuple[bool, bool]]:
    """For every virtual stage, whether it all-gathers its input, and the gradient of its output, from shares that ranks
    of another device sent.
    """
    found = [[False, False] for _ in range(plan.shape.stages)]
    if plan.job.framework.scatter_gather_tensors_in_pipeline:
        for index in range(plan.shape.stages):
            for before in plan.schedule.predecessors(plan.shape, index):
                if plan.device(before) != plan.device(index):
                    found[index][0] = found[before][1] = True
    return [(first, last) for first, last in found]


def _held_stages(plan: Plan, stages: EveryStageOps) -> list[tuple[StageOps, ...]]:
    """The ops of the stages on every pipeline device, in their first variant."""
    held: list[list[StageOps]] = [[] for _ in range(plan.devices)]
    for index, stage in enumerate(stages):
        held[plan.device(index)].append(one_of(stage))
    return [tuple(own) for own in held]


def device_params(plan: Plan, stages: EveryStageOps) -> list[tuple[tuple[Param, int], ...]]:
    """The parameters on one rank of every pipeline device, each with its number of copies; devices that hold the same
    stages share one tuple."""
    held = _held_stages(plan, stages)
    made = {own: tuple(found for stage in own for found in stage.params()) for own in dict.fromkeys(held)}
    return [made[own] for own in held]


def _update(
    plan: Plan,
    device: int,
    params: tuple[tuple[Param, int], ...],
    shared: tuple[GradientSum, ...],
) -> Update:
    """The optimizer update of one device."""
    framework, unlike = plan.job.framework, bool(plan.on(device).mesh.stage)
    state = BYTES[framework.main_weights] + 2 * BYTES[framework.moments]
    return Update(
        f"update {device}",
        tuple((param, count) for param, count in params if param.trained),
        BYTES[framework.gradients],
        BYTES[framework.gradients] + state,
        BYTES[framework.weights] + framework.main_copy_bytes + 2 * BYTES[framework.moments],
        shared,
        plan.schedule.flush,
        range(plan.job.cluster.gpus) if unlike else None,
    )
