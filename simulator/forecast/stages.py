"""Lowers every distinct stage of a plan, and the optimizer update of every device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import field
from functools import partial
from typing import NamedTuple

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import AgingStore, RecentResults, remember
from meshcast.simulator.forecast.lowering import lowering_traits, make_lowering
from meshcast.simulator.forecast.resident_memory import DeviceParams, adds_apart, find_matrix_update
from meshcast.simulator.forecast.shared_gradients import count_elements, sum_shared_gradients
from meshcast.simulator.ir.capabilities import ShardsStates, schemes_with
from meshcast.simulator.ir.modules import BatchLossUnit, GradientSum, MatrixUpdate, Stage, Update, UpdateWorkspace
from meshcast.simulator.ir.ops import BYTES, Collective, Exchange, Fragment, Op, ShardMessages, StageOps
from meshcast.simulator.lowering.equal_ops import EqualOps
from meshcast.simulator.lowering.lower import LoweredUnits, Lowering
from meshcast.simulator.lowering.scatter_gather import scatter_gather
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.program import EveryStageOps, one_of, variants_of
from meshcast.simulator.scheduling.batch_loss import coupled_stages

LoweredStage = StageOps | Sequence[StageOps]
"""The ops of a stage in all its variants; of a single variant without a list."""

SIDE_OP_BYTES = 50
"""Of an entry of a list of side ops, most of which are the same op, roughly."""

FP32_BYTES = 4
"""Of a value in fp32."""

SUMS_OF_TOKEN = 3
"""Values of a token that shards of the output layer sum up."""

KEY_BYTES = 4_000
"""Of what a stage or an update depends on, roughly."""

PARAM_BYTES = 200
"""Of a parameter of a device with its traits, roughly."""

StagesByKey = dict[Hashable, LoweredStage]
"""The ops of stages by what they depend on."""


def _count_stage(stage: LoweredStage) -> int:
    """Counts the bytes of the side ops of a stage; fragments are counted with their units and blocks."""
    sides = [side for each in variants_of(stage) for side in (*each.ahead, *each.behind, *each.again)]
    return KEY_BYTES + sum(SIDE_OP_BYTES * len(side.ops) + side.params.nbytes for side in sides)


def _count_update(update: Fragment) -> int:
    """Counts the bytes of an update."""
    return KEY_BYTES + update.count_bytes()


@dataclass
class LoweredStages:
    """Lowered stages, and updates of devices, by what they depend on.

    stages: their ops in all variants.
    updates: the optimizer updates of devices that hold such stages.
    params: the parameters of devices that hold such stages.
    equal: where given, looks for equal stages and updates among those that depend on something else.
    """

    equal: EqualOps | None = None
    stages: RecentResults[Hashable, LoweredStage] = field(default_factory=partial(RecentResults, _count_stage))
    updates: RecentResults[Hashable, Fragment] = field(default_factory=partial(RecentResults, _count_update))
    params: RecentResults[tuple[StageOps, ...], DeviceParams] = field(
        default_factory=partial(RecentResults, lambda params: PARAM_BYTES * len(params))
    )

    def find_stage(self, key: Hashable, lower: Callable[[], LoweredStage]) -> LoweredStage:
        """Returns the stage that depends on `key`, lowered once."""

        def make() -> LoweredStage:
            stage = lower()
            if self.equal is None:
                return stage
            return self.equal.find_stage(stage) if isinstance(stage, StageOps) else [*map(self.equal.find_stage, stage)]

        return remember(self.stages, key, make)

    def find_update(self, key: Hashable, lower: Callable[[], Fragment]) -> Fragment:
        """Returns the update that depends on `key`, lowered once."""
        return remember(self.updates, key, lambda: self.equal.find_fragment(lower()) if self.equal else lower())

    @property
    def stores(self) -> list[AgingStore]:
        """All stores."""
        return [self.stages, self.updates, self.params]


def lower_stages(
    plan: Plan, units: LoweredUnits | None = None, known: LoweredStages | None = None
) -> tuple[EveryStageOps, list[Fragment]]:
    """Returns the ops of every virtual stage, equal stages once, and the optimizer update of every device, if there is
    one.

    units, known: units, and stages with updates, that were lowered before, for this plan or another.
    """
    shared = known if known is not None and not (plan.stage_plans or plan.pipelines) else LoweredStages()
    on_one_mesh: StagesByKey = {}
    stages = [
        stage
        for pipeline in plan.every_pipeline
        for stage in _lower_pipeline(pipeline, units, on_one_mesh if pipeline.positions else {}, shared)
    ]
    _check_meetings(plan, stages)
    if plan.job.forward_only:
        return stages, []
    return stages, lower_updates(plan, stages, device_params(plan, stages, known), units, shared)


def lower_updates(
    plan: Plan,
    stages: EveryStageOps,
    every_params: Sequence[DeviceParams],
    units: LoweredUnits | None,
    shared: LoweredStages,
) -> list[Fragment]:
    """Returns the optimizer update of every device. every_params: of every device; units, shared: as in
    `lower_stages`."""
    sums, updates = sum_shared_gradients(plan, stages, units), []
    traits_of: dict[int, Hashable] = {}
    for device, params in enumerate(every_params):
        device_plan, update = plan.on(device), _find_update(plan, device, params)
        # Micro-batches of another size, and other numbers of chunks, change no parameters.
        find_traits = partial(_traits, device_plan)
        traits = device_plan if device_plan.mesh.stage else remember(traits_of, id(device_plan), find_traits)
        key = params.traits, sums[device], update, traits
        lower = partial(_lower_update, device_plan, f"update {device}", params, sums[device], update, units)
        updates.append(shared.find_update(key, lower))
    return updates


def _traits(plan: Plan) -> Hashable:
    """Returns what the lowering of a plan depends on besides the units of its stages; schemes and meshes that are alike
    are the same objects (`KnownParts`)."""
    return plan.mesh, plan.schemes, lowering_traits(plan)


class StageRole(NamedTuple):
    """What a virtual stage does beside the units of its part of the model.

    embeds: whether it has the table of the embedding, and reads it.
    idle: roles of schemes that are idle on it.
    gathers: see `_received_shares`.
    sums_early: whether its gradients are summed before the end of the step.
    vocabulary: what shard of the vocabulary it holds: ``input``, ``output`` or none.
    """

    embeds: bool
    idle: Sequence[str]
    gathers: tuple[bool, bool]
    sums_early: bool
    vocabulary: str = ""


def _lower_pipeline(plan: Plan, units: LoweredUnits | None, known: StagesByKey, shared: LoweredStages) -> EveryStageOps:
    """Returns the ops of every virtual stage of a pipeline.

    known: stages that were lowered before, on the same mesh; shared: for other plans too.
    """
    gathers, ends = _received_shares(plan), coupled_stages(plan.schedule, plan.shape)
    parts, stages = plan.model_parts, []
    for index in range(plan.shape.stages):
        part = parts.of_stage(index)
        device_plan = plan.on(parts.device(index)) if plan.stage_plans else plan
        role = _find_role(plan, index, gathers[index])
        slices = [device_plan.model_parts.stage(part, blocks) for blocks in device_plan.passes.slices]
        # What plans of equal stages have in common.
        schemes = tuple(scheme.lowering_key for scheme in device_plan.schemes) if plan.positions else ()
        units_of = tuple((unit.children, unit.count) for unit in slices[0].units)
        key = units_of, role, device_plan if plan.stage_plans else None, schemes, slices[0].microbatches
        if key not in known:
            loss = device_plan.model_parts.batch_loss(part) if index in ends else None
            traits = _traits(device_plan), device_plan.passes.traits_of_classes
            in_any_plan = _units_of(slices), role, loss, slices[0].microbatches, traits
            lower = partial(_lower_stage, device_plan, slices, role, loss, units)
            known[key] = shared.find_stage(in_any_plan, lower)
        stages.append(known[key])
    return stages


def _find_role(plan: Plan, index: int, gathers: tuple[bool, bool]) -> StageRole:
    """Finds the role of a virtual stage. gathers: see `_received_shares`."""
    parts, schedule = plan.model_parts, plan.schedule
    holds_table = parts.device(index) in parts.holders(parts.with_embedding)
    embeds = holds_table and parts.of_stage(index) in parts.with_table
    held = parts.shards.role(index) if parts.shards is not None else "layers"
    idle, sums_early = schedule.unused_roles(plan.shape, index), schedule.sums_early(plan.shape, index)
    return StageRole(embeds, idle, gathers, sums_early, "" if held == "layers" else held)


def _lower_stage(
    plan: Plan, slices: Sequence[Stage], role: StageRole, loss: BatchLossUnit | None, units: LoweredUnits | None
) -> StageOps | list[StageOps]:
    """Returns the ops of a stage in all its variants.

    slices: its modules in each.
    loss: over the samples of a batch.
    """
    # Classes of micro-batches that differ in padding alone have the same ops.
    keys = [(blocks, its.schemes) for blocks, its in zip(plan.passes.slices, plan.passes.slice_plans, strict=True)]
    lowerings: dict[Hashable, Lowering] = {}
    lowered: dict[Hashable, StageOps] = {}
    for key, stage, its_plan in zip(keys, slices, plan.passes.slice_plans, strict=True):
        if key not in lowered:
            lowering = remember(lowerings, its_plan.schemes, partial(make_lowering, its_plan, units, role.idle))
            lowered[key] = scatter_gather(lowering, stage, lowering.run(stage, role.embeds), *role.gathers)
    for stage_ops in lowered.values():
        if loss is not None:
            stage_ops.batch_loss = lowering.run_batch_loss(loss)
        if role.sums_early:
            elements = count_elements(plan, stage_ops.params(), "optimizer")
            stage_ops.shared_gradients = elements * BYTES[plan.job.framework.gradients]
        if role.vocabulary:
            stage_ops.shard_messages = _count_shard_messages(plan, stage_ops, role.vocabulary)
    variants = [lowered[key] for key in keys]
    return variants if len(variants) > 1 else variants[0]


def _count_shard_messages(plan: Plan, stage_ops: StageOps, role: str) -> ShardMessages:
    """Counts the bytes of the collectives of a shard of the vocabulary, as the program of the paper sends them
    (megatron/core/pipeline_parallel/vocab_parallel_schedule.py of sail-sg/VocabularyParallelism @6191c3bf).

    What the output layer reads is broadcast in fp32, with a gradient of each token. All shards sum up three values of
    fp32 for each token: the largest logit, the logit of the target, the sum of exponentials.
    """
    (unit_run,) = stage_ops.unit_runs
    if role == "input":
        return ShardMessages(unit_run.nbytes, (unit_run.nbytes,))
    nbytes, shards = unit_run.nbytes_in, plan.model_parts.shards
    assert shards is not None
    elements = int(nbytes // BYTES[plan.job.framework.weights])
    tokens = elements // plan.model_parts.model.hidden
    sums = (FP32_BYTES * tokens,) * SUMS_OF_TOKEN
    shared = FP32_BYTES * (elements + tokens)
    return ShardMessages(shared, (*sums, nbytes)) if shards.early else ShardMessages(shared, sums, (nbytes,))


def _units_of(slices: Sequence[Stage]) -> Hashable:
    """Returns what the units of a stage lower to, in all slices."""
    return tuple(
        tuple(
            (unit.children if unit.lowering_key is None else unit.lowering_key, unit.count, unit.marks)
            for unit in stage.units
        )
        for stage in slices
    )


def _check_meetings(plan: Plan, stages: EveryStageOps) -> None:
    """Raises PlanError if heterogeneous replicas meet in every micro-batch, and run different numbers of them or bring
    different buffers."""
    if not plan.pipelines or plan.pipelines[0].positions is None:
        return
    axis, _ = plan.pipelines[0].positions
    meetings = list[list[Op]]()
    for number, pipeline in enumerate(plan.pipelines):
        passing = [stage for index, stage in enumerate(stages) if plan.model_parts.pipeline_of(index)[0] == number]
        passed = [variants_of(stage)[which] for which in pipeline.shape.classes or (0,) for stage in passing]
        fragments = (unit_run.fragment for stage_ops in passed for unit_run in stage_ops.unit_runs)
        ops = (op for fragment in fragments for op in (*fragment.forward, *fragment.backward))
        meetings.append([op for op in ops if isinstance(op.work, Collective | Exchange) and axis in op.work.axes])
    if any(meetings) and len({pipeline.shape.m for pipeline in plan.pipelines}) > 1:
        rule = f"all replicas meet in every micro-batch ({meetings[0][0].name}), of which they run different numbers"
        remedy = "Use data/zero-1 or data/ddp, experts within a replica, or equal numbers"
        raise PlanError("plan.replicas", rule, remedy)
    for op, *others in zip(*meetings, strict=True):
        if any(other.work != op.work for other in others):
            rule = f"all replicas meet in every micro-batch ({op.name}), and bring different buffers"
            raise PlanError("plan.replicas", rule, "Use experts within a replica, or equal micro-batches")


def _received_shares(plan: Plan) -> list[tuple[bool, bool]]:
    """Says for every virtual stage whether it all-gathers its input, and the gradient of its output, from shares that
    ranks of another device sent.
    """
    gathered = [[False, False] for _ in range(plan.shape.stages)]
    if plan.job.framework.scatter_gather_tensors_in_pipeline:
        for index in range(plan.shape.stages):
            for before in plan.schedule.predecessors(plan.shape, index):
                if plan.model_parts.device(before) != plan.model_parts.device(index):
                    gathered[index][0] = gathered[before][1] = True
    return [(first, last) for first, last in gathered]


def device_params(plan: Plan, stages: EveryStageOps, known: LoweredStages | None = None) -> list[DeviceParams]:
    """Returns the parameters on a rank of every pipeline device; devices that hold the same stages share an object.

    known: stages that were lowered before, with the parameters of devices that hold them.
    """
    held: list[tuple[StageOps, ...]] = [()] * plan.ranks.devices
    for index, stage in enumerate(stages):
        held[plan.model_parts.device(index)] += (one_of(stage),)
    store: dict[tuple[StageOps, ...], DeviceParams] = known.params if known is not None else {}
    params = {
        of_device: remember(store, of_device, partial(_list_params, of_device)) for of_device in dict.fromkeys(held)
    }
    return [params[of_device] for of_device in held]


def _list_params(stages: Sequence[StageOps]) -> DeviceParams:
    """Returns the parameters on a rank of a device that holds some stages."""
    return DeviceParams(param for stage_ops in stages for param in stage_ops.params())


class UpdateTraits(NamedTuple):
    """What the optimizer does with the parameters of a device; see `Update`."""

    grad_bytes: int
    read: float
    write: float
    convert: tuple[int, int]
    workspace: UpdateWorkspace
    sub_group: float
    clipped: bool
    everyone: range | None
    matrices: MatrixUpdate | None


def _lower_update(
    plan: Plan,
    name: str,
    params: DeviceParams,
    shared: tuple[GradientSum, ...],
    traits: UpdateTraits,
    units: LoweredUnits | None,
) -> Fragment:
    """Lowers the optimizer update of a device. plan: of the device."""
    trained = tuple((param, count) for param, count in params if param.trained)
    return make_lowering(plan, units).lower(Update(name, trained, shared=shared, **traits._asdict()))


def _find_update(plan: Plan, device: int, params: DeviceParams) -> UpdateTraits:
    """Finds what the optimizer does with the parameters of a device."""
    framework, heterogeneous = plan.job.framework, bool(plan.on(device).mesh.stage)
    main, moments = BYTES[framework.main_weights], framework.update.states.element_bytes(framework.moments)
    weights = BYTES[framework.adapters.weights or framework.weights]
    read, write = BYTES[framework.gradients], weights + framework.main_copy_bytes
    convert = (0, 0)
    sharded = any("optimizer" in scheme.shards for scheme in schemes_with(plan.schemes, ShardsStates))
    if framework.converts_apart:
        formats = ((framework.gradients, framework.main_weights), (framework.main_weights, framework.weights))
        changed = [(BYTES[source], BYTES[target]) for source, target in formats if source != target]
        convert = sum(read for read, _ in changed), sum(written for _, written in changed)
        read = write = main
    if framework.update.moment_copies:
        # By tensors (`_multi_tensor_adamw` of torch/optim/adamw.py): weights are read and written once more for their
        # decay, gradients and the first moment read, the second read twice and written, its root three times each.
        again = main + BYTES[framework.gradients] + 3 * moments, main + 2 * moments
        read, write = read + again[0], write + again[1]
    further = framework.update.states.passes
    read, write = read + further[0], write + further[1]
    grouped = len({bool(param.shape) for param, _ in params if param.trained}) > 1
    return UpdateTraits(
        BYTES[framework.gradients],
        read + main + moments,
        write + moments,
        convert,
        framework.update.make_workspace(framework, sharded, adds_apart(plan.on(device)), grouped),
        framework.update.sub_group,
        plan.schedule.flush,
        range(plan.job.cluster.gpus) if heterogeneous else None,
        find_matrix_update(plan),
    )
