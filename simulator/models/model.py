"""The shape of a decoder-only transformer, and its parameter counts.

A model is only a shape: parallelism, number formats and GPUs belong to the job. Letters used in this package: L layers,
h hidden, a heads, k key/value heads, d width of a head, f width of the MLP, V vocabulary, T (or seq) positions of a
sequence, E experts.

A model may have towers (the branches of a multi-modal transformer). Each tower embeds its own part of a sequence, all
parts of equal length, and runs its own layers over it; the outputs are concatenated along the sequence, and the trunk
runs over the whole sequence. Layers are numbered tower by tower, and then through the trunk.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError, model_validator

from hardware.errors import ModelError
from hardware.load import explain, line_of
from simulator.models.parts import MLA, Count, Depth, Flag, MoEShape, Probability, ShapePart, Share, Size, StateSpace

UNDESCRIBED = {"attention": "Choose the attention kernel in framework.set.attention"}
"""Keys of ``spec.model`` in published runs that are no field, with the remedy. Null, false and none are accepted."""


class LayerKind(NamedTuple):
    """The kind of a layer; layers of one kind have the same modules.

    Attributes:
        experts: whether it has experts.
        local: whether its attention is local: a sliding window, or chunks.
        block: in a hybrid model its only block, a letter of `StateSpace.pattern`; otherwise empty, and the layer has
            attention and then an MLP or experts.
    """

    experts: bool
    local: bool
    block: str = ""

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


class Model(ShapePart):
    """A decoder-only transformer.

    The first five fields have no default. The other defaults describe a GPT: learned positions, layer norms, biases
    everywhere, a GELU MLP of width 4 h, a tied output layer. None (``null``) means the default.
    """

    layers: Depth
    """Transformer layers, L; with towers the layers of the trunk, with `ssm` the blocks of the pattern."""
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
    towers: Size = 1
    """Number of towers before the trunk; 1: no towers, the embedding is before the layers."""
    tower_layers: Count = 0
    """Transformer layers of each tower."""
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
    position_rows: Size = Field(default_factory=lambda given: max(1, given.get("seq", 1) // given.get("towers", 1)))
    """Rows of the table of learned positions in each tower. Default: `seq / towers`; OPT has two more."""
    rope_share: Share = 1.0
    """Share of the width of a head with RoPE (GPT-NeoX: ``rotary_pct``)."""
    tied: Flag = Field(default_factory=lambda given: given.get("towers", 1) == 1)
    """The output layer shares the matrix of the embedding. Default: True without towers."""
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
    parallel_residual: Flag = False
    """Attention and MLP both read the input of the layer, each through its own norm (GPT-NeoX)."""
    window: Size | None = None
    """Sliding window: tokens that a token attends to, itself included; None: all before it."""
    attention_chunk: Size | None = None
    """Chunked attention: a sequence is divided into chunks of so many tokens, and a token attends to those before it in
    its chunk (Llama 4: 8192); None: one chunk. Source: ``attention_chunk_size`` in ``transformers``."""
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

    @model_validator(mode="before")
    @classmethod
    def _nothing_said(cls, given: Any) -> Any:
        """Leaves out words for features that the model does not have."""
        if not isinstance(given, Mapping):
            return given
        for key, remedy in UNDESCRIBED.items():
            if given.get(key):
                raise ModelError(key, "no block of meshcast describes it", remedy, given[key])
        return {key: value for key, value in given.items() if key not in UNDESCRIBED}

    @model_validator(mode="after")
    def _relations(self) -> Model:
        if self.mla is None and "head_dim" not in self.model_fields_set and self.hidden % self.heads:
            raise ModelError(
                "hidden",
                f"it must be a multiple of heads ({self.heads}) when head_dim is not given",
                f"Give head_dim, or hidden {self.hidden // self.heads * self.heads or self.heads}",
                self.hidden,
            )
        self._mask_relations()
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
        self._tower_relations()
        if self.positions == "learned" and self.position_rows < self.seq // self.towers:
            of = f"seq {self.seq}" + (f" / towers {self.towers}" if self.towers > 1 else "")
            rule = f"the table of positions needs a row for each token of a sequence ({of})"
            raise ModelError("position_rows", rule, "Give at least as many, or leave it out", self.position_rows)
        if self.mla:
            self._latent_relations(self.mla)
        if self.moe:
            self._expert_relations(self.moe)
        if self.ssm:
            self._hybrid_relations(self.ssm)
        return self

    def _mask_relations(self) -> None:
        if self.window is not None and self.attention_chunk is not None:
            rule = "a layer has a window or chunks"
            raise ModelError("attention_chunk", rule, "Leave one of them out", self.attention_chunk)
        if self.full_every and self.window is None and self.attention_chunk is None:
            rule = "without a window or chunks every layer attends to everything"
            remedy = "Give window or attention_chunk too, or leave full_every out"
            raise ModelError("full_every", rule, remedy, self.full_every)
        if not self.full_rope and (not self.full_every or self.positions != "rope" or self.mla):
            rule = "without RoPE can be the layers of full_every, where positions are rope and there is no mla"
            raise ModelError("full_rope", rule, "Leave it out", False)

    def _tower_relations(self) -> None:
        if self.towers == 1:
            if self.tower_layers:
                raise ModelError("tower_layers", "there are no towers", "Give towers too", self.tower_layers)
            return
        if not self.tower_layers:
            raise ModelError("tower_layers", "each tower has at least one layer", "Give it with towers", 0)
        if self.seq % self.towers:
            rule = f"each of the {self.towers} towers has an equal part of a sequence"
            near = max(1, round(self.seq / self.towers)) * self.towers
            raise ModelError("seq", rule, f"{near} would work", self.seq)
        for word, value in (("tied", self.tied), ("moe", self.moe), ("mtp", self.mtp)):
            if value:
                raise ModelError(word, "models with towers are supported without it", "Leave it out, or towers")

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
        if moe.top_k > moe.experts:
            rule = f"a token passes each expert at most once, and there are {moe.experts}"
            raise ModelError("moe.top_k", rule, f"Give at most {moe.experts}", moe.top_k)
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
        others = ("towers", self.towers > 1), ("parallel_residual", self.parallel_residual), ("mtp", self.mtp)
        for word, value in (*others, ("window", self.window), ("attention_chunk", self.attention_chunk)):
            if value:
                raise ModelError(word, "models with state-space layers are supported without it", "Leave it out", value)

    # -------------------------------------------------------------------------------- layers and widths

    @property
    def trunk(self) -> int:
        """Number of the first layer of the trunk, which is the number of layers of all towers."""
        return self.towers * self.tower_layers

    @property
    def every_layer(self) -> range:
        """Numbers of all layers, without those of multi-token prediction."""
        return range(self.trunk + self.layers)

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` (from 0) has experts."""
        moe = self.moe
        if self.ssm:
            return self.ssm.pattern[layer] == "E"
        return moe is not None and layer >= moe.first_dense and (layer - moe.first_dense + 1) % moe.every == 0

    def is_local(self, layer: int) -> bool:
        """Whether `layer` (from 0) has the window or chunks; `full_every` counts anew in every tower and the trunk."""
        turn = layer % self.tower_layers if layer < self.trunk else layer - self.trunk
        limited = self.window is not None or self.attention_chunk is not None
        return limited and not (self.full_every and (turn + 1) % self.full_every == 0)

    def kind(self, layer: int) -> LayerKind:
        """The kind of `layer` (from 0)."""
        return LayerKind(self.is_moe(layer), self.is_local(layer), self.ssm.pattern[layer] if self.ssm else "")

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
        return made + (self.qk_layernorm is True) * normed + out * h + self.proj_bias * h

    def mlp_parameters(self, ffn: int) -> int:
        """Parameters of an MLP or expert of inner width `ffn`, biases included."""
        ups = 2 if self.gated else 1
        return (ups + 1) * self.hidden * ffn + self.mlp_bias * (ups * ffn + self.hidden)

    def moe_parameters(self, experts: int | None = None) -> int:
        """Parameters of the router, routed and shared experts of one layer; 0 without experts.

        experts: number of routed experts to count; default: all.
        """
        if self.moe is None:
            return 0
        its = self.moe
        routed = (its.experts if experts is None else experts) * self.mlp_parameters(its.expert_ffn)
        shared = self.mlp_parameters(its.shared_ffn) if its.shared_ffn else 0
        return its.experts * (self.hidden + its.router_bias) + routed + shared

    @property
    def mamba_parameters(self) -> int:
        """Parameters of one Mamba-2 block: both projections, the convolution with its bias, A, D and the bias of dt of
        every head, the gated norm; 0 without such blocks."""
        ssm = self.ssm
        if ssm is None:
            return 0
        projections = self.hidden * (ssm.projected + ssm.inner)
        return projections + ssm.convolved * (ssm.conv + 1) + 3 * ssm.heads + ssm.inner

    def layer_parameters(self, moe: bool = False, experts: int | None = None) -> int:
        """Parameters of a layer of attention and then an MLP, or router and experts: both norms, weights, biases.

        moe: whether the layer has experts.
        experts: number of routed experts to count; default: all.
        """
        inner = self.moe_parameters(experts) if moe and self.moe else self.mlp_parameters(self.dense_ffn)
        return 2 * self.norm_parameters + self.attention_parameters + inner

    def block_parameters(self, block: str, experts: int | None = None) -> int:
        """Parameters of a layer of a hybrid model, which is a norm and one block.

        block: a letter of `StateSpace.pattern`.
        experts: number of routed experts to count; default: all.
        """
        if block == "E":
            return self.norm_parameters + self.moe_parameters(experts)
        inner = {"M": self.mamba_parameters, "*": self.attention_parameters, "-": self.mlp_parameters(self.dense_ffn)}
        return self.norm_parameters + inner[block]

    @property
    def parameter_parts(self) -> dict[str, int]:
        """Parameters by part, with the vocabulary as given; ``head`` is 0 when the output layer is tied."""
        return self._parts(None, self.towers)

    @property
    def parameters(self) -> int:
        """All parameters, exactly, with the vocabulary as given (a tied matrix counts once)."""
        return sum(self.parameter_parts.values())

    @property
    def parameters_without_mtp(self) -> int:
        """`parameters` without those of multi-token prediction, as publications print it."""
        return self.parameters - self.parameter_parts["mtp"]

    @property
    def active_parameters(self) -> int:
        """`parameters` that a token passes: top_k routed experts of each layer, and one of the towers."""
        return sum(self._parts(self.moe.top_k if self.moe else None, 1).values())

    def _parts(self, experts: int | None, towers: int) -> dict[str, int]:
        table, h, last = self.vocab * self.hidden, self.hidden, self.is_moe(self.layers - 1)
        if self.ssm:
            layers = sum(self.block_parameters(block, experts) for block in self.ssm.pattern)
        else:
            with_experts = sum(map(self.is_moe, range(self.layers)))
            plain = towers * self.tower_layers + self.layers - with_experts
            layers = plain * self.layer_parameters() + with_experts * self.layer_parameters(True, experts)
        return {
            "embedding": towers * table,
            "embedding_norm": towers * self.norm_parameters if self.embedding_norm else 0,
            "positions": towers * self.position_rows * h if self.positions == "learned" else 0,
            "layers": layers,
            "final_norm": self.norm_parameters,
            "head": 0 if self.tied else table,
            "mtp": self.mtp * (2 * self.norm_parameters + 2 * h * h + self.layer_parameters(last, experts)),
        }

    def pad_heads(self, ranks: int) -> Model:
        """The model with dummy heads, so that `ranks` have equally many; the widths of a head stay.

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
        return self.model_copy(update={"heads": keys * group, "kv_heads": keys})

    def padded_vocab(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple; Megatron pads to 128 times the tensor-parallel size."""
        return -(-self.vocab // multiple) * multiple


def _head_dim(given: Mapping[str, Any]) -> int:
    """The default of `Model.head_dim`."""
    if given.get("mla"):
        return int(given["mla"].v)
    return max(1, int(given.get("hidden", 1)) // int(given.get("heads", 1)))


def _has_biases(given: Mapping[str, Any]) -> bool:
    """The default of all biases."""
    return given.get("norm") == "layernorm"


@contextmanager
def explain_errors(where: str, text: str = "", words: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turns the validation errors of pydantic models of this package into one ModelError.

    Args:
        where: the path of the description in a job, or with `text` the file.
        text: the text of the file, for the line of the field.
        words: the keys of the user for our fields, where they differ.
    """
    try:
        yield
    except ModelError as error:
        field = (words or {}).get(error.where, error.where)
        raise ModelError(error_place(where, field, text), error.rule, error.remedy, error.value) from None
    except ValidationError as error:
        # Unknown keys of a config.json are ignored, so only keys of `Model` are suggested.
        found = explain(error, where, ModelError, text=text, model=None if words else Model)
        missing = [str(each["loc"][-1]) for each in error.errors(include_url=False) if each["type"] == "missing"]
        if len(missing) > 1 and found.value is None and found.where.endswith(missing[0]):
            found = ModelError(found.where, found.rule, f"Add all that are missing: {', '.join(missing)}")
        raise found from None


def error_place(where: str, field: str, text: str = "") -> str:
    """The place of a field for error messages: ``model.heads`` in a job, ``my.yaml:3 heads`` in a file with `text`."""
    return f"{where}:{line_of(text, tuple(field.split('.')))} {field}" if text else f"{where}.{field}"
