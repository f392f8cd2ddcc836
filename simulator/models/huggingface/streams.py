"""Configs of decoders with several residual streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

from meshcast.simulator.models.huggingface.config import (
    Decoder,
    MlpTypes,
    check_every_layer,
    key,
    leave_out_mtp,
    sparse_layers,
)
from meshcast.simulator.models.huggingface.moe import DeepSeekV3
from meshcast.simulator.models.parts import Count, Share, Size

EntryTypes = list[Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]]

RATES: dict[int, str] = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}
"""Types of layers by the numbers of ``compress_ratios``."""


def variant_fields(kinds: Sequence[Hashable], fields: Mapping[Hashable, dict[str, object]]) -> dict[str, object]:
    """Returns the fields of `Model` for layers of several kinds: the most frequent is the model, others are variants.

    kinds: of every layer.
    fields: those of each kind.
    """
    common = Counter(kinds).most_common(1)[0][0]
    numbers = {kind: [layer for layer, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)}
    variants = [{**fields[kind], "numbers": layers} for kind, layers in numbers.items() if kind != common]
    return fields[common] | ({"variants": variants} if variants else {})


class DeepSeekV4(Decoder):
    """``DeepseekV4Config``: several residual streams; a window in all layers, beside which most attend to compressed
    entries, some to those that an indexer chooses; experts of the first layers by a table of token ids. Layers of
    multi-token prediction are left out."""

    kv_heads: Size | None = key("num_key_value_heads", default=1)
    head_dim: Size = key("head_dim", default=512)
    ffn: Size = key("moe_intermediate_size", "intermediate_size", default=2048)
    q_lora_rank: Size = key("q_lora_rank", default=1024)
    rope_share: Share = key("partial_rotary_factor", default=64 / 512)
    rope: Size | None = key("qk_rope_head_dim", default=None)
    window: Size = key("sliding_window", default=128)
    out_groups: Size = key("o_groups", default=8)
    out_rank: Size = key("o_lora_rank", default=1024)
    index_heads: Size = key("index_n_heads", default=64)
    index_dim: Size = key("index_head_dim", default=128)
    index_top_k: Size = key("index_topk", default=512)
    layer_types: EntryTypes | None = key("layer_types", default=None)
    ratios: list[Count] | None = key("compress_ratios", default=None)
    rates: dict[str, Size] | None = key("compress_rates", default=None)
    kinds: list[Literal["hash_moe", "moe"]] | None = key("mlp_layer_types", default=None)
    hashed: Count = key("num_hash_layers", default=3)
    experts: Size = key("n_routed_experts", "num_local_experts", default=256)
    top_k: Size = key("num_experts_per_tok", default=6)
    shared_experts: Count = key("n_shared_experts", default=1)
    streams: Size = key("hc_mult", default=4)
    mtp: Count = key("num_nextn_predict_layers", default=1)

    def fields(self) -> dict[str, object]:
        share = self.rope / self.head_dim if self.rope else self.rope_share
        shape = super().fields() | self.same_fields("head_dim", "window") | {"rope_share": share, "sinks": True}
        shape |= leave_out_mtp(self.mtp, self.layers)
        routers = [each == "hash_moe" for each in self.kinds or []]
        routers = routers or [layer < self.hashed for layer in range(self.layers)]
        check_every_layer(routers, self.layers, "mlp_layer_types")
        kinds = [*zip(self._types(), routers, strict=True)]
        fields: dict[Hashable, dict[str, object]] = {
            kind: {"compressed": self._attention(kind[0]), "moe": self._moe(kind[1])} for kind in {*kinds}
        }
        return shape | {"hyper_connections": {"streams": self.streams}} | variant_fields(kinds, fields)

    def _types(self) -> list[str]:
        """Returns the type of attention of every layer."""
        light, heavy = RATES[4], RATES[128]
        types = [heavy, heavy, *(light if layer % 2 else heavy for layer in range(self.layers - 2))]
        if self.ratios is not None:
            types = [RATES.get(ratio, str(ratio)) for ratio in self.ratios[: self.layers]]
        types = list(self.layer_types or types[: self.layers])
        check_every_layer(types, self.layers, "layer_types")
        return types

    def _attention(self, kind: str) -> dict[str, object]:
        """Returns the fields of `CompressedAttention` of layers of a type."""
        part: dict[str, object] = self.same_fields("q_lora_rank", "out_groups", "out_rank")
        rates = {name: rate for rate, name in RATES.items() if rate} | (self.rates or {})
        if kind not in rates:
            return part
        if kind != RATES[4]:
            return part | {"rate": rates[kind]}
        index = {"heads": self.index_heads, "dim": self.index_dim, "top_k": self.index_top_k}
        return part | {"rate": rates[kind], "overlaps": True, "index": index}

    def _moe(self, hashed: bool) -> dict[str, object]:
        """Returns the fields of experts. hashed: a table says the experts of a token, so that none has a correction."""
        moe = self.same_fields("experts", "top_k", "shared_experts") | {"expert_ffn": self.ffn, "clamped": True}
        return moe | {"router_bias": not hashed}


class HYV4(DeepSeekV3):
    """``HYV4Config`` (Hunyuan 4): several residual streams that go on as they are, latent attention with a gate, and a
    learned logit of every head, to the keys that an indexer chooses in every fourth layer."""

    kv_heads: Size | None = key("num_key_value_heads", default=None)
    q_lora_rank: Size | None = key("q_lora_rank", default=1536)
    qk_nope: Size = key("qk_nope_head_dim", default=192)
    v: Size = key("v_head_dim", default=256)
    expert_ffn: Size = key("moe_intermediate_size", default=768)
    index_heads: Size = key("index_n_heads", default=16)
    index_dim: Size = key("index_head_dim", default=128)
    index_top_k: Size = key("index_topk", default=2048)
    indexers: list[Literal["full", "shared"]] | None = key("indexer_types", default=None)
    layer_types: list[Literal["indexed_attention"]] | None = key("layer_types", default=None)
    mlp_types: MlpTypes | None = key("mlp_layer_types", default=None)
    streams: Size = key("hc_mult", default=4)
    limit: float = key("swiglu_limit", default=10.0)

    def fields(self) -> dict[str, object]:
        choose = self.indexers or ["full" if layer % 4 == 1 or not layer else "shared" for layer in range(self.layers)]
        check_every_layer(choose, self.layers, "indexer_types")
        shape = super().fields() | {"kv_heads": None, "hyper_connections": {"streams": self.streams, "mixes": False}}
        moe = self.same_fields("experts", "top_k", "expert_ffn") | sparse_layers(self.mlp_types, self.layers, 1)
        moe |= {"shared_experts": self.shared_experts or 0, "router_bias": True, "clamped": self.limit > 0}
        shared = tuple(layer for layer, each in enumerate(choose) if each == "shared")
        index = {"heads": self.index_heads, "dim": self.index_dim, "top_k": self.index_top_k, "shared_by": shared}
        return shape | {"attention_gate": True, "sinks": True, "mla": shape["mla"] | {"index": index}, "moe": moe}
