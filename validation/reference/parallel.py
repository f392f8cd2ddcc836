"""Tensor parallelism: who holds which part of a weight, and what is sent at the edges of the divided blocks.

The operators of Megatron: f and g (arXiv 1909.08053, section 3), and with sequence parallelism gather and
reduce-scatter along the positions (arXiv 2205.05198, section 4.2.2). All of them take activations [b, s, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that divide each layer.

    size, rank: how many they are and which one this is. group: their process group; with None and size > 1 nothing is
    sent, and the shapes are those of one rank: kernels are timed and memory is filled as if it had neighbours.
    sequence: between the blocks activations are cut along the positions.
    """

    size: int = 1
    rank: int = 0
    group: Any = None
    sequence: bool = False

    @property
    def cuts(self) -> bool:
        """Whether the residual stream lies cut along its positions."""
        return self.sequence and self.size > 1

    def positions(self, total: int) -> slice:
        """The positions of `total` that the residual stream holds on this rank."""
        if not self.cuts:
            return slice(0, total)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream, ready for a linear that is divided by columns."""
        if self.size == 1:
            return x
        return _Gather.apply(x, self) if self.sequence else _Copy.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of all ranks' results of a linear divided by rows; without sequence parallelism made inside `x`."""
        if self.size == 1:
            return x
        return _Scatter.apply(x, self) if self.sequence else _Reduce.apply(x, self)

    # ------------------------------------------------------------------------------------ what is sent

    def reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """The sum (or the largest) over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, self.group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """[b, s/size, ...] of every rank to [b, s, ...].

        The parts arrive one behind the other; with one sample that is their order along the positions already, with
        more it takes a copy.
        """
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        if self.group is not None:
            gather_all(parts.flatten(0, 1), x, self.group)
        else:
            parts.copy_(x.expand_as(parts))
        return parts.transpose(0, 1).flatten(1, 2)

    def scatter(self, x: Tensor) -> Tensor:
        """The sum over all ranks of [b, s, ...], cut to the positions of this rank: [b, s/size, ...]."""
        b, s = x.shape[:2]
        parts = x.unflatten(1, (self.size, s // self.size)).transpose(0, 1)
        if self.group is None:
            return parts[self.rank].clone(memory_format=torch.contiguous_format)
        mine = x.new_empty((b, s // self.size, *x.shape[2:]))
        scatter_sum(mine, parts.contiguous().flatten(0, 1), self.group)
        return mine


def gather_all(whole: Tensor, mine: Tensor, group: Any) -> None:
    """The parts of all ranks one behind the other in `whole`, of which `mine` may be one."""
    _GATHER(whole, mine, group=group)


def scatter_sum(mine: Tensor, whole: Tensor, group: Any) -> None:
    """The part of this rank, which may lie in `whole`, of the sum over all ranks."""
    _SCATTER(mine, whole, group=group)


# Newer releases of PyTorch have other names for them, and warn of the old ones.
_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class _Copy(Function):
    """f: whole in front of a block. The gradient is the sum over the ranks, made in place: it comes fresh out of the
    linear behind, the only reader."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tensor.reduce(grad.contiguous()), None


class _Reduce(Function):
    """g: the sum over the ranks behind a block, in place; the gradient is whole already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.mark_dirty(x)
        return tensor.reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(Function):
    """All positions in front of a block; the gradients of all ranks are summed and cut."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.tensor = tensor
        return tensor.gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tensor.scatter(grad.contiguous()), None


class _Scatter(Function):
    """The sum over the ranks behind a block, cut along the positions; its gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.tensor = tensor
        return tensor.scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tensor.gather(grad), None
