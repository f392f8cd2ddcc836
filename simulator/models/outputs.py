"""What a model computes behind its last layer in place of logits of the vocabulary: logits of classes, of sequences or
of tokens, or vectors of sequences for a contrastive loss."""

from __future__ import annotations

from collections.abc import Mapping

from meshcast.simulator.ir.layout import Dim, Tensor
from meshcast.simulator.ir.modules import LocalShapes, Module, Operator
from meshcast.simulator.ir.operators import Activation, Head, Loss, Norm
from meshcast.simulator.ir.ops import Gemm, Memory, Work
from meshcast.simulator.models.ends import Pool
from meshcast.simulator.models.parts import ModelOutput
from meshcast.simulator.models.shapes import Shapes


class ComparePairs(Operator):
    """The contrastive loss of the vectors [b, h] of a rank's sequences, half of them queries and half texts: each of
    the former is compared with each of the latter."""

    def _pairs(self, at: LocalShapes) -> tuple[int, int]:
        """Returns the pairs of a rank, and the width of a vector."""
        sizes = at.dims(self.ins[0])
        return max(1, sizes["b"] // 2), sizes["h"]

    def _product(self, m: int, n: int, k: int, layout: str) -> Gemm:
        return Gemm(m, n, k, 1, self.ins[0].dtype, layout, what="similarity")

    def forward(self, at: LocalShapes) -> list[Work]:
        pairs, width = self._pairs(at)
        return [self._product(pairs, pairs, width, "tn"), Memory("cross-entropy", 14 * pairs**2, 0)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        pairs, width = self._pairs(at)
        softmax = Memory("cross-entropy", 6 * pairs**2, 0, backward=True)
        return [softmax, self._product(pairs, width, pairs, "nn"), self._product(pairs, width, pairs, "nt")]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("softmax", 4 * self._pairs(at)[0] ** 2, "logits")]


def build_output(shapes: Shapes, output: ModelOutput, x: Tensor) -> list[Module]:
    """Builds the way from the result `x` of the final norm to the loss."""
    modules, rows = list[Module](), shapes.token_dims
    samples = {"b": rows["b"]}
    if output.pools_states:
        pooled = Tensor("pooled", {**samples, "h": shapes.hidden_dim}, shapes.dtype)
        modules.append(Pool("pool", (x,), (pooled,), mean=output.pool == "mean"))
        x, rows = pooled, samples
    if "dense" in shapes.model.head:
        x = _project(shapes, modules, x, rows)
    if output.classes is None:
        unit = Tensor("normalised", {**rows, "h": shapes.hidden_dim}, shapes.dtype)
        modules.append(Norm("normalise", (x,), (unit,)))
        return [*modules, ComparePairs("loss", (unit,), (Tensor("loss", samples, "fp32"),))]
    classes = Dim(output.classes)
    logits = Tensor("logits", {**rows, "n": classes}, shapes.dtype)
    weights = [shapes.weight("wclasses", h=shapes.hidden_dim, n=classes)]
    weights += [shapes.weight("bclasses", n=classes)] if "bias" in shapes.model.head else []
    modules.append(Head("classes", (x,), (logits,), tuple(weights), shapes.grad_dtype))
    if output.pool == "logits":
        taken = Tensor("logits.taken", {**samples, "n": classes}, shapes.dtype)
        modules.append(Pool("pool", (logits,), (taken,)))
        logits, rows = taken, samples
    return [*modules, Loss("loss", (logits,), (Tensor("loss", rows, "fp32"),), (), *shapes.loss[:4])]


def _project(shapes: Shapes, modules: list[Module], x: Tensor, rows: Mapping[str, Dim]) -> Tensor:
    """Adds a square linear layer and its activation to the modules; returns their output."""
    linear, act = (Tensor(f"head.{name}", {**rows, "h": shapes.hidden_dim}, x.dtype) for name in ("dense", "act"))
    weight = shapes.weight("head.dense", g=shapes.hidden_dim, h=shapes.hidden_dim)
    bias = shapes.weight("head.dense.bias", h=shapes.hidden_dim)
    modules += shapes.linear("head.dense", x.rename_dims(h="g"), (linear,), weight, bias)
    modules.append(Activation("head.act", (linear,), (act,)))
    return act
