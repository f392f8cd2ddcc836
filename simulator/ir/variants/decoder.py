"""Operators of decoders that differ from a GPT or Llama in a norm or a cap."""

from __future__ import annotations

from typing import ClassVar

from meshcast.simulator.ir.modules import LocalShapes
from meshcast.simulator.ir.operators import Activation, CoreAttention, Norm
from meshcast.simulator.ir.ops import Memory, Work


class NormOfHeads(Norm):
    """A norm over all heads together (OLMo 2, arXiv 2501.00656, section 3.2).

    Where heads are sharded, sums over the shard are all-reduced, as those over a sharded h.
    """

    widths: ClassVar[tuple[str, ...]] = ("a",)


class Softcap(Activation):
    """y = c tanh(x / c), in one kernel each way (Gemma 2, arXiv 2408.00118, section 2)."""


class CappedAttention(CoreAttention):
    """Attention whose scores pass c tanh(x / c) before the softmax.

    Fused kernels compute that with the softmax, and are priced as those without. Unfused attention has one more
    elementwise kernel over the scores each way, and saves its result.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        works = super().forward(at)
        if self.kernel == "flash":
            return works
        scores = 2 * self._scores(at)
        return [works[0], Memory("gelu", scores, scores), *works[1:]]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        works = super().backward_inputs(at)
        if self.kernel == "flash":
            return works
        scores, after = 2 * self._scores(at), 3 + self.dropout
        return [*works[:after], Memory("gelu", 2 * scores, scores, backward=True), *works[after:]]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        capped = [] if self.kernel == "flash" else [("capped", 2 * self._scores(at), "workspace")]
        return [*super().saved_buffers(at), *capped]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if self.kernel == "flash" or not backward:
            return super().temporary_buffers(at, backward)
        scores, softmax = 2 * self._scores(at), 2 + self.dropout
        return [(0, softmax, scores), (softmax, softmax + 1, scores), (softmax + 1, softmax + 3, scores)]
