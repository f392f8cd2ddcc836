"""The parts of the shape of a model: latent attention, experts, state-space blocks; and the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, model_validator

Size = Annotated[int, Field(strict=True, ge=1, le=100_000_000)]
"""A width, a number of heads or tokens. The ceiling is far above any model and catches typing errors."""

Depth = Annotated[int, Field(strict=True, ge=1, le=10_000)]
"""A number of layers; the ceiling is lower because every layer costs simulation time."""

Flag = Annotated[bool, Field(strict=True)]

Probability = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]

Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]

Count = Annotated[int, Field(strict=True, ge=0, le=10_000)]
"""A number of layers or experts, possibly zero."""


Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""FLOPs or bytes of a token."""


class ShapePart(BaseModel):
    """Base class of the parts of a model: null means the default, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, fields: Any) -> Any:
        if not isinstance(fields, Mapping):
            return fields
        return {key: value for key, value in fields.items() if value is not None or key not in cls.model_fields}


class Other(ShapePart):
    """What a traced model has beside the parts that are described: priced by its FLOPs and its bytes, for every token
    of a rank. Ranks of tensor parallelism hold all of it."""

    modules: tuple[str, ...] = ()
    """Names of its modules in the code, or of its parameters."""
    parameters: Annotated[int, Field(strict=True, ge=-1_000_000_000, le=100_000_000_000_000)] = 0
    """Its parameters; negative where described parts have some that the code lacks (a norm), which then count less."""
    flops: Amount = 0
    """FLOPs of a token in its matrix products, forward."""
    moved: Amount = 0
    """Bytes that its other kernels read and write for a token, forward."""
    saved: Amount = 0
    """Bytes of a token that it saves for the backward pass."""
    mixes: Flag = False
    """It mixes the tokens of a sequence, so that ranks need whole sequences."""
    alone: Flag = False
    """The layer has nothing else."""


class InputConvolution(ShapePart):
    """A convolution along a sequence with a bias, and GELU or the gate behind it."""

    channels: Size
    """Channels of its result, both halves of gated ones included."""
    kernel: Size
    """Positions that a position of its result reads."""
    stride: Size = 1
    """Positions for each of its result."""
    gated: Flag = False
    """One half of its channels is multiplied with the sigmoid of the other (GLU: Speech2Text)."""


class ModelOutput(ShapePart):
    """What a model computes behind its final norm in place of logits of the vocabulary."""

    classes: Size | None = None
    """Logits: classes, or a single reward; None: the vectors of sequences, of which a contrastive loss compares those
    of queries and of texts."""
    pool: Literal["none", "logits", "token", "mean"] = Field(
        default_factory=lambda fields: "mean" if fields.get("classes") is None else "logits"
    )
    """How tokens become a sequence: none: every token has logits; logits: these are computed for every token, and those
    of one are taken (Llama, GPT-2); token: the state of one token is taken first (BERT); mean: the mean of states.
    Default: logits; without classes mean."""

    @property
    def pools_states(self) -> bool:
        """Whether the states of a sequence become one before anything is computed of them."""
        return self.pool in ("token", "mean")


class SparseIndex(ShapePart):
    """An indexer that chooses the keys which each query attends to: queries of its own from the latent of queries, one
    key of a token, which passes a layer norm, and a weight of each head. Source: DeepSeek-V3.2, section 2.1 (arXiv
    2512.02556).
    """

    heads: Size
    """Heads of the indexer."""
    dim: Size
    """Width of one of these heads (elements)."""
    top_k: Size
    """Keys that a query attends to at most."""
    shared: Flag = False
    """The layer has no indexer: it attends to the keys that the last one before it has chosen (Hunyuan 4)."""
    shared_by: tuple[Annotated[int, Field(strict=True, ge=0, le=10_000)], ...] = ()
    """Numbers of the layers (from 0) that are so, of a model (GLM-5.2)."""


class MLA(ShapePart):
    """Multi-head latent attention: keys and values, and usually queries, are projected from narrow latents.

    Every head has its queries, keys and values, projected from the latents; the RoPE part of a key is projected
    from the input of the layer and shared by all heads. Source: DeepSeek-V2, section 2.1 (arXiv 2405.04434).
    """

    q_lora_rank: Size | None = None
    """Width of the latent of queries; None: queries have no latent (DeepSeek-V2-Lite)."""
    kv_lora_rank: Size
    """Width of the latent of keys and values."""
    qk_nope: Size
    """Width of the part of a head of queries and keys without RoPE."""
    qk_rope: Size
    """Width of the part with RoPE."""
    v: Size
    """Width of a head of values."""
    index: SparseIndex | None = None
    """Attention to the keys that an indexer chooses (DeepSeek-V3.2, GLM-5); None: to all. It needs `q_lora_rank`."""

    @property
    def shares_choice(self) -> bool:
        """Whether keys are those that an earlier layer chose."""
        return self.index is not None and self.index.shared

    def share_choice(self) -> MLA:
        """Returns the attention of a layer that reads the keys of an earlier one."""
        index = self.index and self.index.model_copy(update={"shared": True})
        return self.model_copy(update={"index": index})

    def reads_choice(self, layer: int) -> bool:
        """Returns whether `layer` (from 0) attends to keys that an earlier layer chose."""
        return self.index is not None and layer in self.index.shared_by

    def index_parameters(self, hidden: int) -> int:
        """Counts the parameters of the indexer; hidden: width of the residual stream."""
        if self.index is None or self.index.shared:
            return 0
        heads, dim = self.index.heads, self.index.dim
        return (self.q_lora_rank or 0) * heads * dim + hidden * (dim + heads) + 2 * dim


class LocalAttention(ShapePart):
    """Attention of the layers with a window or chunks, where it differs from that of the others; None: it does not."""

    heads: Size | None = None
    """Query heads."""
    kv_heads: Size | None = None
    """Key/value heads."""
    head_dim: Size | None = None
    """Width of one head of queries and keys."""
    value_dim: Size | None = None
    """Width of one head of values, where it is not `head_dim`."""
    rope_share: Share | None = None
    """Share of the width of a head with RoPE."""
    sinks: Flag | None = None
    """Every query head has a learned logit in its softmax."""
    keys_are_values: Flag | None = None
    """Values are the keys before their norm and RoPE."""


class LayerInput(ShapePart):
    """An input that every layer has of each token beside the residual stream: the sum of a row of a table of its own
    and of a projection of the embedding, behind a norm. Behind its MLP a layer multiplies a projection of its stream,
    through the activation, with that input, projects the product back, and adds it behind a norm (Gemma 3n and 4).
    """

    vocab: Size
    """Rows of the table of a layer."""
    width: Size
    """Width of the input (elements)."""

    def parameters(self, hidden: int) -> int:
        """Counts the parameters of a layer: table and projections, without norms. hidden: of the residual stream."""
        return (self.vocab + 3 * hidden) * self.width


class ExpertLatent(ShapePart):
    """A latent over which routed experts work: a linear layer projects tokens to it before they are sent to their
    experts, another one the sum of the results back; routers and shared experts read the residual stream. Source:
    ``moe_latent_size`` of Megatron-Core (Nemotron 3).
    """

    width: Size
    """Width of the latent (elements)."""
    norm: Flag = False
    """A norm over the sum of the results, in front of the projection back (Kimi K3)."""


class MoEShape(ShapePart):
    """A mixture of experts. Experts are MLPs with the activation and the biases of the model."""

    experts: Size
    """Routed experts per layer, E."""
    top_k: Size
    """Routed experts per token."""
    expert_ffn: Size
    """Inner width of one routed expert."""
    experts_from: tuple[tuple[Count, Size], ...] = ()
    """Pairs of a layer (from 0) and the number of routed experts that layers have from there on, in place of `experts`:
    later layers of PR-MoE have more. Source: DeepSpeed-MoE, section 4.1 (arXiv 2201.05596)."""
    shared_experts: Count = 0
    """Shared experts, which every token passes."""
    shared_ffn: Annotated[int, Field(strict=True, ge=0, le=100_000_000)] = Field(
        default_factory=lambda fields: fields.get("shared_experts", 0) * fields.get("expert_ffn", 0)
    )
    """Inner width of all shared experts together. Default: shared_experts * expert_ffn."""
    first_dense: Count = 0
    """Number of first layers with an MLP in place of experts."""
    dense_ffn: Size | None = None
    """Inner width of the MLP of layers without experts; None: the model's `ffn`."""
    every: Size = 1
    """After the first dense layers, the last of every `every` layers has experts (GShard and Switch: 2), as with
    ``decoder_sparse_step`` of Qwen in ``transformers``; with ``--moe-layer-freq`` of Megatron it is the first."""
    leading: Flag = False
    """The first of every `every` layers has experts, in place of the last (LongCat-Flash)."""
    zero_experts: Count = 0
    """Further experts, which return their input (LongCat-Flash, arXiv 2509.01322, section 2.1). The router chooses
    among them too; `top_k` is the number of the others that a token passes, in the mean."""
    latent: ExpertLatent | None = None
    """A latent over which routed experts work; None: they work over the residual stream."""
    capacity: Annotated[float, Field(strict=True, ge=0.01, le=1000, allow_inf_nan=False)] | None = None
    """Capacity factor: an expert computes exactly capacity * tokens * top_k / experts tokens, dropped or padded; None:
    dropless."""
    routing: Literal["balanced", "forced-balanced", "natural", "loss-free"] | None = None
    """Routing where the plan does not say it: even (padded, or by a router that is forced to be), or that of a trained
    router, which an auxiliary loss or a bias keeps nearly even. None: even."""
    clamped: Flag = False
    """Both halves of the gated activation are clamped first (gpt-oss)."""
    router_bias: Flag = False
    """The router has one more parameter for each expert: a bias, or the correction of DeepSeek-V3."""
    sum_bias: Flag = False
    """The sum of the results has a bias (JetMoE)."""
    residual: Flag = False
    """A token's results of routed and of shared experts are added with two weights, from a linear layer with bias
    (``use_residual`` of DeepSpeed-MoE); otherwise as they are."""
    shared_gate: Flag | Literal["each"] = False
    """A token's result of shared experts is multiplied by the sigmoid of one number, from a linear layer without bias
    (Qwen2-MoE); each: that of every one by a number of its own, of the router (Inkling)."""

    norm: Flag | Literal["each"] = False
    """A norm over the sum of the results of routed and shared experts, before the residual addition (A.X-K1); each: in
    front of the router and of routed experts, and behind the results of routed and of shared experts (Gemma 4)."""

    @property
    def shared_weights(self) -> int:
        """Numbers by which a token's results of shared experts are multiplied."""
        return self.shared_experts if self.shared_gate == "each" else int(self.shared_gate)

    def token_width(self, hidden: int) -> int:
        """Width of the tokens that routed experts read and write: that of the stream, `hidden`, or of their latent."""
        return self.latent.width if self.latent else hidden

    def is_in(self, layer: int) -> bool:
        """Returns whether `layer` (from 0) has experts."""
        behind = layer - self.first_dense
        return behind >= 0 and (behind if self.leading else behind + 1) % self.every == 0

    def experts_of(self, layer: int) -> int:
        """Counts the routed experts of `layer` (from 0), if it has some."""
        return next((experts for first, experts in reversed(self.experts_from) if first <= layer), self.experts)

    @property
    def expert_counts(self) -> tuple[int, ...]:
        """All numbers of routed experts that layers have."""
        return tuple(dict.fromkeys((self.experts, *(experts for _, experts in self.experts_from))))


class LinearAttention(ShapePart):
    """What mixes tokens in place of softmax attention: a state of fixed size stands for all tokens before, of linear
    attention [key_dim, value_dim] for each head.

    gated-delta-net: queries, keys and values pass a causal convolution; a token has two rates alpha and beta for each
    head, and a gate as wide as the values, which multiplies the normalised result. Source: Yang et al. 2024 (arXiv
    2412.06464), as Qwen3-Next has it. kimi-delta: the same with an alpha for each element of a key; alpha and the gate
    may come from latents. Source: Kimi Linear (arXiv 2510.26692, section 3). lightning: queries, keys and values pass
    an activation; the result is normalised over all heads and multiplied by a gate as wide. Source: MiniMax-01, section
    2.2 (arXiv 2501.08313). short-conv: a causal convolution of each channel (a head 1 wide) between two products with
    gates; its state are the last inputs. Source: LFM2 (arXiv 2511.23404), ``Lfm2ShortConv`` of ``transformers``. mlstm:
    a token has gates of input and of forgetting for each head, and a gate as wide as the values, which multiplies the
    result after a norm of each head. Source: Beck et al. 2024 (arXiv 2405.04517, section 2.3), as xLSTM 7B has it.
    rg-lru: values pass a causal convolution; every channel is a state, whose gates are linear in the channels of its
    head; the result is multiplied by an activated projection as wide. Source: Griffin (arXiv 2402.19427, section 2.4).
    rwkv: keys, values and receptances are projected from three mixtures of a token with that before it; every channel
    (a head 1 wide) has a sum of values and one of their weights, and the sigmoid of its receptance multiplies their
    ratio; MLPs read such mixtures too, and the sigmoid of a square projection multiplies their result. Source: Peng et
    al. 2023 (RWKV-4, arXiv 2305.13048, section 3).
    """

    kind: Literal["gated-delta-net", "kimi-delta", "lightning", "short-conv", "mlstm", "rg-lru", "rwkv"]
    """The rule of the state."""
    heads: Size
    """Heads of values, each with a state."""
    key_heads: Size = Field(default_factory=lambda fields: fields.get("heads", 1))
    """Heads of queries and of keys; each serves equally many heads of values. Default: `heads`."""
    key_dim: Size
    """Width of a head of queries and of keys."""
    value_dim: Size = Field(default_factory=lambda fields: fields.get("key_dim", 1))
    """Width of a head of values. Default: `key_dim`."""
    conv: Size = 4
    """Positions that a causal convolution reads, the token itself included; lightning and mlstm have none."""
    rank: Size | None = None
    """Width of the latents from which kimi-delta projects alpha and the gate; None: from the input itself (Ling 3)."""
    full_gate: Flag = False
    """With `rank`: the gate is projected from the input itself (Kimi K3)."""
    layers: tuple[Count, ...] | None = None
    """Numbers of the layers that have it (from 0, ascending); None: all but those of `full_every`. The others may have
    windows, but those of `full_every` (LFM3)."""
    norm_place: Literal["before", "after"] | None = None
    """Where the norms of layers with linear attention are, if elsewhere than in the others (OLMo Hybrid)."""
    chunk: Size = Field(default_factory=lambda fields: 256 if fields.get("kind") == "lightning" else 64)
    """Tokens of a chunk, within which products of matrices are computed. Default: 64, for lightning 256."""

    @property
    def key_width(self) -> int:
        """Width of the queries, and of the keys (elements)."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of the values, of the gate and of the result (elements)."""
        return self.heads * self.value_dim

    @property
    def projections(self) -> dict[str, int]:
        """Widths of what is projected from the input, by name."""
        keys, values = dict.fromkeys("qk", self.key_width), {"v": self.value_width}
        if self.kind == "short-conv":
            return dict.fromkeys(("in_gate", "out_gate", "v"), self.value_width)
        if self.kind in ("rg-lru", "rwkv"):
            return dict.fromkeys("vz" if self.kind == "rg-lru" else "kvr", self.value_width)
        alphas = {"gated-delta-net": self.heads, "mlstm": self.heads, "kimi-delta": self.key_width}
        alpha = alphas.get(self.kind)
        rates = {"beta": self.heads, "alpha": alpha} if alpha else {}
        return {**keys, **values, **rates, "z": self.value_width}

    def input_weights(self, hidden: int) -> int:
        """Counts the elements of the matrices that make the projections from an input of width `hidden`, and of those
        of both gates of rg-lru, a block for each head."""
        widths = self.projections
        through = [widths.pop(name) for name in self.through_latents]
        gates = 2 * self.value_width * self.value_dim if self.kind == "rg-lru" else 0
        latents = (self.rank or 0) * (len(through) * hidden + sum(through))
        return hidden * sum(widths.values()) + latents + gates

    @property
    def through_latents(self) -> tuple[str, ...]:
        """Names of the projections through latents."""
        return () if not self.rank else ("alpha",) if self.full_gate else ("alpha", "z")

    @property
    def state(self) -> int:
        """Elements of the states of all heads."""
        return self.value_width * {"short-conv": self.conv, "rg-lru": 1, "rwkv": 2}.get(self.kind, self.key_dim)

    @property
    def update_flops(self) -> int:
        """FLOPs of a token for each element of a state. Of linear attention, it decays and is multiplied with the query
        (3), and a product of key and value is added (2); a delta rule multiplies it with the key before (2; equation
        10). That of a convolution is multiplied and summed up (2), that of rg-lru decays, and a value with two factors
        is added (4). That of rwkv decays and a weighted value is added, once with the decay and once with that of the
        present token (6)."""
        return {"lightning": 5, "mlstm": 5, "short-conv": 2, "rg-lru": 4, "rwkv": 6}.get(self.kind, 7)

    @property
    def out_bias(self) -> bool:
        """Whether the output projection has a bias."""
        return self.kind == "rg-lru"

    def own_parameters(self, hidden: int) -> int:
        """Counts the parameters beside matrices and the bias of the result: convolution, A, bias of the rates and norm
        of a head; norm of all; convolution; norm of all and biases of two gates of each head; convolution, A and biases
        of it, of both projections and of both gates; shares of three mixtures of a stream `hidden` wide and two
        decays."""
        others = {
            "lightning": self.value_width,
            "short-conv": self.value_width * self.conv,
            "mlstm": self.value_width + 2 * self.heads,
            "rg-lru": self.value_width * (self.conv + 6),
            "rwkv": 3 * hidden + 2 * self.value_width,
        }
        if self.kind in others:
            return others[self.kind]
        convolved = (2 * self.key_width + self.value_width) * self.conv
        return convolved + self.heads + self.projections["alpha"] + self.value_dim


class StateSpace(ShapePart):
    """Mamba blocks, and the type of every layer of a hybrid model.

    Each layer of a hybrid model is a norm, a block and a residual addition. A Mamba-2 block projects its input to
    the gate z and the values x (heads * head_dim each), to B and C (groups * state each) and to a step size dt for
    each head; x, B and C pass a causal convolution. Sources: Dao and Gu 2024 (arXiv 2405.21060), section 7;
    Waleffe et al. 2024 (arXiv 2406.07887); ``hybrid_override_pattern`` of Megatron-Core.

    With `rank` they are Mamba-1 blocks, whose heads are channels (`head_dim` and `groups` 1): z and x alone are
    projected from the input; B, C and a latent of dt from the convolved x, and dt of every channel from its latent.
    Source: Gu and Dao 2023 (arXiv 2312.00752), section 3; ``MambaMixer`` of ``transformers``.
    """

    pattern: Annotated[str, Field(strict=True, pattern=r"^[-M*PES]+$")]
    """Block of each layer: M a Mamba block, * attention, P both in parallel, over one norm (Falcon-H1), - an MLP, E
    experts, S a shared block in front of a Mamba block (Zamba2, see `SharedBlock`)."""
    mtp_pattern: Annotated[str, Field(strict=True, pattern=r"^[-M*PE]+$")] | None = None
    """Blocks of one layer of multi-token prediction (Nemotron 3: *E); needed with `Model.mtp`."""
    heads: Size
    """Heads of a Mamba block."""
    head_dim: Size
    """Width of one of these heads (elements)."""
    state: Size
    """Width of the state of each element of a head."""
    groups: Size
    """Groups of heads, each with its own B and C."""
    conv: Size = 4
    """Positions that the causal convolution reads, the token itself included."""
    chunk: Size = 128
    """Tokens of a chunk, within which the scan is computed as matrix products; Megatron-Core: 128."""
    rank: Size | None = None
    """Width of the latent from which dt of every channel is projected; None: Mamba-2 blocks."""
    norm: Flag | Literal["inputs", "inputs0"] = Field(default_factory=lambda fields: fields.get("rank") is None)
    """An RMS norm over the gated result of the scan, before the output projection (Falcon-H1 has none); inputs: with
    `rank`, RMS norms over the latent of dt, B and C (Jamba); inputs0: without weights (Falcon-Mamba). Default: without
    `rank` true."""

    @property
    def inner(self) -> int:
        """Width of the gate z, and of the values x (elements)."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of B, and of C (elements)."""
        return self.groups * self.state

    @property
    def projected(self) -> int:
        """Width of the result of the input projection: z, x and, of Mamba-2, B, C and dt (elements)."""
        return 2 * self.inner + (0 if self.rank else 2 * self.shared + self.heads)

    @property
    def convolved(self) -> int:
        """Channels of the convolution: x and, of Mamba-2, B and C."""
        return self.inner + (0 if self.rank else 2 * self.shared)

    @property
    def latent_weights(self) -> int:
        """Elements of the matrices of Mamba-1 from x to the latent of dt, B and C, and from that latent to dt."""
        return self.inner * (2 * self.rank + 2 * self.state) if self.rank else 0

    @property
    def own_parameters(self) -> int:
        """Parameters beside these matrices and the projections from the input and to the output: the convolution with
        its bias, A, D and the bias of dt of every head, norms."""
        normed = self.inner if self.norm is True else 0
        if self.norm == "inputs":
            normed = (self.rank or 0) + 2 * self.state
        return self.convolved * (self.conv + 1) + (2 + (self.state if self.rank else 1)) * self.heads + normed
