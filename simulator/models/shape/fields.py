"""The fields of a stack of transformer layers with its input: what a job, a preset or a config says about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.parts import (
    MLA,
    Count,
    Depth,
    Flag,
    LinearAttention,
    MoEShape,
    Probability,
    ShapePart,
    Share,
    Size,
    StateSpace,
)


class TransformerFields(ShapePart):
    """Layers of a transformer, and the table of its vocabulary.

    The first five fields have no default. The other defaults describe a GPT: learned positions, layer norms, biases
    everywhere, a GELU MLP of width 4 h, a tied output layer. None (``null``) means the default.
    """

    layers: Depth
    """Transformer layers, L; with `ssm` the blocks of the pattern."""
    hidden: Size
    """Width of the residual stream, h (elements)."""
    heads: Size
    """Query heads, a."""
    vocab: Size
    """Vocabulary size without padding, V; frameworks pad it (`padded_vocab`)."""
    seq: Size
    """Default training sequence, T (tokens); with learned positions also the size of their table."""

    name: Annotated[str, Field(strict=True, min_length=1)] = "custom"
    """Name in reports."""
    mla: MLA | None = None
    """Multi-head latent attention, in place of multi-head or grouped-query attention."""
    moe: MoEShape | None = None
    """Experts, in place of the MLP of some layers."""
    ssm: StateSpace | None = None
    """Mamba-2 blocks: each layer is one block, as its pattern says."""
    linear_attention: LinearAttention | None = None
    """Linear attention in all layers but those of `full_every`."""
    kv_heads: Size = Field(default_factory=lambda fields: fields.get("heads", 1))
    """Key/value heads, k; fewer than `heads` is grouped-query attention. Default: `heads`."""
    head_dim: Size = Field(default_factory=lambda fields: _head_dim(fields))
    """Width of one head, d (elements). Default: hidden / heads, which must be an integer; with `mla` its `v`."""
    ffn: Size = Field(default_factory=lambda fields: 4 * fields.get("hidden", 1))
    """Inner width of the MLP, f (elements). Default: 4 hidden."""
    gated: Flag = False
    """True: SwiGLU or GeGLU with three matrices. False: GELU or squared ReLU with two."""
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"
    """Only learned positions have parameters."""
    relative_buckets: Size | None = None
    """Rows of a table of relative positions, with a number for each head that is added to scores (T5); one table for
    all layers. None: no table."""
    position_rows: Size = Field(default_factory=lambda fields: fields.get("seq", 1))
    """Rows of the table of learned positions. Default: `seq`; OPT has two more."""
    rope_share: Share = 1.0
    """Share of the width of a head with RoPE (GPT-NeoX: ``rotary_pct``)."""
    tied: Flag = True
    """The output layer shares the matrix of the embedding."""
    norm: Literal["layernorm", "rmsnorm", "layernorm1p", "rmsnorm1p", "layernorm0", "rmsnorm0"] = "layernorm"
    """RMS norms have a weight, the others a weight and a bias; layernorm1p and rmsnorm1p (Gemma) store weight - 1;
    layernorm0 (OLMo 1) and rmsnorm0 (nanochat) have no weights."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Where the norms of a layer are: before attention and MLP; after them, before the residual addition (OLMo 2,
    EXAONE 4); or both (Gemma 2 and 3)."""
    shared_norm: Flag = False
    """With `parallel_residual`: attention and MLP read the result of one norm (Falcon 7B, Cohere)."""
    norm_residual: Flag = False
    """The residual stream goes on from the results of the norms before attention and MLP (MiniMax-01); so norms behind
    residual additions are described (BERT), with that behind the embedding as the first."""
    embedding_norm: Flag = False
    """A norm right after the embedding (BLOOM)."""
    qk_layernorm: Flag | Literal["l2", "all", "layer"] = Field(
        default_factory=lambda fields: fields.get("mla") is not None
    )
    """RMS norms over each head of queries and keys, with one weight for all heads; with `mla`, where it is the default,
    over the latents. l2: without weights, in the layers with RoPE (Llama 4). all: over all heads together, with a
    weight for each element (OLMo 2). layer: as true, layer norms with a weight and a bias (Persimmon)."""
    qkv_bias: Flag | Literal["queries-values"] = Field(
        default_factory=lambda fields: _has_biases(fields) and fields.get("mla") is None
    )
    """Biases of queries, keys and values; queries-values: keys have none (Whisper). Default: True with layernorm and
    without `mla`."""
    proj_bias: Flag = Field(default_factory=lambda fields: _has_biases(fields))
    """Bias of the output layer of attention. Default: True with layernorm."""
    mlp_bias: Flag = Field(default_factory=lambda fields: _has_biases(fields))
    """Biases of MLPs and experts. Default: True with layernorm."""
    head: tuple[Literal["transform", "dense", "bias"], ...] = ()
    """What the output layer has: transform, in front of it a square linear layer with a bias, the activation and a norm
    (BERT); dense, the same without a norm, in front of classes; a bias (GPT-J, Phi 1 and 2)."""
    sinks: Flag = False
    """Every query head has a learned logit, which only its softmax counts (gpt-oss)."""
    attention_gate: Flag | Literal["heads"] = False
    """The result of attention is multiplied by the sigmoid of a projection as wide (Qwen3-Next); heads: each head by
    that of a single number (Laguna, Ling 3, LFM3)."""
    softcaps: tuple[Literal["attention", "logits"], ...] = ()
    """Which numbers pass c tanh(x / c) for some c: the scores of attention, the logits (Gemma 2)."""
    frames: Size | None = None
    """Frames of a video, each of seq / frames tokens: attention runs within every frame and, in the next layer, at
    every place of a frame across all frames (Latte, Open-Sora). None: one axis of positions."""
    bidirectional: Flag = Field(default_factory=lambda fields: fields.get("frames") is not None)
    """A token attends to all tokens of its sequence, or of its chunk (an encoder); otherwise to those before it."""
    parallel_residual: Flag = False
    """Attention and MLP both read the input of the layer, each through its own norm (GPT-NeoX)."""
    window: Size | None = None
    """Sliding window: tokens that a token attends to, itself included; None: all before it."""
    attention_chunk: Size | None = None
    """Chunked attention: a sequence is divided into chunks of so many tokens, and a token attends to those before it in
    its chunk (Llama 4: 8192); None: one chunk. Source: ``attention_chunk_size`` in ``transformers``."""
    projected_keys: Size | None = None
    """Linformer: two matrices [positions, projected_keys] of each layer, which its heads share, project the keys and
    values of all positions to so many (arXiv 2006.04768, section 4); None: no projection."""
    full_every: Count | tuple[Count, ...] = 0
    """The last of every `full_every` layers, or those of these numbers (from 0, ascending), have full attention despite
    a `window` (gpt-oss: 2), `attention_chunk` (Llama 4: 4), `blocks` or `linear_attention` (Qwen3-Next: 4); 0: none
    has."""
    full_rope: Flag = True
    """Where positions are rope: the layers of `full_every` have RoPE too (Llama 4, SmolLM3: False)."""
    mtp: Count = 0
    """Multi-token-prediction layers, on top of `layers`. Each is two norms (of the stream and of the next token's
    embedding), a projection from both (2 h) to h without bias and one layer of the last layer's kind; the embedding,
    the final norm and the output layer are those of the model. Source: DeepSeek-V3, section 2.2 (arXiv 2412.19437)."""
    dropout: Probability = 0.0
    """Probability on the embedding, on attention scores and on both residual branches; 0: no kernels for it."""

    @property
    def longest_input(self) -> int:
        """Positions that a table of learned ones has to have rows for."""
        return self.seq


def _head_dim(fields: Mapping[str, Any]) -> int:
    if fields.get("mla"):
        return int(fields["mla"].v)
    return max(1, int(fields.get("hidden", 1)) // int(fields.get("heads", 1)))


def _has_biases(fields: Mapping[str, Any]) -> bool:
    return fields.get("norm") == "layernorm"
