"""Groups of ranks with their collectives, and tensor parallelism: the collectives at both ends of each region.

Megatron's operators: f and g (arXiv 1909.08053, section 3), with sequence parallelism all-gather and reduce-scatter
along the positions (arXiv 2205.05198, section 4.2.2). All of them take activations of shape [b, s, ...].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from meshcast.hardware.records import dataclass


@dataclass(frozen=True)
class AxisGroup:
    """The ranks along an axis.

    size: number of ranks.
    rank: this rank among them.
    group: their process group; None for an axis of size 1. None with size > 1: tensors have the shapes of a shard but
        nothing is sent, so that a single process can time the kernels of a rank.
    """

    size: int = 1
    rank: int = 0
    group: Any = None

    def all_reduce(self, x: Tensor, largest: bool = False) -> Tensor:
        """All-reduces the sum (or the maximum) over all ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gathers along the positions: [b, s/size, ...] of each rank to [b, s, ...].

        Shards arrive rank by rank. With a single sample this is the order of positions; with more it takes a copy.
        """
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        if self.group is not None:
            all_gather_into(parts.flatten(0, 1), x, self.group)
        else:
            parts.copy_(x.expand_as(parts))
        return parts.transpose(0, 1).flatten(1, 2)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatters along the positions: the sum of [b, s, ...] over all ranks to [b, s/size, ...] on each."""
        b, s = x.shape[:2]
        parts = x.unflatten(1, (self.size, s // self.size)).transpose(0, 1)
        if self.group is None:
            return parts[self.rank].clone(memory_format=torch.contiguous_format)
        mine = x.new_empty((b, s // self.size, *x.shape[2:]))
        reduce_scatter_into(mine, parts.contiguous().flatten(0, 1), self.group)
        return mine

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Exchanges by all-to-all: sends part i of [size, ...] to rank i, and returns the parts that the ranks have
        sent, in order.

        The backward pass sends their gradients back.
        """
        return Exchange.apply(parts, self._exchange, self._exchange)  # type: ignore[no-any-return]

    def _exchange(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        if self.group is None:
            return parts.clone()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.group)
        return received


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
        """Returns the positions out of `total` that this rank's residual stream holds."""
        if not self.shards_sequence:
            return slice(0, total)
        part = total // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def enter_region(self, x: Tensor) -> Tensor:
        """Returns the input of a column-parallel linear, from the residual stream."""
        if self.size == 1:
            return x
        if self.sequence:
            return Exchange.apply(x, self.all_gather, self.reduce_scatter)  # type: ignore[no-any-return]
        # Megatron's f. The gradient is overwritten: nobody else reads it.
        return Exchange.apply(x, lambda whole: whole.view_as(whole), self.all_reduce)  # type: ignore[no-any-return]

    def leave_region(self, x: Tensor) -> Tensor:
        """Returns the residual stream, from the output of a row-parallel linear; overwrites `x` without sequence
        parallelism."""
        if self.size == 1:
            return x
        if self.sequence:
            return Exchange.apply(x, self.reduce_scatter, self.all_gather)  # type: ignore[no-any-return]
        return _ReduceFromRegion.apply(x, self)


def all_gather_into(whole: Tensor, mine: Tensor, group: Any) -> None:
    """All-gathers `mine` into `whole`, rank by rank; `mine` may be a slice of `whole`."""
    _ALL_GATHER(whole, mine, group=group)


def reduce_scatter_into(mine: Tensor, whole: Tensor, group: Any) -> None:
    """Reduce-scatters `whole` into this rank's shard `mine`, which may be a slice of `whole`."""
    _REDUCE_SCATTER(mine, whole, group=group)


# Newer PyTorch releases renamed these collectives and deprecated the old names.
_ALL_GATHER = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_REDUCE_SCATTER = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor


class Exchange(Function):
    """A collective of the activations forward, and its counterpart of the gradients backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, collective: Callable[[Tensor], Tensor], counterpart: Callable[[Tensor], Tensor]
    ) -> Any:
        ctx.counterpart = counterpart
        return collective(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.counterpart(grad.contiguous()), None, None


class _ReduceFromRegion(Function):
    """Megatron's g: all-reduce forward (in place), identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Any:
        ctx.mark_dirty(x)
        return tensor.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None
