"""Configs of decoders that a search has pruned block by block (Puzzle, arXiv 2411.19146)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Literal

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.huggingface.config import Decoder, Keys, check_every_layer, key, refuse
from meshcast.simulator.models.huggingface.streams import variant_fields
from meshcast.simulator.models.parts import Flag, Size

ROUNDED = 256
"""What inner widths of MLPs are a multiple of (``_ffn_mult_to_intermediate_size`` of ``modeling_decilm.py``)."""


class AttentionBlock(Keys):
    """``AttentionConfig`` of ``block_config.py``."""

    no_op: Flag = key("no_op", default=False)
    linear: Flag = key("replace_with_linear", default=False)
    group: Size | None = key("n_heads_in_group", default=None)
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    window: Size | None = key("window_length", default=None)
    sinks: Annotated[object, refuse("tokens that all later ones attend to, beside a window")] = key(
        "num_sink_tokens", default=None
    )
    mamba: Annotated[object, refuse("Mamba blocks in place of attention by this list")] = key("mamba", default=None)
    sparsify: Annotated[object, refuse("sparsified weights")] = key("sparsify", default=None)


class MLPBlock(Keys):
    """``FFNConfig`` of ``block_config.py``."""

    no_op: Flag = key("no_op", default=False)
    linear: Flag = key("replace_with_linear", default=False)
    factor: float | None = key("ffn_mult", default=None)
    width: Size | None = key("intermediate_size", default=None)
    moe: Annotated[object, refuse("experts by this list")] = key("moe", default=None)
    sparsify: Annotated[object, refuse("sparsified weights")] = key("sparsify", default=None)


class LayerBlocks(Keys):
    """``BlockConfig`` of ``block_config.py``: the two blocks of a layer."""

    attention: AttentionBlock = key("attention", default=AttentionBlock())
    mlp: MLPBlock = key("ffn", default=MLPBlock())
    parallel: Annotated[object, refuse("parallel blocks by this list")] = key("parallel_blocks", default=None)


class NemotronNAS(Decoder):
    """``DeciLMConfig`` of Llama-Nemotron (Super 49B, Ultra 253B): a Llama of which each layer has attention with its
    own number of key/value heads, a linear layer in its place, or none of both, and the same of an MLP with its own
    width. Layers without any block, where MLPs were merged into one, are left out."""

    ffn: Size | None = key("intermediate_size", default=None)  # type: ignore[assignment]
    head_dim: Size | None = key("head_dim", default=None)
    attention_bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    blocks: list[LayerBlocks] = key("block_configs")

    def fields(self) -> dict[str, object]:
        check_every_layer(self.blocks, self.layers, "block_configs")
        described = [(i, each) for i, each in enumerate(self.blocks) if not (each.attention.no_op and each.mlp.no_op)]
        if not described:
            raise ModelError("blocks", "none of the layers has a block", "Correct the list")
        kinds: list[Hashable] = [(self._attention(i, each), self._mlp(i, each)) for i, each in described]
        fields: dict[Hashable, dict[str, object]] = {kind: _describe(*kind) for kind in {*kinds}}  # type: ignore[misc]
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        shape = super().fields() | self.same_fields("head_dim") | biases | {"layers": len(kinds)}
        empty = self.layers - len(kinds)
        left_out = {"left_out": (f"layers without any block ({empty}, of {self.layers}) are",)} if empty else {}
        return shape | variant_fields(kinds, fields) | left_out

    def _attention(self, layer: int, blocks: LayerBlocks) -> tuple[Literal["", "linear", "attention"], int, int]:
        """Returns what attention a layer has, with its key/value heads and its window; 0: none."""
        block = blocks.attention
        if block.no_op or block.linear:
            return "" if block.no_op else "linear", 0, 0
        group = block.group or (block.kv_heads and self.heads // block.kv_heads)
        if not group or self.heads % group:
            rule = f"layer {layer} has attention, whose groups share a key/value head each ({self.heads} heads)"
            raise ModelError("blocks", rule, "Give n_heads_in_group, a divisor of the heads", group)
        return "attention", self.heads // group, block.window or 0

    def _mlp(self, layer: int, blocks: LayerBlocks) -> tuple[Literal["", "linear", "mlp"], int]:
        """Returns what MLP a layer has, and its inner width."""
        block = blocks.mlp
        if block.no_op or block.linear:
            return "" if block.no_op else "linear", 0
        if not (block.width or block.factor):
            raise ModelError("blocks", f"layer {layer} has an MLP without a width", "Give ffn_mult")
        width = block.width or int(2 * (block.factor or 0) * self.hidden / 3)
        return "mlp", block.width or width + -width % ROUNDED


def _describe(attention: tuple[str, int, int], mlp: tuple[str, int]) -> dict[str, object]:
    """Returns the fields of `Model` of a kind of layers; see the two methods above for its parts."""
    words = ("attention", attention[0]), ("mlp", mlp[0])
    only = next((name for (name, word), (_, other) in zip(words, words[::-1], strict=True) if word and not other), None)
    shape: dict[str, object] = {"only": only, "replaced": tuple(name for name, word in words if word == "linear")}
    shape |= {"kv_heads": attention[1]} if attention[1] else {}
    shape |= {"ffn": mlp[1]} if mlp[1] else {}
    return shape | {"window": attention[2] or None}
