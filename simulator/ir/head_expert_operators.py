"""Linear layers of a mixture of attention heads: every expert has matrices for a query of each key/value head, and a
token passes several (JetMoE, arXiv 2404.07413, section 2.2).

Ranks that share heads share the columns, or the rows, of every expert; experts are whole on all other ranks. A
token's rows are copied and sorted by experts before, and brought back behind.
"""

from __future__ import annotations

import math

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes
from meshcast.simulator.ir.operators import Linear
from meshcast.simulator.ir.ops import BYTES, Memory, Work


class HeadExperts(Linear):
    """Queries [b, s, a] of all experts of a token, from its input [b, s, h]: a grouped GEMM over all experts.

    The weights are [e, h, a]; where several queries of a head make up a, a token passes so many experts.
    """

    @property
    def _heads(self) -> Tensor:
        """The tensor with heads."""
        return self.outs[0]

    @property
    def _tokens(self) -> Tensor:
        """The tensor with the width of the stream."""
        return self.ins[0]

    def _passes(self, at: LocalShapes) -> int:
        """Returns the experts that a token passes."""
        return at.dims(self._heads)["a"] // at.dims(self.weights[0])["a"]

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        sizes, tokens = at.dims(self.weights[0]), at.dims(self._tokens)
        rows = math.prod(n for dim, n in tokens.items() if dim != "h") * self._passes(at)
        columns, inner = (sizes["a"], sizes["h"]) if self._heads is self.outs[0] else (sizes["h"], sizes["a"])
        return math.ceil(rows / sizes["e"]), columns, inner, sizes["e"]

    def _copies(self, at: LocalShapes) -> int:
        """Bytes of the copies of tokens that experts read or write."""
        return self._passes(at) * at.size(self._tokens) * int(BYTES[self._tokens.dtype])

    def _sort(self, at: LocalShapes, gathers: bool) -> list[Work]:
        """Returns the kernels that copy and sort rows before a product and behind it. gathers: it reads tokens."""
        one, copies, heads = at.bytes(self._tokens), self._copies(at), at.bytes(self._heads)
        of_tokens = Memory("permute", one, copies) if gathers else Memory("permute", copies, one)
        of_heads = Memory("permute", heads, heads)
        return [of_tokens, of_heads] if gathers else [of_heads, of_tokens]

    def forward(self, at: LocalShapes) -> list[Work]:
        before, behind = self._sort(at, gathers=self._tokens is self.ins[0])
        return [before, *super().forward(at), behind]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        before, behind = self._sort(at, gathers=self._tokens is self.outs[0])
        return [before, *super().backward_inputs(at), behind]

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        return self.weights[:1]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        sorted_rows = self._copies(at) if self._tokens is self.ins[0] else at.bytes(self._heads)
        return [("sorted", sorted_rows, "activations")]

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return ()


class HeadExpertsBack(HeadExperts):
    """The same from the results of all heads back to the width of the stream, weighted by the router and summed up."""

    @property
    def _heads(self) -> Tensor:
        return self.ins[0]

    @property
    def _tokens(self) -> Tensor:
        return self.outs[0]
