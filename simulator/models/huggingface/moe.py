"""Configs of models with experts or latent attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Decoder,
    MlpTypes,
    check_every_layer,
    expert_layers,
    key,
    local_fields,
    refuse,
    round_share,
    sparse_layers,
)
from meshcast.simulator.models.huggingface.gemma import window_fields
from meshcast.simulator.models.huggingface.llama import HunyuanDense, LayerTypes
from meshcast.simulator.models.parts import Count, Flag, Share, Size

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


class BailingMoE(Decoder):
    """``BailingMoeConfig`` of Ling 1 and ``BailingMoeV2Config`` of Ling 2: experts beside shared ones behind the first
    layers; Ling 2 has norms of queries and keys, RoPE on half of a head, and corrections of routers. Source:
    inclusionAI/Ling @69823a61 and Ling-V2 @efee9bb7, models/modeling_bailing_moe*.py."""

    head_dim: Size | None = key("head_dim", default=None)
    rope_share: Share = key("partial_rotary_factor", default=1.0)
    qkv_bias: Flag = key("use_qkv_bias", default=False)
    proj_bias: Flag = key("use_bias")  # its default differs between both
    qk_layernorm: Flag = key("use_qk_norm", default=False)
    normed_head: Flag = key("norm_head", default=False)
    experts: Size = key("num_experts")
    top_k: Size = key("num_experts_per_tok")
    expert_ffn: Size = key("moe_intermediate_size")
    shared_experts: Count | None = key("num_shared_experts", default=None)
    first_dense: Count = key("first_k_dense_replace", default=0)
    router_bias: Flag = key("moe_router_enable_expert_bias", default=False)

    def fields(self) -> dict[str, Any]:
        kind = self.same_fields("head_dim", "rope_share", "qkv_bias", "proj_bias", "qk_layernorm")
        if self.normed_head:
            kind["left_out"] = ("the normalisation of the output layer's weights is",)
        if self.first_dense >= self.layers:
            return super().fields() | kind
        moe = self.same_fields("experts", "top_k", "expert_ffn", "first_dense", "router_bias")
        return super().fields() | kind | {"moe": moe | {"shared_experts": self.shared_experts or 0}}


class Qwen3MoE(Decoder):
    """``Qwen3MoeConfig``: experts in every ``decoder_sparse_step``-th layer that is not among ``mlp_only_layers``."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=None)
    attention_bias: Flag = key("attention_bias", default=False)
    slides: Flag = key("use_sliding_window", default=False)
    window: Size | None = key("sliding_window", default=4096)
    experts: Size = key("num_experts", "num_local_experts", default=128)
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


class Qwen3VLMoEText(Qwen3MoE):
    """``Qwen3VLMoeTextConfig``: Qwen 3 with experts, with defaults of its own."""

    kv_heads: Size | None = key("num_key_value_heads", default=16)
    experts: Size = key("num_experts", "num_local_experts", default=60)
    top_k: Size = key("num_experts_per_tok", default=4)
    expert_ffn: Size = key("moe_intermediate_size", default=1408)


class Llama4(Decoder):
    """``Llama4TextConfig``: chunked attention with RoPE, and in every fourth layer full attention without; a shared
    expert as wide as a routed expert. It is the ``text_config`` of the whole model, which also has a vision encoder.

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
            return local_fields("attention_chunk", self.attention_chunk, local)
        if ropes != local or not any(local) or self.attention_chunk is None:
            rule = "only layers with full attention among chunked ones can be without RoPE"
            raise ModelError("no_rope_layers", rule, "Give the fields of `model:` themselves", self.ropes)
        return local_fields("attention_chunk", self.attention_chunk, local) | {"full_rope": False}

    def _moe(self) -> dict[str, Any]:
        flags = [self.every > 0 and (layer + 1) % self.every == 0 for layer in range(self.layers)]
        if self.moe_layers is not None:
            flags = [layer in self.moe_layers for layer in range(self.layers)]
        if not any(flags):
            return {"ffn": self.dense_ffn}
        moe = self.same_fields("experts", "top_k", "dense_ffn") | {"expert_ffn": self.ffn, "shared_experts": 1}
        return {"moe": moe | expert_layers(flags, "moe_layers")}


class DeepSeekV2(Decoder):
    """``DeepseekV2Config``: latent attention; routed and shared experts from layer ``first_k_dense_replace`` on.

    ``n_routed_experts: null`` means no experts, ``q_lora_rank: null`` no latent of queries. ``moe_layer_freq`` is a key
    of DeepSeek's code.
    """

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

    def fields(self) -> dict[str, Any]:
        mla = self.same_fields("q_lora_rank", "kv_lora_rank", "qk_nope", "qk_rope", "v")
        return super().fields() | self.same_fields("mlp_bias") | {"mla": mla, "moe": self._moe()}

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


class ListedExperts(DeepSeekV3):
    """The architecture of DeepSeek-V3, whose configs may list the layers that have experts."""

    kinds: MlpTypes | None = key("mlp_layer_types", default=None)

    def _moe(self) -> dict[str, Any] | None:
        moe = super()._moe()
        return moe and moe | sparse_layers(self.kinds, self.layers, self.first_dense)


class DeepSeekV32(ListedExperts):
    """``DeepseekV32Config``: DeepSeek-V3 with attention to the keys that an indexer chooses."""

    index_heads: Size = key("index_n_heads", default=64)
    index_dim: Size = key("index_head_dim", default=128)
    index_top_k: Size = key("index_topk", default=2048)
    layer_types: list[Literal["indexed_attention", "deepseek_sparse_attention"]] | None = key(
        "layer_types", default=None
    )

    def fields(self) -> dict[str, Any]:
        shape = super().fields()
        index = {"heads": self.index_heads, "dim": self.index_dim, "top_k": self.index_top_k}
        return shape | {"mla": shape["mla"] | {"index": index}}


class GlmMoEDSA(DeepSeekV32):
    """``GlmMoeDsaConfig`` (GLM-5)."""

    kv_heads: Size | None = key("num_key_value_heads", default=64)
    q_lora_rank: Size | None = key("q_lora_rank", default=2048)
    qk_nope: Size = key("qk_nope_head_dim", default=192)
    v: Size = key("v_head_dim", default=256)
    index_heads: Size = key("index_n_heads", default=32)
    indexers: list[Literal["full", "shared"]] | None = key("indexer_types", default=None)
    every_index: Count = key("index_topk_freq", default=1)
    first_index: Count = key("index_skip_topk_offset", default=2)
    index_pattern: str | list[str] | None = key("index_topk_pattern", default=None)

    def fields(self) -> dict[str, Any]:
        shape = super().fields()
        shared = tuple(layer for layer, kind in enumerate(self._indexers()) if kind == "shared")
        return shape | {"mla": shape["mla"] | {"index": shape["mla"]["index"] | {"shared_by": shared}}}

    def _indexers(self) -> list[str]:
        """Lists how every layer chooses its keys, by the rule of ``GlmMoeDsaConfig``."""
        if self.indexers:
            check_every_layer(self.indexers, self.layers, "indexer_types")
            return list(self.indexers)
        if self.index_pattern:
            return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in self.index_pattern][: self.layers]
        behind = (max(layer - self.first_index + 1, 0) for layer in range(self.layers))
        return ["shared" if layers % max(1, self.every_index) else "full" for layers in behind]


class KimiK2(DeepSeekV3):
    """``kimi_k2``: the architecture of DeepSeek-V3, with its defaults."""


class GptOss(Decoder):
    """``GptOssConfig``: biases everywhere, a window in every other layer, experts in all layers, and a learned logit of
    every head in the softmax. Weights are published in MXFP4, and trained in other formats.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size = key("head_dim", default=64)
    attention_bias: Flag = key("attention_bias", default=True)
    window: Size | None = key("sliding_window", default=128)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    experts: Size = key("num_local_experts", default=128)
    top_k: Size = key("num_experts_per_tok", "experts_per_token", default=4)

    def fields(self) -> dict[str, Any]:
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias, "mlp_bias": True}
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn, "router_bias": True, "clamped": True}
        windows = window_fields(self.window, self.layers, self.layer_types, 2)
        return super().fields() | self.same_fields("head_dim") | biases | windows | {"moe": moe, "sinks": True}


class Qwen2MoE(Decoder):
    """``Qwen2MoeConfig``: routed experts beside a shared expert with a gate, and biases of queries, keys and values."""

    kv_heads: Size | None = key("num_key_value_heads", default=16)
    qkv_bias: Flag = key("qkv_bias", default=True)
    slides: Flag = key("use_sliding_window", default=False)
    window: Index | None = key("sliding_window", default=4096)
    first_full: int = key("max_window_layers", default=28)
    experts: Size = key("num_experts", default=60)
    top_k: Size = key("num_experts_per_tok", default=4)
    expert_ffn: Size = key("moe_intermediate_size", default=1408)
    shared_ffn: Size = key("shared_expert_intermediate_size", default=5632)
    every: Size = key("decoder_sparse_step", default=1)
    plain: list[Index] | None = key("mlp_only_layers", default=None)

    def fields(self) -> dict[str, Any]:
        slides = [self.slides and layer >= self.first_full for layer in range(self.layers)]
        window = local_fields("window", self.window or None, slides)
        return super().fields() | self.same_fields("qkv_bias") | window | self._moe()

    def _moe(self) -> dict[str, Any]:
        plain = set(self.plain or ())
        flags = [layer not in plain and (layer + 1) % self.every == 0 for layer in range(self.layers)]
        if not any(flags):
            return {}
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_ffn")
        places = expert_layers(flags, "mlp_only_layers" if plain else "decoder_sparse_step")
        return {"moe": moe | places | {"shared_experts": 1, "shared_gate": True}}


class Glm4MoE(Decoder):
    """``Glm4MoeConfig`` (GLM-4.5 and 4.6): experts as in DeepSeek-V3 over grouped-query attention, with RoPE on a share
    of each head. The layer of multi-token prediction is a key of checkpoints that ``transformers`` does not load."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=None)
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    attention_bias: Flag = key("attention_bias", default=False)
    qk_norm: Flag = key("use_qk_norm", default=False)
    experts: Size = key("n_routed_experts", default=128)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1408)
    shared_experts: Count = key("n_shared_experts", default=1)
    first_dense: Count = key("first_k_dense_replace", default=1)

    def fields(self) -> dict[str, Any]:
        width = self.head_dim or self.hidden // self.heads
        shape = super().fields() | {"head_dim": width, "rope_share": round_share(self.rope_share, width)}
        biases = {"qkv_bias": self.attention_bias, "proj_bias": False, "qk_layernorm": self.qk_norm}
        if self.first_dense >= self.layers:
            return shape | biases
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_experts", "first_dense")
        return shape | biases | {"moe": moe | {"router_bias": True}}


class Glm4VMoEText(Glm4MoE):
    """``Glm4vMoeTextConfig``: GLM-4.5 with biases of queries, keys and values."""

    attention_bias: Flag = key("attention_bias", default=True)


class SarvamMoE(Glm4MoE):
    """``SarvamMoEConfig``: GLM-4.5's experts, with RoPE on whole heads and norms of queries and keys."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=64)
    rope_share: Share = key("partial_rotary_factor", default=1.0)
    attention_bias: Flag = key("attention_bias", "use_qkv_bias", default=False)
    qk_norm: Flag = key("use_qk_norm", default=True)
    experts: Size = key("n_routed_experts", "num_experts", "num_local_experts", default=128)
    top_k: Size = key("num_experts_per_tok", default=6)
    expert_ffn: Size = key("moe_intermediate_size", default=1024)
    shared_experts: Count = key("n_shared_experts", "num_shared_experts", default=1)


class SarvamMLA(DeepSeekV3):
    """``SarvamMLAConfig``: the architecture of DeepSeek-V3, with queries without a latent."""

    kv_heads: Size | None = key("num_key_value_heads", default=None)
    q_lora_rank: Size | None = key("q_lora_rank", default=None)
    experts: Size | None = key("n_routed_experts", "num_experts", "num_local_experts", default=128)
    shared_experts: Count | None = key("n_shared_experts", "num_shared_experts", default=1)
    first_dense: Count = key("first_k_dense_replace", default=1)


class HunyuanMoE(HunyuanDense):
    """``HunYuanMoEV1Config``: norms on queries and keys; in all layers routed experts and a shared expert, as wide as
    ``intermediate_size``. Lists, with a number for each layer, are read if all of these are the same.
    """

    experts: Size | list[Size] = key("num_experts", default=1)
    top_k: Size | list[Size] = key("moe_topk", default=1)
    expert_ffn: Size | list[Size] | None = key("moe_intermediate_size", default=None)
    shared: Size | list[Size] = key("num_shared_expert", default=1)

    def fields(self) -> dict[str, Any]:
        experts, top_k, shared = (self._same(word) for word in ("experts", "top_k", "shared"))
        width = self._same("expert_ffn") or self.ffn
        if width != self.ffn or shared != 1:
            rule = f"routed experts and one shared expert of the width intermediate_size ({self.ffn}) are supported"
            raise ModelError("expert_ffn", rule, "Give the fields of `model:` themselves", width)
        moe = {"experts": experts, "top_k": top_k, "expert_ffn": self.ffn, "shared_experts": 1}
        return super().fields() | {"moe": moe}

    def _same(self, word: str) -> int | None:
        """Returns the number of all layers."""
        number: int | list[int] | None = getattr(self, word)
        if not isinstance(number, list):
            return number
        if len(set(number)) != 1:
            raise ModelError(word, "one number for all layers is supported", "Give the fields of `model:`", number)
        return number[0]


class Grok1(Decoder):
    """``grok-1``, the code of hpcai-tech: experts in all layers, four norms a layer, and capped scores.

    Factors on embeddings, scores and logits are part of kernels that run anyway, and are left out.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    activation: Literal["gelu"] = key("hidden_act", default="gelu")  # type: ignore[assignment]
    tied: Flag = key("tie_word_embeddings", default=True)
    experts: Size = key("num_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        kind = {"moe": moe, "norm_place": "both", "softcaps": ("attention",)}
        return super().fields() | self.read_activation() | kind
