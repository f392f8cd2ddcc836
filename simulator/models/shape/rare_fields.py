"""Fields of a stack of layers that few models have: attention that differs between layers, norms inside of blocks."""

from __future__ import annotations

from typing import Literal, Self

from meshcast.hardware.schemas import Field
from meshcast.simulator.models.parts import Count, Flag, LayerInput, LocalAttention, ModelOutput, Size
from meshcast.simulator.models.shape.part_fields import PartFields

Block = Literal["attention", "mlp"]
"""The blocks of a layer."""


class RareFields(PartFields):
    """Layers that differ from each other, or from those of a GPT or Llama inside of attention and MLPs.

    The first two fields change what programs save for the backward pass that compose layers of PyTorch's operations
    (`ProcessMemory.composed`), and no time.
    """

    activation: Literal["silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "xielu"] = Field(
        default_factory=lambda fields: "silu" if fields.get("gated") else "gelu"
    )
    """The function between the linear layers of MLPs and experts. gelu_new is the tanh approximation in separate
    operations (GPT-2, Phi); xielu has two parameters (Apertus). Default: silu if `gated`, else gelu."""
    fused_qkv: Flag = False
    """One matrix makes queries, keys and values, which are views of its product (GPT-2, GPT-NeoX, Falcon, Phi 3): all
    of it stays in memory with the values."""
    score_dropout: Flag = Field(default_factory=lambda fields: fields.get("dropout", 0.0) > 0)
    """Dropout on attention scores. Default: with `dropout`; BART and Marian have it elsewhere only."""
    value_dim: Size | None = None
    """Width of a head of values, where it is not `head_dim` (MiMo-V2)."""
    keys_are_values: Flag = False
    """Values are the keys before their norm and RoPE, without a projection (Gemma 4)."""
    value_norm: Flag = False
    """An RMS norm without weights over each head of values (Gemma 4)."""
    local_attention: LocalAttention | None = None
    """Heads of the layers with a window, where they differ from those of the others (MiMo-V2, Gemma 4)."""
    shared_keys: Count = 0
    """The last so many layers project no keys and values: they read those of the last layer before them that has the
    same kind of attention (Gemma 4 E2B)."""
    reading_ffn: Size | None = None
    """Inner width of the MLP of these layers, where it is not `ffn`."""
    layer_input: LayerInput | None = None
    """An input of every layer beside the residual stream (Gemma 4 E2B); None: none."""
    mtp_like: Count | None = None
    """The number of the layer (from 0) of whose kind the layers of multi-token prediction are (Step 3.5: 1, without
    experts); None: of the last layer."""
    output: ModelOutput | None = None
    """Classes, a reward or vectors in place of logits of the vocabulary; None: these."""
    left_out: tuple[str, ...] = ()
    """What a config has and its reader leaves out: the answer names it."""
    layer_scale: Flag = False
    """What attention and the MLP add to the stream is multiplied by a vector of its own (InternVL)."""
    inner_norms: Flag = False
    """RMS norms in front of the output layers of attention, over all heads, and of MLPs (BitNet)."""
    only: Block | None = None
    """The one block of its layers, with its norm: the other was pruned away (Llama-Nemotron); None: they have both."""
    replaced: tuple[Block, ...] = ()
    """The blocks in whose place a linear layer stands, from the width of the stream to the same (Llama-Nemotron)."""

    def in_layers(self, local: bool, reads_keys: bool) -> Self:
        """Returns the shape of its layers that have a window or not, and that read keys of another or not."""
        changes: dict[str, object] = {}
        if local and self.local_attention is not None:
            changes |= {**self.local_attention.model_dump(exclude_none=True), "local_attention": None}
        profiles = self.distance_profiles
        if local and profiles and self.window and profiles.extent != self.window:
            changes |= {"distance_profiles": profiles.model_copy(update={"extent": self.window})}
        if self.blocks and not local:
            changes["blocks"] = None
        if reads_keys and self.mla:
            changes |= {"mla": self.mla.share_choice()} if not self.mla.shares_choice else {}
        elif reads_keys and not self.reads_keys:
            changes |= {"shared_keys": self.layers, "ffn": self.reading_ffn or self.ffn}
        return self.model_copy(update=changes) if changes else self

    @property
    def reads_keys(self) -> bool:
        """Whether all its layers read the keys and values of another."""
        return self.shared_keys == self.layers > 0
