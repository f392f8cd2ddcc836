"""Layers of a model whose shape differs from that of the others in more than a kind, such as their widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.parts import Count
from meshcast.simulator.models.transformer import Transformer

OWN = (
    "name",
    "branches",
    "variants",
    "outside",
    "mtp",
    "cross_attention",
    "contrastive",
    "diffusion",
    "full_every",
    "layers",
    "head",
    "output",
    "left_out",
    "attention_residuals",
)
"""Fields of a model that its variants do not inherit."""


class LayerVariant(Transformer):
    """The shape of some layers, each a stack of one layer; what it leaves out is as in the model."""

    numbers: tuple[Count, ...]
    """Numbers of these layers in the trunk, from 0."""

    @property
    def top_k(self) -> int | None:
        """Routed experts of a token; None without experts."""
        return self.moe.top_k if self.moe else None


def inherit_fields(stated: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model whose variants have the fields that they leave out. Those that state how wide the
    model is have them already: a part that a variant lacks (null) must not come back when its fields are read again.
    Fields of wrong types are left to pydantic."""
    variants = stated.get("variants")
    if not isinstance(variants, list | tuple) or not all(isinstance(variant, Mapping) for variant in variants):
        return stated
    shared = {key: value for key, value in stated.items() if key not in OWN}
    inherited = {**shared, "layers": 1}
    return {**stated, "variants": [variant if "hidden" in variant else inherited | {**variant} for variant in variants]}


def check_variants(stack: Transformer, variants: Sequence[LayerVariant]) -> None:
    """Raises ModelError for layers that are no layers of the trunk, or of several variants. stack: the trunk."""
    seen: set[int] = set()
    for i, variant in enumerate(variants):
        numbers = {*variant.numbers}
        if not numbers or len(numbers) < len(variant.numbers) or max(numbers) >= stack.layers or numbers & seen:
            rule = f"it names layers of the trunk, from 0 and below {stack.layers}, each in one variant"
            raise ModelError(f"variants[{i}].numbers", rule, "Correct the numbers", list(variant.numbers))
        seen |= numbers
        if variant.layers != 1 or variant.hidden != stack.hidden:
            rule = f"a variant is a shape of single layers as wide as the model (hidden {stack.hidden})"
            raise ModelError(f"variants[{i}]", rule, "Leave layers and hidden out")
    for word, value in (("mtp", stack.mtp), ("frames", stack.frames)):
        if value:
            rule = "models with variants of layers are supported without it"
            raise ModelError(word, rule, "Leave it out, or variants", value)
