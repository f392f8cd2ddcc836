"""Configs of models with a short convolution in most layers and softmax attention in the others (LFM2 and 3)."""

from __future__ import annotations

from typing import Annotated, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
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
    window: Size | None = key("sliding_window", default=None)
    layer_types: list[Literal["conv", "full_attention", "sliding_attention"]] | None = key("layer_types", default=None)

    def fields(self) -> dict[str, object]:
        linear: dict[str, object] = {"kind": "short-conv", "heads": self.hidden, "key_dim": 1, "conv": self.taps}
        types = self.layer_types or self._usual_types()
        check_every_layer(types, self.layers, "layer_types")
        windows = {}
        if "sliding_attention" in types and self.window:
            linear["layers"] = tuple(layer for layer, each in enumerate(types) if each == "conv")
            windows = {"window": self.window}
        full = [each == "full_attention" or (each == "sliding_attention" and not windows) for each in types]
        shape = super().fields() | self.same_fields("head_dim") | {"qk_layernorm": True}
        return shape | windows | mixer_fields(linear, full)

    def _usual_types(self) -> list[str]:
        """Returns the types of all layers where the config does not say them."""
        return ["full_attention"] * self.layers


class Lfm2(ShortConvolutions):
    """``Lfm2Config``: dense MLPs, two thirds as wide as the config says, and rounded up."""

    ffn: Size = key("block_ff_dim", "intermediate_size")
    adjusts: Flag = key("block_auto_adjust_ff_dim", default=True)
    factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = key("block_ffn_dim_multiplier", default=1.0)
    multiple: Size = key("block_multiple_of", default=256)
    attention: list[Annotated[int, Field(strict=True, ge=0)]] | None = key("full_attn_idxs", default=None)

    def fields(self) -> dict[str, object]:
        ffn = int(2 * self.ffn / 3) if self.adjusts else self.ffn
        if self.adjusts and self.factor is not None:
            ffn = -(-int(self.factor * ffn) // self.multiple) * self.multiple
        return super().fields() | {"ffn": ffn}

    def _usual_types(self) -> list[str]:
        full = range(self.layers) if self.attention is None else self.attention
        return ["full_attention" if layer in full else "conv" for layer in range(self.layers)]


class Lfm2MoE(ShortConvolutions):
    """``Lfm2MoeConfig``: experts with a correction for each in all but the first layers."""

    ffn: Size = key("intermediate_size", default=7168)
    first_dense: Count = key("num_dense_layers", default=2)
    experts: Size = key("num_experts", default=32)
    top_k: Size = key("num_experts_per_tok", default=4)
    expert_ffn: Size = key("moe_intermediate_size", default=1792)
    router_bias: Flag = key("use_expert_bias", default=True)

    def fields(self) -> dict[str, object]:
        flags = [layer >= self.first_dense for layer in range(self.layers)]
        if not any(flags):
            return super().fields()
        moe = self.same_fields("experts", "top_k", "expert_ffn", "router_bias")
        return super().fields() | {"moe": moe | expert_layers(flags, "num_dense_layers")}

    def _usual_types(self) -> list[str]:
        rule = "it says which layers have convolutions, and has no default"
        raise ModelError("layer_types", rule, "Add the list of the model's config.json")


class Lfm3(ShortConvolutions):
    """``Lfm3Config``: convolutions, attention within a window and full attention, with a gate of each head; norms in
    front of and behind mixer and MLP. RoPE on half of a head in layers with full attention is read as on all of it, for
    its kernel runs over all."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=128)
    taps: Size = key("conv_L_cache", default=7)
    attention_bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key(
        "attention_bias", default=False
    )
    window: Size | None = key("sliding_window", default=256)
    gated: Flag = key("use_attention_gate", default=True)
    sandwich: Flag = key("use_sandwich_norm", default=True)

    def fields(self) -> dict[str, object]:
        gate = {"attention_gate": "heads"} if self.gated else {}
        return super().fields() | gate | ({"norm_place": "both"} if self.sandwich else {})

    def _usual_types(self) -> list[str]:
        types = ["sliding_attention", "conv", "full_attention", "conv"]
        return ["conv", *(types[layer % 4] for layer in range(1, self.layers))]
