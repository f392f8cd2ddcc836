"""Data parallelism of the reference trainer: torch's DDP and FSDP2, ZeRO-1, and their optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hardware.errors import PlanError
from simulator.ir.ops import BYTES
from simulator.plan.plan import Plan
from validation.distributed.process_groups import ProcessPlace
from validation.measurements.device import DTYPES
from validation.reference.model import Stage
from validation.reference.optimizer import Optimizer, ZeroOptimizer


def data_scheme_of(plan: Plan) -> str:
    """The plan's data scheme (``data/ddp``, ``data/zero-1``, ``data/fsdp``); empty without replicas."""
    return next((one.use for one in plan.family("data") if plan.mesh.size(one.over) > 1), "")


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


def weight_dtype(plan: Plan) -> Any:
    """Torch's type of the stored weights: FSDP stores the main weights, sharded."""
    framework = plan.job.framework
    return DTYPES[framework.main_weights if data_scheme_of(plan) == "data/fsdp" else framework.weights]


def wrap_stage(plan: Plan, stage: Stage, place: ProcessPlace) -> nn.Module:
    """The stage with the plan's data parallelism around it."""
    use = data_scheme_of(plan)
    if use == "data/ddp":
        return _wrap_ddp(plan, stage, place)
    if use == "data/fsdp":
        _shard_fsdp(plan, stage, place)
    return stage


def _wrap_ddp(plan: Plan, stage: Stage, place: ProcessPlace) -> nn.Module:
    """DDP with the framework's bucket size. Gradients are views of the buckets, so there is no second copy of them."""
    framework = plan.job.framework
    elements = max(framework.bucket.elements, framework.bucket.elements_per_rank * place.data.size)
    return DistributedDataParallel(
        stage,
        process_group=place.data.group,
        bucket_cap_mb=elements * BYTES[framework.gradients] / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,  # replicas have the same initial weights already
    )


def _shard_fsdp(plan: Plan, stage: Stage, place: ProcessPlace) -> None:
    """Applies FSDP2 with the forecast's units: each layer, the embedding, the output layer, the rest of the stage.

    A tied embedding belongs to the rest, because the output layer uses it outside its module.
    """
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
    """Optimizer of this rank's parameters; the gradient norm sums over the ranks with other parameters or shards."""
    params = list(dict.fromkeys(param for stage in stages for param in stage.parameters()))
    use = data_scheme_of(plan)
    axes = [axis for axis in (place.tensor, place.pipeline) if axis.size > 1]
    if use == "data/fsdp":
        axes.append(place.data)
    groups = [axis.group for axis in axes]
    if use == "data/zero-1":
        return ZeroOptimizer(params, plan, place.data.group, groups)
    return Optimizer(params, plan, groups)
