"""The operators of dense transformers: single operations over named dims with global sizes.

Samples ``b``, positions ``s``, of videos those in a frame, and frames ``u``, key positions ``t``, tokens of a text that
patches attend to ``w``, hidden ``h``, head width ``a``, feed-forward width ``f``, vocabulary ``v``, experts ``e``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, ClassVar

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.attention_mask import WHOLE, ScoreBlock
from meshcast.simulator.ir.layout import Layout, Tensor, required_layout
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.ops import BYTES, Attention, Collective, Gemm, Memory, StoredFormat, Work


class Boundary(Operator):
    """The end of a unit: no work; it brings the residual stream into the layout of a residual."""


@dataclass(frozen=True, eq=False)
class Embedding(Operator):
    """Embedding: rows of a table [v, h] looked up by ids [b, s]; where v is sharded, the outputs of ranks are summed.

    tied: whether the table is a copy of the model's first embedding.
    """

    tied: bool = False
    sums = True

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("embedding", at.bytes(*self.outs), at.bytes(*self.outs))]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        # Adds rows to an fp32 gradient: reads the incoming gradient, reads and writes four bytes an element.
        gradient = 4 * at.size(*self.outs)
        return [Memory("embedding", at.bytes(*self.outs) + gradient, gradient, backward=True)]

    def temporary_gradient_work(self, at: LocalShapes) -> list[Work]:
        # The temporary gradient of the whole table is set to zero first.
        return [Memory("zero-grad", 0, at.bytes(*self.weights))]

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True, eq=False)
class Residual(Operator):
    """Bias, dropout and addition in a kernel: y = ins[0] + dropout(ins[1] + bias), the bias of the linear before.

    With a single input (learned positions, embedding dropout) the second operand is a weight or absent.

    dropout: whether there is dropout.
    """

    dropout: bool = False

    @property
    def pass_through(self) -> list[Tensor]:
        """Inputs whose gradient is the gradient of the output itself, and takes no further memory."""
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


class Sum(Operator):
    """outs[i] = ins[i] + ins[n + i], for n outputs in a kernel."""

    @property
    def pass_through(self) -> list[tuple[Tensor, Tensor]]:
        """Every input with the output whose gradient is also its gradient."""
        return [(t, self.outs[i % len(self.outs)]) for i, t in enumerate(self.ins)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("add", at.bytes(*self.ins), at.bytes(*self.outs))]


@dataclass(frozen=True, eq=False)
class Elementwise(Operator):
    """One kernel over the elements of a tensor, as PyTorch runs it: conversion to another number format, product with a
    number, dropout.

    what: kind of the kernel, see `Memory`.
    dropout: whether it is dropout, whose mask of a byte an element is saved.
    """

    what: str = "convert"
    dropout: bool = False

    def _mask(self, at: LocalShapes) -> int:
        return at.size(*self.ins) if self.dropout else 0

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory(self.what, at.bytes(*self.ins), at.bytes(*self.outs) + self._mask(at))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory(self.what, at.bytes(*self.outs) + self._mask(at), at.bytes(*self.ins), backward=True)]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        return [("mask", self._mask(at), "workspace")] if self.dropout else []


class PromotedSum(Sum):
    """outs[0] = ins[0] + ins[1] in the wider number format of ins[1]; the gradient of ins[0] is converted back."""

    @property
    def pass_through(self) -> list[tuple[Tensor, Tensor]]:
        """The input with the output whose gradient is also its gradient."""
        return [(self.ins[1], self.outs[0])]

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("convert", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("convert", at.bytes(*self.outs), at.bytes(self.ins[0]), backward=True)]


class Norm(Operator):
    """Layer norm or RMS norm over h; the same backward kernel computes the weight gradients.

    Where h (or the width r of a latent) is sharded, a first kernel sums over the shard and an all-reduce adds the sums
    of every token, forward and backward: two fp32 values for a layer norm, a single value for an RMS norm (arXiv
        2104.05343,
    section 3). Heads are never sharded, so norms over the width of a head need no all-reduce.
    """

    widths: ClassVar[tuple[str, ...]] = ("h", "r")

    def forward(self, at: LocalShapes) -> list[Work]:
        read, write = at.bytes(*self.ins), at.bytes(*self.outs)
        return [*self._statistics(at, read, backward=False), Memory(self._what, read, write)]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        size = at.bytes(*self.ins)
        first = self._statistics(at, 2 * size, backward=True)
        return [*first, Memory(self._what, 2 * size, size, backward=True)]

    def _statistics(self, at: LocalShapes, read: int, backward: bool) -> list[Work]:
        """Returns the kernel and the all-reduce that sum over a sharded width; none where the width is not sharded."""
        width = next((dim for dim in self.widths if at.axes_of(dim)), "")
        if not width:
            return []
        tokens = sum(math.prod(n for dim, n in at.dims(t).items() if dim != width) for t in self.ins)
        values = 2 if self._what == "norm" else 1
        joined = Collective("all_reduce", BYTES["fp32"] * values * tokens, tuple(at.axes_of(width)))
        return [Memory(self._what, read, 0, backward), joined]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        """Returns mean and deviation of every row, or the root mean square, in fp32."""
        numbers = 1 if self.is_root_mean_square else 2
        return [("statistics", BYTES["fp32"] * numbers * self._rows(at), "workspace")]

    def _rows(self, at: LocalShapes) -> int:
        """Returns the rows that it normalises: tokens, or heads of tokens."""
        if weights := self.weights or self.shared_weights:
            widths = [at.size(weight) for weight in weights]
        else:
            dims = [next(dim for dim in ("a", *self.widths) if t.has(dim)) for t in self.ins]
            widths = [
                int(t.dims[dim].unit) if dim == "a" else at.dims(t)[dim] for t, dim in zip(self.ins, dims, strict=True)
            ]
        return sum(at.size(t) // width for t, width in zip(self.ins, widths, strict=False))

    @property
    def _what(self) -> str:
        """The kind of memory-bound kernel."""
        return "rms-norm" if self.is_root_mean_square else "norm"

    @property
    def is_root_mean_square(self) -> bool:
        """Whether it is an RMS norm, which has no bias."""
        return not any(weight.name.endswith("bias") for weight in self.weights)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.ins


@dataclass(frozen=True)
class QuantisedFormat:
    """A quantisation recipe for the GEMMs of linear layers.

    dtype: number format of the GEMMs.
    read: bytes read per element to cast an operand from bf16, as is and transposed, as the three GEMMs need it.
    write: bytes written per element by the same cast.
    scaling: see `Gemm.scaling`.

    Weights are cast once a step; that time is neglected.
    """

    dtype: str
    read: float
    write: float
    scaling: str = ""

    def cast(self, elements: int) -> Memory:
        """Returns the cast of an operand."""
        return Memory("cast", round(self.read * elements), round(self.write * elements))


QUANTISED = {
    "fp8-delayed": QuantisedFormat("fp8", 2, 2),  # the scale comes from the maxima of earlier steps
    "fp8-tensorwise": QuantisedFormat("fp8", 4, 2),  # another pass takes the maximum
    "fp8-rowwise": QuantisedFormat("fp8", 4, 2, "row"),  # torch._scaled_mm: CUTLASS, in the others cuBLAS
    "fp8-blockwise": QuantisedFormat("fp8", 2, 2),
    "mxfp8": QuantisedFormat("fp8", 2, 2 + 2 / 32),
    "nvfp4": QuantisedFormat("fp4", 4, 1 + 2 / 16),  # blocks of 16, and a scale a tensor
    "nvfp4-apart": QuantisedFormat("fp4", 6, 1 + 2 / 16),  # a kernel for rows, and another for the rotated columns
    "fp8": QuantisedFormat("fp8", 2, 2),
}
"""Recipes of NVIDIA Transformer Engine (docs, FP8 and FP4 primer) by their names in ``precision.compute``, and as its
older releases cast by them."""

CAST_APART = {"nvfp4": "nvfp4-apart"}
"""Recipes by which older releases cast rows and columns with a kernel each, by the newer names: the maxima, the rows
and the columns, after a Hadamard transform, are read singly (NVIDIA/TransformerEngine v2.8 to v2.13,
pytorch/csrc/quantizer.cpp, NVFP4Quantizer::quantize_impl); row_cast_col_hadamard_transform_cast_fusion.cu reads rows
and columns at once (@523801df7 of 2026-03-16)."""


@dataclass(frozen=True, eq=False)
class Cast(Operator):
    """Casts an activation by the recipe `quantised`; its gradient is not cast."""

    quantised: str = "fp8"

    def forward(self, at: LocalShapes) -> list[Work]:
        return [QUANTISED[self.quantised].cast(at.size(*self.ins))]


class SavedCast(Cast):
    """Converts a tensor to 8 bits as it is, without a scale, to save it so for the backward pass."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("cast", at.bytes(*self.ins), at.bytes(*self.outs))]


class Concat(Operator):
    """Concatenates its inputs."""

    def forward(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return [Memory("concat", at.bytes(*self.outs), at.bytes(*self.ins))]


@dataclass(frozen=True, eq=False)
class Linear(Operator):
    """A linear layer: outs[i] = ins[0] @ weights[i], all in a single GEMM; further weights are biases.

    grad_dtype: format of the gradient buffer to which the GEMM of the weight gradient adds its result.
    quantised: recipe (a key of `QUANTISED`) in whose format the input is, and to which the gradient of the output is
        cast; empty: none.
    stored: format in which its matrices are stored, of which a kernel makes copies in the format of the GEMMs before
        each pass, a matrix at a time; None: that of the GEMMs.
    whole: a single matrix computes all outputs, which are parts of the same tensor; otherwise the framework may have a
        matrix of each.
    """

    grad_dtype: str = "fp32"
    quantised: str = ""
    stored: StoredFormat | None = field(default=None, kw_only=True)
    whole: bool = field(default=False, kw_only=True)
    sums = True

    def _sizes(self, at: LocalShapes) -> tuple[int, int, int, int]:
        """Returns the size of the GEMM: rows (dims of both input and outputs), columns of all outputs, contracted size,
        batch."""
        taken, first = at.dims(self.ins[0]), self.outs[0]
        rows = math.prod(n for dim, n in taken.items() if first.has(dim))
        inner = math.prod(n for dim, n in taken.items() if not first.has(dim))
        columns = sum(math.prod(n for dim, n in at.dims(out).items() if dim not in taken) for out in self.outs)
        return rows, columns, inner, 1

    def _groups(self, at: LocalShapes) -> tuple[tuple[int, int], ...]:
        return ()

    def _product(self, at: LocalShapes, m: int, n: int, k: int, layout: str, **how: Any) -> Gemm:
        scaling = QUANTISED[self.quantised].scaling if self.quantised else ""
        groups, dtype = self._groups(at), self.ins[0].dtype
        return Gemm(m, n, k, self._sizes(at)[3], dtype, layout, what="linear", groups=groups, scaling=scaling, **how)

    def forward(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, _ = self._sizes(at)
        return [*self._convert_weights(at), self._product(at, rows, columns, inner, "tn")]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, _ = self._sizes(at)
        casts = [QUANTISED[self.quantised].cast(at.size(*self.outs))] if self.quantised else []
        return [*casts, *self._convert_weights(at), self._product(at, rows, inner, columns, "nn")]

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Its weights without biases."""
        return tuple(weight for weight in self.weights if len({*weight.dims} - {"e"}) == 2)

    @property
    def converted(self) -> StoredFormat | None:
        """The format from which its matrices are converted before each pass; None: they are not."""
        return None if self.quantised else self.stored

    def _convert_weights(self, at: LocalShapes) -> list[Work]:
        if self.converted is None:
            return []
        elements = at.size(*self.matrices)
        return [Memory("dequantise", round(self.converted.nbytes * elements), at.bytes(*self.matrices))]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        return [(0, 1, max(map(at.bytes, self.matrices)))] if self.converted is not None else []

    def cast_gradient_bytes(self, at: LocalShapes) -> int:
        return int(at.size(*self.outs) * BYTES[QUANTISED[self.quantised].dtype]) if self.quantised else 0

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        rows, columns, inner, _ = self._sizes(at)
        return [self._product(at, columns, inner, rows, "nt", accumulate=True, out_dtype=self.grad_dtype)]

    def temporary_gradient_work(self, at: LocalShapes) -> list[Work]:
        # Where the GEMM of the weight gradient adds to the main gradient, it sums that of the bias, too.
        return [Memory("bias-gradient", at.bytes(*self.outs), 0)] if len(self.weights) > len(self.outs) else []

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins


WHOLE_ROWS = 8
"""Elements in 16 bits of which a row has a multiple, where tensor cores read it as it lies."""


@dataclass(frozen=True, eq=False)
class Head(Linear):
    """The output layer, h to v, or to the logits of classes.

    tied: whether it shares the matrix of the embedding.
    recomputed: whether the backward pass computes the logits again.
    remade: bytes moved per logit to make the gradients of the logits again before that of the weights; 0: they stay.

    Logits in pieces are as many products, each of which reads the matrix, and adds to its gradient.
    """

    tied: bool = False
    recomputed: bool = False
    remade: int = 0

    def _product(self, at: LocalShapes, m: int, n: int, k: int, layout: str, **how: object) -> Gemm:
        whole, pieces = super()._product(at, m, n, k, layout, **how), self.outs[0].pieces
        if pieces == 1 or self._sizes(at)[1] % WHOLE_ROWS:  # batched products of other rows have other kernels
            return whole
        rows = -(-self._sizes(at)[0] // pieces)
        return replace(whole, batch=pieces, k=rows) if layout == "nt" else replace(whole, batch=pieces, m=rows)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        again = self.forward(at) if self.recomputed else []
        return [*again, *super().backward_inputs(at)]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        again = [Memory("cross-entropy", self.remade * at.size(*self.outs), 0, backward=True)] if self.remade else []
        return [*again, *super().backward_weights(at)]


@dataclass(frozen=True, eq=False)
class Rope(Operator):
    """Rotary position embedding (RoPE) on queries and keys: rotated elements are read and written once per pass.

    share: share of the elements that are rotated.
    """

    share: float = 1.0

    def _rotate(self, at: LocalShapes, backward: bool) -> list[Work]:
        read, write = (round(self.share * at.bytes(*tensors)) for tensors in (self.ins, self.outs))
        return [Memory("rope", read, write, backward)]

    def forward(self, at: LocalShapes) -> list[Work]:
        return self._rotate(at, backward=False)

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        return self._rotate(at, backward=True)


def count_pairs(tokens: int, document: int | None, window: int | None) -> float:
    """Returns the pairs of queries and keys of a sequence that the causal mask leaves.

    document: tokens of the documents that fill it, within each of which queries see keys; None: a single one.
    window: keys that a query sees at most; None: all.
    """
    document = min(document or tokens, tokens)
    visible = min(window or document, document)
    return tokens / document * visible * (document - visible / 2) if tokens else 0.0


@dataclass(frozen=True, eq=False)
class CoreAttention(Operator):
    """Attention core: softmax(Q K^T) V for queries [b, s, a] over keys and values [b, t, a].

    Of a sliced sequence, the queries of a slice also attend to the keys and values of all earlier slices, which are in
    memory. Backward, the last slice comes first, and the gradients of these keys and values are summed over slices.

    head_dim: width of a head of queries and keys.
    kernel: ``flash``: a fused kernel per pass, which saves the log-sum-exp of each row (4 bytes per row and head);
        ``unfused``: two batched GEMMs around softmax and dropout kernels over all scores (no causal saving), which save
        the softmax, and with dropout its mask and result (2 + 1 + 2 bytes per score in 16 bits; arXiv 2205.05198,
        section 4.1).
    dropout: whether there is dropout on the scores.
    value_dim: width of a head of values.
    window: number of latest positions that a query attends to (sliding window); None: all.
    tokens_before: tokens of the sequence before this slice.
    tokens_after: tokens of the sequence after this slice.
    balanced: of a sliced sequence, the devices of a pipeline exchange scores so that each slice takes the mean of all.
    document: tokens of the documents packed into a sequence, within each of which fused kernels attend; None: a single
        document.
    chunk: tokens of the chunks of a sequence, within each of which fused kernels attend (Llama 4); None: a single
        chunk.
    bidirectional: a query attends to all positions, or to those of its chunk, in place of those before it.
    block: the block of scores that this is, where attention is computed block by block; the log-sum-exp of its rows is
        saved to merge the blocks.
    """

    head_dim: int = 128
    kernel: str = "flash"
    dropout: bool = False
    value_dim: int = 128
    window: int | None = None
    tokens_before: int = 0
    tokens_after: int = 0
    document: int | None = None
    chunk: int | None = None
    block: ScoreBlock | None = None
    bidirectional: bool = False
    balanced: bool = False
    label = "core_attn"

    @property
    def computed_block(self) -> ScoreBlock:
        """The scores that kernels compute: unfused kernels compute a block without its mask."""
        return self.block if self.block is not None and self.kernel == "flash" else WHOLE

    def _visible_positions(self, position: int) -> int:
        """Counts the positions before `position` that a query there attends to."""
        return position % self.chunk if self.chunk else min(self.window or position, position)

    def pairs_before(self, position: int) -> float:
        """Pairs of queries before `position` and keys that the causal mask, window, chunks and documents leave."""
        chunk = min(self.chunk or position, position)
        return position // chunk * self._pairs_of(chunk) + self._pairs_of(position % chunk) if position else 0.0

    def _pairs_of(self, tokens: int) -> float:
        """Counts the pairs within `tokens` of a chunk: of documents, there are as many as fill it, or a document that
        it cuts."""
        if self.bidirectional:
            return tokens * min(self.document or tokens, tokens)
        return count_pairs(tokens, self.document, self.window)

    @property
    def along(self) -> str:
        """The dim of the positions of keys, and of queries where these have it; it is the same at all others, as for
        samples."""
        return next((old for old, new in self.ins[1].renamed.items() if new == "t"), "s")

    def _shape(self, at: LocalShapes) -> tuple[int, int, int, int, int]:
        """Samples, query positions, key positions, heads, key heads."""
        queries, keys = at.dims(self.ins[0]), at.dims(self.ins[1])
        t = keys["t"] + self._visible_positions(self.tokens_before)
        along = self.along if self.ins[0].has(self.along) else "s"  # keys may be those of other tokens, a text
        b = math.prod(n for dim, n in queries.items() if dim not in (along, "a"))
        return b, queries[along], t, queries["a"] // self.head_dim, keys["a"] // self.head_dim

    def _fused_kernel(self, at: LocalShapes, backward: bool) -> list[Work]:
        b, q, t, heads, kv_heads = self._shape(at)
        keys = at.dims(self.ins[1])["t"]
        dims = self.head_dim, self.value_dim
        if self.block is not None:
            most, mean = self.block.most_loaded(keys), self.block.mean_share(keys)
            q, t, share = int(q * most.queries), int(t * most.keys), float(mean / (most.queries * most.keys))
            pace = float(most.computed_share(keys) / mean)
            return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype, pace)]
        if self.balanced:
            every = self.tokens_before + keys + self.tokens_after
            t = (every + keys) // 2
            share = self.pairs_before(every) / every / t
            return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype)]
        d = min(keys, self.document or keys, self.chunk or keys)
        if d < keys and self.tokens_before % d == 0:
            # Documents or chunks are so many short sequences. The last chunk may be shorter: the share is a mean.
            share = self.pairs_before(keys) / (keys * d)
            return [Attention(b * q / d, d, d, heads, kv_heads, *dims, share, backward, self.ins[0].dtype)]
        share = (self.pairs_before(self.tokens_before + keys) - self.pairs_before(self.tokens_before)) / (keys * t)
        return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype)]

    def _add_slice_gradients(self, at: LocalShapes) -> list[Work]:
        """Adds the gradients of the next slice to the gradients of keys and values."""
        taken_over, _ = self.slice_gradient_bytes(at)
        return [Memory("add", 2 * taken_over, taken_over)] if taken_over else []

    def scores(self, at: LocalShapes) -> int:
        """Returns the number of scores."""
        b, q, t, heads, _ = self._shape(at)
        return b * heads * q * t

    def heads_per_key(self, at: LocalShapes) -> int:
        """Returns the query heads that share a key head."""
        _, _, _, heads, kv_heads = self._shape(at)
        return heads // kv_heads

    def forward(self, at: LocalShapes) -> list[Work]:
        if self.kernel == "flash":
            return self._fused_kernel(at, backward=False)
        b, q, t, heads, _ = self._shape(at)
        d, v, dtype, scores = self.head_dim, self.value_dim, self.ins[0].dtype, self.scores(at)
        held = count_score_bytes(self, at)
        works: list[Work] = [Gemm(q, t, d, b * heads, dtype, what="scores"), Memory("softmax", held, held)]
        if self.dropout:
            works.append(Memory("dropout", held, held + scores))
        return [*works, Gemm(q, v, t, b * heads, dtype, what="scores")]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        if self.kernel == "flash":
            return [*self._fused_kernel(at, backward=True), *self._add_slice_gradients(at)]
        b, q, t, heads, _ = self._shape(at)
        d, v, n, dtype, scores = self.head_dim, self.value_dim, b * heads, self.ins[0].dtype, self.scores(at)
        from_output: list[Work] = [
            Gemm(q, t, v, n, dtype, "nn", what="scores"),
            Gemm(t, v, q, n, dtype, "nt", what="scores"),
        ]
        to_inputs: list[Work] = [
            Gemm(q, d, t, n, dtype, "nn", what="scores"),
            Gemm(t, d, q, n, dtype, "nt", what="scores"),
        ]
        held = count_score_bytes(self, at)
        drop: list[Work] = [Memory("dropout", held + scores, held)] if self.dropout else []
        softmax = Memory("softmax", 2 * held, held)
        return [*from_output, *drop, softmax, *to_inputs, *self._add_slice_gradients(at)]

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (*self.ins, *self.outs) if self.kernel == "flash" else self.ins

    @property
    def read_by_later_slices(self) -> tuple[Tensor, ...]:
        return self.ins[1:] if self.tokens_after else ()

    def slice_gradient_bytes(self, at: LocalShapes) -> tuple[int, int]:
        keys = at.dims(self.ins[1])["t"]
        per_token = at.bytes(*self.ins[1:]) // keys
        taken_over = self._visible_positions(self.tokens_before + keys) if self.tokens_after else 0
        return per_token * taken_over, per_token * self._visible_positions(self.tokens_before)

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        b, q, _, heads, _ = self._shape(at)
        sums = [("lse", 4 * b * heads * q, "workspace")]
        if self.kernel == "flash":
            return sums
        scores = self.scores(at)
        held = count_score_bytes(self, at)
        dropped = [("dropped", held, "workspace"), ("mask", scores, "workspace")] if self.dropout else []
        return [("softmax", held, "workspace"), *dropped, *(sums if self.block is not None else [])]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        if self.kernel == "flash":
            return []
        scores, softmax = count_score_bytes(self, at), 2 + self.dropout
        # Forward the scores until the softmax; backward the gradients of the softmax result and of the scores.
        return [(0, softmax, scores), (softmax, softmax + 2, scores)] if backward else [(0, 1, scores)]


def count_score_bytes(core: CoreAttention, at: LocalShapes) -> int:
    """Returns the bytes of all scores, in the format of the operands."""
    return BYTES[core.ins[0].dtype] * core.scores(at)


class Activation(Operator):
    """GELU of an input, or the gated product of two."""

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
    """Cross-entropy over v. Where v is sharded, there are three all-reduces of an fp32 value per token: the maximum,
    the logit of the target, the sum of exponentials (arXiv 1909.08053, section 3).

    traffic: bytes moved per logit, forward and backward.
    kept: bytes saved per logit for the backward pass.
    peaks: bytes held per logit at most in the backward pass, with a whole and with a sharded vocabulary: what is kept,
        the gradient of the logits and temporaries; 0: no temporaries.
    kept_of_all: whether what is kept is kept of all pieces of the logits.
    whole_vocabulary: whether every rank has the logits of the whole vocabulary, with Megatron's shards.
    """

    traffic: tuple[int, int] = (14, 6)
    kept: int = 4
    peaks: tuple[int, int] = (0, 0)
    kept_of_all: bool = False
    whole_vocabulary: bool = False
    sums = True

    def output_layout(self, tensor: Tensor, divide: Mapping[str, str]) -> Layout:
        return required_layout(tensor, divide)

    def forward(self, at: LocalShapes) -> list[Work]:
        logits = at.size(self.ins[0])
        axes = tuple(at.axes_of("v"))
        joins = [Collective("all_reduce", at.bytes(*self.outs), axes) for _ in range(3)] if axes else []
        # The backward pass reads the result of the last kernel, so it waits for none of the all-reduces.
        first = self.traffic[0] // 2
        kernels = [Memory("cross-entropy", part * logits, 0) for part in (first, self.traffic[0] - first)]
        return [kernels[0], *joins, kernels[1]]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        # Temporaries are what a first kernel hands to a second.
        traffic, logits = self.traffic[1], at.size(self.ins[0])
        parts = (traffic // 2, traffic - traffic // 2) if self._temporaries(at) else (traffic,)
        return [Memory("cross-entropy", part * logits, 0, backward=True) for part in parts]

    def saved_buffers(self, at: LocalShapes) -> list[tuple[str, int, str]]:
        pieces = 1 if self.kept_of_all else self.ins[0].pieces
        return [("softmax", -(-self.kept * at.size(self.ins[0]) // pieces), "logits")]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        # Forward the copies in fp32 that the backward pass has gradients of lie beside the logits themselves.
        temporaries = self._temporaries(at) - (0 if backward else int(BYTES[self.ins[0].dtype]))
        nbytes = -(-temporaries * at.size(self.ins[0]) // self.ins[0].pieces)
        return [(0, 1 if backward else len(self.forward(at)) - 1, nbytes)] if temporaries > 0 else []

    def _temporaries(self, at: LocalShapes) -> int:
        """Bytes per logit beside what is kept and the gradient of the logits."""
        gradient = int(BYTES[self.ins[0].gradient.dtype])
        return max(0, self.peaks[bool(at.axes_of("v"))] - self.kept - gradient)
