"""Relations between the fields of a diffusion transformer; each function raises a ModelError if it is broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.branches import Branch
from meshcast.simulator.models.diffusion import Diffusion, Modulation
from meshcast.simulator.models.transformer import Transformer
from meshcast.simulator.models.variants import LayerVariant

REFUSED = (
    *("moe", "mla", "ssm", "linear_attention", "mtp", "tied", "contrastive", "outside", "other", "window", "head"),
    *("attention_chunk", "softcaps", "norm_residual", "sinks", "attention_gate", "layer_input", "shared_keys"),
    *("layer_scale", "projected_keys", "dropout", "relative_buckets", "embedding_norm", "inner_norms", "value_norm"),
    *("keys_are_values", "value_dim"),
)
"""Fields that a diffusion transformer is described without."""


class DiffusionParts(NamedTuple):
    """What a diffusion transformer has beside its layers.

    Attributes:
        diffusion: its ends.
        branches: its texts.
        variants: layers that differ from the others.
        cross_attention: whether layers attend to the text; otherwise texts are in the sequence of the patches.
    """

    diffusion: Diffusion
    branches: Sequence[Branch]
    variants: Sequence[LayerVariant]
    cross_attention: bool


def check_diffusion(model: Transformer, parts: DiffusionParts) -> None:
    """Raises ModelError if any of the relations is broken. model: the layers, with the fields of a whole model."""
    rule = "diffusion transformers are supported without it"
    for word in REFUSED:
        if value := getattr(model, word, None):
            raise ModelError(word, rule, "Leave it out", value if isinstance(value, bool | int | float) else None)
    if not model.bidirectional:
        raise ModelError("bidirectional", "every patch attends to all", "Leave it out", False)
    if model.positions not in ("none", "rope"):
        rule = "positions of patches are rotations, or numbers without parameters (none)"
        raise ModelError("positions", rule, "Give rope or none", model.positions)
    if model.norm_place != "before":
        raise ModelError("norm_place", "modulated norms are before attention and MLP", "Leave it out", model.norm_place)
    for i, branch in enumerate(parts.branches):
        _check_text(branch, f"branches[{i}]")
    _check_frames(model, parts)
    if parts.cross_attention:
        _check_cross(model, parts)
    elif parts.diffusion.cross_norm:
        raise ModelError("diffusion.cross_norm", "it is that of cross_attention", "Leave it out", True)
    for where, shape in (("", model), *((f"variants[{i}].", variant) for i, variant in enumerate(parts.variants))):
        if shape.modulation is None:
            rule = "all layers of patches are modulated"
            raise ModelError(f"{where}modulation", rule, "Leave it out, as the model has it")
        _check_layers(parts, shape, shape.modulation, where)


def _check_frames(model: Transformer, parts: DiffusionParts) -> None:
    if parts.diffusion.cross_frames and not (parts.cross_attention and model.frames):
        rule = "it is that of cross_attention in a model with frames"
        raise ModelError("diffusion.cross_frames", rule, "Leave it out", True)
    if not model.frames:
        return
    if parts.branches and not parts.cross_attention:
        rule = "texts in the sequence of the patches of a video are supported with attention to all frames"
        raise ModelError("frames", rule, "Leave it out, or give cross_attention: true", model.frames)
    if over := (model.seq - sum(text.tokens or 0 for text in parts.branches)) % model.frames:
        rule = f"every one of {model.frames} frames has equally many patches"
        raise ModelError("seq", rule, f"Give {model.seq - over or model.frames}", model.seq)


def _check_text(branch: Branch, where: str) -> None:
    if branch.tokens is None or not branch.input_width:
        rule = "the tokens of a text are results of an encoder, of a stated number and width"
        raise ModelError(f"{where}.tokens", rule, "Give tokens and input_width")
    if branch.merge > 1 or branch.frozen or branch.class_token or branch.pool != "none":
        rule = "texts of diffusion transformers are trained from the results of their encoder on, token by token"
        raise ModelError(where, rule, "Leave merge, frozen, class_token and pool out")


def _check_cross(model: Transformer, parts: DiffusionParts) -> None:
    (text, *others) = parts.branches or (None,)
    if text is None or others or text.layers or text.hidden != model.hidden or text.projector != "none":
        rule = f"layers attend to one text, a branch without layers, as wide as the model ({model.hidden})"
        raise ModelError("branches", rule, "Give one, with tokens, input_width and layers: 0")
    refused = {"joint_attention": model.joint_attention, "parallel_residual": model.parallel_residual}
    for word, value in {**refused, "variants": parts.variants}.items():
        if value:
            raise ModelError(word, "layers with cross_attention are supported without it", "Leave it out")


def _check_layers(parts: DiffusionParts, shape: Transformer, modulation: Modulation, where: str) -> None:
    joined = bool(parts.branches) and not parts.cross_attention
    if shape.joint_attention and (not joined or shape.parallel_residual or shape.frames):
        rule = "in joint attention the tokens of branches pass weights of their own, each block behind the other"
        raise ModelError(f"{where}joint_attention", rule, "Give branches, and no parallel_residual and frames")
    if shape.parallel_residual and not shape.shared_norm:
        rule = "a modulated layer with attention beside the MLP has one norm"
        raise ModelError(f"{where}shared_norm", rule, "Give true", False)
    if modulation.parts == "gates":
        raise ModelError(
            f"{where}modulation.parts", "norms of the layers of patches are modulated", "Give all", "gates"
        )
    if modulation.by == "table" and (shape.joint_attention or shape.parallel_residual or modulation.sets > 1):
        rule = "a table is added to the six vectors that all layers share"
        raise ModelError(f"{where}modulation.by", rule, "Give linear", "table")
    if modulation.sets > 1 and (not joined or shape.joint_attention):
        rule = "texts have vectors of their own where they are branches that share the weights of the layer"
        raise ModelError(f"{where}modulation.sets", rule, "Give 1", modulation.sets)
