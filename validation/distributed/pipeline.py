"""Forward and backward passes of a step: torch's pipeline runtime, or gradient accumulation without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshcast.hardware.errors import PlanError
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.scheduling.schedule import Action
from meshcast.validation.distributed import torch_pipelining
from meshcast.validation.distributed.data_parallel import data_scheme_of
from meshcast.validation.distributed.pipeline_messages import PipelineMessages, make_edge_groups
from meshcast.validation.distributed.process_groups import ProcessPlace
from meshcast.validation.distributed.torch_pipelining import LeanPipelineStage
from meshcast.validation.measurements.device import DTYPES
from meshcast.validation.reference.deferred_weight_gradients import DeferredWeightGradients
from meshcast.validation.reference.orders import action_orders

Passes = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""Runs all passes of a step: from token ids (first stage) and targets (last stage) of all micro-batches [m b, s] to the
mean loss (last stage). Gradients accumulate on the parameters."""


def check(plan: Plan) -> None:
    """Raises PlanError for a schedule that torch's runtime cannot run."""
    if plan.shape.p > 1:
        torch_pipelining.check()
    orders, last, use = action_orders(plan), plan.shape.stages - 1, plan.schedule.use
    forwards = [action.microbatch for order in orders for action in order if action[:2] == (last, "F")]
    if forwards != sorted(forwards):
        rule = "torch expects the losses in the order of the micro-batches"
        raise PlanError("plan.schedule", rule, "Use a schedule whose last stage keeps that order", use)
    split = any(action.kind == "W" for order in orders for action in order)
    ddp = data_scheme_of(plan) == "data/ddp"
    if split and ddp:
        rule = "torch's DDP waits for weight gradients in the backward pass, and this schedule computes them later"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or a schedule whose actions are BW", use)
    if plan.job.model.tied and ddp and last and plan.model_parts.device(0) == plan.model_parts.device(last):
        rule = "torch's DDP reduces a tied embedding's gradient once, and here two stages of one device share it"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or set model.tied: false", use)
    if plan.shape.p == 1 and orders[0] != [Action(0, kind, k) for k in plan.shape.microbatches for kind in ("F", "BW")]:
        rule = "without a pipeline micro-batches run one after another through the whole model"
        raise PlanError("plan.schedule", rule, "Use 1f1b, or choose pp > 1", use)


class GradientAccumulation:
    """Gradient accumulation over the micro-batches; DDP communicates in the last only."""

    def __init__(self, m: int, module: nn.Module) -> None:
        self.m, self.module = m, module

    def __call__(self, ids: Tensor | None, targets: Tensor | None) -> Tensor | None:
        assert ids is not None and targets is not None
        total = torch.zeros((), device=ids.device)
        for k, (x, y) in enumerate(zip(ids.chunk(self.m), targets.chunk(self.m), strict=True)):
            with self._no_sync() if k < self.m - 1 else nullcontext():
                loss = self.module(x, y) / self.m
                loss.backward()
            total += loss.detach()
        return total

    def _no_sync(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()


class PipelinePasses:
    """The plan's order of actions, run by torch's pipeline runtime.

    modules: the stages of this rank by number, from `data_parallel.wrap_stage`. The last stage takes the targets and
        returns the loss, so that logits live only between its forward and backward pass, as in the forecast.
    """

    def __init__(self, plan: Plan, modules: Mapping[int, nn.Module], place: ProcessPlace) -> None:
        self.place, self.m = place, plan.shape.m
        orders = action_orders(plan)
        split = any(action.kind == "W" for action in orders[place.pipeline.rank])
        deferred = (
            DeferredWeightGradients(param for module in modules.values() for param in module.parameters())
            if split
            else None
        )
        self.messages = PipelineMessages(make_edge_groups(plan), place.device.cuda)
        stages = [_stage(plan, number, modules[number], place, deferred, self.messages) for number in sorted(modules)]
        self.schedule = torch_pipelining.make_runtime(stages, self.m, lambda loss, _: loss / self.m, orders)

    def __call__(self, ids: Tensor | None, targets: Tensor | None) -> Tensor | None:
        kwargs: dict[str, Any] = {}
        losses: list[Tensor] = []
        if targets is not None:
            kwargs = {"targets": targets, "target": targets, "losses": losses}
        self.schedule.step(*(() if ids is None else (ids,)), **kwargs)
        self.messages.wait()
        return torch.stack([loss.detach() for loss in losses]).sum() if targets is not None else None


def _stage(
    plan: Plan,
    number: int,
    module: nn.Module,
    place: ProcessPlace,
    deferred: DeferredWeightGradients | None,
    messages: PipelineMessages,
) -> LeanPipelineStage:
    """Returns torch's stage around a stage of the reference model. Given the shapes, torch need not run it to infer
    them."""
    batch, last = plan.job.batch, number == plan.shape.stages - 1
    assert batch.sequence is not None
    positions = batch.sequence // place.context.size
    ids = torch.empty((batch.micro, positions), dtype=torch.int64, device="meta")
    cut = positions // place.tensor.size if uses_sequence_parallelism(plan) else positions
    shape, dtype = (batch.micro, cut, plan.job.model.hidden), DTYPES[plan.job.framework.weights]
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    return LeanPipelineStage(
        module,
        number,
        plan.shape.stages,
        place.device.torch,
        input_args=ids if number == 0 else hidden,
        output_args=torch.empty((), device="meta", requires_grad=True) if last else hidden,
        group=place.pipeline.group,
        messages=messages,
        deferred=deferred,
    )


def uses_sequence_parallelism(plan: Plan) -> bool:
    """Returns whether the plan shards the residual stream along the positions."""
    return any(scheme.use == "tensor/megatron-sp" for scheme in plan.family("tensor"))
