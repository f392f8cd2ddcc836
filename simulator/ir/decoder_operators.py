"""Operators of decoders that differ from a GPT or Llama: in a norm, a cap, or attention to the output of an encoder."""

from __future__ import annotations

from typing import ClassVar

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import Activation, Boundary, CoreAttention, Norm, count_score_bytes
from meshcast.simulator.ir.ops import Memory, Work


class NormOfHeads(Norm):
    """A norm over all heads together (OLMo 2, arXiv 2501.00656, section 3.2), or over the width of an MLP (BitNet).

    Where these are sharded, sums over the shard are all-reduced, as those over a sharded h.
    """

    widths: ClassVar[tuple[str, ...]] = ("a", "f")


class Softcap(Activation):
    """y = c tanh(x / c), in a kernel each way (Gemma 2, arXiv 2408.00118, section 2)."""


class CappedAttention(CoreAttention):
    """Attention whose scores pass c tanh(x / c) before the softmax.

    Fused kernels compute that with the softmax, and are priced as those without. Unfused attention has another
    elementwise kernel over the scores each way, and saves its result.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        works = super().forward(at)
        if self.kernel == "flash":
            return works
        scores = count_score_bytes(self, at)
        return [works[0], Memory("gelu", scores, scores), *works[1:]]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        works = super().backward_inputs(at)
        if self.kernel == "flash":
            return works
        scores, after = count_score_bytes(self, at), 3 + self.dropout
        return [*works[:after], Memory("gelu", 2 * scores, scores, backward=True), *works[after:]]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        capped = [] if self.kernel == "flash" else [("capped", count_score_bytes(self, at), "workspace")]
        return [*super().saved_buffers(at), *capped]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if self.kernel == "flash" or not backward:
            return super().temporary_buffers(at, backward)
        scores, softmax = count_score_bytes(self, at), 2 + self.dropout
        return [(0, softmax, scores), (softmax, softmax + 1, scores), (softmax + 1, softmax + 3, scores)]


class KeepContext(Operator):
    """The end of an encoder: its output stays in memory until the backward pass of the decoder has its gradient.

    Its kernels have no bytes and take no time.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class ReadContext(Boundary):
    """A layer of a decoder reads the context; its gradient is added to that of the layers behind."""

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        nbytes = at.bytes(*self.ins)
        return [Memory("add", 2 * nbytes, nbytes)]


class Scale(Operator):
    """y = w x, for a vector w over h; a kernel backward makes the gradients of both."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("residual", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("residual", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class ReadKeys(Operator):
    """A layer reads the keys and values of an earlier one, which are in memory: it takes no time. The addition of their
    gradients to those of the other layers that read them is left out."""


class HoldWeights(Boundary):
    """Holds a table that attention reads elsewhere: relative positions of a stack of layers (T5)."""
