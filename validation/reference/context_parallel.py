"""Context parallelism: the positions of every sequence are divided over ranks, which exchange data around attention.

``all-gather``: keys and values are all-gathered, their gradients reduce-scattered (arXiv 2407.21783, section 3.3.2).
    Rank r of p holds parts r and 2p-1-r of 2p, so that the causal mask leaves all ranks the same work.
``ulysses``: all-to-alls turn positions into heads and back (arXiv 2309.14509, section 3). Rank r holds part r of p.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from meshcast.hardware.records import dataclass
from meshcast.validation.reference import functions
from meshcast.validation.reference.tensor_parallel import AxisGroup, Exchange

KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
"""Fused attention on a CPU and its backward pass; unlike torch's public function it returns the log-sum-exp."""

Rows = tuple[slice, int]
"""Queries at consecutive positions, and the end of the keys that they attend to, which is the last query's position."""


@dataclass(frozen=True)
class ContextGroup(AxisGroup):
    """The context-parallel ranks.

    scheme: ``all-gather`` or ``ulysses``.
    """

    scheme: str = "all-gather"

    @property
    def gathers(self) -> bool:
        """Whether keys and values are all-gathered."""
        return self.size > 1 and self.scheme == "all-gather"

    def own_positions(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Returns this rank's positions out of a tensor with all positions along `dim`."""
        if not self.gathers:
            return whole.chunk(self.size, dim)[self.rank]
        parts = whole.chunk(2 * self.size, dim)
        return torch.cat((parts[self.rank], parts[-1 - self.rank]), dim)

    def enter_attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs of `attention` from queries, keys and values of this rank's positions [b, heads, s/p, d].

        all-gather: the same queries, and all keys and values [b, heads, s, d].
        ulysses: queries, keys and values of all positions for a share of the heads [b, heads/p, s, d].
        """
        if self.size == 1:
            return q, k, v
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.gathers:
            # The copy of the queries frees the fused QKV tensor with this rank's keys and values.
            q, (k, v) = q.contiguous(), (Exchange.apply(x, self.all_gather, self.reduce_scatter) for x in (k, v))
        else:
            q, k, v = (self._positions_to_heads(x) for x in (q, k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Computes causal attention of the inputs from `enter_attention`: [b, s/p, heads d]; ulysses: [b, s, heads
        d/p]."""
        if not self.gathers:
            return functions.attention(q, k, v)
        return (attend_by_rows if q.is_cuda else attend_by_blocks)(q, k, v, self.rows(k.shape[2]))

    def leave_attention(self, o: Tensor) -> Tensor:
        """Brings the result of `attention` to this rank's positions: [b, s/p, heads d]."""
        return o if self.size == 1 or self.gathers else self._heads_to_positions(o)

    # --------------------------------------------------------------------------------- all-gather

    def all_gather(self, x: Tensor) -> Tensor:
        """All-gathers, in the order of positions: [b, s/p, ...] to [b, s, ...]."""
        shards = super().all_gather(x).unflatten(1, (2 * self.size, -1))
        order = [2 * rank for rank in range(self.size)]
        return shards[:, order + [shard + 1 for shard in reversed(order)]].flatten(1, 2)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Reduce-scatters a tensor in the order of positions: the sum of [b, s, ...] to [b, s/p, ...]."""
        parts = x.unflatten(1, (2 * self.size, -1))
        order = [part for rank in range(self.size) for part in (rank, 2 * self.size - 1 - rank)]
        return super().reduce_scatter(parts[:, order].flatten(1, 2))

    def rows(self, s: int) -> list[Rows]:
        """Queries of this rank's two parts out of 2p, each with the end of the keys that the causal mask leaves."""
        n = s // (2 * self.size)
        return [(slice(0, n), (self.rank + 1) * n), (slice(n, 2 * n), (2 * self.size - self.rank) * n)]

    # ------------------------------------------------------------------------------------ Ulysses

    def _positions_to_heads(self, x: Tensor) -> Tensor:
        """Exchanges by all-to-all from [b, s/p, heads, d] to [b, s, heads/p, d]."""
        return self.all_to_all(x.unflatten(2, (self.size, -1)).movedim(2, 0)).movedim(0, 1).flatten(1, 2)

    def _heads_to_positions(self, x: Tensor) -> Tensor:
        """Exchanges by all-to-all from [b, s, heads d/p] to [b, s/p, heads d]."""
        return self.all_to_all(x.unflatten(1, (self.size, -1)).movedim(1, 0)).movedim(0, 2).flatten(2, 3)


WHOLE_SEQUENCES = ContextGroup()
"""No context parallelism."""


def attend_by_rows(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Computes attention [b, s, heads d] of queries [b, heads, s, d], a kernel for each of the rows.

    A GPU's kernels align the causal mask to the last query and the last key; a CPU's need the mask as a tensor.
    """
    return torch.cat([functions.attention(q[:, :, at], k[:, :, :end], v[:, :, :end]) for at, end in rows], 1)


def attend_by_blocks(q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Rows]) -> Tensor:
    """Computes attention [b, s, heads d] of queries [b, heads, s, d] on a CPU, a kernel for each block of the rows."""
    return _BlockAttention.apply(q, k, v, rows)  # type: ignore[no-any-return]


class _BlockAttention(Function):
    """Keys before the queries and those of their positions are two blocks, merged by their log-sum-exp.

    Saves its inputs, its result and the log-sum-exp of each row and head, as a fused kernel does.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[Rows]) -> Any:
        b, heads, s, d = q.shape
        out = q.new_empty((b, s, heads, d)).transpose(1, 2)
        lse = q.new_empty((b, heads, s), dtype=functions.accumulation_dtype(q.dtype))
        ctx.blocks = [block for at, end in rows for block in _blocks(at, end)]
        for at, keys, causal in ctx.blocks:
            part, part_lse = KERNEL(q[:, :, at], k[:, :, keys], v[:, :, keys], 0.0, causal)
            if causal:
                out[:, :, at], lse[:, :, at] = part, part_lse
            else:
                total = torch.logaddexp(lse[:, :, at], part_lse)
                part.mul_((part_lse - total).exp_()[..., None])
                out[:, :, at].mul_((lse[:, :, at] - total).exp_()[..., None]).add_(part)
                lse[:, :, at] = total
        ctx.save_for_backward(q, k, v, out, lse)
        return out.transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grad.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)
        gradients = d_q, d_k, d_v = [torch.zeros_like(x) for x in (q, k, v)]
        for at, keys, causal in ctx.blocks:
            ins = grad[:, :, at], q[:, :, at], k[:, :, keys], v[:, :, keys], out[:, :, at], lse[:, :, at]
            parts = BACKWARD_KERNEL(*ins, 0.0, causal)
            for total, part in zip((d_q[:, :, at], d_k[:, :, keys], d_v[:, :, keys]), parts, strict=True):
                total.add_(part)
        return *gradients, None


def _blocks(at: slice, end: int) -> list[tuple[slice, slice, bool]]:
    """Queries and keys of the blocks of a row, and whether they have the causal mask; those of the mask first."""
    begin = end - (at.stop - at.start)
    return [(at, slice(begin, end), True), *([(at, slice(0, begin), False)] if begin else [])]
