"""Data parallelism of the reference trainer: torch's DDP and FSDP2, ZeRO-1, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import BYTES
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed.process_groups import ProcessPlace
from meshcast.validation.measurements.device import DTYPES
from meshcast.validation.reference.model import Stage
from meshcast.validation.reference.optimizer import Optimizer, ZeroOptimizer, gradient
from meshcast.validation.reference.sharded_parameter import holds_experts
from meshcast.validation.reference.tensor_parallel import AxisGroup


def data_scheme_of(plan: Plan) -> str:
    """Returns the plan's data scheme (``data/ddp``, ``data/zero-1``, ``data/fsdp``); empty if no two ranks share
    weights."""
    data = plan.family("data")
    return next((scheme.use for scheme in data if plan.mesh.size((*scheme.over, *scheme.sequence_axes)) > 1), "")


def check(plan: Plan) -> None:
    """Raises PlanError if torch's DDP or FSDP would not do what the plan says."""
    framework, use = plan.job.framework, data_scheme_of(plan)
    if use == "data/ddp" and framework.gradients != framework.weights:
        rule = f"torch's DDP reduces gradients in the format of the weights, {framework.weights}"
        raise PlanError("precision.gradients", rule, "Use that, or data/zero-1", framework.gradients)
    if use == "data/fsdp" and framework.gradients != framework.main_weights:
        rule = f"torch's FSDP keeps gradients in the format of the sharded weights, {framework.main_weights}"
        raise PlanError(
            "precision.gradients", rule, f"Set precision.gradients: {framework.main_weights}", framework.gradients
        )
    if use == "data/fsdp" and plan.shape.p > 1:
        rule = "torch's pipelines all-gather and reduce-scatter once a step under FSDP, the plan does so in each pass"
        raise PlanError("plan.schemes", rule, "Use data/zero-1 or data/ddp with a pipeline", use)
    _check_reductions(plan)


def _check_reductions(plan: Plan) -> None:
    """Raises PlanError for gradients of context or expert parallelism that the trainer does not reduce."""
    use, experts = data_scheme_of(plan), plan.family("expert")
    context = plan.mesh.size(axis for scheme in plan.family("sequence") for axis in scheme.over)
    if context > 1 and not use:
        rule = "context-parallel ranks hold the same weights, whose gradients a data scheme reduces"
        raise PlanError(
            "plan.schemes", rule, "Add data/zero-1 or data/ddp, over an axis of size 1 if there are no replicas"
        )
    if (ranks := plan.mesh.size(axis for scheme in experts for axis in scheme.over)) == 1:
        return
    if use == "data/fsdp":
        rule = "the reference trainer does not shard experts over fewer ranks than other weights"
        raise PlanError("plan.schemes", rule, "Use data/zero-1 or data/ddp with expert parallelism", use)
    if use == "data/ddp" and plan.shape.p > 1 and ranks < plan.ranks.replicas * context:
        rule = "torch's pipelines know one DDP, and experts on several ranks have a DDP of their own"
        raise PlanError("plan.schemes", rule, "Use data/zero-1, or distribute experts over all ranks of a stage", use)


def weight_dtype(plan: Plan) -> Any:
    """Returns torch's type of the stored weights: FSDP stores the main weights, sharded."""
    framework = plan.job.framework
    return DTYPES[framework.main_weights if data_scheme_of(plan) == "data/fsdp" else framework.weights]


def wrap_stage(plan: Plan, stage: Stage, place: ProcessPlace) -> nn.Module:
    """Returns the stage with the plan's data parallelism around it."""
    use = data_scheme_of(plan)
    if use == "data/ddp":
        return _wrap_ddp(plan, stage, place)
    if use == "data/fsdp":
        _shard_fsdp(plan, stage, place)
    return stage


class NestedDDP(DistributedDataParallel):
    """DDP around a stage whose experts have another DDP."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with super().no_sync(), self.module.no_sync():
            yield


def _wrap_ddp(plan: Plan, stage: Stage, place: ProcessPlace) -> nn.Module:
    """Returns DDP; experts on several data ranks have a DDP over these."""
    experts = {name for name, param in stage.named_parameters() if holds_experts(param)}
    if not experts or place.expert_data.size == 1:
        return _make_ddp(DistributedDataParallel, stage, plan, place.data, experts)
    rest = {name for name, _ in stage.named_parameters()} - experts
    inner = _make_ddp(DistributedDataParallel, stage, plan, place.expert_data, rest)
    return _make_ddp(NestedDDP, inner, plan, place.data, {f"module.{name}" for name in experts})


def _make_ddp(
    kind: type[DistributedDataParallel], module: nn.Module, plan: Plan, ranks: AxisGroup, others: set[str]
) -> DistributedDataParallel:
    """Returns DDP with the framework's bucket size for all parameters but those named by `others`.

    Gradients are views of the buckets, so there is no second copy of them.
    """
    framework = plan.job.framework
    elements = max(framework.bucket.elements, framework.bucket.elements_per_rank * ranks.size)
    kind._set_params_and_buffers_to_ignore_for_model(module, others)
    return kind(
        module,
        process_group=ranks.group,
        bucket_cap_mb=elements * BYTES[framework.gradients] / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,  # replicas have the same initial weights already
    )


def data_ranks(param: Tensor, place: ProcessPlace) -> AxisGroup:
    """Returns the ranks that hold the same shard of a parameter, over which its gradient is reduced."""
    return place.expert_data if holds_experts(param) else place.data


def average_expert_gradients(plan: Plan, params: Iterable[Tensor], place: ProcessPlace) -> None:
    """Divides gradients of experts by the number of expert-parallel ranks, whose tokens they sum over.

    The others are means over all data ranks. ZeRO-1 divides in its step.
    """
    if data_scheme_of(plan) == "data/ddp":
        for param in params:
            if holds_experts(param):
                gradient(param).div_(place.expert.size)


def _shard_fsdp(plan: Plan, stage: Stage, place: ProcessPlace) -> None:
    """Applies FSDP2 with the forecast's units: each layer, the embedding, the output layer, the rest of the stage.

    A tied embedding belongs to the rest, because the output layer uses it outside its module.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes seconds, and few plans need it

    framework = plan.job.framework
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[framework.weights], reduce_dtype=DTYPES[framework.gradients])
    units: list[Any] = list(stage.layers.values())
    if not stage.tied:
        units += [stage.embedding, [stage.norm, stage.head]]
    for unit in (*units, stage):
        fully_shard(unit, mesh=place.data_mesh, mp_policy=policy)
        first = unit[0] if isinstance(unit, list) else unit
        if place.device.backend == "gloo":  # gloo cannot average, NCCL can
            first.set_force_sum_reduction_for_comms(True)
    stage.reattach_shardings()


def make_optimizer(plan: Plan, stages: Iterable[Stage], place: ProcessPlace) -> Optimizer | ZeroOptimizer:
    """Returns the optimizer of this rank's parameters; the gradient norm sums over the ranks with other parameters or
    shards."""
    params = list(dict.fromkeys(param for stage in stages for param in stage.parameters()))
    use = data_scheme_of(plan)
    axes = [axis for axis in (place.tensor, place.pipeline) if axis.size > 1]
    if use == "data/fsdp":
        axes.append(place.data)
    groups = [axis.group for axis in axes]
    if use == "data/zero-1":
        return ZeroOptimizer(params, plan, place.data.group, groups, place.expert_data.group)
    if place.expert.size > 1:
        groups.append(place.expert.group)
        for param in params:
            if place.expert.rank > 0 and not holds_experts(param):  # rank 0 adds what all of them hold to the norm
                param.in_norm = False  # type: ignore[attr-defined]
    return Optimizer(params, plan, groups)
