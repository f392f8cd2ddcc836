"""The leaves of a model: its operations, each over named dims with global sizes.

Samples ``b``, positions ``s``, key positions ``t``, hidden ``h``, head width ``a``, feed-forward width ``f``,
vocabulary ``v``, experts ``e``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from simulator.ir.attention_mask import WHOLE, ScoreBlock
from simulator.ir.layout import Layout, Tensor, required_layout
from simulator.ir.modules import LocalShapes, Operator
from simulator.ir.ops import BYTES, Attention, Collective, Gemm, Memory, Work


@dataclass(frozen=True, eq=False)
class Boundary(Operator):
    """Where the residual stream enters or leaves a unit: no work, its input handed on, in the layout of a residual."""


@dataclass(frozen=True, eq=False)
class Embedding(Operator):
    """Rows of a table [v, h] picked by ids [b, s]; where v is divided, a rank adds zeros for rows it lacks.

    tied: the table is a copy of the model's first one.
    """

    tied: bool = False

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("embedding", at.bytes(*self.outs), at.bytes(*self.outs))]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        # Rows are added to an fp32 gradient: read the incoming gradient, read and write four bytes an element.
        return [Memory("embedding", at.bytes(*self.outs) + 4 * at.size(*self.outs), 4 * at.size(*self.outs))]

    def temporary_gradient_work(self, at: LocalShapes) -> list[Work]:
        # A gradient of all rows, set to zero first.
        return [Memory("zero-grad", 0, at.bytes(*self.weights))]

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Residual(Operator):
    """Bias, dropout and addition in one kernel: y = ins[0] + dropout(ins[1] + bias). The bias is of the linear before.

    With one input (positions, embedding dropout) the second operand is a weight or nothing.
    """

    dropout: bool = False

    @property
    def pass_through(self) -> list[Tensor]:
        """Inputs whose gradient from here is the gradient of the output itself, and takes no memory of its own."""
        return [t for i, t in enumerate(self.ins) if not self.dropout or (i == 0 and len(self.ins) > 1)]

    def forward(self, at: LocalShapes) -> list[Work]:
        mask = at.size(*self.outs) if self.dropout else 0
        return [Memory("residual", at.bytes(*self.ins), at.bytes(*self.outs) + mask)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        if not self.dropout:
            return []
        size = at.bytes(*self.outs)
        return [Memory("dropout", size + at.size(*self.outs), size)]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("mask", at.size(*self.outs), "workspace")] if self.dropout else []


@dataclass(frozen=True, eq=False)
class Sum(Operator):
    """outs[i] = ins[i] + ins[n + i], for n outputs in one kernel."""

    @property
    def pass_through(self) -> list[tuple[Tensor, Tensor]]:
        """Every input, with the output whose gradient is its own."""
        return [(t, self.outs[i % len(self.outs)]) for i, t in enumerate(self.ins)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*self.ins), at.bytes(*self.outs))]


@dataclass(frozen=True, eq=False)
class Norm(Operator):
    """Layer or RMS norm over h; the weight gradients come out of the same backward kernel.

    Where h (or the width r of a latent) is divided, a first kernel sums over the part of a rank and an all-reduce joins
    the sums of every token, forward and backward: two fp32 values, one without a shift (arXiv 2104.05343, section 3).
    Heads are never cut, so norms over the width of each have nothing to join.
    """

    def forward(self, at: LocalShapes) -> list[Work]:
        read, write = at.bytes(*self.ins), at.bytes(*self.outs)
        return [*self._statistics(at, read, backward=False), Memory(self._what, read, write)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        size = at.bytes(*self.ins)
        first = self._statistics(at, 2 * size, backward=True)
        return [*first, Memory(self._what, 2 * size, size, backward=True)]

    def _statistics(self, at: LocalShapes, read: int, backward: bool) -> list[Work]:
        """What joins the parts of a divided width."""
        width = next((dim for dim in ("h", "r") if at.axes_of(dim)), "")
        if not width:
            return []
        tokens = sum(math.prod(n for dim, n in at.dims(t).items() if dim != width) for t in self.ins)
        values = 2 if self._what == "norm" else 1
        joined = Collective("all_reduce", BYTES["fp32"] * values * tokens, tuple(at.axes_of(width)))
        return [Memory(self._what, read, 0, backward), joined]

    @property
    def _what(self) -> str:
        """RMS norms have no shift."""
        return "norm" if any(one.name.endswith("bias") for one in self.weights) else "rms-norm"

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True)
class QuantisedFormat:
    """A format of fewer bits for the products of linear layers.

    dtype: what the products run in. read, write: bytes moved per element to cast one operand from bf16, in both the
    orders that the three products need. Weights are cast once a step, which counts for nothing.
    """

    dtype: str
    read: float
    write: float

    def cast(self, elements: int) -> Memory:
        return Memory("cast", round(self.read * elements), round(self.write * elements))


QUANTISED = {
    "fp8-delayed": QuantisedFormat("fp8", 2, 2),  # the scale is known before, from the maxima of earlier steps
    "fp8-tensorwise": QuantisedFormat("fp8", 4, 2),  # one pass more, to find the maximum
    "fp8-rowwise": QuantisedFormat("fp8", 4, 2),
    "fp8-blockwise": QuantisedFormat("fp8", 2, 2),
    "mxfp8": QuantisedFormat("fp8", 2, 2 + 2 / 32),
    "nvfp4": QuantisedFormat("fp4", 4, 1 + 2 / 16),  # blocks of 16, and one scale a tensor
    "fp8": QuantisedFormat("fp8", 2, 2),
}
"""By the words of ``precision.compute``; the recipes of NVIDIA Transformer Engine (docs, FP8 and FP4 primer)."""


@dataclass(frozen=True, eq=False)
class Cast(Operator):
    """An activation in the format `quantised`; its gradient stays as it is."""

    quantised: str = "fp8"

    def forward(self, at: LocalShapes) -> list[Work]:
        return [QUANTISED[self.quantised].cast(at.size(*self.ins))]


@dataclass(frozen=True, eq=False)
class Concat(Operator):
    """Its inputs side by side."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class Linear(Operator):
    """outs[i] = ins[0] @ weights[i], all in one GEMM; further weights are biases.

    Weight gradients are added to a gradient buffer of `grad_dtype` inside the GEMM. quantised: a key of `QUANTISED`,
    where the input is in that format; the gradient of the output is cast to it.
    """

    grad_dtype: str = "fp32"
    quantised: str = ""

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        """Rows (what input and outputs share), columns of all outputs, the contracted size; how many such products."""
        given, first = at.dims(self.ins[0]), self.outs[0]
        rows = math.prod(n for dim, n in given.items() if first.has(dim))
        inner = math.prod(n for dim, n in given.items() if not first.has(dim))
        columns = sum(math.prod(n for dim, n in at.dims(out).items() if dim not in given) for out in self.outs)
        return rows, columns, inner, 1

    def _groups(self, at: LocalShapes) -> tuple[tuple[int, int], ...]:
        """See `Gemm.groups`."""
        return ()

    def forward(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, count = self._sizes(at)
        return [Gemm(rows, columns, inner, count, self.ins[0].dtype, "tn", what="linear", groups=self._groups(at))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, count = self._sizes(at)
        casts = [QUANTISED[self.quantised].cast(at.size(*self.outs))] if self.quantised else []
        product = Gemm(rows, inner, columns, count, self.ins[0].dtype, "nn", what="linear", groups=self._groups(at))
        return [*casts, product]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, count = self._sizes(at)
        dtypes = self.ins[0].dtype, "nt", True, self.grad_dtype
        return [Gemm(columns, inner, rows, count, *dtypes, "linear", self._groups(at))]

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Head(Linear):
    """The output layer, h to v. A tied one reads the embedding's table."""

    tied: bool = False


@dataclass(frozen=True, eq=False)
class Rope(Operator):
    """Rotary positions on queries and keys: each turned element read and written once per direction.

    share: of the elements that are turned.
    """

    share: float = 1.0

    def _turn(self, at: LocalShapes, backward: bool) -> list[Work]:
        read, write = (round(self.share * at.bytes(*tensors)) for tensors in (self.ins, self.outs))
        return [Memory("rope", read, write, backward)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return self._turn(at, backward=False)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return self._turn(at, backward=True)


@dataclass(frozen=True, eq=False)
class CoreAttention(Operator):
    """Softmax(Q K^T) V for queries [b, s, a] over keys and values [b, t, a].

    kernel ``flash``: one fused kernel a direction, that keeps the row sums (4 bytes a row and head). ``unfused``:
    two batched GEMMs around softmax and dropout kernels over all scores (no causal saving), which keep the
    softmax, and under dropout a mask and the result (2 + 1 + 2 bytes a score; arXiv 2205.05198, section 4.1).
    head_dim: width of a head of queries and keys; value_dim: of values. window: latest positions that a query meets.

    Of a slice of a sequence, queries also meet the keys and values of the slices before it, which are there; backward,
    what they add to the gradients of those is summed over the slices, the last one first. before, behind: positions of
    the sequence in front of the slice, and behind it.

    block: of attention that is computed block by block, this one; the sums of its rows are kept for whoever joins them.
    """

    head_dim: int = 128
    kernel: str = "flash"
    dropout: bool = False
    value_dim: int = 128
    window: int | None = None
    before: int = 0
    behind: int = 0
    block: ScoreBlock | None = None
    label = "core_attn"

    @property
    def computed_block(self) -> ScoreBlock:
        """What takes part in a block: where kernels know no mask, all."""
        return self.block if self.block is not None and self.kernel == "flash" else WHOLE

    def _met(self, position: int) -> int:
        """Positions in front of one that a query there meets."""
        return min(self.window or position, position)

    def _pairs(self, position: int) -> float:
        """Pairs of queries in front of a position and keys, of those that the causal mask and the window leave."""
        return self._met(position) * (position - self._met(position) / 2)

    def _shape(self, at: LocalShapes) -> tuple[int, int, int, int, int]:
        """Samples, query positions, key positions, heads, key heads."""
        queries, keys = at.dims(self.ins[0]), at.dims(self.ins[1])
        t = keys["t"] + self._met(self.before)
        return queries["b"], queries["s"], t, queries["a"] // self.head_dim, keys["a"] // self.head_dim

    def _fused(self, at: LocalShapes, backward: bool) -> list[Work]:
        b, q, t, heads, kv_heads = self._shape(at)
        own = at.dims(self.ins[1])["t"]
        dims = self.head_dim, self.value_dim
        if self.block is not None:
            most, mean = self.block.most_loaded(own), self.block.mean_share(own)
            q, t, share = int(q * most.queries), int(t * most.keys), float(mean / (most.queries * most.keys))
            pace = float(most.computed_share(own) / mean)
            return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype, pace)]
        share = (self._pairs(self.before + own) - self._pairs(self.before)) / (own * t)
        return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype)]

    def _summed(self, at: LocalShapes) -> list[Work]:
        """The gradients that were found, added to those made here."""
        found, _ = self.slice_gradient_bytes(at)
        return [Memory("add", 2 * found, found)] if found else []

    def _scores(self, at: LocalShapes) -> int:
        b, q, t, heads, _ = self._shape(at)
        return b * heads * q * t

    def forward(self, at: LocalShapes) -> list[Work]:
        if self.kernel == "flash":
            return self._fused(at, backward=False)
        b, q, t, heads, _ = self._shape(at)
        d, v, dtype, scores = self.head_dim, self.value_dim, self.ins[0].dtype, self._scores(at)
        works: list[Work] = [Gemm(q, t, d, b * heads, dtype, what="scores"), Memory("softmax", 2 * scores, 2 * scores)]
        if self.dropout:
            works.append(Memory("dropout", 2 * scores, 3 * scores))
        return [*works, Gemm(q, v, t, b * heads, dtype, what="scores")]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        if self.kernel == "flash":
            return [*self._fused(at, backward=True), *self._summed(at)]
        b, q, t, heads, _ = self._shape(at)
        d, v, n, dtype, scores = self.head_dim, self.value_dim, b * heads, self.ins[0].dtype, self._scores(at)
        from_output: list[Work] = [
            Gemm(q, t, v, n, dtype, "nn", what="scores"),
            Gemm(t, v, q, n, dtype, "nt", what="scores"),
        ]
        to_inputs: list[Work] = [
            Gemm(q, d, t, n, dtype, "nn", what="scores"),
            Gemm(t, d, q, n, dtype, "nt", what="scores"),
        ]
        drop: list[Work] = [Memory("dropout", 3 * scores, 2 * scores)] if self.dropout else []
        softmax = Memory("softmax", 4 * scores, 2 * scores)
        return [*from_output, *drop, softmax, *to_inputs, *self._summed(at)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs) if self.kernel == "flash" else self.ins

    @property
    def read_by_later_slices(self) -> tuple[Tensor, ...]:
        return self.ins[1:] if self.behind else ()

    def slice_gradient_bytes(self, at: LocalShapes) -> tuple[int, int]:
        own = at.dims(self.ins[1])["t"]
        each = at.bytes(*self.ins[1:]) // own
        return each * self._met(self.before + own) if self.behind else 0, each * self._met(self.before)

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        b, q, _, heads, _ = self._shape(at)
        sums = [("lse", 4 * b * heads * q, "workspace")]
        if self.kernel == "flash":
            return sums
        scores = self._scores(at)
        dropped = [("dropped", 2 * scores, "workspace"), ("mask", scores, "workspace")] if self.dropout else []
        return [("softmax", 2 * scores, "workspace"), *dropped, *(sums if self.block is not None else [])]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if self.kernel == "flash":
            return []
        scores, softmax = 2 * self._scores(at), 2 + self.dropout
        # Forward the scores on their way to the softmax; backward the gradients behind it and in front of it.
        return [(0, softmax, scores), (softmax, softmax + 2, scores)] if backward else [(0, 1, scores)]


@dataclass(frozen=True, eq=False)
class Activation(Operator):
    """GELU of one input, or the gated product of two."""

    @property
    def _what(self) -> str:
        return "gelu" if len(self.ins) == 1 else "activation"

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(self._what, at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(self._what, at.bytes(*self.ins, *self.outs), at.bytes(*self.ins), backward=True)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Loss(Operator):
    """Cross-entropy over v. Where v is divided, three all-reduces of one fp32 value a token join the parts: the
    maximum, the logit of the target, the sum of exponentials (arXiv 1909.08053, section 3).

    traffic: bytes moved per logit, forward and backward; kept: bytes kept per logit for the backward pass.
    """

    traffic: tuple[int, int] = (14, 6)
    kept: int = 4

    def output_layout(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        return required_layout(tensor, divide)

    def forward(self, at: LocalShapes) -> list[Work]:
        logits = at.size(self.ins[0])
        axes = tuple(at.axes_of("v"))
        joins = [Collective("all_reduce", at.bytes(*self.outs), axes) for _ in range(3)] if axes else []
        # The backward pass reads what the last kernel writes with the joined sums, so it needs no wait of its own.
        first = self.traffic[0] // 2
        kernels = [Memory("cross-entropy", part * logits, 0) for part in (first, self.traffic[0] - first)]
        return [kernels[0], *joins, kernels[1]]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("cross-entropy", self.traffic[1] * at.size(self.ins[0]), 0, backward=True)]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("softmax", self.kept * at.size(self.ins[0]), "logits")]
