"""Groups of ranks with their collectives, and tensor parallelism: the collectives at both ends of each region.

Megatron's operators: f and g (arXiv 1909.08053, section 3), with sequence parallelism all-gather and reduce-scatter
along the positions (arXiv 2205.05198, section 4.2.2). All of them take activations of shape [b, s, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along one axis.

    size: number of ranks.
    rank: this rank among them.
    group: their process group; None for an axis of size 1. None with size > 1: tensors have the shapes of one shard but
        nothing is sent, so that a single process can time the kernels of one rank.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """All-reduce of the sum (or the maximum) over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gather along the positions: [b, s/size, ...] of each rank to [b, s, ...].

        Shards arrive rank by rank. With one sample this is the order of positions; with more it takes a copy.
        """
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        if self.group is not None:
            all_gather_into(parts.flatten(0, 1), x, self.group)
        else:
            parts.copy_(x.expand_as(parts))
        return parts.transpose(0, 1).flatten(1, 2)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatter along the positions: the sum of [b, s, ...] over all ranks to [b, s/size, ...] on each."""
        b, s = x.shape[:2]
        parts = x.unflatten(1, (self.size, s // self.size)).transpose(0, 1)
        if self.group is None:
            return parts[self.rank].clone(memory_format=torch.contiguous_format)
        mine = x.new_empty((b, s // self.size, *x.shape[2:]))
        reduce_scatter_into(mine, parts.contiguous().flatten(0, 1), self.group)
        return mine

    def all_to_all(self, parts: Tensor) -> Tensor:
        """All-to-all: sends part i of [size, ...] to rank i, and returns the parts that the ranks have sent, in order.

        The backward pass sends their gradients back.
        """
        return _AllToAll.apply(parts, self)  # type: ignore[no-any-return]


ONE_RANK = AxisGroup()
"""An axis of size 1."""


@dataclass(frozen=True)
class TensorGroup(AxisGroup):
    """The tensor-parallel ranks.

    sequence: sequence parallelism: between the regions activations are sharded along the positions.
    """

    sequence: bool = False

    @property
    def shards_sequence(self) -> bool:
        """Whether the residual stream is sharded along the positions."""
        return self.sequence and self.size > 1

    def positions(self, total: int) -> slice:
        """The positions out of `total` that this rank's residual stream holds."""
        if not self.shards_sequence:
            return slice(0, total)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def enter_region(self, x: Tensor) -> Tensor:
        """Input of a column-parallel linear, from the residual stream."""
        if self.size == 1:
            return x
        return AllGatherPositions.apply(x, self) if self.sequence else _CopyToRegion.apply(x, self)

    def leave_region(self, x: Tensor) -> Tensor:
        """Residual stream, from the output of a row-parallel linear; overwrites `x` without sequence parallelism."""
        if self.size == 1:
            return x
        return _ReduceScatterFromRegion.apply(x, self) if self.sequence else _ReduceFromRegion.apply(x, self)


def all_gather_into(whole: Tensor, mine: Tensor, group: Any) -> None:
    """All-gather of `mine` into `whole`, rank by rank; `mine` may be a slice of `whole`."""
    _ALL_GATHER(whole, mine, group=group)


def reduce_scatter_into(mine: Tensor, whole: Tensor, group: Any) -> None:
    """Reduce-scatter of `whole` into this rank's shard `mine`, which may be a slice of `whole`."""
    _REDUCE_SCATTER(mine, whole, group=group)


# Newer PyTorch releases renamed these collectives and deprecated the old names.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class _CopyToRegion(Function):
    """Megatron's f: identity forward, all-reduce backward. The gradient is overwritten: nobody else reads it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.tensor = tensor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tensor.all_reduce(grad.contiguous()), None


class _ReduceFromRegion(Function):
    """Megatron's g: all-reduce forward (in place), identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.mark_dirty(x)
        return tensor.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class AllGatherPositions(Function):
    """All-gather along the positions forward, reduce-scatter backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: AxisGroup) -> Any:
        ctx.ranks = ranks
        return ranks.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.ranks.reduce_scatter(grad.contiguous()), None


class _ReduceScatterFromRegion(Function):
    """Reduce-scatter forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.tensor = tensor
        return tensor.reduce_scatter(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.tensor.all_gather(grad), None


class _AllToAll(Function):
    """All-to-all forward and backward."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: AxisGroup) -> Any:
        ctx.ranks = ranks
        return _exchange(parts, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchange(grad, ctx.ranks), None


def _exchange(parts: Tensor, ranks: AxisGroup) -> Tensor:
    """Exchanges parts [size, ...] between the ranks."""
    parts = parts.contiguous()
    if ranks.group is None:
        return parts.clone()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=ranks.group)
    return received
