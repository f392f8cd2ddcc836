"""Operators of diffusion transformers: what vectors of a sample do with its tokens, and streams of tokens with weights
of their own.

The vectors are computed by the operators that need them, at the number of samples of a rank: every rank of tensor and
of sequence parallelism computes all of them from weights that it has whole, as in NeMo (``AdaLN`` in
nemo/collections/diffusion/models/dit/dit_layer_spec.py) and by the plans of diffusers (``_tp_plan``). Gradients of
these weights are sums over the tokens of a rank, and so partial where ranks share a sequence.
"""

from __future__ import annotations

from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import Gemm, Memory, Work


class SampleProducts(Operator):
    """An operator with products of matrices over samples in place of tokens: those of its weights that have an input
    ``c``, but not those of tables of labels ``l``."""

    def _products(self, at: LocalShapes) -> list[tuple[int, int, int]]:
        """Returns samples, outputs and inputs of each product."""
        samples = int(at.dims(self.ins[0])["b"])
        sizes = [at.dims(weight) for weight in self.weights if {*weight.dims} == {"c", "m"}]
        return [(samples, int(dims["m"]), int(dims["c"])) for dims in sizes]

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Gemm(b, n, c, 1, self.ins[0].dtype, "tn", what="linear") for b, n, c in self._products(at)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Gemm(b, c, n, 1, self.ins[0].dtype, "nn", what="linear") for b, n, c in self._products(at)]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return [Gemm(n, c, b, 1, self.ins[0].dtype, "nt", what="linear") for b, n, c in self._products(at)]


class EmbedConditions(SampleProducts):
    """Embeds the conditions of the samples of a stream, which it passes on as it is."""


class Modulate(SampleProducts):
    """y = x (1 + scale) + shift, in a kernel, with vectors of a sample; a kernel backward makes the gradients of all
    three."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [*super().forward(at), Memory("residual", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        kernel = Memory("residual", at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)
        return [kernel, *super().backward_inputs(at)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


class Gate(Modulate):
    """y = gate x, with a vector of a sample."""


class RepeatWords(Operator):
    """A text for every frame; the gradients of all are summed."""

    sums = True

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.outs), at.bytes(*self.ins))]


class SplitTokens(Operator):
    """Parts of a sequence, one behind the other, as tensors of their own: views, which take no time."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 0, 0)]


class JoinTokens(SplitTokens):
    """A sequence of parts that programs keep as tensors of their own: it takes no time."""


class SplitResults(SplitTokens):
    """Views of parts of a tensor whose gradients are concatenated by a kernel."""

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.outs), at.bytes(*self.ins))]


class SquaredError(Operator):
    """The mean squared error of predicted patches, against targets of the same size."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 2 * at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", 2 * at.bytes(*self.ins), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins
