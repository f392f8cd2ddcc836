"""Configs of models with linear attention in most layers and softmax attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Decoder,
    check_every_layer,
    expert_layers,
    full_fields,
    key,
    refuse,
)
from meshcast.simulator.models.parts import Count, Flag, Share, Size

MixerTypes = list[Literal["full_attention", "linear_attention"]]


def mixer_fields(linear: dict[str, Any], full: Sequence[bool]) -> dict[str, Any]:
    """Returns the fields of `Model` for layers with linear attention; none if no layer has it.

    linear: the fields of `LinearAttention`.
    full: for each layer whether it has softmax attention.
    """
    return {} if all(full) else {"linear_attention": linear} | full_fields(full)


class Qwen3Next(Decoder):
    """``Qwen3NextConfig``: Gated DeltaNet in three of four layers, gated attention with RoPE on a quarter of a head in
    the others, and experts beside a shared expert with a gate.

    Multi-token prediction of the released checkpoints has no key, and is left out, as ``transformers`` does.
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

    def fields(self) -> dict[str, Any]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        shape = super().fields() | self.same_fields("head_dim", "rope_share") | biases
        gates = {"norm": "rmsnorm1p", "qk_layernorm": True, "attention_gate": True}
        return shape | gates | self._mixers() | self._moe()

    def _mixers(self) -> dict[str, Any]:
        full = [(layer + 1) % self.full_every == 0 for layer in range(self.layers)]
        if self.layer_types is not None:
            full = [each == "full_attention" for each in self.layer_types]
        check_every_layer(full, self.layers, "layer_types")
        linear = self.same_fields("key_heads", "key_dim", "value_dim", "conv") | {"heads": self.value_heads}
        return mixer_fields({"kind": "gated-delta-net", **linear}, full)

    def _moe(self) -> dict[str, Any]:
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
    """``Qwen3_5TextConfig``: the mixers of Qwen3-Next over dense MLPs. Multi-token prediction of the released
    checkpoints (``mtp_num_hidden_layers``) is left out, as ``transformers`` does."""

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

    def fields(self) -> dict[str, Any]:
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
