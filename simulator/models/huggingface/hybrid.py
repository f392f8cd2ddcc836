"""Configs of hybrid models, whose layers are a block each: Mamba-2, attention, an MLP or experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from meshcast.hardware.errors import ModelError
from meshcast.hardware.schemas import Field
from meshcast.simulator.models.huggingface.config import Config, Decoder, check_every_layer, key, refuse
from meshcast.simulator.models.parts import Count, Depth, Flag, Probability, Share, Size

Block = Literal["linear_attention", "mamba", "full_attention", "attention", "mlp", "moe"]

LETTERS: dict[Block, str] = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
"""Letters of `StateSpace.pattern` for the kinds of layers in configs of transformers 5."""


class NemotronH(Config):
    """``NemotronHConfig`` (Nemotron-H, Nemotron Nano 2 and 3): Mamba-2, attention without RoPE, squared ReLU.

    The router has a correction for each expert, as in DeepSeek-V3.
    """

    layers: Depth | None = key("num_hidden_layers", default=None)
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size = key("num_key_value_heads", default=8)
    head_dim: Size = key("head_dim", "attention_head_dim", default=128)
    ffn: Size = key("intermediate_size")
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings")
    activation: Literal["relu2"] = key("mlp_hidden_act", default="relu2")
    tied: Flag = key("tie_word_embeddings", default=False)
    attention_bias: Flag = key("attention_bias", default=False)
    mlp_bias: Flag = key("mlp_bias", default=False)
    pattern: str | list[Block] = key("hybrid_override_pattern", "layers_block_type")
    mamba_heads: Size = key("mamba_num_heads")
    mamba_head_dim: Size = key("mamba_head_dim")
    state: Size = key("ssm_state_size")
    groups: Size = key("n_groups")
    conv: Size = key("conv_kernel", default=4)
    chunk: Size = key("chunk_size", default=128)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-2 blocks")] = key(
        "mamba_proj_bias", "use_bias", default=False
    )
    experts: Size | None = key("n_routed_experts", default=None)
    top_k: Size = key("num_experts_per_tok", default=2)
    expert_ffn: Size = key("moe_intermediate_size", default=7688)
    shared_experts: Count = key("n_shared_experts", default=1)
    shared_ffn: Size = key("moe_shared_expert_intermediate_size", default=7688)
    latent: Annotated[Size | None, refuse("experts over a latent of the residual stream")] = key(
        "moe_latent_size", default=None
    )
    mtp: Annotated[Count, refuse("multi-token prediction with state-space layers")] = key(
        "num_nextn_predict_layers", default=0
    )
    dropout: Annotated[Probability, refuse("dropout on the residual stream alone")] = key("hidden_dropout", default=0.0)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, Any]:
        pattern = self.pattern if isinstance(self.pattern, str) else "".join(LETTERS[block] for block in self.pattern)
        shape = self.same_fields("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "tied")
        shape["layers"] = self.layers or len(pattern)
        ssm = self.same_fields("state", "groups", "conv", "chunk") | {"pattern": pattern}
        ssm |= {"heads": self.mamba_heads, "head_dim": self.mamba_head_dim}
        moe = {}
        if "E" in pattern and self.experts:
            shared = self.same_fields("shared_experts", "shared_ffn") if self.shared_experts else {}
            moe = {"moe": self.same_fields("experts", "top_k", "expert_ffn") | shared | {"router_bias": True}}
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias, "mlp_bias": self.mlp_bias}
        kind = {"ssm": ssm, "norm": "rmsnorm", "positions": "none", "gated": False}
        return shape | biases | moe | self.read_activation() | kind


class Mamba2(Config):
    """``Mamba2Config``: Mamba-2 blocks alone. It names no sequence length: 2048, that of the paper (arXiv 2405.21060,
    appendix D), stands in for it."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    vocab: Size = key("vocab_size")
    heads: Size = key("num_heads")
    head_dim: Size = key("head_dim", default=64)
    expand: Annotated[float, Field(gt=0, allow_inf_nan=False)] = key("expand", default=2)
    state: Size = key("state_size", default=128)
    groups: Size = key("n_groups", default=8)
    conv: Size = key("conv_kernel", default=4)
    chunk: Size = key("chunk_size", default=256)
    activation: Literal["silu", "swish"] = key("hidden_act", default="silu")
    tied: Flag = key("tie_word_embeddings", default=False)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-2 blocks")] = key("use_bias", default=False)
    conv_bias: Flag = key("use_conv_bias", default=True)

    def fields(self) -> dict[str, Any]:
        if self.heads * self.head_dim != int(self.expand * self.hidden):
            rule = f"heads of {self.head_dim} are to be expand x hidden_size = {int(self.expand * self.hidden)} wide"
            raise ModelError("heads", rule, "Correct num_heads, head_dim or expand", self.heads)
        if not self.conv_bias:
            raise ModelError("conv_bias", "convolutions have a bias here", "Only true is read", False)
        ssm = self.same_fields("heads", "head_dim", "state", "groups", "conv", "chunk") | {"pattern": "M" * self.layers}
        # No layer has attention: `heads` only has to be a number of heads.
        shape = self.same_fields("layers", "hidden", "vocab", "tied", "heads", "head_dim") | {"seq": 2048}
        return shape | {"ssm": ssm, "norm": "rmsnorm", "positions": "none", "gated": False}


class MixerLayers(Decoder):
    """Layers of a Mamba-2 block or attention, and then an MLP or experts: two blocks each, each behind a norm. So
    `Model.layers` is twice ``num_hidden_layers``."""

    attention_bias: Flag = key("attention_bias", default=False)
    mamba_heads: Size = key("mamba_n_heads", default=128)
    mamba_head_dim: Size | Literal["auto"] = key("mamba_d_head", default="auto")
    expand: Size = key("mamba_expand", default=2)
    state: Size = key("mamba_d_state", default=256)
    groups: Size = key("mamba_n_groups", default=1)
    conv: Size = key("mamba_d_conv", default=4)
    chunk: Size = key("mamba_chunk_size", default=256)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-2 blocks")] = key(
        "mamba_proj_bias", default=False
    )
    conv_bias: Flag = key("mamba_conv_bias", default=True)

    def _blocks(self, attention: Sequence[bool], mlp: str) -> dict[str, Any]:
        """Returns the fields of `Model` for layers that have attention or a Mamba-2 block each, and then `mlp`."""
        width = self.expand * self.hidden // self.mamba_heads
        if self.mamba_head_dim not in ("auto", width):
            rule = f"{self.mamba_heads} heads are to be expand x hidden_size = {self.expand * self.hidden} wide"
            raise ModelError("mamba_head_dim", rule, f"Give {width} or auto", self.mamba_head_dim)
        if not self.conv_bias:
            raise ModelError("conv_bias", "convolutions have a bias here", "Only true is read", False)
        pattern = "".join(("*" if flag else "M") + mlp for flag in attention)
        ssm = self.same_fields("state", "groups", "conv", "chunk") | {"pattern": pattern}
        ssm |= {"heads": self.mamba_heads, "head_dim": width}
        biases = {"qkv_bias": self.attention_bias, "proj_bias": self.attention_bias}
        return super().fields() | biases | {"layers": len(pattern), "ssm": ssm}


class GraniteHybrid(MixerLayers):
    """``GraniteMoeHybridConfig`` (Granite 4): routed experts beside a shared MLP, or that MLP alone.

    Factors on embeddings, scores, residual additions and logits are part of kernels that run anyway.
    """

    ffn: Size = key("intermediate_size", default=11008)
    experts: Count = key("num_local_experts", default=8)
    top_k: Count = key("num_experts_per_tok", default=2)
    shared_ffn: Size = key("shared_intermediate_size", default=1024)
    layer_types: list[Literal["mamba", "attention", "linear_attention", "full_attention"]] | None = key(
        "layer_types", "layers_block_type", default=None
    )
    positions: Literal["rope", "nope"] | None = key("position_embedding_type", default=None)

    def fields(self) -> dict[str, Any]:
        types = self.layer_types or ["mamba"] * self.layers
        check_every_layer(types, self.layers, "layer_types")
        attention = [each in ("attention", "full_attention") for each in types]
        shape = self._blocks(attention, "E" if self.experts else "-") | {"ffn": self.shared_ffn}
        shape["positions"] = "rope" if self.positions == "rope" else "none"
        if self.experts:
            moe = self.same_fields("experts", "top_k", "shared_ffn") | {"expert_ffn": self.ffn, "shared_experts": 1}
            shape["moe"] = moe
        return shape


class Bamba(MixerLayers):
    """``BambaConfig``: MLPs behind Mamba-2 blocks, and behind attention with RoPE on half of a head."""

    mlp_bias: Flag = key("mlp_bias", default=False)

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    rope_share: Share = key("partial_rotary_factor", default=0.5)
    attention: list[Annotated[int, Field(strict=True, ge=0)]] | None = key("attn_layer_indices", default=None)

    def fields(self) -> dict[str, Any]:
        attention = [layer in (self.attention or ()) for layer in range(self.layers)]
        return self._blocks(attention, "-") | self.same_fields("rope_share", "mlp_bias")
