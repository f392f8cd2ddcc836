"""Configs of models with experts or latent attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from hardware.errors import ModelError
from simulator.models.huggingface.config import (
    Decoder,
    check_every_layer,
    expert_layers,
    key,
    local_fields,
    refuse,
)
from simulator.models.parts import Count, Flag, Size

Index = Annotated[int, Field(strict=True, ge=0)]


class Mixtral(Decoder):
    """``MixtralConfig``: experts in every layer, of the width ``intermediate_size``."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    window: Size | None = key("sliding_window", default=None)
    experts: Size = key("num_local_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        return super().fields() | self.same_fields("head_dim", "window") | {"moe": moe}


class Qwen3MoE(Decoder):
    """``Qwen3MoeConfig``: experts in every ``decoder_sparse_step``-th layer that is not among ``mlp_only_layers``."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=None)
    attention_bias: Flag = key("attention_bias", default=False)
    slides: Flag = key("use_sliding_window", default=False)
    window: Size | None = key("sliding_window", default=4096)
    experts: Size = key("num_experts", default=128)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=768)
    every: Size = key("decoder_sparse_step", default=1)
    plain: list[Index] | None = key("mlp_only_layers", default=None)

    def fields(self) -> dict[str, Any]:
        plain = set(self.plain or ())
        flags = [layer not in plain and (layer + 1) % self.every == 0 for layer in range(self.layers)]
        moe = {}
        if any(flags):
            places = expert_layers(flags, "mlp_only_layers" if plain else "decoder_sparse_step")
            moe = {"moe": self.same_fields("experts", "top_k", "expert_ffn") | places}
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        window = {"window": self.window} if self.slides else {}
        return super().fields() | self.same_fields("head_dim") | biases | window | moe | {"qk_layernorm": True}


class Llama4(Decoder):
    """``Llama4TextConfig``: chunked attention with RoPE, and in every fourth layer full attention without; a shared
    expert as wide as a routed one. It is the ``text_config`` of the whole model, which also has a vision encoder.

    The scale of queries by their position (``attn_temperature_tuning``) is left out.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    attention_bias: Flag = key("attention_bias", default=False)
    dense_ffn: Size = key("intermediate_size_mlp", default=16384)
    experts: Count = key("num_local_experts", default=16)
    top_k: Count = key("num_experts_per_tok", default=1)
    every: Count = key("interleave_moe_layer_step", default=1)
    moe_layers: list[Index] | None = key("moe_layers", default=None)
    qk_norm: Flag = key("use_qk_norm", default=True)
    ropes: list[Literal[0, 1]] | None = key("no_rope_layers", default=None)
    full_every: Size = key("no_rope_layer_interval", default=4)
    attention_chunk: Size | None = key("attention_chunk_size", default=8192)
    layer_types: list[Literal["full_attention", "chunked_attention"]] | None = key("layer_types", default=None)

    def fields(self) -> dict[str, Any]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        norms = {"qk_layernorm": "l2" if self.qk_norm else False}
        return super().fields() | self.same_fields("head_dim") | biases | norms | self._masks() | self._moe()

    def _masks(self) -> dict[str, Any]:
        # Unlike its name, no_rope_layers has 1 for a layer with RoPE.
        ropes = [(layer + 1) % self.full_every != 0 for layer in range(self.layers)]
        if self.ropes:
            ropes = [*map(bool, self.ropes[: self.layers])]
        local = [each == "chunked_attention" for each in self.layer_types] if self.layer_types else ropes
        check_every_layer(ropes, self.layers, "no_rope_layers")
        check_every_layer(local, self.layers, "layer_types")
        if all(ropes):
            return local_fields("attention_chunk", self.attention_chunk, local, "layer_types")
        if ropes != local or not any(local) or self.attention_chunk is None:
            rule = "only layers with full attention among chunked ones can be without RoPE"
            raise ModelError("no_rope_layers", rule, "Give the fields of `model:` themselves", self.ropes)
        return local_fields("attention_chunk", self.attention_chunk, local, "no_rope_layers") | {"full_rope": False}

    def _moe(self) -> dict[str, Any]:
        flags = [self.every > 0 and (layer + 1) % self.every == 0 for layer in range(self.layers)]
        if self.moe_layers is not None:
            flags = [layer in self.moe_layers for layer in range(self.layers)]
        if not any(flags):
            return {"ffn": self.dense_ffn}
        moe = self.same_fields("experts", "top_k", "dense_ffn") | {"expert_ffn": self.ffn, "shared_experts": 1}
        return {"moe": moe | expert_layers(flags, "moe_layers")}


def _fp8_only(value: Any) -> Any:
    """Accepts fp8, in which DeepSeek-V3 is trained and published: number formats belong to the job."""
    if value and not (isinstance(value, dict) and value.get("quant_method") == "fp8"):
        raise ValueError("meshcast supports no quantised weights. Remove the key if the model works without it")
    return value


class DeepSeekV2(Decoder):
    """``DeepseekV2Config``: latent attention; routed and shared experts from layer ``first_k_dense_replace`` on.

    ``n_routed_experts: null`` means no experts, ``q_lora_rank: null`` no latent of queries. ``moe_layer_freq`` and
    ``num_nextn_predict_layers`` are keys of DeepSeek's own code.
    """

    quantization: Annotated[Any, AfterValidator(_fp8_only)] = key("quantization_config", default=None)
    attention_bias: Annotated[Flag, refuse("bias of latent attention")] = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    q_lora_rank: Size | None = key("q_lora_rank", default=1536)
    kv_lora_rank: Size = key("kv_lora_rank", default=512)
    qk_nope: Size = key("qk_nope_head_dim", default=128)
    qk_rope: Size = key("qk_rope_head_dim", default=64)
    v: Size = key("v_head_dim", default=128)
    experts: Size | None = key("n_routed_experts", default=64)
    top_k: Size = key("num_experts_per_tok")
    expert_ffn: Size = key("moe_intermediate_size", default=1407)
    shared_experts: Count | None = key("n_shared_experts", default=2)
    first_dense: Count = key("first_k_dense_replace", default=0)
    every: Size = key("moe_layer_freq", default=1)
    selection: str = key("topk_method", default="greedy")
    mtp: Count = key("num_nextn_predict_layers", default=0)

    def fields(self) -> dict[str, Any]:
        mla = self.same_fields("q_lora_rank", "kv_lora_rank", "qk_nope", "qk_rope", "v")
        return super().fields() | self.same_fields("mlp_bias", "mtp") | {"mla": mla, "moe": self._moe()}

    def _moe(self) -> dict[str, Any] | None:
        flags = [layer >= self.first_dense and layer % self.every == 0 for layer in range(self.layers)]
        if self.experts is None or not any(flags):
            return None
        moe = self.same_fields("experts", "top_k", "expert_ffn") | {"shared_experts": self.shared_experts or 0}
        # noaux_tc: the router has a correction bias for each expert.
        return moe | expert_layers(flags, "moe_layer_freq") | {"router_bias": self.selection == "noaux_tc"}


class DeepSeekV3(DeepSeekV2):
    """``DeepseekV3Config`` (DeepSeek V3 and R1)."""

    kv_heads: Size | None = key("num_key_value_heads", default=128)
    experts: Size | None = key("n_routed_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=2048)
    shared_experts: Count | None = key("n_shared_experts", default=1)
    first_dense: Count = key("first_k_dense_replace", default=3)
    selection: Literal["noaux_tc", "greedy", "group_limited_greedy"] = key("topk_method", default="noaux_tc")
