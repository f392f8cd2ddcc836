"""The shape of a stack of transformer layers with its input, and its parameter counts: what a model and its branches
have in common.

A shape says nothing about parallelism, number formats and GPUs, which belong to the job. Letters used in this package:
L layers, h hidden, a heads, k key/value heads, d width of a head, f width of the MLP, V vocabulary, T (or seq)
positions of a sequence, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Self

from meshcast.hardware.schemas import model_validator
from meshcast.simulator.models.parts import Other
from meshcast.simulator.models.shape.rare_fields import RareFields
from meshcast.simulator.models.shape.relations import check_relations

ALONE = "?"
"""The block of a layer of which no part is described (`Other.alone`)."""

LETTERS: dict[str | None, str] = {None: "", "attention": "*", "mlp": "-"}
"""Letters of `StateSpace.pattern` for the block that a layer has alone; None: it has both."""


class LayerKind(NamedTuple):
    """The kind of a layer; layers of a kind have the same modules.

    Attributes:
        experts: whether it has experts.
        local: whether it has what the layers with full attention lack: a sliding window, chunks, blocks, or RoPE.
        block: its only block, a letter of `StateSpace.pattern`, in a hybrid model and where a layer has one alone;
            otherwise empty, and the layer has attention and then an MLP or experts.
        routed: number of routed experts; 0: it has none.
        along: of a video, the dim along which its attention runs: ``s``, within a frame, or ``u``, across frames.
        linear: whether it has linear attention in place of softmax attention.
        reads_keys: whether it reads the keys and values of an earlier layer.
        variant: number of the variant of the model that it is, from 1; 0: it is as the model says.
        borrows: whether an earlier layer of its stage holds the weights of its shared block.
        replaced: blocks in whose place a linear layer stands, see `RareFields.replaced`.
        sums: of attention residuals, in front of the layer; 0: the model has none.
        opens: whether it begins a sum.
        follows: whether the layer before begins a sum.
    """

    experts: bool
    local: bool
    block: str = ""
    routed: int = 0
    along: str = ""
    linear: bool = False
    reads_keys: bool = False
    variant: int = 0
    borrows: bool = False
    replaced: tuple[str, ...] = ()
    sums: int = 0
    opens: bool = False
    follows: bool = False

    @property
    def has_attention(self) -> bool:
        """Whether it has softmax attention."""
        return self.block in ("", "*", "P", "S") and not self.linear and "attention" not in self.replaced

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP, in place of experts."""
        return (self.block in ("-", "S") or (not self.block and not self.experts)) and "mlp" not in self.replaced

    @property
    def has_mamba(self) -> bool:
        """Whether it has a Mamba block."""
        return self.block in ("M", "P", "S")


class Transformer(RareFields):
    """A stack of transformer layers: widths that follow from its fields, kinds of layers, parameter counts."""

    other: Other | None = None
    """What every layer has beside the parts that these fields describe, in a model that was traced."""

    @model_validator(mode="after")
    def _relations(self) -> Transformer:
        check_relations(self)
        return self

    # -------------------------------------------------------------------------------- layers and widths

    @property
    def every_layer(self) -> range:
        """Numbers of all layers, without those of multi-token prediction."""
        return range(self.layers)

    @property
    def _plain_layers(self) -> Sequence[int]:
        """Numbers of the layers that are as these fields say: of a model with variants the others, else all."""
        return self.every_layer

    def is_moe(self, layer: int) -> bool:
        """Returns whether `layer` (from 0) has experts."""
        return self.kind(layer).experts

    def kind(self, layer: int) -> LayerKind:
        """Returns the kind of `layer` (from 0)."""
        if self.other and self.other.alone:
            return LayerKind(False, False, ALONE)
        if self.ssm:
            return self._hybrid_kind(self.ssm.pattern[layer], layer)
        limited = not self.full_rope or (self.window, self.attention_chunk, self.blocks) != (None, None, None)
        routed = self.moe.experts_of(layer) if self.moe and self.moe.is_in(layer) else 0
        experts = routed > 0
        if self.frames:
            return LayerKind(experts, False, routed=routed, along="su"[layer % 2])
        every = self.full_every
        full = layer in every if isinstance(every, tuple) else every and (layer + 1) % every == 0
        mixer = self.linear_attention
        linear = mixer is not None and (not full if mixer.layers is None else layer in mixer.layers)
        reads = layer >= self.layers - self.shared_keys or (self.mla is not None and self.mla.reads_choice(layer))
        limited = limited and not full and not linear
        block, replaced = LETTERS[self.only], self.replaced
        return LayerKind(experts, limited, block, routed, linear=linear, reads_keys=reads, replaced=replaced)

    def shape_of(self, kind: LayerKind) -> Self:
        """Returns the shape of its layers of this kind."""
        return self.in_layers(kind.local, kind.reads_keys)

    def _hybrid_kind(self, block: str, layer: int) -> LayerKind:
        routed = self.moe.experts_of(layer) if self.moe and block == "E" else 0
        return LayerKind(block == "E", block == "*" and self.window is not None, block, routed)

    @property
    def kinds(self) -> Counter[LayerKind]:
        """Number of layers of each kind, without those of multi-token prediction."""
        return Counter(map(self.kind, self.every_layer))

    @property
    def rope_width(self) -> int:
        """Elements of a head with RoPE, where positions are rope."""
        return self.mla.qk_rope if self.mla else int(self.head_dim * self.rope_share)

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
        return self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def output_width(self) -> int:
        """Width of a token's result of the attention core, all heads (elements)."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def projected_widths(self) -> tuple[int, ...]:
        """Widths of what a layer projects its input to, without `mla`: queries, keys, values, and a gate."""
        keys = () if self.reads_keys else (self.key_width,)
        values = () if self.reads_keys or self.keys_are_values else (self.value_width,)
        gates = (self.gate_width,) if self.attention_gate else ()
        return (self.query_width, *keys, *values, *gates)

    def _bias_width(self, projected: int) -> int:
        """Returns the width of the biases of projections that are `projected` wide in all."""
        return bool(self.qkv_bias) * projected - self.key_width * (self.qkv_bias == "queries-values")

    @property
    def gate_width(self) -> int:
        """Width of a token's gate of the result of attention (elements); 0 without a gate."""
        return self.heads if self.attention_gate == "heads" else self.output_width if self.attention_gate else 0

    @property
    def channel_mix(self) -> bool:
        """Whether MLPs are those of RWKV, see `LinearAttention`."""
        return self.linear_attention is not None and self.linear_attention.kind == "rwkv"

    @property
    def dense_ffn(self) -> int:
        """Inner width of the MLP of layers without experts."""
        return (self.moe and self.moe.dense_ffn) or self.ffn

    def padded_heads(self, ranks: int) -> dict[str, object]:
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
        padded: dict[str, object] = {"heads": keys * group, "kv_heads": keys}
        if local := self.local_attention:
            heads = self.in_layers(local=True, reads_keys=False).padded_heads(ranks)
            padded["local_attention"] = local.model_copy(update=heads)
        return padded

    # ----------------------------------------------------------------------------------------- parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm."""
        return self._norm_elements(self.hidden)

    def _norm_elements(self, width: int) -> int:
        """Counts the parameters of a norm over `width` elements."""
        return 0 if self.norm.endswith("0") else width * (2 if self.norm.startswith("layer") else 1)

    @property
    def _norms(self) -> int:
        """Norms over the residual stream, or over what is added to it, in a layer of attention and then an MLP."""
        return 4 if self.norm_place == "both" else 1 if self.shared_norm else 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of a layer, including biases and norms of queries, keys or latents."""
        h, q, out, mla = self.hidden, self.query_width, self.output_width, self.mla
        if "attention" in self.replaced:
            return h * (h + self.proj_bias)
        if part := self.compressed:
            weights = part.weights(h, self.heads, self.head_dim) + part.out_weights(h, self.heads, self.head_dim)
            return weights + part.own_parameters(self.head_dim) + self.heads * self.sinks
        if mla:
            rank = mla.q_lora_rank
            queries = h * rank + rank * q if rank else h * q
            keys = h * (mla.kv_lora_rank + mla.qk_rope) + mla.kv_lora_rank * self.heads * (mla.qk_nope + mla.v)
            projections = queries + keys + mla.index_parameters(h) + h * self.gate_width
            normed = self.qk_layernorm is True and (rank or 0) + mla.kv_lora_rank
        else:
            projections = h * sum(self.projected_widths) + self._bias_width(sum(self.projected_widths))
            widths = {"all": q + self.key_width, "layer": 4 * self.head_dim, True: 2 * self.head_dim}
            normed = widths.get(self.qk_layernorm, 0) // (2 if self.reads_keys else 1)
        if blocks := self.blocks:
            projections += blocks.weights(h, self.heads, self.key_width, self.value_width)
            projections += blocks.pool_weights(self.key_width, self.value_width, self.kv_heads)
            normed += blocks.own_parameters(self.key_width)
        if experts := self.head_experts:
            projections += h * experts + self._unused_head_experts
        projections += 2 * self.seq * (self.projected_keys or 0) + self.heads * self.sinks + out * self.inner_norms
        return projections + normed + out * h + self.proj_bias * h

    def _expert_parameters(self, experts: int) -> int:
        """Counts the parameters of so many routed experts of a layer, and of the projections to and from a latent."""
        assert self.moe is not None
        width, ffn, ups = self.moe.token_width(self.hidden), self.moe.expert_ffn, 2 if self.gated else 1
        each = (ups + 1) * width * ffn + self.mlp_bias * (ups * ffn + width)
        if self.moe.latent is None:
            return experts * each
        biases = self.mlp_bias * (width + self.hidden)
        return experts * each + 2 * self.hidden * width + biases + self.moe.latent.norm * self._norm_elements(width)

    @property
    def _unused_head_experts(self) -> int:
        """Parameters of the experts of attention that a token does not pass; 0 without experts."""
        passes = self.heads // self.kv_heads
        width = (self.query_width + self.output_width) // passes
        return ((self.head_experts or passes) - passes) * width * self.hidden

    def mlp_parameters(self, ffn: int) -> int:
        """Parameters of an MLP or shared expert of inner width `ffn`, biases included."""
        if "mlp" in self.replaced:
            return self.hidden * (self.hidden + self.mlp_bias)
        ups = 2 if self.gated else 1
        inner = ffn * self.inner_norms + 2 * (self.activation == "xielu")
        inner += self.hidden * (self.hidden + 2) if self.channel_mix else 0
        return (ups + 1) * self.hidden * ffn + self.mlp_bias * (ups * ffn + self.hidden) + inner

    def _moe_parameters(self, experts: int | None = None, of: int | None = None) -> int:
        """Counts the parameters of the router, routed and shared experts of a layer; 0 without experts.

        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        """
        if self.moe is None:
            return 0
        its, there = self.moe, of or self.moe.experts
        routed = self._expert_parameters(there if experts is None else experts)
        shared = self.mlp_parameters(its.shared_ffn) if its.shared_ffn else 0
        mixing = 2 * (self.hidden + 1) if its.residual else self.hidden * its.shared_weights
        mixing += self.hidden * its.sum_bias
        mixing += self.norm_parameters * (4 if its.norm == "each" else its.norm)
        return (there + its.zero_experts) * (self.hidden + its.router_bias) + routed + shared + mixing

    @property
    def mamba_parameters(self) -> int:
        """Parameters of a Mamba block; 0 without such blocks."""
        ssm = self.ssm
        if ssm is None:
            return 0
        return self.hidden * (ssm.projected + ssm.inner) + ssm.latent_weights + ssm.own_parameters

    @property
    def linear_parameters(self) -> int:
        """Parameters of the linear attention of a layer; 0 without it."""
        if (linear := self.linear_attention) is None:
            return 0
        output = self.hidden * (linear.value_width + linear.out_bias)
        return linear.input_weights(self.hidden) + output + linear.own_parameters(self.hidden)

    def layer_parameters(
        self, moe: bool = False, experts: int | None = None, of: int | None = None, linear: bool = False
    ) -> int:
        """Parameters of a layer of attention and then an MLP, or router and experts: both norms, weights, biases.

        moe: whether the layer has experts.
        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        linear: whether it has linear attention.
        """
        if self.other and self.other.alone:
            return self.other.parameters
        inner = self._moe_parameters(experts, of) if moe and self.moe else self.mlp_parameters(self.dense_ffn)
        mixer = self.linear_parameters if linear else self.attention_parameters
        if not linear:
            mixer += (self.token_convolutions or 0) * (self.key_width + self.value_width + 2 * self.hidden)
            mixer += self.distance_profiles.parameters(self.hidden, self.heads) if self.distance_profiles else 0
        mixer += self.result_scale
        mixer -= self._unused_head_experts if experts is not None and not linear else 0
        added = self.layer_input.parameters(self.hidden) + self.norm_parameters if self.layer_input else 0
        added += self.stream_parameters
        added += 2 * self.hidden * self.layer_scale + (self.other.parameters if self.other else 0)
        added += count_stream_parameters(self)
        if self.modulation:
            added += self.modulation.layer_parameters(self.hidden, count_vectors(self))
        return self._norms * self.norm_parameters + mixer + inner + added

    def _block_parameters(self, block: str, experts: int | None = None, of: int | None = None) -> int:
        """Counts the parameters of a layer of a hybrid model, which is a norm and a block.

        block: a letter of `StateSpace.pattern`.
        experts: number of routed experts to count; default: all.
        of: routed experts of the layer; default: `MoEShape.experts`.
        """
        other = self.other.parameters if self.other else 0
        if block == "E":
            return self.norm_parameters + self._moe_parameters(experts, of) + other
        mamba, attention = self.mamba_parameters, self.attention_parameters
        if block == "S":
            return self.norm_parameters + mamba + self.use_weights + other
        inner = {"M": mamba, "*": attention, "P": mamba + attention, "-": self.mlp_parameters(self.dense_ffn)}
        return self.norm_parameters + inner[block] + other

    @property
    def use_weights(self) -> int:
        """Elements of the matrices of a layer that uses a shared block, beside those of its Mamba block."""
        part, ups = self.shared_block, (2 if self.gated else 1) * self.ffn
        return part.use_parameters(self.hidden, self.projected_widths, ups) if part else 0

    def _shared_parameters(self, uses: int) -> int:
        """Counts the parameters of all shared blocks. uses: layers that use one."""
        if not self.shared_block:
            return 0
        sizes = self.hidden, sum(self.projected_widths), self.output_width, self.mlp_parameters(self.ffn)
        return min(uses, self.shared_block.blocks) * self.shared_block.parameters(*sizes)

    @property
    def input_parameters(self) -> dict[str, int]:
        """Parameters in front of the layers, by part."""
        return {
            "embedding": self.vocab * self.hidden,
            "embedding_norm": (self.norm_parameters if self.embedding_norm else 0)
            + (self.layer_input.width if self.layer_input else 0),
            "positions": (self.position_rows * self.hidden if self.positions == "learned" else 0)
            + (self.relative_buckets or 0) * self.heads,
        }

    def every_layer_parameters(self, experts: int | None = None) -> int:
        """Parameters of all layers, without those of multi-token prediction.

        experts: number of routed experts to count; default: all.
        """
        parts = self.ssm, self.moe, self.linear_attention, self.local_attention, self.shared_keys, self.only
        if not any((*parts, self.blocks)):
            return len(self._plain_layers) * self.layer_parameters()
        numbers = Counter(Transformer.kind(self, layer) for layer in self._plain_layers)
        shared = self._shared_parameters(self.ssm.pattern.count("S")) if self.ssm else 0
        return shared + sum(layers * self._kind_parameters(kind, experts) for kind, layers in numbers.items())

    def _kind_parameters(self, kind: LayerKind, experts: int | None = None) -> int:
        """Counts the parameters of a layer of this kind. experts: routed ones to count; default: all."""
        if self.ssm or self.only:
            return self._block_parameters(kind.block, experts, kind.routed)
        return self.shape_of(kind).layer_parameters(kind.experts, experts, kind.routed, kind.linear)


def list_further_kinds(model: Transformer) -> tuple[LayerKind, ...]:
    """Returns the kinds of the layers of one depth of multi-token prediction: of a hybrid model those of a pattern of
    its own, else that of a layer of the model."""
    if model.ssm and (pattern := model.ssm.mtp_pattern):
        further = model.model_copy(update={"ssm": model.ssm.model_copy(update={"pattern": pattern})})
        return tuple(Transformer.kind(further, layer) for layer in range(len(pattern)))
    return (Transformer.kind(model, model.layers - 1 if model.mtp_like is None else model.mtp_like),)


def count_vectors(shape: Transformer) -> int:
    """Counts the vectors over h that modulate a layer: shift, scale and gate of each norm, for both streams of a layer
    with joint attention."""
    if shape.modulation is None:
        return 0
    norms = 1 if shape.shared_norm else 2
    each = (1 if shape.modulation.parts == "gates" else 3) * norms
    # Of the last layer the tokens of branches lack a gate, and the second norm.
    return each * (1 + (shape.joint_attention is True)) + 2 * (shape.joint_attention == "last")


def count_stream_parameters(shape: Transformer) -> int:
    """Counts the parameters of a layer that tokens of branches alone pass, without modulation; 0 without joint
    attention."""
    if not shape.joint_attention:
        return 0
    if shape.joint_attention == "last":
        unread = (shape.output_width + shape.proj_bias) * shape.hidden
        return shape.norm_parameters + shape.attention_parameters - unread
    return 2 * shape.norm_parameters + shape.attention_parameters + shape.mlp_parameters(shape.dense_ffn)
