"""Says what of a model no part describes, and what of it a pipeline leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from meshcast.simulator.models.model import Model, count_patches
from meshcast.simulator.models.parts import Other


def name_undescribed(model: Model) -> list[str]:
    """Returns a sentence for every part of a model that is priced by its FLOPs and bytes alone."""
    return [_describe(place, other) for place, other in _others(model) if other.parameters > 0 or other.flops]


def name_left_out(model: Model) -> list[str]:
    """Returns a sentence for what the config of a model has and its reader leaves out."""
    return [f"model: {part} left out" for part in model.left_out]


def name_unsent(model: Model, stages: int) -> list[str]:
    """Returns a sentence for all that later stages of a pipeline need beside the residual stream and are not sent, with
    its width beside that of the stream."""
    shapes = (model, *([model.in_layers(True, False)] if model.window is not None else []))
    keys = sum(shape.key_width + (not shape.keys_are_values) * shape.value_width for shape in shapes)
    width_of = {
        "keys and values that later layers read (model.shared_keys)": keys * bool(model.shared_keys),
        "inputs of layers (model.layer_input), for each layer": model.layer_input.width if model.layer_input else 0,
        "the embedding that shared blocks read (model.shared_block)": model.hidden * bool(model.shared_block),
        "keys that an indexer has chosen (model.mla.index), 32 bits each": _shared_choices(model),
        "states of images that early layers add (deepstack), of their tokens": model.hidden
        * sum(branch.deepstack for branch in model.branches),
    }
    if stages == 1:
        return []
    shared = "shared blocks (model.shared_block): every stage holds them, and sums of their gradients are left out"
    conditions = "the vector of the conditions of a sample: not sent to later stages, nor is its gradient summed"
    return [
        *([shared] if model.shared_block else []),
        *([f"{conditions}, {model.modulation.condition:,} elements"] if model.modulation else []),
        *(
            f"{what}: not sent to later stages, {width:,} elements a token beside the {model.hidden:,} of the stream"
            for what, width in width_of.items()
            if width
        ),
    ]


def _shared_choices(model: Model) -> int:
    """Counts the keys of a query that layers read which an earlier layer has chosen; 0 without such layers."""
    indexes = [shape.mla.index for shape in (model, *model.variants) if shape.mla and shape.mla.index]
    return max((index.top_k for index in indexes if index.shared or index.shared_by), default=0)


def name_sample(model: Model, seq: int) -> list[str]:
    """Returns a sentence about what a sequence of `seq` tokens of a diffusion transformer holds, and what else its
    samples pass that is no part of a step."""
    if model.diffusion is None:
        return []
    texts = sum(model.branch_tokens(seq))
    text = f" and {texts:,.0f} tokens of a text" if texts else ""
    encoders = "the encoder of texts and that of images" if texts else "the encoder of images"
    return [
        f"a sample is {count_patches(model, seq):,.0f} patches{text}; {encoders} (VAE) run elsewhere, not in the step"
    ]


def mixes_tokens(model: Model) -> bool:
    """Returns whether work that no part describes needs whole sequences."""
    return any(shape.other is not None and shape.other.mixes for shape in (model, *model.variants, *model.branches))


def _others(model: Model) -> Iterator[tuple[str, Other]]:
    """Yields what no part describes, each with its place."""
    varied = sum(len(variant.numbers) for variant in model.variants)
    counts = model.layers - varied, *(len(variant.numbers) for variant in model.variants)
    for shape, layers in zip((model, *model.variants), counts, strict=True):
        if shape.other:
            yield f"{layers} layers", shape.other
    for branch in model.branches:
        if branch.other:
            yield f"{branch.layers} layers of {branch.name}", branch.other
    if model.outside:
        yield "outside of the layers", model.outside


def _describe(place: str, other: Other) -> str:
    names = ", ".join(other.modules) or "what is left"
    work = f"{other.flops:.3g} FLOPs a token" if other.flops else "no matrix products"
    how = (
        "priced by its FLOPs and bytes, and not divided by tensor parallelism" if other.flops else "held by every rank"
    )
    return f"model, not described: {names} ({place}, {max(other.parameters, 0):,} parameters, {work}) is {how}"
