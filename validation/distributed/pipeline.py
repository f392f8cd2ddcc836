"""The passes of a step's micro-batches: through torch's pipeline schedules, or one after another without a pipeline."""

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
from validation.distributed.groups import Place
from validation.measurements.device import DTYPES
from validation.reference.deferred_weight_gradients import DeferredWeightGradients
from validation.reference.orders import action_orders

Passes = Callable[[Tensor | None, Tensor | None], Tensor | None]
"""From the ids and targets [m b, s] of all micro-batches of a replica, each where it is needed, to their mean
loss where the last stage is; gradients are left on the parameters."""


def check(plan: Plan) -> None:
    """Raises PlanError for a schedule that torch lacks."""
    found, last, use = action_orders(plan), plan.shape.stages - 1, plan.schedule.use
    made = [action.microbatch for order in found for action in order if action[:2] == (last, "F")]
    if made != sorted(made):
        rule = "torch takes the losses of micro-batches in their order"
        raise PlanError("plan.schedule", rule, "Use a schedule whose last stage has them in order", use)
    split = any(action.kind == "W" for order in found for action in order)
    ddp = any(one.use == "data/ddp" and plan.mesh.size(one.over) > 1 for one in plan.family("data"))
    if split and ddp:
        rule = "torch's DDP waits for gradients of weights in the backward pass, and this schedule makes them apart"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or a schedule whose actions are BW", use)
    if plan.job.model.tied and ddp and last and plan.device(0) == plan.device(last):
        rule = "torch's DDP sums the gradient of a table once, and here two stages of one device share it"
        raise PlanError("plan.schedule", rule, "Use data/zero-1 with it, or set model.tied: false", use)
    if plan.shape.p == 1 and found[0] != [Action(0, kind, k) for k in plan.shape.microbatches for kind in ("F", "BW")]:
        rule = "one device plays one micro-batch after another through the whole model"
        raise PlanError("plan.schedule", rule, "Use 1f1b, or choose pp > 1", use)


def passes(plan: Plan, modules: Mapping[int, nn.Module], place: Place) -> Passes:
    """modules: the stages of this rank by their numbers, as `data.wrapped` gives them."""
    return Accumulation(plan.shape.m, modules[0]) if place.pipeline.size == 1 else Pipeline(plan, modules, place)


class Accumulation:
    """One micro-batch after another through the whole model; DDP sends behind the last one only."""

    def __init__(self, m: int, module: nn.Module) -> None:
        self.m, self.module = m, module

    def __call__(self, ids: Tensor | None, targets: Tensor | None) -> Tensor | None:
        assert ids is not None and targets is not None
        total = torch.zeros((), device=ids.device)
        for k, (x, y) in enumerate(zip(ids.chunk(self.m), targets.chunk(self.m), strict=True)):
            with self._quiet() if k < self.m - 1 else nullcontext():
                loss = self.module(x, y) / self.m
                loss.backward()
            total += loss.detach()
        return total

    def _quiet(self) -> AbstractContextManager[None]:
        return self.module.no_sync() if isinstance(self.module, DistributedDataParallel) else nullcontext()


class Pipeline:
    """The passes in the plan's order, by torch's runtime of schedules. The last stage is given the targets and gives
    the loss: logits are held by nobody, and live from the output layer's forward to its backward pass as in a forecast.
    """

    def __init__(self, plan: Plan, modules: Mapping[int, nn.Module], place: Place) -> None:
        self.place, self.m = place, plan.shape.m
        told = action_orders(plan)
        split = any(action.kind == "W" for action in told[place.pipeline.rank])
        deferred = (
            DeferredWeightGradients(param for module in modules.values() for param in module.parameters())
            if split
            else None
        )
        stages = [_stage(plan, number, modules[number], place, deferred) for number in sorted(modules)]
        # The mean over micro-batches is taken in the loss: to scale all gradients would be a kernel more a step.
        self.schedule = _PipelineScheduleRuntime(
            stages, self.m, loss_fn=lambda loss, _: loss / self.m, scale_grads=False
        )
        load(self.schedule, told)
        self.sends = Sends(stages, self.schedule)

    def __call__(self, ids: Tensor | None, targets: Tensor | None) -> Tensor | None:
        told: dict[str, Any] = {}
        losses: list[Tensor] = []
        if targets is not None:
            told = {"targets": targets, "target": targets, "losses": losses}
        self.schedule.step(*(() if ids is None else (ids,)), **told, return_outputs=False)
        self.sends.wait()
        return torch.stack([loss.detach() for loss in losses]).sum() if targets is not None else None


def load(schedule: Any, told: Sequence[Sequence[Action]]) -> None:
    """Gives torch's runtime the orders of all devices, in torch's own format; it adds the messages, and reads off which
    device holds which stage."""
    with tempfile.TemporaryDirectory(prefix="meshcast-") as name:
        path = Path(name) / "schedule.csv"
        path.write_text(write_csv(told), "utf-8", newline="")
        schedule._load_csv(str(path), format="compute_only")


class Sends:
    """Waits for one message before it sends the next of the same kind, as Megatron does.

    torch's runtime waits at the end of a step, and holds all that it sent until then. In its order who sends may wait
    for who receives.
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
        """For the last message of these kinds, or of all."""
        for kind in kinds or list(self.works):
            for work in self.works.pop(kind, []):
                work.wait()


class Lean(PipelineStage):
    """torch's stage with memory for what arrives only while it is in flight, as Megatron's has.

    torch makes a buffer for every micro-batch of a step, and keeps them all from step to step. later: where gradients
    of weights are put off to actions of their own, see `DeferredWeightGradients`.
    """

    def __init__(self, *given: Any, deferred: DeferredWeightGradients | None = None, **told: Any) -> None:
        super().__init__(*given, **told)
        self.deferred = deferred
        self.dw_builder = deferred.take_work if deferred else None

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        self._fill(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        if self.has_backward and not self.is_last:
            self._fill(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        with self.deferred.defer(not full_backward) if self.deferred else nullcontext():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps it, and by its graph what had arrived
        self._empty(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        self._empty(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        self._empty(*self.grad_recv_info.values())

    def _fill(self, infos: tuple[Any, ...]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    @staticmethod
    def _empty(*groups: tuple[Any, ...]) -> None:
        for infos in groups:
            for info in infos:
                info.buffer = None


def _stage(
    plan: Plan, number: int, module: nn.Module, place: Place, deferred: DeferredWeightGradients | None
) -> PipelineStage:
    """torch's stage around one of ours. Told what goes in and out, it need not try."""
    batch, last = plan.job.batch, number == plan.shape.stages - 1
    assert batch.sequence is not None
    tokens = batch.micro, batch.sequence
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    cut = batch.sequence // place.tensor.size if sequence(plan) else batch.sequence
    shape, dtype = (batch.micro, cut, plan.job.model.hidden), DTYPES[plan.job.framework.weights]
    hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    return Lean(
        module,
        number,
        plan.shape.stages,
        place.device.torch,
        input_args=ids if number == 0 else hidden,
        output_args=torch.empty((), device="meta", requires_grad=True) if last else hidden,
        group=place.pipeline.group,
        deferred=deferred,
    )


def sequence(plan: Plan) -> bool:
    """Whether tensor-parallel ranks cut the residual stream along the positions."""
    return any(one.use == "tensor/megatron-sp" for one in plan.family("tensor"))
