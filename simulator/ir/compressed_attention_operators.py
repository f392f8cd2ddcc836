"""Operators of attention to compressed entries (DeepSeek-V4): entries, attention to them, projections of groups.

Positions of a sequence are ``p`` where all of them have to be on a rank, entries are ``t``.
"""

from __future__ import annotations

import math

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import CoreAttention, Linear, count_pairs
from meshcast.simulator.ir.ops import Attention, Memory, Work


class Compress(Operator):
    """Entries [b, t, d]: sums of values ins[0] [b, p, w] over the tokens of an entry, weighted by the softmax of ins[1]
    over these, with a norm and RoPE, in a kernel each way."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("activation", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("activation", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs)


@dataclass(frozen=True, eq=False)
class AttentionToEntries(CoreAttention):
    """Attention to the tokens of a window, whose keys ins[1] are the values, and to entries ins[2] of tokens before.

    rate: tokens from one entry to the next.
    most: entries that an indexer chooses for a query; None: it attends to all before it.
    """

    rate: int = 1
    most: int | None = None

    def _entries(self, at: LocalShapes) -> int:
        """Returns the number of entries."""
        return at.dims(self.ins[2])["t"] if len(self.ins) > 2 else 0

    def _shape(self, at: LocalShapes) -> tuple[int, int, int, int, int]:
        b, q, t, heads, kv_heads = super()._shape(at)
        return b, q, t + self._entries(at), heads, kv_heads

    def _fused_kernel(self, at: LocalShapes, backward: bool) -> list[Work]:
        b, q, t, heads, kv_heads = self._shape(at)
        entries = self._entries(at)
        pairs = self.pairs_before(t - entries)
        if entries:
            document = self.document // self.rate if self.document else None
            pairs += q / entries * count_pairs(entries, document, self.most)
        widths = self.head_dim, self.value_dim
        share, chosen = pairs / (q * t), "keys" if self.most is not None else ""
        return [Attention(b, q, t, heads, kv_heads, *widths, share, backward, self.ins[0].dtype, chosen=chosen)]


class GroupedLinear(Linear):
    """A linear layer within each group of heads: outs[0] [b, s, a] = ins[0] [b, s, a] @ weights[0] [a, r], the width of
    a group's latent, in a batched GEMM."""

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        taken = at.dims(self.ins[0])
        width = at.dims(self.weights[0])["r"]
        groups = at.dims(self.outs[0])["a"] // width
        rows = math.prod(n for dim, n in taken.items() if dim != "a")
        return rows, width, taken["a"] // groups, groups
