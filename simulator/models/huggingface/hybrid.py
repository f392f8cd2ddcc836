"""Configs of hybrid models, whose layers are a block each: Mamba-1 or 2, attention, an MLP or experts."""

from __future__ import annotations

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

Rank = Size | Literal["auto"]
"""Width of the latent of dt in Mamba-1 blocks; auto: a sixteenth of the width of the stream."""


def _join_letters(blocks: str | list[Block]) -> str:
    """Returns the blocks of layers as letters of `StateSpace.pattern`."""
    return blocks if isinstance(blocks, str) else "".join(LETTERS[block] for block in blocks)


class HybridExperts(Config):
    """Keys of `NemotronH` for experts and for multi-token prediction."""

    experts: Size | None = key("n_routed_experts", default=None)
    top_k: Size = key("num_experts_per_tok", default=2)
    expert_ffn: Size = key("moe_intermediate_size", default=7688)
    shared_experts: Count = key("n_shared_experts", default=1)
    shared_ffn: Size = key("moe_shared_expert_intermediate_size", default=7688)
    latent: Size | None = key("moe_latent_size", default=None)
    mtp: Count = key("num_nextn_predict_layers", default=0)
    mtp_pattern: str | list[Block] | None = key("mtp_hybrid_override_pattern", "mtp_layers_block_type", default=None)

    def read_experts(self) -> dict[str, object]:
        """Returns the fields of `MoEShape`. The router has a correction for each expert, as in DeepSeek-V3."""
        shared = {"shared_experts": self.shared_experts, "shared_ffn": self.shared_ffn} if self.shared_experts else {}
        routed = {
            "experts": self.experts,
            "top_k": self.top_k,
            "expert_ffn": self.expert_ffn,
            "latent": self.latent and {"width": self.latent},
        }
        return {**routed, **shared, "router_bias": True}


class NemotronH(HybridExperts):
    """``NemotronHConfig`` (Nemotron-H, Nemotron Nano 2, Nemotron 3): Mamba-2, attention without RoPE, squared ReLU."""

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
    dropout: Annotated[Probability, refuse("dropout on the residual stream alone")] = key("hidden_dropout", default=0.0)
    attention_dropout: Annotated[Probability, refuse("dropout on attention alone")] = key(
        "attention_dropout", default=0.0
    )

    def fields(self) -> dict[str, object]:
        pattern = _join_letters(self.pattern)
        shape = self.same_fields("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "seq", "tied")
        shape["layers"] = self.layers or len(pattern)
        ssm = self.same_fields("state", "groups", "conv", "chunk") | {"pattern": pattern}
        if self.mtp:
            shape["mtp"] = self.mtp
            ssm["mtp_pattern"] = _join_letters(self.mtp_pattern or "*E")
        ssm |= {"heads": self.mamba_heads, "head_dim": self.mamba_head_dim}
        moe = {"moe": self.read_experts()} if "E" in pattern and self.experts else {}
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

    def fields(self) -> dict[str, object]:
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

    @property
    def inner(self) -> int:
        """Width of the values of a Mamba-2 block."""
        return self.expand * self.hidden

    def _blocks(self, pattern: str) -> dict[str, Any]:
        """Returns the fields of `Model` for blocks by the letters of `StateSpace.pattern`."""
        width = self.inner // self.mamba_heads
        if self.mamba_head_dim not in ("auto", width):
            rule = f"{self.mamba_heads} heads are to be {self.inner} wide in all"
            raise ModelError("mamba_head_dim", rule, f"Give {width} or auto", self.mamba_head_dim)
        if not self.conv_bias:
            raise ModelError("conv_bias", "convolutions have a bias here", "Only true is read", False)
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

    def fields(self) -> dict[str, object]:
        types = self.layer_types or ["mamba"] * self.layers
        check_every_layer(types, self.layers, "layer_types")
        mlp = "E" if self.experts else "-"
        shape = self._blocks("".join(LETTERS[each] + mlp for each in types)) | {"ffn": self.shared_ffn}
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

    def fields(self) -> dict[str, object]:
        attention = self.attention or ()
        pattern = "".join("*-" if layer in attention else "M-" for layer in range(self.layers))
        return self._blocks(pattern) | self.same_fields("rope_share", "mlp_bias")


class FalconH1(MixerLayers):
    """``FalconH1Config``: attention and a Mamba-2 block in parallel behind one norm, and then an MLP, in all layers.

    Its factors on activations, in front of and behind linear layers, are left out as kernels of their own.
    """

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    mlp_bias: Flag = key("mlp_bias", default=False)
    mamba_width: Size | None = key("mamba_d_ssm", default=1024)
    norm: Flag = key("mamba_rms_norm", default=False)
    out_bias: Annotated[Flag, refuse("bias of the projections of Mamba-2 blocks")] = key(
        "projectors_bias", default=False
    )

    @property
    def inner(self) -> int:
        return self.mamba_width or super().inner

    def fields(self) -> dict[str, object]:
        shape = self._blocks("P-" * self.layers) | self.same_fields("mlp_bias")
        return shape | {"ssm": shape["ssm"] | self.same_fields("norm")}


class Mamba1(Config):
    """``MambaConfig``: Mamba-1 blocks alone. It names no sequence length: 2048, that of the paper (arXiv 2312.00752,
    section 4.2), stands in for it. A residual stream in fp32 (``residual_in_fp32``) is left out."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    vocab: Size = key("vocab_size")
    expand: Annotated[float, Field(gt=0, allow_inf_nan=False)] = key("expand", default=2)
    inner: Size | None = key("intermediate_size", default=None)
    state: Size = key("state_size", default=16)
    conv: Size = key("conv_kernel", default=4)
    rank: Rank = key("time_step_rank", default="auto")
    activation: Literal["silu", "swish"] = key("hidden_act", default="silu")
    tied: Flag = key("tie_word_embeddings", default=True)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-1 blocks")] = key("use_bias", default=False)
    conv_bias: Literal[True] = key("use_conv_bias", default=True)

    def fields(self) -> dict[str, Any]:
        ssm = self.same_fields("state", "conv") | {"pattern": "M" * self.layers}
        ssm |= selective_fields(self.rank, self.hidden, self.inner or int(self.expand * self.hidden))
        # No layer has attention: `heads` only has to be a number of heads.
        shape = self.same_fields("layers", "hidden", "vocab", "tied") | {"seq": 2048, "heads": 1}
        return shape | {"ssm": ssm, "norm": "rmsnorm", "positions": "none", "gated": False}


class FalconMamba(Mamba1):
    """``FalconMambaConfig``: norms without weights over the latent of dt, B and C."""

    def fields(self) -> dict[str, object]:
        shape = super().fields()
        return shape | {"ssm": shape["ssm"] | {"norm": "inputs0"}}


class Jamba(Decoder):
    """``JambaConfig``: Mamba-1 blocks with norms over the latent of dt, B and C, attention without RoPE in some layers,
    and experts in some. `Model.layers` is twice ``num_hidden_layers``."""

    kv_heads: Size | None = key("num_key_value_heads", default=8)
    seq: Size = key("max_position_embeddings", default=262144)
    attention_every: Size = key("attn_layer_period", default=8)
    attention_first: Count = key("attn_layer_offset", default=4)
    experts_every: Size = key("expert_layer_period", default=2)
    experts_first: Count = key("expert_layer_offset", default=1)
    experts: Size = key("num_experts", "num_local_experts", default=16)
    top_k: Size = key("num_experts_per_tok", default=2)
    expand: Size = key("mamba_expand", default=2)
    state: Size = key("mamba_d_state", default=16)
    conv: Size = key("mamba_d_conv", default=4)
    rank: Rank = key("mamba_dt_rank", default="auto")
    conv_bias: Literal[True] = key("mamba_conv_bias", default=True)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-1 blocks")] = key(
        "mamba_proj_bias", default=False
    )

    def fields(self) -> dict[str, object]:
        pattern = ""
        for layer in range(self.layers):
            pattern += "*" if layer % self.attention_every == self.attention_first else "M"
            sparse = self.experts > 1 and layer % self.experts_every == self.experts_first
            pattern += "E" if sparse else "-"
        ssm = self.same_fields("state", "conv") | {"pattern": pattern, "norm": "inputs"}
        ssm |= selective_fields(self.rank, self.hidden, self.expand * self.hidden)
        moe = {"moe": self.same_fields("experts", "top_k") | {"expert_ffn": self.ffn}} if "E" in pattern else {}
        return super().fields() | moe | {"layers": len(pattern), "ssm": ssm, "positions": "none"}


def selective_fields(rank: Rank, hidden: int, inner: int) -> dict[str, object]:
    """Returns the fields of `StateSpace` that make Mamba-1 blocks of `inner` channels. rank: of the latent of dt."""
    width = -(-hidden // 16) if rank == "auto" else rank
    return {"heads": inner, "head_dim": 1, "groups": 1, "rank": width}


class SharedBlocks(Config):
    """Keys of Zamba 1 and 2: Mamba blocks, in front of some of which is a block of attention and an MLP whose weights
    these layers share."""

    layers: Depth = key("num_hidden_layers")
    hidden: Size = key("hidden_size")
    heads: Size = key("num_attention_heads")
    kv_heads: Size | None = key("num_key_value_heads", default=None)
    vocab: Size = key("vocab_size")
    seq: Size = key("max_position_embeddings", default=4096)
    types: list[Literal["linear_attention", "mamba", "hybrid"]] | None = key(
        "layers_block_type", "layer_types", default=None
    )
    expand: Size = key("mamba_expand", default=2)
    state: Size = key("mamba_d_state", default=64)
    conv: Size = key("mamba_d_conv", default=4)
    tied: Flag = key("tie_word_embeddings", default=True)

    def join_pattern(self, default: list[str]) -> str:
        """Returns the letters of the layers. default: those of a config that lists no types."""
        letters = ["S" if kind == "hybrid" else "M" for kind in self.types or ()] or default
        check_every_layer(letters, self.layers, "layers_block_type")
        return "".join(letters)

    def read_stack(self) -> dict[str, object]:
        """Returns the fields of `Model` that both have. Heads of shared blocks are twice as wide: these blocks read the
        stream and the embedding."""
        shape = self.same_fields("layers", "hidden", "heads", "kv_heads", "vocab", "seq", "tied")
        return shape | {
            "head_dim": 2 * self.hidden // self.heads,
            "norm": "rmsnorm",
            "gated": True,
            "activation": "gelu",
        }


class Zamba2(SharedBlocks):
    """``Zamba2Config``: Mamba-2 blocks; shared blocks have adapters of their own in each layer."""

    ffn: Size | None = key("intermediate_size", default=None)
    mamba_heads: Size = key("n_mamba_heads", default=8)
    groups: Size = key("mamba_ngroups", default=1)
    chunk: Size = key("chunk_size", default=256)
    blocks: Size = key("num_mem_blocks", default=1)
    adapts_attention: Flag = key("use_shared_attention_adapter", default=False)
    adapter_rank: Size = key("adapter_rank", default=128)
    has_rope: Flag = key("use_mem_rope", default=False)
    bias: Annotated[Flag, refuse("biases of shared blocks")] = key("add_bias_linear", default=False)

    def fields(self) -> dict[str, object]:
        hybrid = (6, 12, 18, 24, 30, 36, 42, 47, 51)
        pattern = self.join_pattern(["S" if layer in hybrid else "M" for layer in range(self.layers)])
        ssm = self.same_fields("state", "groups", "conv", "chunk") | {"pattern": pattern}
        ssm |= {"heads": self.mamba_heads, "head_dim": self.expand * self.hidden // self.mamba_heads}
        block = self.same_fields("blocks", "adapter_rank", "adapts_attention") if "S" in pattern else None
        kind = {"positions": "rope" if self.has_rope else "none", "ffn": self.ffn or 4 * self.hidden}
        return self.read_stack() | kind | {"ssm": ssm, "shared_block": block}


class Zamba(SharedBlocks):
    """``ZambaConfig``: Mamba-1 blocks. Their heads have a latent each, which count as one for all channels: parameters
    and products are the same."""

    kv_heads: Size | None = key("num_key_value_heads", default=16)
    ffn: Size = key("intermediate_size")
    every: Size = key("attn_layer_period", default=6)
    first: Count = key("attn_layer_offset", default=4)
    state: Size = key("mamba_d_state", default=16)
    rank: Rank = key("mamba_dt_rank", default="auto")
    conv_bias: Literal[True] = key("mamba_conv_bias", default=True)
    mamba_bias: Annotated[Flag, refuse("bias of the projections of Mamba-1 blocks")] = key(
        "mamba_proj_bias", default=False
    )

    def fields(self) -> dict[str, object]:
        behind = ["S" if layer % self.every == self.first else "M" for layer in range(self.layers - 3)]
        pattern = self.join_pattern(["M", "M", "S", *behind])
        ssm = self.same_fields("state", "conv") | {"pattern": pattern}
        ssm |= selective_fields(self.rank, self.hidden, self.expand * self.hidden)
        shared: dict[str, object] | None = {} if "S" in pattern else None
        return self.read_stack() | {"ffn": self.ffn, "positions": "none", "ssm": ssm, "shared_block": shared}
