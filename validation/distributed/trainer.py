"""One rank's part of a training step of the reference model, as a plan says."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulator.plan.plan import Plan
from validation.distributed import data_parallel as data
from validation.distributed import pipeline
from validation.distributed.groups import Place, axis_of
from validation.reference import model
from validation.reference.model import Stage
from validation.reference.optimizer import gradient
from validation.reference.tensor_parallel import TensorGroup
from validation.reference.tokens import make_tokens

Given = tuple[Tensor | None, Tensor | None]


def check(plan: Plan) -> None:
    """Raises PlanError for a plan that the reference trainer does not run."""
    for family in ("pipeline", "data", "tensor"):
        axis_of(plan, family)
    model.check(plan)
    pipeline.check(plan)
    data.check(plan)


class Trainer:
    """The stages of this rank, their replicas and their optimizer."""

    def __init__(self, plan: Plan, place: Place) -> None:
        check(plan)
        self.plan, self.place = plan, place
        tensor = TensorGroup(place.tensor.size, place.tensor.rank, place.tensor.group, pipeline.sequence(plan))
        mine = [i for i in range(plan.shape.stages) if plan.device(i) == place.pipeline.rank]
        numbers: dict[int, int | None] = {0: None} if place.pipeline.size == 1 else {i: i for i in mine}
        dtype, device = data.dtype_of(plan), place.device.torch
        self.stages: dict[int, Stage] = {
            i: model.build_stage(plan, number, tensor, device, dtype) for i, number in numbers.items()
        }
        model.share_tied_embedding(self.stages.values())
        modules = {i: data.wrapped(plan, stage, place) for i, stage in self.stages.items()}
        self.optimizer = data.optimizer(plan, self.stages.values(), place)
        self.passes = pipeline.passes(plan, modules, place)

    def given(self, step: int) -> Given:
        """The ids where the first stage is and the targets where the last one is, [m b, s] on the device."""
        replica, m = self.place.data.rank, self.plan.shape.m
        pairs = [make_tokens(self.plan, step, k, replica) for k in range(m)]
        ids, targets = (torch.cat(some).to(self.place.device.torch) for some in zip(*pairs, strict=True))
        rank = self.place.pipeline.rank
        return ids if rank == 0 else None, targets if rank == self.place.last else None

    def gradients(self, given: Given) -> Tensor | None:
        """Forward and backward passes, then what ranks owe each other of the gradients; replicas are joined by DDP and
        FSDP in the passes, by ZeRO-1 in its step. Returns the mean loss of this replica where the last stage is."""
        loss = self.passes(*given)
        for param in self.parameters().values():
            if getattr(param, "partial_gradient", False):
                dist.all_reduce(local(gradient(param)), group=self.place.tensor.group)
        for stage in self.stages.values():
            if (table := model.tied_embedding(stage)) is not None and self.place.ends is not None:
                dist.all_reduce(gradient(table), group=self.place.ends)
        return loss

    def step(self, given: Given) -> Tensor | None:
        """A whole step; gradients are zero behind it."""
        loss = self.gradients(given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def parameters(self) -> dict[str, Any]:
        """All of this rank, by their names in the whole model, in their order there."""
        return {name: param for stage in self.stages.values() for name, param in stage.named_parameters()}


def local(one: Any) -> Tensor:
    """The part of this rank, where FSDP cuts the tensor."""
    found: Tensor = one.to_local() if hasattr(one, "to_local") else one
    return found
