"""The check that a plan trains the model as one process does: same loss, gradients, norm, and weights after a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simulator.plan.plan import Plan
from validation.distributed.data_parallel import scheme_of
from validation.distributed.trainer import Trainer
from validation.reference import model
from validation.reference.optimizer import LEARNING_RATE, Optimizer, gradient
from validation.reference.tensor_parallel import TensorGroup
from validation.reference.tokens import make_tokens

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest relative difference by number format, from the finest on: some thousand roundings in another order."""

STEP = 1e-2
"""Largest mean difference of the weights after one step, in learning rates. Adam's first step is the gradient's sign:
where a gradient is nothing but rounding, weights part by up to two; a shard that went astray makes the mean about 1."""

SHARE = 0.25
"""Of a device's memory that the whole model may take in one process."""


@dataclass(frozen=True)
class Check:
    """Differences between the sharded and the serial step, the largest of all ranks.

    format: the coarser of the weights' and the gradients'. loss, norm: relative. gradient: the largest, relative to
    the largest entry of its tensor, whose name is `worst`. weights: mean after the step in learning rates; None below
    32 bits, whose rounding is more.
    """

    format: str
    loss: float
    gradient: float
    worst: str
    norm: float
    weights: float | None

    @property
    def equal(self) -> bool:
        tolerance = TOLERANCE[self.format]
        return all(one <= tolerance for one in (self.loss, self.gradient, self.norm)) and (self.weights or 0.0) <= STEP

    def __str__(self) -> str:
        words = "equals" if self.equal else "DIFFERS FROM"
        rest = "" if self.weights is None else f"; weights after a step by {self.weights:.1e} learning rates on average"
        return (
            f"sharded training {words} serial training in {self.format} within {TOLERANCE[self.format]:.0e}: the loss"
            f" differs by {self.loss:.1e}, gradients by at most {self.gradient:.1e} ({self.worst}), their norm by"
            f" {self.norm:.1e}{rest}"
        )


def affordable(plan: Plan, memory: int | None) -> bool:
    """Whether one process can train the whole model in its share of `memory` [bytes]: weights, gradients, main weights
    and moments of at most 4 bytes each."""
    return memory is None or plan.job.model.parameters * 5 * 4 <= SHARE * memory


def compare(trainer: Trainer) -> Check:
    """Trains the first step sharded and, on rank 0, serial, and compares; all ranks call it and get the same answer.

    Tokens are made from their place in the batch, so the serial step has those of all replicas. The trainer is one step
    further behind it.
    """
    plan = trainer.plan
    loss = trainer.gradients(trainer.given(0))
    serial = _Serial(trainer) if dist.get_rank() == 0 else None
    pairs = _pairs(trainer, serial, gradients=True)
    largest, worst = max((_relative(have, want, whole), name) for name, have, want, whole in pairs)
    norm = float(trainer.optimizer.step())
    trainer.optimizer.zero_grad()
    serial_norm = serial.norm() if serial else 0.0
    weights = None
    if _format(plan) == "fp32":
        apart = [((have - want).abs().sum(), want.numel()) for _, have, want, _ in _pairs(trainer, serial, False)]
        weights = float(sum(one for one, _ in apart)) / sum(count for _, count in apart) / LEARNING_RATE
    own = loss.item() / trainer.place.data.size / trainer.place.tensor.size if loss is not None else 0.0
    mean = torch.tensor(own, dtype=torch.float64, device=trainer.place.device.torch)
    dist.all_reduce(mean)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (largest, worst, weights, serial.loss if serial else 0.0, serial_norm))
    (*_, true_loss, true_norm), (largest, worst) = told[0], max(one[:2] for one in told)
    return Check(
        format=_format(plan),
        loss=abs(float(mean) / true_loss - 1),
        gradient=largest,
        worst=worst,
        norm=abs(norm / true_norm - 1),
        weights=None if weights is None else max(one[2] for one in told),
    )


def _format(plan: Plan) -> str:
    framework = plan.job.framework
    return max(framework.weights, framework.gradients, key=list(TOLERANCE).index)


class _Serial:
    """The whole model and batch in one process, with its gradients and its loss."""

    def __init__(self, trainer: Trainer) -> None:
        plan, device = trainer.plan, trainer.place.device.torch
        self.stage = model.build_stage(plan, None, TensorGroup(), device)
        self.optimizer = Optimizer(self.stage.parameters(), plan)
        self.loss, parts = 0.0, plan.shape.m * plan.replicas
        for replica in range(plan.replicas):
            for k in range(plan.shape.m):
                ids, targets = (one.to(device) for one in make_tokens(plan, 0, k, replica))
                loss = self.stage(ids, targets) / parts
                loss.backward()
                self.loss += loss.item()

    def norm(self) -> float:
        """Of all gradients; the weights are a step further behind it."""
        return float(self.optimizer.step())


def _pairs(trainer: Trainer, serial: _Serial | None, gradients: bool) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Name, this rank's gradient (or weight), what it should be, and the whole of that, of each of its parameters.

    The serial ones come from rank 0, one after another.
    """
    theirs = dict(serial.stage.named_parameters()) if serial else {}
    shapes: list[Any] = [[(name, tuple(param.shape)) for name, param in theirs.items()]]
    dist.broadcast_object_list(shapes, 0)
    mine = trainer.parameters()
    for name, shape in shapes[0]:
        if serial:
            whole = (gradient(theirs[name]) if gradients else theirs[name]).detach().float().contiguous()
        else:
            whole = torch.empty(shape, device=trainer.place.device.torch)
        dist.broadcast(whole, 0)
        if name in mine:
            have = _joined(gradient(mine[name]), trainer) if gradients else _full(mine[name].detach()).float()
            yield name, have, mine[name].sharding.shard_of(whole), whole


def _joined(one: Any, trainer: Trainer) -> Tensor:
    """A gradient as the optimizer sees it, whole over the replicas: ZeRO-1 joins them only as it steps."""
    found = _full(one).float()
    if scheme_of(trainer.plan) == "data/zero-1":
        found = found.clone()
        dist.all_reduce(found, group=trainer.place.data.group)
        found /= trainer.place.data.size
    return found


def _full(one: Any) -> Tensor:
    """A tensor that FSDP cuts, put together."""
    found: Tensor = one.full_tensor() if hasattr(one, "full_tensor") else one
    return found


def _relative(have: Tensor, want: Tensor, whole: Tensor) -> float:
    """The largest difference against the largest entry of the whole; of a whole of zeros, the difference itself."""
    return float((have - want).abs().max()) / (float(whole.abs().max()) or 1.0)
