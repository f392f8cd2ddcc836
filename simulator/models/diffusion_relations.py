"""Relations between the fields of a diffusion transformer; each function raises a ModelError if it is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.diffusion import Diffusion, Modulation

if TYPE_CHECKING:
    from meshcast.simulator.models.branches import Branch
    from meshcast.simulator.models.model import Model
    from meshcast.simulator.models.transformer import Transformer

REFUSED = (
    *("moe", "mla", "ssm", "linear_attention", "mtp", "tied", "contrastive", "outside", "other", "window", "head"),
    *("attention_chunk", "softcaps", "norm_residual", "sinks", "attention_gate", "layer_input", "shared_keys"),
    *("layer_scale", "projected_keys", "dropout", "relative_buckets", "embedding_norm", "inner_norms", "value_norm"),
    *("keys_are_values", "value_dim"),
)
"""Fields that a diffusion transformer is described without."""


def check_diffusion(model: Model, diffusion: Diffusion) -> None:
    """Raises ModelError if any of the relations is broken."""
    rule = "diffusion transformers are supported without it"
    for word in REFUSED:
        if value := getattr(model, word):
            raise ModelError(word, rule, "Leave it out", value if isinstance(value, bool | int | float) else None)
    if not model.bidirectional:
        raise ModelError("bidirectional", "every patch attends to all", "Leave it out", False)
    if model.positions not in ("none", "rope"):
        rule = "positions of patches are rotations, or numbers without parameters (none)"
        raise ModelError("positions", rule, "Give rope or none", model.positions)
    if model.norm_place != "before":
        raise ModelError("norm_place", "modulated norms are before attention and MLP", "Leave it out", model.norm_place)
    for i, branch in enumerate(model.branches):
        _check_text(branch, f"branches[{i}]")
    if model.frames and model.branches:
        raise ModelError("frames", "videos with texts are supported with attention to all frames", "Leave it out")
    if model.cross_attention:
        _check_cross(model)
    elif diffusion.cross_norm:
        raise ModelError("diffusion.cross_norm", "it is that of cross_attention", "Leave it out", True)
    for where, shape in (("", model), *((f"variants[{i}].", variant) for i, variant in enumerate(model.variants))):
        assert shape.modulation is not None
        _check_layers(model, shape, shape.modulation, where)


def _check_text(branch: Branch, where: str) -> None:
    if branch.tokens is None or not branch.input_width:
        rule = "the tokens of a text are results of an encoder, of a stated number and width"
        raise ModelError(f"{where}.tokens", rule, "Give tokens and input_width")
    if branch.merge > 1 or branch.frozen or branch.class_token or branch.pool != "none":
        rule = "texts of diffusion transformers are trained from the results of their encoder on, token by token"
        raise ModelError(where, rule, "Leave merge, frozen, class_token and pool out")


def _check_cross(model: Model) -> None:
    (text, *others) = model.branches or (None,)
    if text is None or others or text.layers or text.hidden != model.hidden or text.projector != "none":
        rule = f"layers attend to one text, a branch without layers, as wide as the model ({model.hidden})"
        raise ModelError("branches", rule, "Give one, with tokens, input_width and layers: 0")
    words = ("joint_attention", "parallel_residual", "variants")
    for word in words:
        if getattr(model, word):
            raise ModelError(word, "layers with cross_attention are supported without it", "Leave it out")


def _check_layers(model: Model, shape: Transformer, modulation: Modulation, where: str) -> None:
    joined = bool(model.branches) and not model.cross_attention
    if shape.joint_attention and (not joined or shape.parallel_residual or model.frames):
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
