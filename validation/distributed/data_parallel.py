"""Data parallelism around stages of the reference model: DDP, FSDP2, ZeRO-1, and the optimizers that go with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from hardware.errors import PlanError
from simulator.ir.ops import BYTES
from simulator.plan.plan import Plan
from validation.distributed.groups import Place
from validation.measurements.device import DTYPES
from validation.reference.model import Stage
from validation.reference.optimizer import Optimizer, ZeroOptimizer


def scheme_of(plan: Plan) -> str:
    """``data/ddp``, ``data/zero-1``, ``data/fsdp``; empty without replicas."""
    return next((one.use for one in plan.family("data") if plan.mesh.size(one.over) > 1), "")


def check(plan: Plan) -> None:
    """Raises PlanError for what torch's DDP and FSDP do otherwise than the plan says."""
    framework, use = plan.job.framework, scheme_of(plan)
    if use == "data/ddp" and framework.gradients != framework.weights:
        rule = f"torch's DDP sums gradients in the format of the weights, {framework.weights}"
        raise PlanError("precision.gradients", rule, "Use that, or data/zero-1", framework.gradients)
    if use == "data/fsdp" and framework.gradients != framework.main_weights:
        rule = f"torch's FSDP keeps gradients in the format of the weights that it cuts, {framework.main_weights}"
        raise PlanError(
            "precision.gradients", rule, f"Set precision.gradients: {framework.main_weights}", framework.gradients
        )
    if use == "data/fsdp" and plan.shape.p > 1:
        rule = "torch's pipelines gather and scatter FSDP's parameters once a step, the plan does it in each pass"
        raise PlanError("plan.schemes", rule, "Use data/zero-1 or data/ddp with a pipeline", use)


def dtype_of(plan: Plan) -> Any:
    """Torch's type of the weights that rest: FSDP cuts those that the optimizer updates."""
    framework = plan.job.framework
    return DTYPES[framework.main_weights if scheme_of(plan) == "data/fsdp" else framework.weights]


def wrapped(plan: Plan, stage: Stage, place: Place) -> nn.Module:
    """The stage as the plan's replicas run it: forward and backward as of the stage itself."""
    use = scheme_of(plan)
    if use == "data/ddp":
        return _ddp(plan, stage, place)
    if use == "data/fsdp":
        _cut(plan, stage, place)
    return stage


def _ddp(plan: Plan, stage: Stage, place: Place) -> nn.Module:
    """Buckets of the plan's size, in which the gradients lie: a second copy of them is in no forecast."""
    framework = plan.job.framework
    elements = max(framework.bucket.elements, framework.bucket.elements_per_rank * place.data.size)
    return DistributedDataParallel(
        stage,
        process_group=place.data.group,
        bucket_cap_mb=elements * BYTES[framework.gradients] / 2**20,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,  # weights come from a seed, the same everywhere
    )


def _cut(plan: Plan, stage: Stage, place: Place) -> None:
    """FSDP2 in the forecast's units: each layer, the embedding, the output layer; what is left belongs to the stage.

    A table that is embedding and output layer in one is left to the stage: it is used outside of its module.
    """
    framework = plan.job.framework
    policy = MixedPrecisionPolicy(param_dtype=DTYPES[framework.weights], reduce_dtype=DTYPES[framework.gradients])
    units: list[Any] = list(stage.layers.values())
    if not stage.tied:
        units += [stage.embedding, [stage.norm, stage.head]]
    for unit in (*units, stage):
        fully_shard(unit, mesh=place.data_mesh, mp_policy=policy)
        first = unit[0] if isinstance(unit, list) else unit
        if place.device.backend == "gloo":  # which knows sums only; NCCL makes the mean itself
            first.set_force_sum_reduction_for_comms(True)
    stage.reattach_shardings()


def optimizer(plan: Plan, stages: Iterable[Stage], place: Place) -> Optimizer | ZeroOptimizer:
    """Of all parameters of this rank; the norm of the gradients is taken over all ranks that hold others."""
    params = list(dict.fromkeys(param for stage in stages for param in stage.parameters()))
    use = scheme_of(plan)
    apart = [axis for axis in (place.tensor, place.pipeline) if axis.size > 1]
    if use == "data/fsdp":
        apart.append(place.data)
    groups = [axis.group for axis in apart]
    if use == "data/zero-1":
        return ZeroOptimizer(params, plan, place.data.group, groups)
    return Optimizer(params, plan, groups)
