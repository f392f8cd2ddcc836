"""Operators that choose the keys that a query attends to: the indexer of DeepSeek sparse attention.

It reads detached inputs and learns from a loss of its own, the distance from the distribution of attention over the
chosen keys; so its linear layers pass no gradient on. The target, scores of attention summed over heads, is a result
of attention's kernels and has no work here. Source: DeepSeek-V3.2, section 2.1 (arXiv 2512.02556).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace
from typing import ClassVar

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Module, Operator
from meshcast.simulator.ir.operators import CoreAttention, Linear, count_pairs
from meshcast.simulator.ir.ops import Attention, Memory, Work


class ChosenAttention(CoreAttention):
    """Attention to the keys that an indexer has chosen. A query sees as many as in a window, wherever they are."""

    def _fused_kernel(self, at: LocalShapes, backward: bool) -> list[Work]:
        works = super()._fused_kernel(at, backward)
        return [replace(work, chosen="keys") if isinstance(work, Attention) else work for work in works]


class DetachedLinear(Linear):
    """A linear layer whose input gets no gradient from it (`Scope.inputs_with_gradient`)."""


def detach(module: Module) -> Module:
    """Returns a linear layer whose input gets no gradient from it; other modules (casts of its input) as they are."""
    if not isinstance(module, Linear):
        return module
    fields = {field.name: getattr(module, field.name) for field in dataclasses.fields(module)}
    return DetachedLinear(**fields)


@dataclass(frozen=True, eq=False)
class ChooseKeys(Operator):
    """Scores of queries [b, p, i] and keys [b, p, d], ReLU, their sum over heads with weights [b, p, n], and the best
    keys of each query [b, p, k].

    Forward a kernel computes the scores that the causal mask leaves and writes their sums in fp32, of which another
    finds the best. Backward the scores of the chosen keys are computed again, and from their gradients those of queries
    and of keys.

    width: elements of a head.
    document: tokens of the documents packed into a sequence, within each of which keys are chosen; None: a single one.
    rate: tokens for which a key stands, if it is that of a compressed entry.
    """

    width: int = 128
    document: int | None = None
    rate: int = 1
    chosen: ClassVar[str] = "keys"

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        """Returns samples, positions, heads and chosen keys."""
        queries = at.dims(self.ins[0])
        samples = math.prod(n for dim, n in queries.items() if dim not in ("p", "i"))
        return samples, queries["p"], queries["i"] // self.width, at.dims(self.outs[0])["k"]

    def _products(self, at: LocalShapes, most: int | None, count: int) -> list[Work]:
        """Returns products of all heads with the keys before each query, with at most so many of them.

        A kernel keeps the scores on the chip as fused attention does, so it is priced as fused attention of as many
        FLOPs, with half of the width in each of its two products.
        """
        samples, tokens, heads, _ = self._sizes(at)
        share, keys = self._pairs(tokens, most) / tokens**2 * self.rate, max(1, tokens // self.rate)
        half, dtype = max(1, self.width // 2), self.ins[0].dtype
        return [Attention(samples, tokens, keys, heads, 1, half, half, share, False, dtype, chosen=self.chosen)] * count

    def _pairs(self, tokens: int, most: int | None) -> float:
        """Counts the pairs of queries and keys before them, with at most so many keys of a query."""
        document = self.document // self.rate if self.document else None
        return self.rate * count_pairs(max(1, tokens // self.rate), document, most)

    def forward(self, at: LocalShapes) -> list[Work]:
        samples, tokens, _, chosen = self._sizes(at)
        sums = 4 * samples * round(self._pairs(tokens, None))
        return [*self._products(at, None, 1), Memory("softmax", 2 * sums, sums + 4 * samples * tokens * chosen)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return self._products(at, self._sizes(at)[3], 3)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs)
