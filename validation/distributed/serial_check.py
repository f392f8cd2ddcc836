"""Checks that sharded training equals serial training: loss, gradients, gradient norm, and weights after a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshcast.hardware.records import dataclass
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed.data_parallel import data_ranks, data_scheme_of
from meshcast.validation.distributed.trainer import Trainer
from meshcast.validation.reference import model
from meshcast.validation.reference.optimizer import LEARNING_RATE, Optimizer, gradient
from meshcast.validation.reference.tensor_parallel import TensorGroup
from meshcast.validation.reference.tokens import make_tokens

TOLERANCE = {"fp32": 1e-4, "fp16": 2e-2, "bf16": 1e-1}
"""Largest relative difference by number format, finest first: some thousand roundings in another order."""

WEIGHT_TOLERANCE = 1e-2
"""Largest mean difference of the weights after a step, in learning rates. Adam's first step is the sign of the
gradient, so weights whose gradients are rounding noise may differ by 2; a misplaced shard makes the mean about 1."""

MEMORY_SHARE = 0.25
"""Share of a device's memory that the serial model may take."""


@dataclass(frozen=True)
class SerialCheck:
    """Differences between a sharded and a serial step, the maximum over all ranks.

    format: the coarser of the formats of weights and gradients.
    loss: relative difference.
    gradient: largest difference over the largest entry of the same tensor.
    worst: name of that tensor.
    norm: relative difference.
    weights: mean difference after the step, in learning rates; None for formats below 32 bits, which round more.
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
        return (
            all(error <= tolerance for error in (self.loss, self.gradient, self.norm))
            and (self.weights or 0.0) <= WEIGHT_TOLERANCE
        )

    def __str__(self) -> str:
        words = "equals" if self.equal else "DIFFERS FROM"
        rest = "" if self.weights is None else f"; weights after a step by {self.weights:.1e} learning rates on average"
        return (
            f"sharded training {words} serial training in {self.format} within {TOLERANCE[self.format]:.0e}: the loss"
            f" differs by {self.loss:.1e}, gradients by at most {self.gradient:.1e} ({self.worst}), their norm by"
            f" {self.norm:.1e}{rest}"
        )


def fits_serially(plan: Plan, memory: int | None) -> bool:
    """Returns whether a single process can train the whole model in `MEMORY_SHARE` of a device's `memory` [bytes].

    Weights, gradients, main weights and two moments count 4 bytes each.
    """
    return memory is None or plan.job.model.parameters * 5 * 4 <= MEMORY_SHARE * memory


def compare_with_serial(trainer: Trainer) -> SerialCheck:
    """Runs the first step sharded and, on rank 0, serial, and compares them. Collective over all ranks.

    The serial step trains on the tokens of all replicas. The trainer has taken a step afterwards.
    """
    plan = trainer.plan
    loss = trainer.accumulate_gradients(trainer.make_inputs(0))
    serial = _SerialTrainer(trainer) if dist.get_rank() == 0 else None
    pairs = _pairs(trainer, serial, gradients=True)
    largest, worst = max((_relative(have, want, whole), name) for name, have, want, whole in pairs)
    norm = float(trainer.optimizer.step())
    trainer.optimizer.zero_grad()
    serial_norm = float(serial.optimizer.step()) if serial else 0.0
    weights = None
    if _format(plan) == "fp32":
        differences = [((have - want).abs().sum(), want.numel()) for _, have, want, _ in _pairs(trainer, serial, False)]
        weights = float(sum(error for error, _ in differences)) / sum(count for _, count in differences) / LEARNING_RATE
    share = loss.item() / trainer.place.data.size / trainer.place.tensor.size if loss is not None else 0.0
    mean = torch.tensor(share, dtype=torch.float64, device=trainer.place.device.torch)
    dist.all_reduce(mean)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (largest, worst, weights, serial.loss if serial else 0.0, serial_norm))
    (*_, true_loss, true_norm), (largest, worst) = results[0], max(result[:2] for result in results)
    return SerialCheck(
        format=_format(plan),
        loss=abs(float(mean) / true_loss - 1),
        gradient=largest,
        worst=worst,
        norm=abs(norm / true_norm - 1),
        weights=None if weights is None else max(result[2] for result in results),
    )


def _format(plan: Plan) -> str:
    framework = plan.job.framework
    return max(framework.weights, framework.gradients, key=list(TOLERANCE).index)


class _SerialTrainer:
    """The whole model in a single process, after the passes of the whole batch."""

    def __init__(self, trainer: Trainer) -> None:
        plan, device = trainer.plan, trainer.place.device.torch
        self.stage = model.build_stage(plan, None, TensorGroup(), device)
        self.optimizer = Optimizer(self.stage.parameters(), plan)
        self.loss, parts = 0.0, plan.shape.m * plan.ranks.replicas
        for replica in range(plan.ranks.replicas):
            for k in range(plan.shape.m):
                ids, targets = (tokens.to(device) for tokens in make_tokens(plan, 0, k, replica))
                loss = self.stage(ids, targets) / parts
                loss.backward()
                self.loss += loss.item()


def _pairs(
    trainer: Trainer, serial: _SerialTrainer | None, gradients: bool
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yields for each parameter of this rank: name, its gradient (or weight), the expected shard, and the expected
    whole.

    The expected values are broadcast from rank 0 in order.
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
            have = _reduce_over_replicas(mine[name], trainer) if gradients else _unshard(mine[name].detach()).float()
            yield name, have, mine[name].sharding.shard_of(whole), whole


def _reduce_over_replicas(param: Any, trainer: Trainer) -> Tensor:
    """Returns a gradient averaged over the data ranks: ZeRO-1 itself reduces gradients only in its step."""
    whole = _unshard(gradient(param)).float()
    if data_scheme_of(trainer.plan) == "data/zero-1":
        whole = data_ranks(param, trainer.place).all_reduce(whole.clone())
        whole /= trainer.place.data.size
    return whole


def _unshard(tensor: Any) -> Tensor:
    """Returns the whole of a tensor that FSDP may shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _relative(have: Tensor, want: Tensor, whole: Tensor) -> float:
    """Returns the largest difference over the largest entry of the whole tensor; over 1 if that is zero."""
    return float((have - want).abs().max()) / (float(whole.abs().max()) or 1.0)
