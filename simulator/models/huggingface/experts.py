"""Configs of decoders with experts in most layers over grouped-query or latent attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Config,
    Decoder,
    Keys,
    MlpTypes,
    check_every_layer,
    expert_layers,
    key,
    local_fields,
    refuse,
    sparse_layers,
)
from meshcast.simulator.models.huggingface.dense import GraniteSWA
from meshcast.simulator.models.huggingface.gemma import Cohere2, Exaone4, window_fields
from meshcast.simulator.models.huggingface.llama import Granite, LayerTypes, Llama
from meshcast.simulator.models.huggingface.moe import DeepSeekV2, DeepSeekV3, ListedExperts, Qwen3MoE
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Share, Size


class Olmoe(Llama):
    """``OlmoeConfig``: experts in all layers, norms over all heads of queries and of keys. Clipping queries, keys and
    values, an elementwise kernel each, is left out."""

    experts: Size = key("num_experts", default=64)
    top_k: Size = key("num_experts_per_tok", default=8)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        return super().fields() | {"moe": moe, "qk_layernorm": "all"}


class AriaText(Llama):
    """``AriaTextConfig``: experts of the width ``intermediate_size`` beside shared ones in all layers."""

    mlp_bias: Annotated[Flag, refuse("biases of shared experts alone")] = key("mlp_bias", default=False)
    experts: Size = key("moe_num_experts", default=8)
    top_k: Size = key("moe_topk", default=2)
    shared_experts: Count = key("moe_num_shared_experts", default=2)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k", "shared_experts") | {"expert_ffn": self.ffn}
        return super().fields() | {"moe": moe}


class FlexOlmo(Olmoe):
    """``FlexOlmoConfig``: OLMoE with norms behind attention and experts."""

    experts: Size = key("num_experts", default=7)
    top_k: Size = key("num_experts_per_tok", default=5)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"norm_place": "after"}


class PhiMoE(Decoder):
    """``PhimoeConfig`` (Phi-3.5-MoE): experts in all layers behind layer norms."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    bias: Flag = key("attention_bias", default=False)
    head_bias: Flag = key("lm_head_bias", default=False)
    window: Size | None = key("sliding_window", default=None)
    experts: Size = key("num_local_experts", default=16)
    top_k: Size = key("num_experts_per_tok", default=2)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        kind = {"norm": "layernorm", "qkv_bias": self.bias, "proj_bias": self.bias, "mlp_bias": False}
        head = {"head": ("bias",)} if self.head_bias else {}
        return super().fields() | self.same_fields("window") | kind | head | {"moe": moe}


class GraniteMoE(Granite):
    """``GraniteMoeConfig`` and ``GraniteMoeSharedConfig``: experts in all layers, of the width ``intermediate_size``;
    the latter beside a shared expert."""

    experts: Size = key("num_local_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)
    shared_ffn: Annotated[int, Field(strict=True, ge=0)] = key("shared_intermediate_size", default=0)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}
        shared = {"shared_experts": 1, "shared_ffn": self.shared_ffn} if self.shared_ffn else {}
        return super().fields() | {"moe": moe | shared}


class DbrxAttention(Keys):
    """``attn_config`` of a ``DbrxConfig``."""

    dropout: Probability = key("attn_pdrop", default=0.0)
    clip: float | None = key("clip_qkv", default=None)
    kv_heads: Size = key("kv_n_heads", default=1)


class DbrxExperts(Keys):
    """``ffn_config`` of a ``DbrxConfig``."""

    expert_ffn: Size = key("ffn_hidden_size", default=3584)
    experts: Size = key("moe_num_experts", default=4)
    top_k: Size = key("moe_top_k", default=1)


class Dbrx(Config):
    """``DbrxConfig``: experts in all layers, one matrix for queries, keys and values.

    Its layer norm has no bias, and is read as an RMS norm, which has the same weights and memory traffic. Clipping
    queries, keys and values, an elementwise kernel each, is left out.
    """

    layers: Depth = key("n_layers")
    hidden: Size = key("d_model")
    heads: Size = key("n_heads")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_seq_len")
    tied: Flag = key("tie_word_embeddings", default=False)
    dropout: Probability = key("resid_pdrop", default=0.0)
    embedding_dropout: Annotated[Probability, refuse("dropout on the embedding alone")] = key("emb_pdrop", default=0.0)
    attention: DbrxAttention = key("attn_config")
    ffn: DbrxExperts = key("ffn_config")

    def fields(self) -> dict[str, Any]:
        if bool(self.dropout) != bool(self.attention.dropout):
            rule = f"dropout in some places only is not supported (attn_pdrop is {self.attention.dropout})"
            raise ModelError("dropout", rule, "Give both, or 0 for both", self.dropout)
        shape = self.same_fields("layers", "hidden", "heads", "vocab", "seq", "tied", "dropout")
        moe = self.ffn.model_dump()
        kind = {"norm": "rmsnorm", "positions": "rope", "gated": True, "fused_qkv": True}
        return shape | kind | {"kv_heads": self.attention.kv_heads, "ffn": self.ffn.expert_ffn, "moe": moe}


class ExaoneMoE(Exaone4):
    """``ExaoneMoeConfig`` (K-EXAONE): EXAONE 4's attention behind norms, experts beside a shared one."""

    window: Size | None = key("sliding_window", default=4096)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    first_dense: Count = key("first_k_dense_replace", default=1)
    experts: Size = key("num_experts", default=64)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1024)
    shared_experts: Count = key("num_shared_experts", default=1)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_experts") | {"router_bias": True}
        places = sparse_layers(self.kinds, self.layers, self.first_dense)
        return super().fields() | {"norm_place": "before", "moe": moe | places}


class Mellum(Decoder):
    """``MellumConfig``: experts and norms on queries and keys; by default full attention in all layers."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=128)
    bias: Flag = key("attention_bias", default=False)
    window: Size | None = key("sliding_window", default=1024)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    experts: Size = key("num_experts", "num_local_experts", default=64)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=896)

    def fields(self) -> dict[str, Any]:
        windows = window_fields(self.window, self.layers, self.layer_types or ["full_attention"] * self.layers, None)
        moe = self.same_fields("experts", "top_k", "expert_ffn") | sparse_layers(self.kinds, self.layers, 0)
        biases = {"qkv_bias": self.bias, "proj_bias": self.bias, "qk_layernorm": True}
        return super().fields() | self.same_fields("head_dim") | windows | biases | {"moe": moe}


class MiniMaxM2(Decoder):
    """``MiniMaxM2Config``: experts in all layers with a correction for each, norms over all heads of queries and of
    keys. RoPE is on ``rotary_dim`` elements of a head."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size = key("head_dim", default=128)
    rotary: Size | None = key("rotary_dim", default=None)
    rope_share: Share = key("partial_rotary_factor", default=1.0)
    experts: Size = key("num_local_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=8)

    def fields(self) -> dict[str, Any]:
        share = self.rope_share if self.rotary is None else min(1.0, self.rotary / self.head_dim)
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn, "router_bias": True}
        shape = super().fields() | self.same_fields("head_dim") | {"rope_share": share, "qk_layernorm": "all"}
        return shape | {"moe": moe}


class DeepSeekExperts(Decoder):
    """Experts as in DeepSeek-V3 over grouped-query attention."""

    kv_heads: Size | None = key("num_key_value_heads", default=32)
    head_dim: Size | None = key("head_dim", default=None)
    bias: Flag = key("attention_bias", default=False)
    window: Size | None = key("sliding_window", default=4096)
    first_full: int = key("max_window_layers", default=62)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    experts: Size | None = key("n_routed_experts", default=None)
    top_k: Size | None = key("num_experts_per_tok", default=None)
    expert_ffn: Size = key("moe_intermediate_size", default=1408)
    shared_experts: Count | None = key("n_shared_experts", default=None)
    first_dense: Count = key("first_k_dense_replace", default=0)

    def fields(self) -> dict[str, Any]:
        slides = [layer >= self.first_full for layer in range(self.layers)]
        if self.layer_types is not None:
            slides = [each == "sliding_attention" for each in self.layer_types]
        check_every_layer(slides, self.layers, "layer_types")
        windows = local_fields("window", self.window, slides)
        biases = {"qkv_bias": self.bias, "proj_bias": self.bias}
        return super().fields() | self.same_fields("head_dim") | windows | biases | self._moe()

    def _moe(self) -> dict[str, Any]:
        if self.experts is None or self.first_dense >= self.layers:
            return {}
        moe = self.same_fields("experts", "top_k", "expert_ffn", "first_dense") | {"router_bias": True}
        return {"moe": moe | {"shared_experts": self.shared_experts or 0}}


class Dots1(DeepSeekExperts):
    """``Dots1Config``: norms on queries and keys."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"qk_layernorm": True}


class SolarOpen(DeepSeekExperts):
    """``SolarOpenConfig``: experts beside a shared one in all layers, biases of queries, keys and values only."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    ffn: Size = key("intermediate_size", default=10240)
    window: Size | None = key("sliding_window", default=None)
    experts: Size | None = key("n_routed_experts", default=128)
    top_k: Size | None = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1280)
    shared_experts: Count | None = key("n_shared_experts", default=1)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"proj_bias": False}


class HYV3(Decoder):
    """``HYV3Config`` (Hunyuan 3): experts beside a shared one in all but the first layer, norms of queries and keys.
    Sums of their results in fp32 (``enable_moe_fp32_combine``) are left out."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size | None = key("head_dim", default=128)
    bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    experts: Size = key("num_experts", default=192)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1536)
    shared_experts: Count = key("num_shared_experts", default=1)

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_experts") | {"router_bias": True}
        biases = {"qkv_bias": self.bias, "proj_bias": self.bias, "qk_layernorm": True}
        places = sparse_layers(self.kinds, self.layers, 1)
        return super().fields() | self.same_fields("head_dim", "mlp_bias") | biases | {"moe": moe | places}


class Ernie45MoE(Decoder):
    """``Ernie4_5_MoeConfig``: experts with a correction for each beside shared ones, in every
    ``moe_layer_interval``-th layer of a range."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    tied: Flag = key("tie_word_embeddings", default=True)
    bias: Flag = key("use_bias", default=False)
    experts: Size = key("moe_num_experts", default=64)
    top_k: Size = key("moe_k", default=6)
    expert_ffn: Size = key("moe_intermediate_size", default=1536)
    shared_experts: Count = key("moe_num_shared_experts", default=2)
    first: Count = key("moe_layer_start_index", default=1)
    last: Annotated[int, Field(strict=True, ge=-1)] = key("moe_layer_end_index", default=-1)
    every: Size = key("moe_layer_interval", default=1)

    def fields(self) -> dict[str, Any]:
        last = self.last if self.last >= 0 else self.layers - 1
        layers = range(self.layers)
        flags = [(layer + 1) % self.every == 0 and self.first <= layer <= last for layer in layers]
        biases: dict[str, Any] = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), self.bias)
        biases |= {"head": ("bias",)} if self.bias else {}
        if not any(flags):
            return super().fields() | biases
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_experts") | {"router_bias": True}
        return super().fields() | biases | {"moe": moe | expert_layers(flags, "moe_layer_start_index")}


class MiniCPM3(DeepSeekV2):
    """``MiniCPM3Config``: latent attention and a dense MLP. Factors on embeddings, residual additions and logits are
    part of kernels that run anyway, and are left out."""

    q_lora_rank: Size | None = key("q_lora_rank", default=768)
    kv_lora_rank: Size = key("kv_lora_rank", default=256)
    qk_nope: Size = key("qk_nope_head_dim", default=64)
    qk_rope: Size = key("qk_rope_head_dim", default=32)
    v: Size | None = key("v_head_dim", default=None)  # type: ignore[assignment]
    tied: Flag = key("tie_word_embeddings", default=True)
    top_k: Size = key("num_experts_per_tok", default=1)
    experts: Size | None = key("n_routed_experts", default=None)

    def fields(self) -> dict[str, Any]:
        shape = super().fields()
        return shape | {"mla": shape["mla"] | {"v": self.v or self.hidden // self.heads}}


class Youtu(MiniCPM3):
    """``YoutuConfig``: latent attention and a dense MLP."""

    q_lora_rank: Size | None = key("q_lora_rank", default=1536)
    kv_lora_rank: Size = key("kv_lora_rank", default=512)
    qk_nope: Size = key("qk_nope_head_dim", default=128)
    qk_rope: Size = key("qk_rope_head_dim", default=64)
    v: Size | None = key("v_head_dim", default=128)


class LongCatFlash(DeepSeekV3):
    """``LongcatFlashConfig``: a layer is two of latent attention and an MLP, and experts beside the first MLP, so that
    `Model.layers` is twice ``num_layers``. Their results are added with that of the first MLP here, and behind the
    second there. Experts that return their input have no matrices, for which ``transformers`` 5.24 makes some too.
    """

    layers: Depth = key("num_layers")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    ffn: Size = key("ffn_hidden_size")
    experts: Size | None = key("n_routed_experts", default=512)
    top_k: Size = key("moe_topk", default=12)
    expert_ffn: Size = key("expert_ffn_hidden_size", default=2048)
    zero_experts: Count = key("zero_expert_num", default=256)

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"layers": 2 * self.layers}

    def _moe(self) -> dict[str, Any] | None:
        experts = self.experts or 0
        passed, rest = divmod(self.top_k * experts, experts + self.zero_experts)
        if rest:
            rule = f"of {self.top_k} experts of a token a whole number in the mean does not return its input"
            raise ModelError("zero_experts", rule, "Give the fields of `model:` themselves", self.zero_experts)
        places = {"every": 2, "leading": True, "shared_experts": 1, "shared_ffn": self.ffn, "router_bias": True}
        return self.same_fields("experts", "expert_ffn", "zero_experts") | places | {"top_k": passed}


class Kolibri1(Decoder):
    """``Kolibri1Config``: norms around all blocks and on queries and keys, experts beside a shared one in all layers;
    layers with full attention are without RoPE."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size | None = key("head_dim", default=128)
    ffn: Size = key("moe_intermediate_size", default=512)
    window: Size | None = key("sliding_window", default=513)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    experts: Size = key("num_experts", "num_local_experts", default=384)
    top_k: Size = key("num_experts_per_tok", default=6)
    shared_ffn: Size = key("shared_expert_intermediate_size", default=512)

    def fields(self) -> dict[str, Any]:
        windows = window_fields(self.window, self.layers, self.layer_types, 5)
        ropes = {"full_rope": False} if "full_every" in windows else {}
        moe = self.same_fields("experts", "top_k", "shared_ffn") | {"expert_ffn": self.ffn, "shared_experts": 1}
        kind = {"norm_place": "both", "qk_layernorm": True, "moe": moe | {"router_bias": True}}
        return super().fields() | self.same_fields("head_dim") | windows | ropes | kind


class Flint(Qwen3MoE):
    """``FlintConfig``: Qwen 3 with experts beside a shared one, a learned logit of every head, and a window and RoPE in
    the layers that ``layer_types`` names."""

    head_dim: Size | None = key("head_dim", default=128)
    window: Size | None = key("sliding_window", default=513)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    experts: Size = key("num_experts", "num_local_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=6)
    expert_ffn: Size = key("moe_intermediate_size", default=512)
    shared_ffn: Size = key("shared_expert_intermediate_size", default=1024)
    plain: list[Count] | None = key("mlp_only_layers", default=[0, 1])

    def fields(self) -> dict[str, Any]:
        last = self.layers - 1
        types = self.layer_types or [
            "full_attention" if layer in (0, last) or layer % 4 == 1 else "sliding_attention"
            for layer in range(self.layers)
        ]
        windows = window_fields(self.window, self.layers, types, None)
        ropes = {"full_rope": False} if "full_every" in windows else {} if windows else {"positions": "none"}
        shape = super().fields() | windows | ropes | {"sinks": True}
        if "moe" in shape:
            shape["moe"] = shape["moe"] | {"shared_experts": 1, "shared_ffn": self.shared_ffn}
        return shape


class Glm4MoELite(ListedExperts):
    """``Glm4MoeLiteConfig`` (GLM-4.7-Flash): the architecture of DeepSeek-V3."""

    kv_heads: Size | None = key("num_key_value_heads", default=20)
    q_lora_rank: Size | None = key("q_lora_rank", default=768)
    qk_nope: Size = key("qk_nope_head_dim", default=192)
    v: Size = key("v_head_dim", default=256)
    experts: Size | None = key("n_routed_experts", default=64)
    top_k: Size = key("num_experts_per_tok", default=4)
    expert_ffn: Size = key("moe_intermediate_size", default=1536)
    first_dense: Count = key("first_k_dense_replace", default=1)


class AXK1(ListedExperts):
    """``AXK1Config`` (A.X-K1): the architecture of DeepSeek-V3, with a norm behind experts."""

    kv_heads: Size | None = key("num_key_value_heads", default=64)
    experts: Size | None = key("n_routed_experts", default=192)
    first_dense: Count = key("first_k_dense_replace", default=1)

    def _moe(self) -> dict[str, Any] | None:
        moe = super()._moe()
        return moe and moe | {"norm": True}


class GraniteMoESWA(GraniteSWA, GraniteMoE):
    """``GraniteMoeSWAConfig``: Granite's experts with a window in three of four layers."""

    kv_heads: Size | None = key("num_key_value_heads", default=None)
    tied: Flag = key("tie_word_embeddings", default=False)


class Cohere2MoE(Cohere2):
    """``Cohere2MoeConfig``: experts beside shared ones, side by side with attention behind a single norm. The first,
    dense layers have windows by a pattern of their own."""

    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    first_dense: Count = key("first_k_dense_replace", default=0)
    dense_pattern: Size = key("prefix_dense_sliding_window_pattern", default=1)
    experts: Size = key("num_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)
    shared_experts: Count = key("num_shared_experts", default=0)
    dense_ffn: Size | None = key("prefix_dense_intermediate_size", default=None)

    @property
    def types(self) -> LayerTypes:
        """The types of all layers."""
        dense = self.kinds.count("dense") if self.kinds else self.first_dense
        patterns = [(dense, self.dense_pattern), (self.layers - dense, self.pattern)]
        return self.layer_types or [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layers, pattern in patterns
            for layer in range(layers)
        ]

    def fields(self) -> dict[str, Any]:
        moe = self.same_fields("experts", "top_k", "shared_experts", "dense_ffn") | {"expert_ffn": self.ffn}
        return super().fields() | {"moe": moe | sparse_layers(self.kinds, self.layers, self.first_dense)}


class JetMoE(Config):
    """``JetMoeConfig``: a mixture of attention heads, and experts as wide as ``intermediate_size`` in all layers, with
    a bias behind the sums of both."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    kv_heads: Size = key("num_key_value_heads")
    head_dim: Size = key("kv_channels", "head_dim", default=128)
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    activation: Literal["silu", "swish"] = key("activation_function", default="silu")
    experts: Size = key("num_local_experts", default=8)
    top_k: Size = key("num_experts_per_tok", default=2)
    tied: Flag = key("tie_word_embeddings", default=True)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, object]:
        shape = self.same_fields("layers", "hidden", "kv_heads", "head_dim", "ffn", "vocab", "seq", "tied")
        kind = {"norm": "rmsnorm", "positions": "rope", "gated": True, "proj_bias": True}
        moe = self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn, "sum_bias": True}
        return shape | kind | {"heads": self.kv_heads * self.top_k, "head_experts": self.experts, "moe": moe}
