"""Parts of the shape of a model that few models have: several residual streams, attention to compressed entries."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.parts import Count, Flag, ShapePart, Size, SparseIndex


class HyperConnections(ShapePart):
    """Several residual streams of a token. In front of attention, and in front of the MLP, coefficients from all
    streams collapse them to the input of the block; behind it they mix the streams, and add the block's result to each.
    Behind the last layer further coefficients collapse them. Sources: Hyper-connections (arXiv 2409.19606); mHC, whose
    mixing matrix is doubly stochastic (arXiv 2512.24880).
    """

    streams: Size
    """Residual streams of a token, n."""
    mixes: Flag = True
    """A matrix n x n of each token mixes the streams; false: they go on as they are (Hunyuan 4)."""

    @property
    def behind(self) -> int:
        """Coefficients of a token behind a block."""
        return self.streams * (1 + self.streams * self.mixes)

    def parameters(self, hidden: int) -> int:
        """Counts the parameters of the connection of a block: the matrix of all coefficients, their biases, and a
        factor for each kind. hidden: width of a stream."""
        return (self.streams + self.behind) * (self.streams * hidden + 1) + 2 + self.mixes

    def last_parameters(self, hidden: int) -> int:
        """Counts those of the connection behind the last layer."""
        return self.streams * (self.streams * hidden + 1) + 1

    def flops(self, hidden: int) -> int:
        """Counts the FLOPs of a token in the products of the connection of a block."""
        return 2 * (self.streams + self.behind) * self.streams * hidden + self.mixing_flops(hidden)

    def mixing_flops(self, hidden: int) -> int:
        """Counts those of them that mix streams."""
        return 2 * self.streams**2 * hidden * self.mixes

    def last_flops(self, hidden: int) -> int:
        """Counts the FLOPs of a token in the connection behind the last layer."""
        return 2 * self.streams**2 * hidden


class AttentionResiduals(ShapePart):
    """The input of attention, and of the MLP, is a sum of what blocks of layers have added to the embedding, each over
    its layers, and of the embedding: weights of a token are a softmax over its products with a trained query behind a
    norm. A layer adds to the sum of its block. Behind the last layer a further query collapses them. Source: Attention
    Residuals (Moonshot AI 2026); ``_forward_attn_residual`` of the code of Kimi K3.
    """

    block: Size
    """Layers of a block, the first of which begins a sum."""

    def count_sums(self, layer: int) -> int:
        """Counts the sums of a token in front of a layer, from 0: the embedding, and those of blocks that began."""
        return -(-layer // self.block) + 1

    def opens(self, layer: int) -> bool:
        """Returns whether a layer begins a sum."""
        return layer % self.block == 0

    def read_sums(self, layers: int) -> int:
        """Counts the sums that all layers, and what is behind them, read; the first layer's attention reads the
        embedding as it is."""
        read = (2 * self.count_sums(layer) + self.opens(layer) for layer in range(layers))
        return sum(read) - 1 + self.count_sums(layers)

    def parameters(self, hidden: int) -> int:
        """Counts the parameters of a layer: two queries with their norms. hidden: width of a sum."""
        return 4 * hidden

    def flops(self, hidden: int, layers: int) -> int:
        """Counts the FLOPs of a token in the products of all layers with sums."""
        return 4 * hidden * self.read_sums(layers)


class CompressedAttention(ShapePart):
    """Attention of queries from a latent to the tokens of a window, and to entries that stand for tokens before.

    All heads share a key of a token, which is its value too; the result is rotated back. An entry is a sum over `rate`
    tokens of a projection as wide as a head, weighted by the softmax of another over these tokens, and normalised. The
    result is projected to the width of the stream in two steps: each group of heads to a latent, and all latents.
    Source: DeepSeek-V4, section 2.3; ``DeepseekV4Attention`` of ``transformers``.
    """

    q_lora_rank: Size
    """Width of the latent of queries, which a norm follows."""
    out_groups: Size = 1
    """Groups of heads whose results are projected to a latent each."""
    out_rank: Size
    """Width of the latent of a group."""
    rate: Size | None = None
    """Tokens from one entry to the next; None: there are no entries."""
    overlaps: Flag = False
    """An entry is over twice the tokens: a token has a projection for its own entry, and one for the next."""
    index: SparseIndex | None = None
    """An indexer that chooses among entries; None: a query attends to all before it. Its keys are compressed, too."""

    def entries(self, tokens: int) -> int:
        """Counts the entries of a sequence."""
        return max(1, tokens // self.rate) if self.rate else 0

    def entry_width(self, dim: int) -> int:
        """Width of what a token is projected to for its entries, and of their weights. dim: width of an entry."""
        return dim * (1 + self.overlaps) if self.rate else 0

    def weights(self, hidden: int, heads: int, dim: int) -> int:
        """Counts the elements of the matrices of a layer but for those behind attention. dim: width of a head."""
        rank, index = self.q_lora_rank, self.index
        weights = hidden * rank + rank * heads * dim + hidden * dim + 2 * hidden * self.entry_width(dim)
        if index:
            weights += 2 * hidden * self.entry_width(index.dim) + rank * index.heads * index.dim + hidden * index.heads
        return weights

    def out_weights(self, hidden: int, heads: int, dim: int) -> int:
        """Counts the elements of the matrices behind attention."""
        return self.out_rank * (heads * dim + self.out_groups * hidden)

    def own_parameters(self, dim: int) -> int:
        """Counts the parameters beside matrices: norms of latent, keys and entries, and a bias of the weights of
        entries for each of its tokens. dim: width of a head."""
        widths = [dim, *([self.index.dim] if self.index else [])] if self.rate else []
        entries = sum((self.rate or 0) * self.entry_width(width) + width for width in widths)
        return self.q_lora_rank + dim + entries


class BlockIndex(ShapePart):
    """An indexer that scores keys for blocks: a query of each of its heads and one key of a token, projected from the
    input of the layer, each behind an RMS norm and RoPE. A head chooses blocks for as many heads of attention."""

    heads: Size
    """Heads of the indexer; MiniMax-M3 has one for each key/value head."""
    dim: Size
    """Width of one of these heads (elements)."""


class BlockAttention(ShapePart):
    """Attention to blocks of keys: a query attends to its own block, up to itself, and to those before it with the best
    scores. All query heads of a key/value head attend to the same blocks, unless `each_head`.

    A block has the best of the scores of its keys, of an indexer (MiniMax-M3, arXiv 2606.13392, section 3), or of
    entries that stand for several tokens: means of their keys (MoBA, arXiv 2502.13189, section 2.2; InfLLM v2, arXiv
    2509.24663), or what a linear layer makes of these. With `branches` the results of attention to the blocks, to these
    entries and to a window are multiplied by a gate of each token and head, and added (NSA, arXiv 2502.11089, section
    3).
    """

    size: Size
    """Tokens of a block."""
    top_k: Size
    """Blocks that a query attends to at most: its own, and all that are always chosen, included."""
    from_tokens: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = 0
    """Sequences with fewer tokens have dense attention, and no choice of blocks (MiniCPM4: 8192)."""
    index: BlockIndex | None = None
    """An indexer whose scores choose blocks; None: those of entries do."""
    length: Size = Field(default_factory=lambda fields: fields.get("size", 1))
    """Tokens that an entry stands for. Default: those of a block."""
    stride: Size = Field(default_factory=lambda fields: fields.get("length", 1))
    """Tokens from one entry to the next. Default: `length`."""
    coarse: Size | None = None
    """Scores of entries are normalised by those of others, for so many times the tokens, and as much further apart
    (InfLLM v2: 4); None: they are not."""
    each_head: Flag = False
    """Every query head chooses blocks of its own (MoBA)."""
    branches: Flag = False
    """Attention to entries and to a window are branches beside that to blocks (NSA)."""
    window: Size | None = None
    """Tokens of the window of its branch."""
    own_keys: Flag = False
    """Every branch has projections to keys and values of its own."""
    pool: Literal["mean", "linear"] = "mean"
    """What makes entries of keys and values: means of their tokens, or a linear layer of each key/value head from all
    elements of these and, of keys, a learned position of each."""

    def weights(self, hidden: int, heads: int, keys: int, values: int) -> int:
        """Counts the elements of the matrices that read the stream, beside those of other attention. heads: query
        heads. keys, values: widths of keys and values."""
        index = hidden * (self.index.heads + 1) * self.index.dim if self.index else 0
        return index + self.branches * hidden * (3 * heads + 2 * self.own_keys * (keys + values))

    def pool_weights(self, keys: int, values: int, kv_heads: int) -> int:
        """Counts the elements of the matrices that make entries. keys, values: widths of keys and values."""
        return self.length * (keys**2 + values**2) // kv_heads if self.pool == "linear" else 0

    def own_parameters(self, keys: int) -> int:
        """Counts the parameters beside matrices: norms of the indexer, positions of tokens in an entry. keys: width of
        keys."""
        return (2 * self.index.dim if self.index else 0) + self.length * keys * (self.pool == "linear")


class DistanceProfiles(ShapePart):
    """A bias of scores by the distance of query and key, in place of positions: a state of every token and head is
    multiplied with trained profiles. Source: ``InklingRelativeLogits`` of ``transformers``.
    """

    width: Size
    """Elements of the state of a head."""
    extent: Size
    """Distances that have a bias (tokens); in layers with a window those of it."""

    def parameters(self, hidden: int, heads: int) -> int:
        """Counts the parameters of a layer. hidden: width of the stream."""
        return self.width * (hidden * heads + self.extent)

    def flops(self, hidden: int, heads: int) -> int:
        """Counts the FLOPs of a token in their products."""
        return 2 * heads * self.width * (hidden + self.extent)


class AltUp(ShapePart):
    """Several residual streams, of which a layer runs over the first alone (AltUp, arXiv 2301.13310; Gemma 3n). Its
    coefficients, from the first, predict all streams by a matrix; behind the layer others correct them by what it has
    changed. Streams begin as projections of the embedding, and end in projections that are averaged.

    The input of attention also passes a low-rank projection with a norm, whose result is added behind attention
    (LAuReL, arXiv 2411.07501).
    """

    streams: Size
    """Residual streams of a token, n."""
    laurel_rank: Size
    """Width of the low-rank projection."""

    def parameters(self, hidden: int) -> int:
        """Counts the parameters of a layer: a router with its norm, coefficients, a scale, and the low-rank projection
        with its norm. hidden: width of a stream."""
        n = self.streams
        return hidden * (n + 2) + n**3 + n**2 + hidden * (2 * self.laurel_rank + 1)

    def end_parameters(self, hidden: int) -> int:
        """Counts those of the projections in front of the layers, and behind them."""
        return 2 * (self.streams - 1) * hidden**2

    def flops(self, hidden: int) -> int:
        """Counts the FLOPs of a token in the products of a layer."""
        n = self.streams
        return 2 * (2 * hidden * n + n**3 + n**2 + 2 * hidden * self.laurel_rank) + self.mixing_flops(hidden)

    def mixing_flops(self, hidden: int) -> int:
        """Counts those of them that predict streams."""
        return 2 * self.streams**2 * hidden

    def end_flops(self, hidden: int) -> int:
        """Counts the FLOPs of a token in the projections in front of the layers, and behind them."""
        return 2 * self.end_parameters(hidden)


class SharedBlock(ShapePart):
    """Blocks of attention and an MLP whose weights several layers use (Zamba2, arXiv 2411.15242).

    They read the stream and the embedding side by side, behind a norm over both; attention is as wide, and its result
    passes a norm and the MLP, without residual additions. A linear layer of each use projects the result, which is
    added to the input of the Mamba block, and not to the stream. Each use has adapters beside the first linear layer of
    the MLP.
    """

    blocks: Size = 1
    """Blocks that uses take by turns."""
    adapter_rank: Count = 0
    """Width of the adapters of a use; 0: there are none."""
    adapts_attention: Flag = False
    """Each use has adapters of queries, keys and values too."""

    def parameters(self, hidden: int, widths: int, output: int, mlp: int) -> int:
        """Counts the parameters of a block. hidden: width of the stream. widths: of queries, keys and values together.
        output: of the result of attention. mlp: parameters of an MLP."""
        return 2 * hidden * (1 + widths) + output * hidden + hidden + mlp

    def use_parameters(self, hidden: int, widths: tuple[int, ...], ups: int) -> int:
        """Counts those of a use: a linear layer and adapters. widths: of queries, keys and values. ups: of the results
        of the first linear layer of the MLP together."""
        rank = self.adapter_rank
        attention = sum(rank * (2 * hidden + width) for width in widths) if self.adapts_attention else 0
        return hidden * hidden + rank * (hidden + ups) + attention
