"""Configs of decoders that attend to blocks of keys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import (
    Config,
    Keys,
    MlpTypes,
    check_every_layer,
    full_fields,
    key,
    refuse,
    sparse_layers,
)
from meshcast.simulator.models.huggingface.experts import MiniMaxM2
from meshcast.simulator.models.huggingface.llama import Llama
from meshcast.simulator.models.parts import Depth, Flag, Size

Flags = list[Literal[0, 1]]


class MSA(Keys):
    """``sparse_attention_config`` of MiniMax-M3. Blocks that are always chosen, the first ones and the own one, count
    among `top_k`."""

    used: Flag = key("use_sparse_attention", default=True)
    heads: Size | None = key("sparse_num_index_heads", default=None)
    dim: Size | None = key("sparse_index_dim", default=None)
    size: Size | None = key("sparse_block_size", default=None)
    top_k: Size | None = key("sparse_topk_blocks", default=None)
    scores: Literal["max"] = key("sparse_score_type", default="max")
    layers: Flags | None = key("sparse_attention_freq", default=None)
    no_values: Flags | None = key("sparse_disable_index_value", default=None)


class MiniMaxM3Text(MiniMaxM2):
    """``MiniMaxM3VLTextConfig``: norms on each head of queries and keys, experts beside a shared one, clamped
    activations. Layers may attend to blocks of keys that an indexer chooses."""

    kv_heads: Size | None = key("num_key_value_heads", default=4)
    activation: Literal["silu", "swish", "swigluoai"] = key("hidden_act", default="silu")  # type: ignore[assignment]
    rotary: Size | None = key("rotary_dim", default=64)
    experts: Size = key("num_local_experts", default=128)
    top_k: Size = key("num_experts_per_tok", default=4)
    dense_ffn: Size = key("dense_intermediate_size", default=12288)
    shared_ffn: Size = key("shared_intermediate_size", default=3072)
    kinds: MlpTypes | None = key("mlp_layer_types", default=None)
    flags: Flags | None = key("moe_layer_freq", default=None)
    output_gate: Annotated[Flag, refuse("gate of attention to blocks of keys")] = key(
        "attention_output_gate", default=False
    )
    sparse: MSA | None = key("sparse_attention_config", default=None)
    index_heads: Size = key("index_n_heads", default=4)
    index_dim: Size = key("index_head_dim", default=128)
    size: Size = key("index_block_size", default=128)
    blocks: Size = key("index_topk_blocks", default=16)
    layer_types: list[Literal["full_attention", "minimax_m3_sparse"]] | None = key("layer_types", default=None)

    def fields(self) -> dict[str, Any]:
        shape, kinds = super().fields(), self.kinds
        if kinds is None and self.flags is not None:
            kinds = ["sparse" if flag else "dense" for flag in self.flags]
        moe = shape["moe"] | self.same_fields("dense_ffn", "shared_ffn") | {"shared_experts": 1, "clamped": True}
        kind = {"norm": "rmsnorm1p", "qk_layernorm": True}
        return shape | kind | {"moe": moe | sparse_layers(kinds, self.layers, 0)} | self._blocks()

    def _blocks(self) -> dict[str, Any]:
        """Returns the fields of `Model` for attention to blocks; none if no layer has it."""
        said = self.sparse or MSA()
        layers = [each == "minimax_m3_sparse" for each in self.layer_types or ()] or [*map(bool, said.layers or ())]
        if not said.used or not any(layers):
            return {}
        check_every_layer(layers, self.layers, "layer_types" if self.layer_types else "sparse_attention_freq")
        if any(flag and not none for flag, none in zip(layers, said.no_values or layers, strict=False)):
            rule = "an indexer with values, whose result is added to that of attention, is not supported"
            raise ModelError("sparse", rule, "Give sparse_disable_index_value 1 for layers with an indexer")
        index = {"heads": said.heads or self.index_heads, "dim": said.dim or self.index_dim}
        blocks = {"size": said.size or self.size, "top_k": said.top_k or self.blocks, "index": index}
        return {"blocks": blocks} | full_fields([not each for each in layers])


class InfLLM(Keys):
    """``sparse_config`` of MiniCPM4, with the defaults of its code. Blocks of the window, and the first ones, are
    always chosen; those of the window beside the others."""

    length: Size = key("kernel_size", default=32)
    stride: Size = key("kernel_stride", default=16)
    size: Size = key("block_size", default=64)
    window: Annotated[int, Field(strict=True, ge=0)] = key("window_size", default=2048)
    top_k: Size = key("topk", default=64)
    dense: Annotated[int, Field(strict=True, ge=-1)] = key("dense_len", default=8192)

    def blocks(self) -> dict[str, Any]:
        """Returns the fields of `BlockAttention`. Scores are normalised by means of four times as many keys."""
        most = self.top_k + self.window // self.size
        shape = {"size": self.size, "top_k": most, "length": self.length, "stride": self.stride, "coarse": 4}
        return shape | {"from_tokens": max(0, self.dense)}


class MiniCPM(Llama):
    """``MiniCPMConfig`` (MiniCPM 1, 2, 4): Llama with factors on embeddings, residual additions and logits, which are
    part of kernels that run anyway, and are left out. With ``sparse_config`` attention is to blocks of keys."""

    tied: Flag = key("tie_word_embeddings", default=True)
    experts: Annotated[Any, refuse("experts of MiniCPM")] = key("num_experts", default=0)
    sparse: InfLLM | None = key("sparse_config", default=None)

    def fields(self) -> dict[str, Any]:
        return super().fields() | ({"blocks": self.sparse.blocks()} if self.sparse else {})


class NSA(Config):
    """``NSAConfig`` of flash-linear-attention 0.6: native sparse attention, whose branches share keys and values, and
    whose entries are means of blocks."""

    layers: Depth = key("num_hidden_layers", default=24)
    hidden: Size = key("hidden_size", default=2048)
    heads: Size = key("num_heads", default=64)
    kv_heads: Size | None = key("num_kv_heads", default=4)
    head_dim: Size = key("head_dim", default=32)
    vocab: Size = key("vocab_size", default=32000)
    seq: Size = key("max_position_embeddings", default=2048)
    tied: Flag = key("tie_word_embeddings", default=False)
    qkv_bias: Flag = key("qkv_bias", default=False)
    ratio: Size = key("hidden_ratio", default=4)
    ffn: Size | None = key("intermediate_size", default=None)
    activation: Literal["swish", "silu"] = key("hidden_act", default="swish")
    size: Size = key("block_size", default=64)
    blocks: Size = key("block_counts", default=16)
    window: Size = key("window_size", default=512)

    def fields(self) -> dict[str, Any]:
        shape = self.same_fields(
            "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq", "tied", "qkv_bias"
        )
        ffn = self.ffn or -(-int(self.hidden * self.ratio * 2 / 3) // 256) * 256
        blocks = {"size": self.size, "top_k": self.blocks, "branches": True, "window": self.window}
        kind = {"norm": "rmsnorm", "positions": "rope", "gated": True}
        return shape | kind | {"ffn": ffn, "blocks": blocks}
