"""Forward and backward passes of a step: torch's pipeline runtime, or gradient accumulation without a pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _ComputationType, _PipelineScheduleRuntime
from torch.nn.parallel import DistributedDataParallel

from hardware.errors import PlanError
from simulator.bridges.torch_schedule import write_csv
from simulator.plan.plan import Plan
from simulator.scheduling.schedule import Action
from validation.distributed.data_parallel import data_scheme_of
from validation.distributed.process_groups import ProcessPlace
from validation.measurements.device import DTYPES
from validation.reference.deferred_weight_gradients import DeferredWeightGradients
from validation.reference.orders import action_orders

Passes = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""Runs all passes of a step: from token ids (first stage) and targets (last stage) of all micro-batches [m b, s] to the
mean loss (last stage). Gradients accumulate on the parameters."""


def check(plan: Plan) -> None:
    """Raises PlanError for a schedule that torch's runtime cannot run."""
    found, last, use = action_orders(plan), plan.shape.stages - 1, plan.schedule.use
    forwards = [action.microbatch for order in found for action in order if action[:2] == (last, "F")]
    if forwards != sorted(forwards):
        rule = "torch expects the losses in the order of the micro-batches"
        raise PlanError("plan.schedule", rule, "Use a schedule whose last stage keeps that order", use)
    split = any(action.kind == "W" for order in found for action in order)
    ddp = data_scheme_of(plan) == "data/ddp"
    if split and ddp:
        rule = "torch's DDP waits for weight gradients in the backward pass, and this schedule computes them later"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or a schedule whose actions are BW", use)
    if plan.job.model.tied and ddp and last and plan.device(0) == plan.device(last):
        rule = "torch's DDP reduces a tied embedding's gradient once, and here two stages of one device share it"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or set model.tied: false", use)
    if plan.shape.p == 1 and found[0] != [Action(0, kind, k) for k in plan.shape.microbatches for kind in ("F", "BW")]:
        rule = "without a pipeline micro-batches run one after another through the whole model"
        raise PlanError("plan.schedule", rule, "Use 1f1b, or choose pp > 1", use)


def passes(plan: Plan, modules: Mapping[int, nn.Module], place: ProcessPlace) -> Passes:
    """The passes of this rank.

    modules: its stages by number, from `data_parallel.wrap_stage`.
    """
    return (
        GradientAccumulation(plan.shape.m, modules[0])
        if place.pipeline.size == 1
        else PipelinePasses(plan, modules, place)
    )


class GradientAccumulation:
    """Gradient accumulation over the micro-batches; DDP communicates in the last one only."""

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
    """The plan's order of actions, run by torch's `_PipelineScheduleRuntime`.

    The last stage takes the targets and returns the loss, so that logits live only between its forward and backward
    pass, as in the forecast.
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
        stages = [_stage(plan, number, modules[number], place, deferred) for number in sorted(modules)]
        # The loss is divided by m: scaling the gradients instead would take a further kernel.
        self.schedule = _PipelineScheduleRuntime(
            stages, self.m, loss_fn=lambda loss, _: loss / self.m, scale_grads=False
        )
        load_orders(self.schedule, orders)
        self.sends = BlockingSends(stages, self.schedule)

    def __call__(self, ids: Tensor | None, targets: Tensor | None) -> Tensor | None:
        kwargs: dict[str, Any] = {}
        losses: list[Tensor] = []
        if targets is not None:
            kwargs = {"targets": targets, "target": targets, "losses": losses}
        self.schedule.step(*(() if ids is None else (ids,)), **kwargs, return_outputs=False)
        self.sends.wait()
        return torch.stack([loss.detach() for loss in losses]).sum() if targets is not None else None


def load_orders(schedule: Any, orders: Sequence[Sequence[Action]]) -> None:
    """Loads the orders of all devices into torch's runtime as its CSV; the runtime adds sends and receives."""
    with tempfile.TemporaryDirectory(prefix="meshcast-") as name:
        path = Path(name) / "schedule.csv"
        path.write_text(write_csv(orders), "utf-8", newline="")
        schedule._load_csv(str(path), format="compute_only")


class BlockingSends:
    """Waits for each send before the next one in the same direction, as Megatron does.

    torch's runtime waits for all sends at the end of the step and holds their tensors until then.
    """

    def __init__(self, stages: Sequence[PipelineStage], schedule: Any) -> None:
        self.stages = {stage.stage_index: stage for stage in stages}
        self.works: dict[Any, list[Any]] = {}
        for kind in (_ComputationType.SEND_F, _ComputationType.SEND_B):
            schedule._comp_type_to_function_map[kind] = self.send

    def send(self, action: Any, context: Any) -> None:
        kind, stage = action.computation_type, self.stages[action.stage_index]
        self.wait(kind)
        forward = kind == _ComputationType.SEND_F
        ops = (stage.get_fwd_send_ops if forward else stage.get_bwd_send_ops)(action.microbatch_index)
        self.works[kind] = [one.op(one.tensor, group=one.group, tag=one.tag, group_dst=one.group_peer) for one in ops]

    def wait(self, *kinds: Any) -> None:
        """Waits for the latest sends of these kinds; of all kinds if none is given."""
        for kind in kinds or list(self.works):
            for work in self.works.pop(kind, []):
                work.wait()


class LeanPipelineStage(PipelineStage):
    """torch's stage with receive buffers that exist only while a message is in flight, as in Megatron.

    torch allocates one for every micro-batch and keeps them from step to step.
    deferred: collector of weight gradients, if the schedule has W actions.
    """

    def __init__(self, *args: Any, deferred: DeferredWeightGradients | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deferred = deferred
        self.dw_builder = deferred.take_work if deferred else None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._allocate(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._allocate(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.deferred.defer(not full_backward) if self.deferred else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps the loss, whose graph would keep the received activations
        self._free(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._free(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._free(*self.grad_recv_info.values())

    def _allocate(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    @staticmethod
    def _free(*groups: tuple[Any, ...]) -> None:
        for infos in groups:
            for info in infos:
                info.buffer = None


def _stage(
    plan: Plan, number: int, module: nn.Module, place: ProcessPlace, deferred: DeferredWeightGradients | None
) -> PipelineStage:
    """torch's stage around a stage of the reference model. Given the shapes, torch need not run it to infer them."""
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
        deferred=deferred,
    )


def uses_sequence_parallelism(plan: Plan) -> bool:
    """Whether the plan shards the residual stream along the positions."""
    return any(one.use == "tensor/megatron-sp" for one in plan.family("tensor"))
