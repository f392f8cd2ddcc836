"""Configs of models with a short convolution in most layers and softmax attention in the others (LFM2)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from meshcast.simulator.models.huggingface.config import Decoder, check_every_layer, expert_layers, key, refuse
from meshcast.simulator.models.huggingface.linear import mixer_fields
from meshcast.simulator.models.parts import Count, Flag, Size


class ShortConvolutions(Decoder):
    """Convolutions of all channels between two gates, and attention with norms of queries and keys."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    tied: Flag = key("tie_embedding", "tie_word_embeddings", default=True)
    taps: Size = key("conv_L_cache", default=3)
    conv_bias: Annotated[Flag, refuse("biases of short convolutions")] = key("conv_bias", default=False)
    layer_types: list[Literal["conv", "full_attention"]] | None = key("layer_types", default=None)

    def fields(self) -> dict[str, Any]:
        linear = {"kind": "short-conv", "heads": self.hidden, "key_dim": 1, "conv": self.taps}
        shape = super().fields() | self.same_fields("head_dim") | {"qk_layernorm": True}
        return shape | mixer_fields(linear, self._full())

    def _full(self) -> list[bool]:
        """Returns for each layer whether it has attention."""
        types = self.layer_types or ["full_attention"] * self.layers
        check_every_layer(types, self.layers, "layer_types")
        return [each == "full_attention" for each in types]


class Lfm2(ShortConvolutions):
    """``Lfm2Config``: dense MLPs, two thirds as wide as the config says, and rounded up."""

    ffn: Size = key("block_ff_dim", "intermediate_size")
    adjusts: Flag = key("block_auto_adjust_ff_dim", default=True)
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = key("block_ffn_dim_multiplier", default=1.0)
    multiple: Size = key("block_multiple_of", default=256)
    attention: list[Annotated[int, Field(strict=True, ge=0)]] | None = key("full_attn_idxs", default=None)

    def fields(self) -> dict[str, Any]:
        ffn = int(2 * self.ffn / 3) if self.adjusts else self.ffn
        if self.adjusts and self.factor is not None:
            ffn = -(-int(self.factor * ffn) // self.multiple) * self.multiple
        return super().fields() | {"ffn": ffn}

    def _full(self) -> list[bool]:
        if self.layer_types is None and self.attention is not None:
            return [layer in self.attention for layer in range(self.layers)]
        return super()._full()


class Lfm2MoE(ShortConvolutions):
    """``Lfm2MoeConfig``: experts with a correction for each in all but the first layers."""

    layer_types: list[Literal["conv", "full_attention"]] | None = key("layer_types")
    ffn: Size = key("intermediate_size", default=7168)
    first_dense: Count = key("num_dense_layers", default=2)
    experts: Size = key("num_experts", default=32)
    top_k: Size = key("num_experts_per_tok", default=4)
    expert_ffn: Size = key("moe_intermediate_size", default=1792)
    router_bias: Flag = key("use_expert_bias", default=True)

    def fields(self) -> dict[str, Any]:
        flags = [layer >= self.first_dense for layer in range(self.layers)]
        if not any(flags):
            return super().fields()
        moe = self.same_fields("experts", "top_k", "expert_ffn", "router_bias")
        return super().fields() | {"moe": moe | expert_layers(flags, "num_dense_layers")}
