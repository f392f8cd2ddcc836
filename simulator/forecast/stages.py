"""Lowers every distinct stage of a plan, and the optimizer update of every device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from simulator.ir.modules import Update
from simulator.ir.ops import BYTES, Fragment, Param, StageOps
from simulator.lowering.lower import LoweredUnits, Lowering
from simulator.lowering.scatter_gather import scatter_gather
from simulator.lowering.scope import shards_at_rest
from simulator.plan.plan import Plan
from simulator.program.program import EveryStageOps, one_of
from simulator.schemes.expert.shared.expert_parallel import ExpertScheme


def lower_stages(plan: Plan, units: LoweredUnits | None = None) -> tuple[EveryStageOps, list[Fragment]]:
    """The ops of every virtual stage, equal stages once, and the optimizer update of every device, if there is one.

    units: units that were lowered before, for this plan or another.
    """
    last = plan.parts - 1
    gathers = _received_shares(plan)
    known: dict[Hashable, StageOps | Sequence[StageOps]] = {}
    stages = []
    for index in range(plan.shape.stages):
        part = plan.part(index)
        embeds = part == last and plan.device(index) in plan.holders(0)
        slices = [plan.stage(part, blocks) for blocks in plan.slices]
        idle = plan.schedule.unused_roles(plan.shape, index)
        early = plan.schedule.sums_early(plan.shape, index)
        key = (tuple((unit.children, unit.count) for unit in slices[0].units), embeds, idle, gathers[index], early)
        if key not in known:
            lowering = make_lowering(plan, units, idle)
            stage_ops = [
                scatter_gather(lowering, stage, lowering.run(stage, embeds), *gathers[index]) for stage in slices
            ]
            if early:
                for one in stage_ops:
                    elements = _elements(plan, one.params(), "optimizer")
                    one.shared_gradients = elements * BYTES[plan.job.framework.gradients]
            known[key] = stage_ops if len(stage_ops) > 1 else stage_ops[0]
        stages.append(known[key])
    if plan.job.forward_only:
        return stages, []
    known_updates: dict[Hashable, Fragment] = {}
    updates = []
    for device, params in enumerate(device_params(plan, stages)):
        held = (one_of(stage) for index, stage in enumerate(stages) if plan.device(index) == device)
        shared = _shared_gradients(plan, device, stages)
        if (update_key := (*held, shared)) not in known_updates:
            known_updates[update_key] = make_lowering(plan, units).lower(_update(plan, device, params, shared))
        updates.append(known_updates[update_key])
    return stages, updates


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


def make_lowering(plan: Plan, units: LoweredUnits | None = None, unused_roles: Sequence[str] = ()) -> Lowering:
    """The lowering under the schemes of a plan, without those whose role is idle on a stage."""
    framework = plan.job.framework
    schemes = [scheme for scheme in plan.schemes if scheme.role not in unused_roles]
    return Lowering(
        plan.mesh,
        schemes,
        framework.regather,
        units,
        framework.fused_gradients,
        plan.job.forward_only,
        framework.gradients,
        framework.cuda_graphs == "outside-experts",
        host_waits(plan),
    )


def host_waits(plan: Plan) -> bool:
    """Whether the host waits for routers: it launches the kernels of experts, whose tokens none are dropped."""
    moe, framework = plan.job.model.moe, plan.job.framework
    if moe is None or not framework.hidden_launch_s:
        return False
    capacities = [scheme.capacity(moe) for scheme in plan.schemes if isinstance(scheme, ExpertScheme)]
    return (capacities or [moe.capacity])[0] is None


def device_params(plan: Plan, stages: EveryStageOps) -> list[tuple[tuple[Param, int], ...]]:
    """The parameters on one rank of every pipeline device, each with its number of copies."""
    held: list[list[tuple[Param, int]]] = [[] for _ in range(plan.shape.p)]
    for index, stage in enumerate(stages):
        held[plan.device(index)] += one_of(stage).params()
    return [tuple(params) for params in held]


def _elements(plan: Plan, params: Iterable[tuple[Param, int]], state: str) -> int:
    """Elements of gradients on one rank, in the shards that hold a state of the trained parameters at rest."""
    trained = ((param, n) for param, n in params if param.trained)
    return sum(n * param.size // plan.mesh.size(shards_at_rest(plan.schemes, state, param)) for param, n in trained)


def _shared_gradients(plan: Plan, device: int, stages: EveryStageOps) -> tuple[tuple[tuple[int, ...], int], ...]:
    """Weights that several pipeline devices hold, whose gradients they all-reduce at the end of the step: devices, and
    elements on one rank.

    Weights that are there twice (bidirectional schedules) are reduced by the shards that each rank updates; a tied
    embedding table is reduced whole.
    """
    found: dict[tuple[int, ...], int] = defaultdict(int)

    def add(holders: tuple[int, ...], params: Iterable[tuple[Param, int]], state: str) -> None:
        if device in holders and len(holders) > 1:
            found[holders] += _elements(plan, params, state)

    for index, stage in enumerate(stages):
        if plan.device(index) == device and not plan.schedule.sums_early(plan.shape, index):
            add(plan.holders(plan.part(index)), one_of(stage).params(), "optimizer")
    # A tied output layer on another device is a copy of the embedding table.
    ends = plan.holders(0), plan.holders(plan.parts - 1)
    if ends[0] != ends[1]:
        tied = [(param, n) for param, n in one_of(stages[-1]).params() if param.tied]
        add(tuple(sorted({*ends[0], *ends[1]})), tied, "gradients")
    return tuple((holders, elements) for holders, elements in sorted(found.items()) if elements)


def _update(
    plan: Plan,
    device: int,
    params: tuple[tuple[Param, int], ...],
    shared: tuple[tuple[tuple[int, ...], int], ...],
) -> Update:
    """The optimizer update of one device."""
    framework = plan.job.framework
    state = BYTES[framework.main_weights] + 2 * BYTES[framework.moments]
    return Update(
        f"update {device}",
        tuple((param, count) for param, count in params if param.trained),
        BYTES[framework.gradients],
        BYTES[framework.gradients] + state,
        BYTES[framework.weights] + framework.main_copy_bytes + 2 * BYTES[framework.moments],
        shared,
        plan.pipeline_axis,
        clipped=plan.schedule.flush,
    )
