"""The operators of dense transformers in torch, on the shards of a rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.ir import operators as ir
from meshcast.simulator.ir.modules import Operator
from meshcast.simulator.models.model import Model
from meshcast.validation.reference import functions
from meshcast.validation.reference.layers import EPS, ROPE_BASE


@dataclass(frozen=True)
class RankShards:
    """What a rank has of an operator.

    divide: the dim that each axis shards.
    mesh: the device mesh.
    model: the shape of the model.
    targets: the token that follows each position, in the shards of the loss.
    """

    divide: dict[str, str]
    mesh: DeviceMesh
    model: Model
    targets: Tensor

    def axes(self, dim: str) -> list[str]:
        """Returns the axes that shard a dim."""
        return [axis for axis in self.mesh.mesh_dim_names or () if self.divide.get(axis) == dim]

    def start(self, dim: str, size: int) -> int:
        """Returns the place of this rank's shard of `size` elements along a dim."""
        shard = 0
        for axis in self.axes(dim):
            shard = shard * self.mesh[axis].size() + self.mesh.get_local_rank(axis)
        return shard * size

    def is_first(self, dim: str) -> bool:
        """Returns whether this rank has the first shard along a dim."""
        return self.start(dim, 1) == 0

    def sum_shards(self, x: Tensor, dim: str, replicated: bool) -> Tensor:
        """Returns the sum of `x` over the shards of a dim.

        replicated: every rank computes the same with it, so that its gradient is that of a rank; otherwise the
            gradients of all ranks add up.
        """
        for axis in self.axes(dim):
            x = _SumOver.apply(x, self.mesh.get_group(axis), replicated)
        return x

    def largest(self, x: Tensor, dim: str) -> Tensor:
        """Returns the maximum of `x` over the shards of a dim, without a gradient."""
        x = x.detach().clone()
        for axis in self.axes(dim):
            dist.all_reduce(x, dist.ReduceOp.MAX, self.mesh.get_group(axis))
        return x


class _SumOver(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, replicated: bool) -> Any:
        ctx.group, ctx.replicated = group, replicated
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not ctx.replicated:
            grad = grad.contiguous().clone()
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


def compute(operator: Operator, ins: Sequence[Tensor], weights: Sequence[Tensor], at: RankShards) -> list[Tensor]:
    """Returns the shards of the outputs of an operator, some of them partial sums.

    Raises PlanError for an operator that is not implemented.
    """
    match operator:
        case ir.Embedding():
            (table,) = weights
            return [functions.embedding(ins[0], table, at.start("v", len(table)))]
        case ir.Linear():
            return _linear(operator, ins[0], weights, at)
        case ir.Norm():
            return [_norm(ins[0], weights, at)]
        case ir.Residual():
            return [_residual(operator, ins, weights, at)]
        case ir.Rope():
            return [_rotate(x, at) for x in ins]
        case ir.CoreAttention():
            q, k, v = (x.unflatten(-1, (-1, at.model.head_dim)).transpose(1, 2) for x in ins)
            end = at.start("s", q.shape[2]) + q.shape[2]
            return [functions.attention(q, k[:, :, :end], v[:, :, :end])]
        case ir.Activation():
            return [F.silu(ins[0]) * ins[1] if len(ins) > 1 else F.gelu(ins[0], approximate="tanh")]
        case ir.Loss():
            return [_loss(ins[0], at)]
        case ir.Boundary():
            return [ins[0]]
    raise PlanError("model", "the executor of layouts has no such operator", "Use a dense model", operator.name)


def _linear(operator: ir.Linear, x: Tensor, weights: Sequence[Tensor], at: RankShards) -> list[Tensor]:
    matrices = [weight for weight in weights if weight.dim() == 2]
    biases = [weight for weight in weights if weight.dim() == 1]
    outs = [x @ matrix for matrix in matrices]
    if biases:
        (contracted,) = (dim for dim in operator.ins[0].dims if not operator.outs[0].has(dim))
        first = at.is_first(contracted)
        # A single partial sum has the bias; its gradient is that of the whole output on every rank.
        outs = [y + (bias - bias.detach() + first * bias.detach()) for y, bias in zip(outs, biases, strict=True)]
    return outs


def _norm(x: Tensor, weights: Sequence[Tensor], at: RankShards) -> Tensor:
    width = x.shape[-1] * math.prod(at.mesh[axis].size() for axis in at.axes("h"))
    if len(weights) > 1:
        x = x - at.sum_shards(x.sum(-1, keepdim=True), "h", replicated=False) / width
    squares = at.sum_shards(x.square().sum(-1, keepdim=True), "h", replicated=False)
    y = x * torch.rsqrt(squares / width + EPS) * weights[0]
    return y + weights[1] if len(weights) > 1 else y


def _residual(operator: Operator, ins: Sequence[Tensor], weights: Sequence[Tensor], at: RankShards) -> Tensor:
    y = ins[0]
    for other in ins[1:]:
        y = y + other
    for weight in weights:
        if operator.name == "positions":
            first = at.start("s", y.shape[1])
            weight = weight[first : first + y.shape[1]]
        y = y + weight
    return y


def _rotate(x: Tensor, at: RankShards) -> Tensor:
    count = x.shape[1]
    first = at.start("s", count)
    table = functions.rope_table(first + count, at.model.rope_width, ROPE_BASE, x.device)[first:, None]
    heads = x.unflatten(-1, (-1, at.model.head_dim))
    rotated, rest = heads[..., : at.model.rope_width], heads[..., at.model.rope_width :]
    pairs = torch.view_as_complex(rotated.unflatten(-1, (-1, 2)).contiguous()) * table
    return torch.cat([torch.view_as_real(pairs).flatten(-2), rest], -1).flatten(-2)


def _loss(logits: Tensor, at: RankShards) -> Tensor:
    size = logits.shape[-1]
    kept = logits - at.largest(logits.amax(-1, keepdim=True), "v")
    place = at.targets[..., None] - at.start("v", size)
    elsewhere = (place < 0) | (place >= size)
    target_logit = kept.gather(-1, place.masked_fill(elsewhere, 0)).masked_fill(elsewhere, 0)
    total = at.sum_shards(kept.exp().sum(-1, keepdim=True), "v", replicated=True)
    return (total.log() - at.sum_shards(target_logit, "v", replicated=True)).squeeze(-1)
