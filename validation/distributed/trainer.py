"""The reference trainer: a rank's part of a training step of a plan, run eagerly or replayed from a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcast.hardware.errors import PlanError
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed import data_parallel as data
from meshcast.validation.distributed import pipeline
from meshcast.validation.distributed.process_groups import FAMILIES, ProcessPlace, axis_of
from meshcast.validation.reference import model
from meshcast.validation.reference.context_parallel import ContextGroup
from meshcast.validation.reference.model import Stage
from meshcast.validation.reference.optimizer import gradient, local_shard
from meshcast.validation.reference.supported import check_distributed
from meshcast.validation.reference.tensor_parallel import TensorGroup
from meshcast.validation.reference.tokens import make_tokens

Inputs = tuple[Tensor | None, Tensor | None]
"""Token ids and targets; None on ranks that do not need them."""


REHEARSALS = 3
"""Steps that run eagerly before a step is captured: libraries choose their kernels and allocate their workspaces."""


def check(plan: Plan) -> None:
    """Raises PlanError for a plan that the reference trainer does not support."""
    for family in FAMILIES:
        axis_of(plan, family)
    check_distributed(plan)
    pipeline.check(plan)
    data.check(plan)


def check_graphs(plan: Plan, device: str) -> None:
    """Raises PlanError for a plan whose step cannot be captured."""
    if plan.job.framework.cuda_graphs is not True:
        return
    where, remedy = "framework.set.cuda_graphs", "Set it to false"
    if device != "cuda":
        raise PlanError(where, "only CUDA devices have graphs", remedy, True)
    if plan.shape.p > 1 or data.data_scheme_of(plan):
        rule = "the reference trainer captures steps without pipeline and data parallelism"
        raise PlanError(where, rule, remedy, True)


class Trainer:
    """The stages of this rank with their data parallelism and optimizer."""

    def __init__(self, plan: Plan, place: ProcessPlace) -> None:
        check(plan)
        self.plan, self.place = plan, place
        tensor = TensorGroup(**vars(place.tensor), sequence=pipeline.uses_sequence_parallelism(plan))
        ulysses = any(scheme.use == "sequence/ulysses" for scheme in plan.family("sequence"))
        self.context = ContextGroup(**vars(place.context), scheme="ulysses" if ulysses else "all-gather")
        mine = [i for i in range(plan.shape.stages) if plan.model_parts.device(i) == place.pipeline.rank]
        numbers: dict[int, int | None] = {0: None} if place.pipeline.size == 1 else {i: i for i in mine}
        dtype, device = data.weight_dtype(plan), place.device.torch
        self.stages: dict[int, Stage] = {
            i: model.build_stage(plan, number, tensor, device, dtype, self.context, place.expert)
            for i, number in numbers.items()
        }
        model.share_tied_embedding(self.stages.values())
        modules = {i: data.wrap_stage(plan, stage, place) for i, stage in self.stages.items()}
        self.optimizer = data.make_optimizer(plan, self.stages.values(), place)
        self.passes: pipeline.Passes = (
            pipeline.GradientAccumulation(plan.shape.m, modules[0])
            if place.pipeline.size == 1
            else pipeline.PipelinePasses(plan, modules, place)
        )

    def make_inputs(self, step: int) -> Inputs:
        """Returns the token ids (on ranks with the first stage) and targets (with the last stage) on the device: [m b,
        s/cp]."""
        replica, m = self.place.replica.rank, self.plan.shape.m
        pairs = [make_tokens(self.plan, step, k, replica) for k in range(m)]
        batches = [self.context.own_positions(torch.cat(some), 1) for some in zip(*pairs, strict=True)]
        ids, targets = (tokens.contiguous().to(self.place.device.torch) for tokens in batches)
        rank = self.place.pipeline.rank
        return ids if rank == 0 else None, targets if rank == self.place.last else None

    def accumulate_gradients(self, inputs: Inputs) -> Tensor | None:
        """Runs all passes, then the all-reduces of partial gradients and of the tied embedding's.

        DDP and FSDP reduce over the data ranks during the passes, ZeRO-1 in its step.
        Returns the mean loss of this rank's tokens on ranks with the last stage.
        """
        loss = self.passes(*inputs)
        data.average_expert_gradients(self.plan, self.parameters().values(), self.place)
        for param in self.parameters().values():
            if getattr(param, "partial_gradient", False):
                dist.all_reduce(local_shard(gradient(param)), group=self.place.tensor.group)
        for stage in self.stages.values():
            if (table := model.tied_embedding(stage)) is not None and self.place.embedding_group is not None:
                dist.all_reduce(gradient(table), group=self.place.embedding_group)
        return loss

    def step(self, inputs: Inputs) -> Tensor | None:
        """Runs a whole training step; gradients are zero afterwards."""
        loss = self.accumulate_gradients(inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def parameters(self) -> dict[str, Any]:
        """Returns the parameters of this rank by their names in the whole model, in the model's order."""
        return {name: param for stage in self.stages.values() for name, param in stage.named_parameters()}


class CapturedStep:
    """The step of a trainer: the first calls run eagerly, the next is captured, and later ones are replayed."""

    def __init__(self, trainer: Trainer) -> None:
        assert trainer.place.device.cuda is not None
        self.trainer, self.cuda = trainer, trainer.place.device.cuda
        self.calls = 0
        self.stream = self.cuda.new_stream()
        self.inputs: Inputs = (None, None)
        self.graph: Any = None

    def __call__(self, inputs: Inputs) -> None:
        """Runs a step."""
        self.calls += 1
        if self.calls <= REHEARSALS:
            self.stream.wait_stream(self.cuda.current_stream())
            with self.cuda.use_stream(self.stream):
                self.trainer.step(inputs)
            self.cuda.current_stream().wait_stream(self.stream)
            return
        if self.graph is None:
            ids, targets = (None if tokens is None else tokens.clone() for tokens in inputs)
            self.inputs = ids, targets
            self.graph, _ = self.cuda.capture_graph(lambda: self.trainer.step(self.inputs))
        for kept, tokens in zip(self.inputs, inputs, strict=True):
            if kept is not None and tokens is not None:
                kept.copy_(tokens)
        self.graph.replay()
