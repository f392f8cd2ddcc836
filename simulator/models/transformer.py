"""The shape of one stack of transformer layers with its input, and its parameter counts: what a model and its branches
have in common.

A shape says nothing about parallelism, number formats and GPUs, which belong to the job. Letters used in this package:
L layers, h hidden, a heads, k key/value heads, d width of a head, f width of the MLP, V vocabulary, T (or seq)
positions of a sequence, E experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from hardware.errors import ModelError
from simulator.models.parts import MLA, Count, Depth, Flag, MoEShape, Probability, ShapePart, Share, Size, StateSpace


class LayerKind(NamedTuple):
    """The kind of a layer; layers of one kind have the same modules.

    Attributes:
        experts: whether it has experts.
        local: whether its attention is local: a sliding window, or chunks.
        block: in a hybrid model its only block, a letter of `StateSpace.pattern`; otherwise empty, and the layer has
            attention and then an MLP or experts.
        routed: number of routed experts; 0: it has none.
        along: of a video, the dim along which its attention runs: ``s``, within a frame, or ``u``, across frames.
    """

    experts: bool
    local: bool
    block: str = ""
    routed: int = 0
    along: str = ""

    @property
    def has_attention(self) -> bool:
        """Whether it has attention."""
        return self.block in ("", "*")

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP, in place of experts."""
        return self.block == "-" or (not self.block and not self.experts)

    @property
    def has_mamba(self) -> bool:
        """Whether it has a Mamba-2 block."""
        return self.block == "M"


class Transformer(ShapePart):
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
    kv_heads: Size = Field(default_factory=lambda given: given.get("heads", 1))
    """Key/value heads, k; fewer than `heads` is grouped-query attention. Default: `heads`."""
    head_dim: Size = Field(default_factory=lambda given: _head_dim(given))
    """Width of one head, d (elements). Default: hidden / heads, which must be an integer; with `mla` its `v`."""
    ffn: Size = Field(default_factory=lambda given: 4 * given.get("hidden", 1))
    """Inner width of the MLP, f (elements). Default: 4 hidden."""
    gated: Flag = False
    """True: SwiGLU or GeGLU with three matrices. False: GELU or squared ReLU with two."""
    positions: Literal["learned", "rope", "alibi", "none"] = "learned"
    """Only learned positions have parameters."""
    position_rows: Size = Field(default_factory=lambda given: given.get("seq", 1))
    """Rows of the table of learned positions. Default: `seq`; OPT has two more."""
    rope_share: Share = 1.0
    """Share of the width of a head with RoPE (GPT-NeoX: ``rotary_pct``)."""
    tied: Flag = True
    """The output layer shares the matrix of the embedding."""
    norm: Literal["layernorm", "rmsnorm", "layernorm1p"] = "layernorm"
    """rmsnorm has a weight, the others a weight and a bias (layernorm1p stores weight - 1)."""
    embedding_norm: Flag = False
    """A norm right after the embedding (BLOOM)."""
    qk_layernorm: Flag | Literal["l2"] = Field(default_factory=lambda given: given.get("mla") is not None)
    """RMS norms over each head of queries and keys, with one weight for all heads; with `mla`, where it is the default,
    over the latents. l2: without weights, in the layers with RoPE (Llama 4)."""
    qkv_bias: Flag = Field(default_factory=lambda given: _has_biases(given) and given.get("mla") is None)
    """Biases of queries, keys and values. Default: True with layernorm and without `mla`."""
    proj_bias: Flag = Field(default_factory=lambda given: _has_biases(given))
    """Bias of the output layer of attention. Default: True with layernorm."""
    mlp_bias: Flag = Field(default_factory=lambda given: _has_biases(given))
    """Biases of MLPs and experts. Default: True with layernorm."""
    frames: Size | None = None
    """Frames of a video, each of seq / frames tokens: attention runs within every frame and, in the next layer, at
    every place of a frame across all frames (Latte, Open-Sora). None: one axis of positions."""
    bidirectional: Flag = Field(default_factory=lambda given: given.get("frames") is not None)
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
    full_every: Count = 0
    """The last of every `full_every` layers has full attention in spite of `window` (gpt-oss: 2) or `attention_chunk`
    (Llama 4: 4); 0: none has."""
    full_rope: Flag = True
    """Where positions are rope: the layers of `full_every` have RoPE too (Llama 4: False)."""
    mtp: Count = 0
    """Multi-token-prediction layers, on top of `layers`. Each is two norms (of the stream and of the next token's
    embedding), a projection from both (2 h) to h without bias and one layer of the last layer's kind; the embedding,
    the final norm and the output layer are those of the model. Source: DeepSeek-V3, section 2.2 (arXiv 2412.19437)."""
    dropout: Probability = 0.0
    """Probability on the embedding, on attention scores and on both residual branches; 0: no kernels for it."""

    @model_validator(mode="after")
    def _relations(self) -> Transformer:
        if self.mla is None and "head_dim" not in self.model_fields_set and self.hidden % self.heads:
            raise ModelError(
                "hidden",
                f"it must be a multiple of heads ({self.heads}) when head_dim is not given",
                f"Give head_dim, or hidden {self.hidden // self.heads * self.heads or self.heads}",
                self.hidden,
            )
        self._mask_relations()
        if self.frames:
            self._video_relations(self.frames)
        if self.heads % self.kv_heads:
            divisors = [n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0]
            raise ModelError(
                "kv_heads",
                f"it must divide heads ({self.heads}), for each key/value head serves equally many queries",
                f"Possible: {', '.join(map(str, divisors[:20]))}",
                self.kv_heads,
            )
        if self.positions == "rope" and self.mla is None and self.rope_width % 2:
            if self.rope_share == 1:
                rule, remedy = "rope rotates pairs of elements, so it must be even", "Give an even head_dim"
                raise ModelError("head_dim", rule, remedy, self.head_dim)
            rule = f"rope rotates pairs of elements; of heads {self.head_dim} wide it would rotate {self.rope_width}"
            raise ModelError("rope_share", rule, f"Give an even number over {self.head_dim}", self.rope_share)
        if self.positions == "learned" and self.position_rows < self.seq:
            rule = f"the table of positions needs a row for each token of a sequence (seq {self.seq})"
            raise ModelError("position_rows", rule, "Give at least as many, or leave it out", self.position_rows)
        if self.mla:
            self._latent_relations(self.mla)
        if self.moe:
            self._expert_relations(self.moe)
        if self.ssm:
            self._hybrid_relations(self.ssm)
        if self.projected_keys:
            self._projection_relations(self.projected_keys)
        return self

    def _mask_relations(self) -> None:
        if self.window is not None and self.attention_chunk is not None:
            rule = "a layer has a window or chunks"
            raise ModelError("attention_chunk", rule, "Leave one of them out", self.attention_chunk)
        if self.bidirectional and self.window is not None:
            rule = "a token of a bidirectional layer attends to all tokens, or to those of its chunk"
            raise ModelError("window", rule, "Leave it out, or give attention_chunk", self.window)
        if self.full_every and self.window is None and self.attention_chunk is None:
            rule = "without a window or chunks every layer attends to everything"
            remedy = "Give window or attention_chunk too, or leave full_every out"
            raise ModelError("full_every", rule, remedy, self.full_every)
        if not self.full_rope and (not self.full_every or self.positions != "rope" or self.mla):
            rule = "without RoPE can be the layers of full_every, where positions are rope and there is no mla"
            raise ModelError("full_rope", rule, "Leave it out", False)

    def _projection_relations(self, positions: int) -> None:
        if not self.bidirectional:
            rule = "projected keys are of all positions, so that attention is bidirectional"
            raise ModelError("projected_keys", rule, "Give bidirectional: true", positions)
        for word, value in (("attention_chunk", self.attention_chunk), ("frames", self.frames), ("ssm", self.ssm)):
            if value:
                shown = value if isinstance(value, int) else None
                raise ModelError(word, "models with projected keys are supported without it", "Leave it out", shown)

    def _video_relations(self, frames: int) -> None:
        if self.seq % frames:
            near = max(1, round(self.seq / frames)) * frames
            raise ModelError("seq", f"every one of {frames} frames has equally many tokens", f"Give {near}", self.seq)
        if not self.bidirectional:
            rule = "attention within frames and across frames is bidirectional"
            raise ModelError("bidirectional", rule, "Leave it out", False)
        others = ("window", self.window), ("attention_chunk", self.attention_chunk), ("ssm", self.ssm)
        for word, value in (*others, ("mtp", self.mtp)):
            if value:
                shown = value if isinstance(value, int) else None
                raise ModelError(word, "models of videos (frames) are supported without it", "Leave it out", shown)

    def _latent_relations(self, mla: MLA) -> None:
        if self.kv_heads != self.heads:
            rule = f"with mla keys and values are expanded for every head ({self.heads})"
            raise ModelError("kv_heads", rule, "Leave it out", self.kv_heads)
        if self.head_dim != mla.v:
            rule = f"with mla the widths of a head are given there; this one is its v ({mla.v})"
            raise ModelError("head_dim", rule, "Leave it out", self.head_dim)
        if self.positions != "rope":
            rule = "latent attention has rope"
            raise ModelError("positions", rule, "Give `positions: rope`", self.positions)
        if mla.qk_rope % 2:
            rule, remedy = "rope rotates pairs of elements, so it must be even", "Give an even width"
            raise ModelError("mla.qk_rope", rule, remedy, mla.qk_rope)
        if self.qk_layernorm == "l2":
            raise ModelError("qk_layernorm", "norms over latents have weights", "Give true or false", "l2")
        if self.qkv_bias:
            raise ModelError("qkv_bias", "latent attention is supported without biases", "Leave it out", True)

    def _expert_relations(self, moe: MoEShape) -> None:
        if moe.top_k > (least := min(moe.expert_counts)):
            rule = f"a token passes each expert at most once, and there are {least}"
            raise ModelError("moe.top_k", rule, f"Give at most {least}", moe.top_k)
        firsts = [first for first, _ in moe.experts_from]
        if firsts != sorted({*firsts}) or (firsts and firsts[-1] >= self.layers):
            rule = f"its pairs name layers in ascending order, each once, below {self.layers}"
            raise ModelError("moe.experts_from", rule, "Write [[first layer, experts], ...]", firsts)
        if moe.residual and not moe.shared_experts:
            rule = "it weighs the shared experts against the routed ones, and there are none"
            raise ModelError("moe.residual", rule, "Give shared_experts: 1, or leave it out", True)
        if moe.first_dense > self.layers:
            rule = f"there are {self.layers} layers in all"
            raise ModelError("moe.first_dense", rule, f"Give at most {self.layers}", moe.first_dense)
        if bool(moe.shared_experts) != bool(moe.shared_ffn):
            rule = f"it is the inner width of the shared experts together, and there are {moe.shared_experts}"
            raise ModelError("moe.shared_ffn", rule, "Give both or neither", moe.shared_ffn)

    def _hybrid_relations(self, ssm: StateSpace) -> None:
        if len(ssm.pattern) != self.layers:
            rule = f"it has a letter for each of the {self.layers} layers, and {len(ssm.pattern)} letters are given"
            raise ModelError("ssm.pattern", rule, f"Correct it, or give `layers: {len(ssm.pattern)}`", ssm.pattern)
        if ssm.heads % ssm.groups:
            rule = f"each group has equally many of the {ssm.heads} heads"
            raise ModelError("ssm.groups", rule, f"{math.gcd(ssm.heads, ssm.groups)} would work", ssm.groups)
        if ("E" in ssm.pattern) != (self.moe is not None):
            rule = "a model with experts has layers E in its pattern, and one without has none"
            raise ModelError("ssm.pattern", rule, "Give both moe and layers E, or neither", ssm.pattern)
        if self.moe and (self.moe.first_dense or self.moe.every > 1):
            rule = "the pattern of ssm says which layers have experts"
            raise ModelError("moe.first_dense or moe.every", rule, "Leave them out")
        others = ("parallel_residual", self.parallel_residual), ("mtp", self.mtp), ("bidirectional", self.bidirectional)
        for word, value in (*others, ("window", self.window), ("attention_chunk", self.attention_chunk)):
            if value:
                raise ModelError(word, "models with state-space layers are supported without it", "Leave it out", value)

    # -------------------------------------------------------------------------------- layers and widths

    @property
    def every_layer(self) -> range:
        """Numbers of all layers, without those of multi-token prediction."""
        return range(self.layers)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) has experts."""
        return self.kind(layer).experts

    def is_local(self, layer: int) -> bool:
        """Whether `layer` (from 0) has the window or chunks."""
        return self.kind(layer).local

    def kind(self, layer: int) -> LayerKind:
        """The kind of `layer` (from 0)."""
        if self.ssm:
            block = self.ssm.pattern[layer]
            return LayerKind(block == "E", False, block, self.moe.experts_of(layer) if self.moe and block == "E" else 0)
        moe, limited = self.moe, self.window is not None or self.attention_chunk is not None
        experts = moe is not None and layer >= moe.first_dense and (layer - moe.first_dense + 1) % moe.every == 0
        routed = moe.experts_of(layer) if moe and experts else 0
        if self.frames:
            return LayerKind(experts, False, routed=routed, along="su"[layer % 2])
        local = limited and not (self.full_every and (layer + 1) % self.full_every == 0)
        return LayerKind(experts, local, routed=routed)

    @property
    def kinds(self) -> Counter[LayerKind]:
        """Number of layers of each kind, without those of multi-token prediction."""
        return Counter(map(self.kind, self.every_layer))

    @property
    def query_width(self) -> int:
        """Width of a token's queries, all heads (elements)."""
        return self.heads * (self.mla.qk_nope + self.mla.qk_rope if self.mla else self.head_dim)

    @property
    def key_width(self) -> int:
        """Width of a token's keys in the attention core, all heads (elements)."""
        return self.query_width if self.mla else self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a token's values, all heads (elements)."""
        return self.kv_heads * self.head_dim

    @property
    def output_width(self) -> int:
        """Width of a token's result of the attention core, all heads (elements)."""
        return self.heads * self.head_dim

    @property
    def rope_width(self) -> int:
        """Elements of a head with RoPE, where positions are rope."""
        return self.mla.qk_rope if self.mla else int(self.head_dim * self.rope_share)

    @property
    def dense_ffn(self) -> int:
        """Inner width of the MLP of layers without experts."""
        return (self.moe and self.moe.dense_ffn) or self.ffn

    def padded_heads(self, ranks: int) -> dict[str, int]:
        """Heads with dummy ones, so that `ranks` have equally many; the widths of a head stay.

        Key/value heads that the ranks divide, or that divide the ranks, stay, and each serves more queries; others are
        padded too. Source: ``pad_model`` of neuronx-distributed; ``modules/attention/gqa.py`` of its inference package.
        """
        keys, group = self.kv_heads, self.heads // self.kv_heads
        if group == 1:
            keys += -keys % ranks
        while keys % ranks and ranks % keys:
            keys += 1
        while keys * group % ranks:
            group += 1
        return {"heads": keys * group, "kv_heads": keys}

    # ----------------------------------------------------------------------------------------- parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm."""
        return self.hidden * (1 if self.norm == "rmsnorm" else 2)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of one layer, including biases and norms of queries, keys or latents."""
        h, q, out, mla = self.hidden, self.query_width, self.output_width, self.mla
        if mla:
            rank = mla.q_lora_rank
            queries = h * rank + rank * q if rank else h * q
            keys = h * (mla.kv_lora_rank + mla.qk_rope) + mla.kv_lora_rank * self.heads * (mla.qk_nope + mla.v)
            made, normed = queries + keys, (rank or 0) + mla.kv_lora_rank
        else:
            made, normed = (h + self.qkv_bias) * (q + self.key_width + self.value_width), 2 * self.head_dim
        made += 2 * self.seq * (self.projected_keys or 0)
        return made + (self.qk_layernorm is True) * normed + out * h + self.proj_bias * h

    def mlp_parameters(self, ffn: int) -> int:
        """Parameters of an MLP or expert of inner width `ffn`, biases included."""
        ups = 2 if self.gated else 1
        return (ups + 1) * self.hidden * ffn + self.mlp_bias * (ups * ffn + self.hidden)

    def moe_parameters(self, experts: int | None = None, of: int | None = None) -> int:
        """Parameters of the router, routed and shared experts of one layer; 0 without experts.

        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        """
        if self.moe is None:
            return 0
        its, there = self.moe, of or self.moe.experts
        routed = (there if experts is None else experts) * self.mlp_parameters(its.expert_ffn)
        shared = self.mlp_parameters(its.shared_ffn) if its.shared_ffn else 0
        mixing = 2 * (self.hidden + 1) if its.residual else 0
        return there * (self.hidden + its.router_bias) + routed + shared + mixing

    @property
    def mamba_parameters(self) -> int:
        """Parameters of one Mamba-2 block: both projections, the convolution with its bias, A, D and the bias of dt of
        every head, the gated norm; 0 without such blocks."""
        ssm = self.ssm
        if ssm is None:
            return 0
        projections = self.hidden * (ssm.projected + ssm.inner)
        return projections + ssm.convolved * (ssm.conv + 1) + 3 * ssm.heads + ssm.inner

    def layer_parameters(self, moe: bool = False, experts: int | None = None, of: int | None = None) -> int:
        """Parameters of a layer of attention and then an MLP, or router and experts: both norms, weights, biases.

        moe: whether the layer has experts.
        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        """
        inner = self.moe_parameters(experts, of) if moe and self.moe else self.mlp_parameters(self.dense_ffn)
        return 2 * self.norm_parameters + self.attention_parameters + inner

    def block_parameters(self, block: str, experts: int | None = None, of: int | None = None) -> int:
        """Parameters of a layer of a hybrid model, which is a norm and one block.

        block: a letter of `StateSpace.pattern`.
        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        """
        if block == "E":
            return self.norm_parameters + self.moe_parameters(experts, of)
        inner = {"M": self.mamba_parameters, "*": self.attention_parameters, "-": self.mlp_parameters(self.dense_ffn)}
        return self.norm_parameters + inner[block]

    @property
    def input_parameters(self) -> dict[str, int]:
        """Parameters in front of the layers, by part."""
        return {
            "embedding": self.vocab * self.hidden,
            "embedding_norm": self.norm_parameters if self.embedding_norm else 0,
            "positions": self.position_rows * self.hidden if self.positions == "learned" else 0,
        }

    def every_layer_parameters(self, experts: int | None = None) -> int:
        """Parameters of all layers, without those of multi-token prediction.

        experts: number of routed experts to count; default: all.
        """
        if self.ssm:
            kinds = (Transformer.kind(self, layer) for layer in range(self.layers))
            return sum(self.block_parameters(kind.block, experts, kind.routed) for kind in kinds)
        if self.moe is None:
            return self.layers * self.layer_parameters()
        numbers = Counter(Transformer.kind(self, layer).routed for layer in range(self.layers))
        return sum(count * self.layer_parameters(of > 0, experts, of) for of, count in numbers.items())


def _head_dim(given: Mapping[str, Any]) -> int:
    """The default of `Model.head_dim`."""
    if given.get("mla"):
        return int(given["mla"].v)
    return max(1, int(given.get("hidden", 1)) // int(given.get("heads", 1)))


def _has_biases(given: Mapping[str, Any]) -> bool:
    """The default of all biases."""
    return given.get("norm") == "layernorm"
