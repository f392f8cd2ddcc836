"""Configs of models with linear attention in most layers and softmax attention in the others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Decoder,
    Keys,
    check_every_layer,
    expert_layers,
    full_fields,
    key,
    leave_out_mtp,
    refuse,
)
from meshcast.simulator.models.huggingface.moe import ListedExperts
from meshcast.simulator.models.parts import Count, Flag, Share, Size

MixerTypes = list[Literal["full_attention", "linear_attention"]]


def mixer_fields(linear: dict[str, object], full: Sequence[bool]) -> dict[str, object]:
    """Returns the fields of `Model` for layers with linear attention; none if no layer has it.

    linear: the fields of `LinearAttention`.
    full: for each layer whether it has softmax attention.
    """
    return {} if all(full) else {"linear_attention": linear} | full_fields(full)


class Qwen3Next(Decoder):
    """``Qwen3NextConfig``: Gated DeltaNet in three of four layers, gated attention with RoPE on a quarter of a head in
    the others, and experts beside a shared expert with a gate.

    Multi-token prediction of the released checkpoints is left out, as ``transformers`` does; Qwen3-Next has no key for
    it.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=2)
    head_dim: Size = key("head_dim", default=256)
    rope_share: Share = key("partial_rotary_factor", default=0.25)
    attention_bias: Flag = key("attention_bias", default=False)
    conv: Size = key("linear_conv_kernel_dim", default=4)
    key_dim: Size = key("linear_key_head_dim", default=128)
    value_dim: Size = key("linear_value_head_dim", default=128)
    key_heads: Size = key("linear_num_key_heads", default=16)
    value_heads: Size = key("linear_num_value_heads", default=32)
    full_every: Size = key("full_attention_interval", default=4)
    layer_types: MixerTypes | None = key("layer_types", default=None)
    experts: Count = key("num_experts", default=512)
    top_k: Size = key("num_experts_per_tok", default=10)
    expert_ffn: Size = key("moe_intermediate_size", default=512)
    shared_ffn: Size = key("shared_expert_intermediate_size", default=512)
    every: Size = key("decoder_sparse_step", default=1)
    plain: list[Annotated[int, Field(strict=True, ge=0)]] | None = key("mlp_only_layers", default=None)
    mtp: Count = key("mtp_num_hidden_layers", default=0)

    def fields(self) -> dict[str, object]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        shape = super().fields() | self.same_fields("head_dim", "rope_share") | biases
        gates = {"norm": "rmsnorm1p", "qk_layernorm": True, "attention_gate": True}
        return shape | gates | leave_out_mtp(self.mtp, self.layers) | self._mixers() | self._moe()

    def _mixers(self) -> dict[str, object]:
        full = [(layer + 1) % self.full_every == 0 for layer in range(self.layers)]
        if self.layer_types is not None:
            full = [each == "full_attention" for each in self.layer_types]
        check_every_layer(full, self.layers, "layer_types")
        linear = self.same_fields("key_heads", "key_dim", "value_dim", "conv") | {"heads": self.value_heads}
        return mixer_fields({"kind": "gated-delta-net", **linear}, full)

    def _moe(self) -> dict[str, object]:
        plain = set(self.plain or ())
        flags = [
            self.experts > 0 and layer not in plain and (layer + 1) % self.every == 0 for layer in range(self.layers)
        ]
        if not any(flags):
            return {}
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_ffn")
        places = expert_layers(flags, "mlp_only_layers" if plain else "decoder_sparse_step")
        return {"moe": moe | places | {"shared_experts": 1, "shared_gate": True}}


class Qwen35(Qwen3Next):
    """``Qwen3_5TextConfig``: the mixers of Qwen3-Next over dense MLPs."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    experts: Count = key("num_experts", default=0)


class Qwen35MoE(Qwen3Next):
    """``Qwen3_5MoeTextConfig``: Qwen3-Next with experts in all layers, so that no MLP has a width."""

    ffn: Size = key("intermediate_size", default=512)
    experts: Count = key("num_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=8)


class MiniMax(Decoder):
    """``MiniMaxConfig`` (MiniMax-Text-01 and M1): lightning attention in seven of eight layers, and experts in all. The
    residual stream goes on from the results of norms.

    Its factors on both parts of a residual addition are part of kernels that run anyway, and are left out.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    rotary: Size | None = key("rotary_dim", default=None)
    window: Annotated[Size | None, refuse("window beside linear attention")] = key("sliding_window", default=None)
    experts: Size = key("num_local_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)
    block: Size = key("block_size", default=256)
    layer_types: MixerTypes | None = key("layer_types", default=None)
    postnorm: Flag = key("postnorm", default=True)
    shared: Annotated[Count, refuse("shared expert with its kind of gate")] = key("shared_intermediate_size", default=0)

    def fields(self) -> dict[str, object]:
        width = self.head_dim or self.hidden // self.heads
        rope = {} if self.rotary is None else {"rope_share": min(1.0, self.rotary / width)}
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        full, word = self._full()
        check_every_layer(full, self.layers, word)
        linear = {"kind": "lightning", "heads": self.heads, "key_dim": width, "chunk": self.block}
        shape = super().fields() | self.same_fields("head_dim") | rope | {"moe": moe}
        return shape | {"norm_residual": self.postnorm} | mixer_fields(linear, full)

    def _full(self) -> tuple[list[bool], str]:
        """Returns for each layer whether it has softmax attention, and the key that says so."""
        if self.layer_types is not None:
            return [each == "full_attention" for each in self.layer_types], "layer_types"
        return [(layer + 1) % 2 != 0 for layer in range(self.layers)], "layer_types"


class MiniMaxText01(MiniMax):
    """``minimax_text_01``, the code of MiniMaxAI: 1 in ``attn_type_list`` is softmax attention."""

    postnorm: Flag = key("postnorm", default=False)
    kinds: list[Literal[0, 1]] = key("attn_type_list")

    def _full(self) -> tuple[list[bool], str]:
        return [*map(bool, self.kinds)], "attn_type_list"


class KimiDelta(ListedExperts):
    """Kimi delta attention in most layers, latent attention in the others, and experts with a correction for each
    beside a shared one in all but the first layers."""

    kv_heads: Size | None = key("num_key_value_heads", default=32)
    seq: Size = key("model_max_length", "max_position_embeddings")
    q_lora_rank: Size | None = key("q_lora_rank", default=None)
    experts: Size | None = key("num_experts", "num_local_experts", "n_routed_experts", default=256)
    top_k: Size = key("num_experts_per_token", "num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1024)
    shared_experts: Count | None = key("num_shared_experts", "n_shared_experts", default=1)
    first_dense: Count = key("first_k_dense_replace", default=1)
    layer_types: MixerTypes | None = key("layer_types", default=None)

    @property
    @abstractmethod
    def linear(self) -> dict[str, object]:
        """The fields of `LinearAttention`."""

    def fields(self) -> dict[str, object]:
        full = self._full()
        if self.layer_types is not None:
            full = [each == "full_attention" for each in self.layer_types]
        check_every_layer(full, self.layers, "layer_types")
        return super().fields() | mixer_fields({"kind": "kimi-delta", **self.linear}, full)

    @abstractmethod
    def _full(self) -> list[bool]:
        """Returns for each layer whether it has softmax attention, where ``layer_types`` does not say it."""


class KimiLinearShape(Keys):
    """``linear_attn_config`` of a ``KimiLinearConfig``; it numbers layers from 1."""

    head_dim: Size | None = key("head_dim", default=None)
    heads: Size | None = key("num_heads", default=None)
    conv: Size | None = key("short_conv_kernel_size", default=None)
    full: list[Size] | None = key("full_attn_layers", default=None)
    full_gate: Flag = key("use_full_rank_gate", default=False)


class KimiLinear(KimiDelta):
    """``KimiLinearConfig`` (Kimi Linear, the decoder of Kimi K3): decays and gates through latents as wide as a head,
    latent attention without RoPE. Kimi K3 has gates from the input itself, experts over a latent, and attention
    residuals; its activation (situ) runs in kernels that move as much as those of SwiGLU."""

    head_dim: Size = key("linear_head_dim", default=128)
    linear_heads: Size = key("linear_num_heads", default=32)
    conv: Size = key("linear_conv_kernel_dim", default=4)
    shape: KimiLinearShape = key("linear_attn_config", default=KimiLinearShape())
    no_rope: Literal[True] = key("mla_use_nope", default=True)
    gated: Flag = key("mla_use_output_gate", default=False)
    activation: Literal["silu", "swish", "situ"] = key("hidden_act", default="silu")  # type: ignore[assignment]
    latent: Size | None = key("routed_expert_hidden_size", default=None)
    latent_norm: Flag = key("latent_moe_use_norm", default=False)
    every: Literal[1] = key("moe_layer_freq", default=1)
    block: Size | None = key("attn_res_block_size", default=None)

    @property
    def linear(self) -> dict[str, object]:
        width, heads = self.shape.head_dim or self.head_dim, self.shape.heads or self.linear_heads
        gate = {"full_gate": True} if self.shape.full_gate else {}
        return {"heads": heads, "key_dim": width, "rank": width, "conv": self.shape.conv or self.conv, **gate}

    def fields(self) -> dict[str, object]:
        further = {"attention_residuals": {"block": self.block}} if self.block else {}
        gate = {"attention_gate": True} if self.gated else {}
        return super().fields() | {"positions": "none"} | further | gate

    def _moe(self) -> dict[str, object] | None:
        moe = super()._moe()
        return moe and moe | ({"latent": {"width": self.latent, "norm": self.latent_norm}} if self.latent else {})

    def _full(self) -> list[bool]:
        layers = range(self.layers)
        if self.shape.full is not None:
            return [layer + 1 in self.shape.full for layer in layers]
        return [layer > 0 and layer % 4 == 0 for layer in layers]


class BailingHybrid(KimiDelta):
    """``BailingHybridConfig`` (Ling 3): decays and gates from the input itself, latent attention with a gate of each
    head. Multi-token prediction is that which the config names, though ``transformers`` leaves it out."""

    experts: Size | None = key("num_experts", "num_local_experts", default=512)
    expert_ffn: Size = key("moe_intermediate_size", default=768)
    first_dense: Count = key("first_k_dense_replace", default=2)
    head_dim: Size = key("linear_head_dim", "head_dim", default=128)
    conv: Size = key("short_conv_kernel_size", default=4)
    group: Size = key("layer_group_size", default=6)

    @property
    def linear(self) -> dict[str, object]:
        return {"heads": self.heads, "key_dim": self.head_dim, "conv": self.conv}

    def fields(self) -> dict[str, object]:
        return super().fields() | {"attention_gate": "heads"}

    def _full(self) -> list[bool]:
        return [(layer + 1) % self.group == 0 for layer in range(self.layers)]


class OlmoHybrid(Decoder):
    """``OlmoHybridConfig``: Gated DeltaNet behind norms in most layers, OLMo 3's attention in front of norms in the
    others, with RoPE unless its base is null."""

    attention_bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key(
        "attention_bias", default=False
    )
    conv: Size = key("linear_conv_kernel_dim", default=4)
    key_heads: Size | None = key("linear_num_key_heads", default=None)
    value_heads: Size | None = key("linear_num_value_heads", default=None)
    key_dim: Size | None = key("linear_key_head_dim", default=None)
    value_dim: Size | None = key("linear_value_head_dim", default=None)
    layer_types: MixerTypes | None = key("layer_types", default=None)
    rope: dict[str, object] | None = key("rope_parameters", default=None)
    theta: float | None = key("rope_theta", default=1e4)

    def fields(self) -> dict[str, object]:
        full = [layer % 4 == 3 for layer in range(self.layers)]
        full[-1] = full[-1] or not any(full)
        if self.layer_types is not None:
            full = [each == "full_attention" for each in self.layer_types]
        check_every_layer(full, self.layers, "layer_types")
        key_heads = self.key_heads or self.heads
        width = self.key_dim or int(0.75 * self.hidden / key_heads)
        heads = {"heads": self.value_heads or self.heads, "key_heads": key_heads, "conv": self.conv}
        linear = {"kind": "gated-delta-net", "norm_place": "before", "key_dim": width, **heads}
        linear["value_dim"] = self.value_dim or 2 * width
        theta = self.theta if self.rope is None else self.rope.get("rope_theta", self.theta)
        norms = {"norm_place": "after", "qk_layernorm": "all", "positions": "none" if theta is None else "rope"}
        return super().fields() | norms | mixer_fields(linear, full)
