"""Operators of attention to blocks of keys: the choice of blocks, entries that stand for several keys, attention.

Positions of a sequence are ``p`` where all of them have to be on a rank, entries are ``t``.
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.layout import Tensor
from meshcast.simulator.ir.modules import LocalShapes, Operator
from meshcast.simulator.ir.operators import CoreAttention, count_pairs
from meshcast.simulator.ir.ops import Attention, Gemm, Memory, Work
from meshcast.simulator.ir.sparse_attention_operators import ChooseKeys

STATISTICS = 8
"""Bytes of the maximum and the sum of exponentials, in fp32, of a row of scores of a block."""


def count_block_pairs(tokens: float, document: float | None, size: int, most: int) -> float:
    """Returns the pairs of queries and keys of a sequence where a query attends to its own block, up to itself, and to
    all keys of others before it; its own key counts half.

    document: tokens of the documents that fill the sequence, each with blocks of its own; None: a single one.
    size: tokens of a block.
    most: blocks that a query attends to at most, its own included.
    """
    document = min(document or tokens, tokens)
    everything = min(size * most, document)
    whole, rest = divmod(document - everything, size)
    own = (everything**2 + whole * size**2 + rest**2) / 2
    return tokens / document * (own + (document - everything) * (most - 1) * size) if tokens else 0.0


def count_visits(tokens: float, document: float | None, size: int, most: int | None) -> float:
    """Returns the pairs of queries and blocks that they attend to. most: blocks of a query, None: all before it;
    others as in `count_block_pairs`."""
    document = min(document or tokens, tokens)
    whole, rest = divmod(document, size)
    limit = whole + 1 if most is None else most
    few = min(limit, whole)
    visits = size * (few * (few + 1) / 2 + (whole - few) * limit) + rest * min(whole + 1, limit)
    return tokens / document * visits if tokens else 0.0


def count_entries(tokens: float, length: int, stride: int) -> int:
    """Counts the entries of a sequence, each of `length` tokens, `stride` tokens apart."""
    return max(0, int(tokens - length) // stride + 1)


def count_entry_pairs(tokens: float, document: float | None, length: int, stride: int) -> float:
    """Returns the pairs of queries and entries that end before them or at them, see `count_entries`."""
    document = min(document or tokens, tokens)
    entries = count_entries(document, length, stride)
    pairs = entries * (document - length + 1) - stride * entries * (entries - 1) / 2
    return tokens / document * pairs if tokens else 0.0


@dataclass(frozen=True, eq=False)
class AttentionToBlocks(CoreAttention):
    """Attention to chosen blocks of keys; ins[3] are their numbers [b, s, ...].

    Kernels go over blocks of keys: all queries that attend to a block are gathered, and each gets a partial result of
    every block, in the format of the queries, with a maximum and a sum, which another kernel merges (``combine`` of
    MiniMax-AI/MSA; MoBA, arXiv 2502.13189, algorithm 1; Flash Sparse Attention, arXiv 2508.18224). Where a query
    attends to all keys before it, they are those of other attention.

    size: tokens of a block.
    most: blocks that a query attends to at most.
    teaches: an indexer learns the distribution of the scores of a block's keys, which are computed once more for it
        (``kl`` of MiniMax-AI/MSA).
    """

    size: int = 128
    most: int = 1
    teaches: bool = False

    def _pairs_of(self, tokens: int) -> float:
        return count_block_pairs(tokens, self.document, self.size, self.most)

    def _chooses(self, at: LocalShapes) -> bool:
        """Returns whether there are keys before a query that it does not attend to."""
        keys = at.dims(self.ins[1])["t"]
        return min(keys, self.document or keys) > self.size * self.most

    def _partial_bytes(self, at: LocalShapes) -> int:
        """Bytes of the partial results of all queries; 0 where each attends to a single block."""
        if self.most == 1:
            return 0
        b, q, t, heads, _ = self._shape(at)
        visits = b * q / t * count_visits(t, self.document, self.size, self.most)
        return round(visits * heads * (at.bytes(*self.outs) / (b * q * heads) + STATISTICS))

    def _fused_kernel(self, at: LocalShapes, backward: bool) -> list[Work]:
        works = super()._fused_kernel(at, backward)
        if self._chooses(at):
            works = [replace(work, chosen="blocks") if isinstance(work, Attention) else work for work in works]
            partial = self._partial_bytes(at)
            works += [Memory("add", partial, partial)] if partial and not backward else []
        if not (backward and self.teaches):
            return works
        half = max(1, self.head_dim // 2)
        scores = [
            replace(work, qk_dim=half, v_dim=half, backward=False, chosen="blocks")
            for work in works
            if isinstance(work, Attention)
        ]
        return [*works, *scores]

    def temporary_buffers(self, at: LocalShapes, backward: bool) -> list[tuple[int, int, int]]:
        fused = self.kernel == "flash" and not backward and self._chooses(at)
        partial = self._partial_bytes(at) if fused else 0
        return [(0, 1, partial)] if partial else super().temporary_buffers(at, backward)


@dataclass(frozen=True, eq=False)
class ChooseBlocks(ChooseKeys):
    """The best blocks of each query [b, p, n, k], a number of them for each head of an indexer, by the largest of the
    scores of queries [b, p, i] and the keys [b, p, d] of a block.

    Forward a kernel computes the scores that the causal mask leaves and writes the largest of each block in fp32, of
    which another finds the best. Backward as in `ChooseKeys`, of the keys of chosen blocks.

    size: tokens of a block.
    """

    size: int = 128
    chosen = "blocks"

    def _pairs(self, tokens: int, most: int | None) -> float:
        if most is None:
            return count_pairs(tokens, self.document, None)
        return count_block_pairs(tokens, self.document, self.size, most)

    def forward(self, at: LocalShapes) -> list[Work]:
        samples, tokens, heads, _ = self._sizes(at)
        largest = 4 * samples * heads * round(count_visits(tokens, self.document, self.size, None))
        return [*self._products(at, None, 1), Memory("softmax", largest, largest + at.bytes(*self.outs))]


@dataclass(frozen=True, eq=False)
class ChooseByEntries(Operator):
    """The best blocks of each query, chosen by scores of queries ins[0] [b, s, a] and of entries, without gradients:
    ins[1] are entries [b, t, a], or keys [b, t, a] of whose means a kernel makes them.

    A kernel computes the scores and writes their sums over the heads that choose together, in fp32; another finds the
    largest of each block, unless entries are blocks, and a third the best blocks.

    width: elements of a head.
    size: tokens of a block.
    length, stride: of entries, see `count_entries`.
    groups_of: query heads that choose together.
    coarse: scores are normalised by those of entries that are so many times longer and further apart; None: not.
    pools: whether ins[1] are keys.
    document: tokens of the documents packed into a sequence; None: a single one.
    """

    width: int = 128
    size: int = 64
    length: int = 64
    stride: int = 64
    groups_of: int = 1
    coarse: int | None = None
    pools: bool = True
    document: int | None = None

    def forward(self, at: LocalShapes) -> list[Work]:
        queries, asked = at.dims(self.ins[0]), self.ins[1]
        tokens, heads = queries["s"], queries["a"] // self.width
        samples = math.prod(n for dim, n in queries.items() if dim not in ("s", "a"))
        kv_heads, groups = at.dims(asked)["a"] // self.width, heads // self.groups_of
        works: list[Work] = []
        if self.pools:
            entries = sum(count_entries(tokens, self.length * n, self.stride * n) for n in (1, self.coarse or 1))
            works.append(Memory("activation", at.bytes(asked), at.bytes(asked) * entries // tokens))
        for times in (self.coarse, 1) if self.coarse else (1,):
            works += self._score(samples, tokens, heads, kv_heads, times)
        sums = 4 * samples * groups * round(count_entry_pairs(tokens, self.document, self.length, self.stride))
        largest = 4 * samples * groups * round(count_visits(tokens, self.document, self.size, None))
        of_blocks = 0 if self.stride == self.size else largest
        return [*works, Memory("softmax", sums + of_blocks, sums + of_blocks + at.bytes(*self.outs))]

    def _score(self, samples: int, tokens: int, heads: int, kv_heads: int, times: int) -> list[Work]:
        """Returns the products of queries with entries that are so many times longer and further apart."""
        length, stride = self.length * times, self.stride * times
        entries = count_entries(tokens, length, stride)
        if not entries:
            return []
        share = count_entry_pairs(tokens, self.document, length, stride) / (tokens * entries)
        half, dtype = max(1, self.width // 2), self.ins[0].dtype
        sizes = samples, tokens, entries, heads, kv_heads, half, half
        return [Attention(*sizes, share, False, dtype, chosen="blocks")]


@dataclass(frozen=True, eq=False)
class MakeEntries(Operator):
    """Entries of keys and values, outs[i] [b, t, a] of ins[i] [b, p, a], each of `length` tokens and `stride` tokens
    after the one before: means, or with `weights` linear layers of each head from all their elements [r].

    widths: elements of a head of keys, and of values.
    """

    widths: tuple[int, int] = (128, 128)
    length: int = 32
    stride: int = 16
    grad_dtype: str = "fp32"

    def _products(self, at: LocalShapes) -> list[tuple[int, int, int, int]]:
        """Returns rows, columns, contracted elements and batch of the product of keys, and of that of values."""
        sizes = []
        for entries, width in zip(self.outs, self.widths, strict=True):
            dims = at.dims(entries)
            samples = math.prod(n for dim, n in dims.items() if dim not in ("t", "a"))
            sizes.append((dims["t"], width, width * self.length, samples * dims["a"] // width))
        return sizes

    def _gemms(self, at: LocalShapes, layout: str) -> list[Work]:
        works: list[Work] = []
        for m, n, k, batch in self._products(at):
            rows, columns, inner = {"tn": (m, n, k), "nn": (m, k, n), "nt": (n, k, m)}[layout]
            gemm = Gemm(rows, columns, inner, batch, self.ins[0].dtype, layout, what="linear")
            works.append(replace(gemm, accumulate=True, out_dtype=self.grad_dtype) if layout == "nt" else gemm)
        return works

    def forward(self, at: LocalShapes) -> list[Work]:
        if self.weights:
            return self._gemms(at, "tn")
        return [Memory("activation", at.bytes(*self.ins), at.bytes(*self.outs))]

    def backward_inputs(self, at: LocalShapes) -> list[Work]:
        works = self._gemms(at, "nn") if self.weights else []
        return [*works, Memory("activation", at.bytes(*self.outs), at.bytes(*self.ins), backward=True)]

    def backward_weights(self, at: LocalShapes) -> list[Work]:
        return self._gemms(at, "nt") if self.weights else []

    @property
    def saved_for_weights(self) -> tuple[Tensor, ...]:
        return self.ins if self.weights else ()


@dataclass(frozen=True, eq=False)
class AttentionToWholeEntries(CoreAttention):
    """Attention to entries ins[1:] [b, t, a] that end before a query or at it, see `count_entries`.

    length, stride: of entries.
    """

    length: int = 32
    stride: int = 16

    def _fused_kernel(self, at: LocalShapes, backward: bool) -> list[Work]:
        b, q, t, heads, kv_heads = self._shape(at)
        share = count_entry_pairs(q, self.document, self.length, self.stride) / (q * t)
        dims = self.head_dim, self.value_dim
        return [Attention(b, q, t, heads, kv_heads, *dims, share, backward, self.ins[0].dtype, chosen="blocks")]
