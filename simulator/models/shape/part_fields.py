"""Fields of a stack of layers for parts that a family or two have: several residual streams, attention of other kinds,
modulation by the conditions of a sample."""

from __future__ import annotations

from typing import Literal

from meshcast.simulator.models.diffusion import Modulation
from meshcast.simulator.models.parts import Flag, Size
from meshcast.simulator.models.rare_parts import (
    AltUp,
    AttentionResiduals,
    BlockAttention,
    CompressedAttention,
    DistanceProfiles,
    HyperConnections,
    SharedBlock,
)
from meshcast.simulator.models.shape.fields import TransformerFields


class PartFields(TransformerFields):
    """Parts that replace attention or the residual stream, or stand beside them."""

    compressed: CompressedAttention | None = None
    """Attention to a window and to compressed entries, in place of others (DeepSeek-V4); norms are part of it."""
    blocks: BlockAttention | None = None
    """Attention to blocks of keys, in all layers but those of `full_every` (MiniMax-M3, MiniCPM4); None: to all."""
    head_experts: Size | None = None
    """Experts of queries and of the output layer of attention: a token passes heads / kv_heads of them, each with a
    query for every key/value head (JetMoE); None: one matrix for all tokens."""
    distance_profiles: DistanceProfiles | None = None
    """A bias of scores by distance, from a state of each token and head (Inkling); None: none."""
    token_convolutions: Size | None = None
    """Tokens of causal convolutions, with their input added, of keys, of values, and of what attention and the MLP add
    to the stream (Inkling); None: none."""
    result_scale: Flag = False
    """The result of an MLP, or the weights of experts, are multiplied by a single number (Inkling)."""
    hyper_connections: HyperConnections | None = None
    """Several residual streams between blocks (DeepSeek-V4, Hunyuan 4); None: one."""
    modulation: Modulation | None = None
    """Vectors of a sample that shift and scale what norms make, and multiply what a layer adds to its stream (DiT)."""
    joint_attention: Flag | Literal["last"] = False
    """Tokens of branches pass norms, projections and an MLP of their own, and attend with those of the model to all
    (MMDiT, arXiv 2403.03206, section 4). last: they go no further, and lack what comes behind attention."""
    shared_block: SharedBlock | None = None
    """The block of the layers S of `StateSpace.pattern`."""
    altup: AltUp | None = None
    """Several residual streams between layers (Gemma 3n); None: one."""

    attention_residuals: AttentionResiduals | None = None
    """Blocks read weighted sums of what blocks of layers have added to the stream (Kimi K3); None: the stream."""

    @property
    def reads_streams(self) -> bool:
        """Whether blocks read the residual stream by operators of its own, which also add their results to it."""
        return (self.hyper_connections or self.altup or self.attention_residuals) is not None

    @property
    def stream_width(self) -> int:
        """Width of all residual streams of a token (elements); of attention residuals, of which stages send more and
        more, that behind the last layer."""
        sums = self.attention_residuals.count_sums(self.layers) if self.attention_residuals else 1
        return self.hidden * (self.streams or sums)

    @property
    def stream_parameters(self) -> int:
        """Parameters of a layer that read the residual stream, or several, and write them."""
        connections = 2 * self.hyper_connections.parameters(self.hidden) if self.hyper_connections else 0
        parts = (self.altup, self.attention_residuals)
        return connections + sum(part.parameters(self.hidden) for part in parts if part)

    @property
    def streams(self) -> int | None:
        """Residual streams of a token; None: one, and no parts that make several."""
        part = self.hyper_connections or self.altup
        return part.streams if part else None
