"""Configs of decoders whose layers with a window have other heads, RoPE or sinks than those with full attention."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Decoder,
    Gelu,
    MlpTypes,
    check_every_layer,
    key,
    leave_out_mtp,
    local_fields,
    refuse,
    round_share,
    sparse_layers,
)
from meshcast.simulator.models.huggingface.gemma import Cap, window_fields
from meshcast.simulator.models.huggingface.llama import LayerTypes
from meshcast.simulator.models.parts import Count, Flag, Share, Size


class AFMoE(Decoder):
    """``AfmoeConfig`` (Trinity): gated attention, norms on queries and keys and around all blocks, and experts beside
    shared ones; layers with full attention are without RoPE."""

    kv_heads: Size | None = key("num_key_value_heads", default=None)
    head_dim: Size | None = key("head_dim", default=128)
    bias: Annotated[Flag, refuse("biases beside a gate of attention")] = key("attention_bias", default=False)
    window: Size | None = key("sliding_window", default=1024)
    every: Size = key("global_attn_every_n_layers", default=4)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    experts: Size = key("num_experts", default=64)
    top_k: Size = key("num_experts_per_tok", default=6)
    expert_ffn: Size = key("moe_intermediate_size", default=1408)
    shared_experts: Count = key("num_shared_experts", default=2)
    first_dense: Count = key("num_dense_layers", default=1)

    def fields(self) -> dict[str, Any]:
        windows = window_fields(self.window, self.layers, self.layer_types, self.every)
        ropes = {"full_rope": False} if "full_every" in windows else {} if windows else {"positions": "none"}
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_experts", "first_dense")
        kind = {"qk_layernorm": True, "attention_gate": True, "norm_place": "both", "moe": moe | {"router_bias": True}}
        return super().fields() | self.same_fields("head_dim") | windows | ropes | kind


class Laguna(Decoder):
    """``LagunaConfig``: a gate of attention for each head, norms on queries and keys, experts beside a shared one.
    Layers with a window may have other heads, and have RoPE on whole heads."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size = key("head_dim", default=128)
    bias: Annotated[Flag, refuse("biases beside a gate of attention")] = key("attention_bias", default=False)
    gating: bool | Literal["per-head", "per-element"] = key("gating", default=True)
    ropes: dict[str, Any] | None = key("rope_parameters", default=None)
    heads_of: list[Size] | None = key("num_attention_heads_per_layer", default=None)
    window: Size | None = key("sliding_window", default=512)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    experts: Size = key("num_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=512)
    shared_ffn: Size = key("shared_expert_intermediate_size", default=512)
    router_cap: Annotated[float, refuse("caps on the logits of routers")] = key(
        "moe_router_logit_softcapping", default=0.0
    )

    def fields(self) -> dict[str, Any]:
        types = self.layer_types or ["full_attention"] * self.layers
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_ffn") | {"shared_experts": 1}
        moe |= {"router_bias": True, **sparse_layers(self.kinds, self.layers, 1)}
        gate = "heads" if self.gating in (True, "per-head") else True
        kind = {"qk_layernorm": True, "attention_gate": gate, "moe": moe}
        shape = super().fields() | self.same_fields("head_dim") | kind
        return shape | window_fields(self.window, self.layers, types, None) | self._heads(types)

    def _heads(self, types: LayerTypes) -> dict[str, Any]:
        """Returns the fields of `Model` for the heads of layers of both types."""
        heads = self.heads_of or [self.heads] * self.layers
        check_every_layer(heads, self.layers, "num_attention_heads_per_layer")
        numbers = {kind: {n for n, each in zip(heads, types, strict=True) if each == kind} for kind in types}
        if any(len(each) > 1 for each in numbers.values()):
            rule = "layers with the same type of attention have equally many heads"
            raise ModelError("heads_of", rule, "Give the fields of `model:` themselves", heads)
        shapes = {kind: {"heads": each.pop(), "rope_share": self._share(kind)} for kind, each in numbers.items()}
        if "full_attention" not in shapes:
            return shapes["sliding_attention"]
        local = shapes.get("sliding_attention")
        return shapes["full_attention"] | ({"local_attention": local} if local and self.window else {})

    def _share(self, kind: str) -> float:
        default = {"full_attention": 0.5, "sliding_attention": 1.0}
        share = (self.ropes.get(kind) or {}).get("partial_rotary_factor", 1.0) if self.ropes else default[kind]
        return round_share(share, self.head_dim)


class Step35(Decoder):
    """``Step3p7TextConfig`` (``step3p5``, Step 3.5 and 3.7 Flash): a gate of attention for each head, norms on queries
    and keys, experts beside a shared one. Layers with a window may have other heads. The layers of multi-token
    prediction have a window and no experts, as the first layers with a window. Lists may name them behind the others.
    """

    kv_heads: Size | None = key("num_key_value_heads", "num_attention_groups", default=8)
    head_dim: Size = key("head_dim", default=128)
    bias: Annotated[Flag, refuse("biases beside a gate of attention")] = key("attention_bias", default=False)
    gating: bool | Literal["per-head", "per-element"] = key("gating", default=True)
    window: Size | None = key("sliding_window", default=None)
    other: dict[str, Any] | None = key("attention_other_setting", default=None)
    local_heads: Size | None = key("num_sliding_attention_heads", default=None)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    moe_layers: str | list[Count] | None = key("moe_layers_enum", default=None)
    experts: Size = key("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts", default=288)
    top_k: Size = key("num_experts_per_tok", "moe_top_k", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=1280)
    shared_ffn: Size = key("share_expert_dim", "share_expert_dims", default=1280)

    def fields(self) -> dict[str, object]:
        types = (self.layer_types or ["full_attention"] * self.layers)[: self.layers]
        moe = self.same_fields("experts", "top_k", "expert_ffn", "shared_ffn") | {"shared_experts": 1}
        moe |= {"router_bias": True, **sparse_layers(self._kinds(), self.layers, 3)}
        kind = {"qk_layernorm": True, "attention_gate": "heads" if self.gating in (True, "per-head") else True}
        windows = window_fields(self.window, self.layers, types, None)
        heads = self.local_heads or (self.other or {}).get("num_attention_heads", self.heads)
        if windows and heads != self.heads:
            windows |= {"local_attention": {"heads": heads}}
        kinds = self._kinds() or ["dense"] * 3
        dense = [layer for layer, mlp in enumerate(kinds) if (mlp, types[layer]) == ("dense", "sliding_attention")]
        further = {"mtp_like": dense[0] if dense else 0} if self.mtp else {}
        return super().fields() | self.same_fields("head_dim") | kind | windows | {"moe": moe} | further

    def _kinds(self) -> MlpTypes | None:
        if self.kinds or self.moe_layers is None:
            return self.kinds and self.kinds[: self.layers]
        listed = self.moe_layers.split(",") if isinstance(self.moe_layers, str) else self.moe_layers
        numbers = {int(number) for number in listed}
        return ["sparse" if layer in numbers else "dense" for layer in range(self.layers)]


class MiMoV2(Decoder):
    """``MiMoV2FlashConfig``: narrower heads of values; layers with a window have twice the heads of keys and values,
    and a learned logit of every head. Experts in all but the first layer. The factor on values is left out."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size = key("head_dim", default=192)
    value_dim: Size = key("v_head_dim", default=128)
    qkv_bias: Flag = key("attention_bias", default=False)
    rope_share: Share = key("partial_rotary_factor", default=0.334)
    window: Size | None = key("sliding_window", default=129)
    before: Size | None = key("sliding_window_size", default=None)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    windows: list[Literal[0, 1]] | None = key("hybrid_layer_pattern", default=None)
    sparse: list[Literal[0, 1]] | None = key("moe_layer_freq", default=None)
    experts: Size = key("n_routed_experts", "num_local_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=8)
    expert_ffn: Size = key("moe_intermediate_size", default=2048)

    def fields(self) -> dict[str, Any]:
        local = [layer > 0 and (layer + 1) % 6 > 0 for layer in range(self.layers)]
        local = [flag == 1 for flag in self.windows] if self.windows else local
        types = self.layer_types or ["sliding_attention" if each else "full_attention" for each in local]
        windows = window_fields(self.before + 1 if self.before else self.window, self.layers, types, None)
        if windows:
            windows |= {"local_attention": {"kv_heads": 2 * (self.kv_heads or self.heads), "sinks": True}}
        moe = self.same_fields("experts", "top_k", "expert_ffn") | {"router_bias": True}
        kinds = self.kinds
        if kinds is None and self.sparse:
            kinds = ["sparse" if each else "dense" for each in self.sparse]
        places = sparse_layers(kinds, self.layers, 1)
        shape = super().fields() | self.same_fields("head_dim", "value_dim", "qkv_bias")
        share = {"rope_share": round_share(self.rope_share, self.head_dim)}
        return shape | share | windows | {"moe": moe | places}


class Gemma4Text(Decoder):
    """``Gemma4TextConfig`` and ``Gemma4UnifiedTextConfig``: norms on queries, keys and values and around all blocks;
    layers with full attention have wider heads, and may project keys alone. Experts stand beside the MLP. Attention is
    causal: to later tokens only those of images attend, which a text has none of."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    head_dim: Size = key("head_dim", default=256)
    activation: Gelu = key("hidden_activation", default="gelu_pytorch_tanh")  # type: ignore[assignment]
    tied: Flag = key("tie_word_embeddings", default=True)
    bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key("attention_bias", default=False)
    bidirectional: Literal["vision"] | None = key("use_bidirectional_attention", default=None)
    window: Size | None = key("sliding_window", default=512)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    full_heads: dict[str, dict[str, Any]] | None = key("per_layer_config", default=None)
    full_dim: Size = key("global_head_dim", default=512)
    full_kv_heads: Size | None = key("num_global_key_value_heads", default=None)
    keys_are_values: Flag = key("attention_k_eq_v", default=False)
    shared_keys: Count = key("num_kv_shared_layers", default=0)
    doubles: Flag = key("use_double_wide_mlp", default=False)
    logit_cap: Cap | None = key("final_logit_softcapping", default=None)
    input_vocab: Size = key("vocab_size_per_layer_input", default=262144)
    input_width: Annotated[int, Field(strict=True, ge=0)] | None = key("hidden_size_per_layer_input", default=256)
    has_experts: Flag = key("enable_moe_block", default=False)
    experts: Size | None = key("num_experts", default=None)
    top_k: Size | None = key("top_k_experts", default=None)
    expert_ffn: Size | None = key("moe_intermediate_size", default=None)

    def fields(self) -> dict[str, Any]:
        types = self.layer_types or [
            "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(self.layers)
        ]
        types = [*types[:-1], "full_attention"]
        shape = super().fields() | window_fields(self.window, self.layers, types, None) | self._full_heads(types)
        shape |= {"softcaps": ("logits",)} if self.logit_cap else {}
        shape |= {"reading_ffn": 2 * self.ffn} if self.doubles and self.shared_keys else {}
        if self.input_width:
            shape["layer_input"] = {"vocab": self.input_vocab, "width": self.input_width}
        kind = {"norm_place": "both", "qk_layernorm": True, "value_norm": True, "moe": self._moe()}
        kind |= self.same_fields("shared_keys")
        return shape | self.read_activation() | kind

    def _full_heads(self, types: LayerTypes) -> dict[str, Any]:
        """Returns the fields of `Model` for the heads of layers with full attention, and of the others."""
        kv_heads = self.kv_heads or self.heads
        full = {"head_dim": self.full_dim}
        full |= {"num_key_value_heads": self.full_kv_heads} if self.full_kv_heads and self.keys_are_values else {}
        if self.full_heads is not None:
            layers = {int(layer): heads for layer, heads in self.full_heads.items()}
            numbers = [layer for layer, each in enumerate(types) if each == "full_attention"]
            full = layers.get(numbers[0], {})
            if layers != dict.fromkeys(numbers, full) or {*full} - {"head_dim", "num_key_value_heads"}:
                rule = "all layers with full attention have the same heads, and the others those of the config"
                raise ModelError("full_heads", rule, "Give the fields of `model:` themselves")
        shape = {"head_dim": full.get("head_dim", self.head_dim), "keys_are_values": self.keys_are_values}
        shape["kv_heads"] = full.get("num_key_value_heads", kv_heads)
        if "sliding_attention" not in types or not self.window:
            return shape
        local = {"head_dim": self.head_dim, "kv_heads": kv_heads, "keys_are_values": False}
        return shape | {"local_attention": local}

    def _moe(self) -> dict[str, Any] | None:
        if not self.has_experts:
            return None
        shared = {"shared_experts": 1, "shared_ffn": self.ffn, "router_bias": True, "norm": "each"}
        return self.same_fields("experts", "top_k", "expert_ffn") | shared


class Gemma4UnifiedText(Gemma4Text):
    """``Gemma4UnifiedTextConfig``: Gemma 4 without inputs of layers and experts."""

    window: Size | None = key("sliding_window", default=1024)
    input_width: int | None = key("hidden_size_per_layer_input", default=None)


class InklingText(Decoder):
    """``InklingTextConfig``: a bias by distance in place of positions, convolutions of keys, values and results, norms
    on queries and keys, a norm behind the embedding, experts beside shared ones that the router weighs. Logarithmic
    factors on scores are left out, and so is multi-token prediction."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    head_dim: Size = key("head_dim", default=128)
    seq: Size = key("max_position_embeddings", "model_max_length", default=131072)
    local_heads: Size = key("swa_num_attention_heads", default=64)
    local_kv_heads: Size = key("swa_num_key_value_heads", default=16)
    local_dim: Size = key("swa_head_dim", default=128)
    window: Size = key("sliding_window_size", "sliding_window", default=512)
    state: Size = key("d_rel", default=16)
    extent: Size = key("rel_extent", default=1024)
    taps: Size = key("conv_kernel_size", "sconv_kernel_size", default=4)
    local_layers: list[Count] | None = key("local_layer_ids", default=None)
    layer_types: list[Literal["hybrid", "hybrid_sliding"]] | None = key("layer_types", default=None)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    dense: Count = key("dense_mlp_idx", default=0)
    dense_ffn: Size | None = key("dense_intermediate_size", default=None)
    experts: Size = key("n_routed_experts", "num_local_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=6)
    expert_ffn: Size = key("moe_intermediate_size", default=3072)
    shared_experts: Size = key("n_shared_experts", default=2)
    mtp: Count = key("num_mtp_layers", default=0)

    def fields(self) -> dict[str, object]:
        local = [
            layer in self.local_layers if self.local_layers else (layer + 1) % 6 > 0 for layer in range(self.layers)
        ]
        if self.layer_types is not None:
            local = [each == "hybrid_sliding" for each in self.layer_types]
        check_every_layer(local, self.layers, "layer_types")
        heads = {"heads": self.local_heads, "kv_heads": self.local_kv_heads, "head_dim": self.local_dim}
        windows = local_fields("window", self.window, local)
        moe = self.same_fields("experts", "top_k", "shared_experts") | {"shared_gate": "each", "router_bias": True}
        moe |= {"expert_ffn": self.ffn if self.dense_ffn else self.expert_ffn, "dense_ffn": self.dense_ffn}
        kind = {"positions": "none", "qk_layernorm": True, "embedding_norm": True, "result_scale": True}
        kind |= leave_out_mtp(self.mtp, self.layers)
        kind |= {"token_convolutions": self.taps, "distance_profiles": {"width": self.state, "extent": self.extent}}
        kind |= {"local_attention": heads} if windows else {}
        places = sparse_layers(self.kinds, self.layers, self.dense)
        return super().fields() | self.same_fields("head_dim") | windows | kind | {"moe": moe | places}


class Gemma3nText(Decoder):
    """``Gemma3nTextConfig``: several residual streams with layers over the first, a low-rank projection beside
    attention, inputs of layers, and last layers that read keys of others. The sparsity of activations in the first
    layers, elementwise kernels, is left out."""

    kv_heads: Size | None = key("num_key_value_heads", default=2)
    head_dim: Size = key("head_dim", default=256)
    ffn: Size | list[Size] = key("intermediate_size")  # type: ignore[assignment]
    activation: Gelu = key("hidden_activation", default="gelu_pytorch_tanh")  # type: ignore[assignment]
    tied: Flag = key("tie_word_embeddings", default=True)
    bias: Annotated[Flag, refuse("bias of attention in front of a norm")] = key("attention_bias", default=False)
    window: Size | None = key("sliding_window", default=512)
    layer_types: LayerTypes | None = key("layer_types", default=None)
    logit_cap: Cap | None = key("final_logit_softcapping", default=30.0)
    input_vocab: Size = key("vocab_size_per_layer_input", default=262144)
    input_width: Size = key("hidden_size_per_layer_input", default=256)
    shared_keys: Count = key("num_kv_shared_layers", default=15)
    streams: Size = key("altup_num_inputs", default=4)
    laurel_rank: Size = key("laurel_rank", default=64)

    def fields(self) -> dict[str, object]:
        widths = self.ffn if isinstance(self.ffn, list) else [self.ffn]
        if len({*widths}) != 1:
            rule = "layers with MLPs of one width are supported"
            raise ModelError("ffn", rule, "Give the fields of `model:` themselves", widths)
        shape = super().fields() | window_fields(self.window, self.layers, self.layer_types, 5)
        kind: dict[str, object] = {"ffn": widths[0], "norm_place": "both", "qk_layernorm": True, "value_norm": True}
        kind |= {"softcaps": ("logits",) if self.logit_cap else ()}
        kind |= {"layer_input": {"vocab": self.input_vocab, "width": self.input_width}}
        kind |= {"altup": {"streams": self.streams, "laurel_rank": self.laurel_rank}}
        return shape | self.same_fields("head_dim", "shared_keys") | self.read_activation() | kind
