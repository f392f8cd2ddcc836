"""Describes traced layers by the parts of models. What no part describes is `Other`, so that the parameters of a layer
are exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.flops import layer_products
from meshcast.simulator.models.trace.attention import find_attention, read_attention
from meshcast.simulator.models.trace.inner_blocks import read_experts, read_mlps
from meshcast.simulator.models.trace.record import Step
from meshcast.simulator.models.trace.recurrences import read_recurrence
from meshcast.simulator.models.trace.steps import Fields, LayerBlock, LayerSteps
from meshcast.simulator.models.transformer import Transformer

SMALLEST = 0.05
"""Share of the FLOPs of a layer that another MLP beside its first has at least, to be described as one."""

MIXERS = "*MD"
"""Letters of blocks that mix the tokens of a sequence."""

NO_SCAN = {"heads": 1, "head_dim": 1, "state": 1, "groups": 1}
"""Sizes of state-space blocks in a layer without any, which is a single block."""

PLAIN_NORMS: Fields = {"norm_place": "before", "norm_residual": False}
"""Norms before blocks, where a layer with norms elsewhere is not described; its other norms are then `Other`."""

LEAST_LEFT = -4
"""Parameters that a described layer has at most beside those of the code, over the width of the stream: a few norms. A
layer that lacks more shares the weights of another."""

LEAST_REST = -1e-3
"""Products that a described layer has at most beside those of the code, as a share of theirs. A layer that lacks more
attends to fewer tokens than any window says."""


def read_layer(layer: LayerSteps) -> list[Fields]:
    """Returns the fields of a layer; where its blocks are no attention and then an MLP, those of a layer a block."""
    blocks = find_blocks(layer)
    described = _compose(layer, blocks)
    for simpler in ({}, PLAIN_NORMS):
        described = [fields if "ssm" in fields else fields | simpler for fields in described]
        with suppress(ModelError):
            shapes = [_make_shape(fields, layer.hidden) for fields in described]
            left = layer.part.size - sum(shape.every_layer_parameters() for shape in shapes)
            rest = layer.part.flops - sum(layer_products(shape, layer.tokens) for shape in shapes)
            scans = layer.of_kind("recurrence")  # they count by the elements of their states
            if described and left >= LEAST_LEFT * layer.hidden and (scans or rest >= LEAST_REST * layer.part.flops):
                other = _describe_other(layer, blocks, left)
                other |= {} if scans else {"flops": max(rest, 0.0) / layer.tokens}
                described[-1] |= {"other": other} if other["parameters"] or other["flops"] else {}
                return described
    return [{"other": _describe_other(layer, [], layer.part.size) | {"alone": True}}]


def find_blocks(layer: LayerSteps) -> list[LayerBlock]:
    """Returns the parts of a layer in the order in which they run."""
    blocks, taken = list[LayerBlock](), list[Step]()

    def add(block: LayerBlock | None) -> bool:
        if block is None or any(step in taken for step in block.products):
            return False
        blocks.append(block)
        taken.extend(block.products)
        return True

    for place, call in find_attention(layer):
        add(read_attention(layer, place, call))
    for place, step in layer.of_kind("recurrence"):
        add(read_recurrence(layer, place, step))
    has_inner = add(read_experts(layer, taken))
    for mlp in read_mlps(layer, taken):
        if not has_inner or sum(step.flops for step in mlp.products) > SMALLEST * layer.part.flops:
            has_inner = add(mlp) or has_inner
    return sorted(blocks, key=lambda block: block.place)


def _compose(layer: LayerSteps, blocks: Sequence[LayerBlock]) -> list[Fields]:
    """Returns the fields of the layers that these blocks make; none if they make none."""
    letters, norms = "".join(block.letter for block in blocks), _find_norms(layer)
    common = _read_norms(layer, norms)
    fields = {key: value for block in blocks for key, value in block.fields.items()}
    if letters in ("*-", "*E", "D-", "DE"):
        return [fields | common | _place_norms([norm.reads for norm in norms])]
    if letters in ("-*", "E*"):
        return [fields | common | {"parallel_residual": True, "shared_norm": len(norms) < 2}]
    if "D" in letters:
        return []
    bare = {"norm": f"{common['norm'].removesuffix('1p').removesuffix('0')}0"}
    return [
        (common if i < len(norms) else bare)
        | block.fields
        | {"ssm": {**NO_SCAN, **block.fields.get("ssm", {}), "pattern": block.letter}}
        for i, block in enumerate(blocks)
    ]


def _find_norms(layer: LayerSteps) -> list[Step]:
    """Returns the norms over the residual stream, or over what is added to it."""
    mixers = [f"{step.module}." for _, step in layer.of_kind("attention", "recurrence") if step.module]
    return [
        step
        for _, step in layer.of_kind("norm")
        if (step.width, step.rows) == (layer.hidden, layer.tokens)
        and step.module
        and not step.module.startswith(tuple(mixers))
    ]


def _read_norms(layer: LayerSteps, norms: Sequence[Step]) -> Fields:
    """Returns the kind of the norms."""
    if not norms:
        return {"norm": "rmsnorm0"}
    weights = [name for name in layer.parameters if name.rpartition(".")[0] == norms[0].module]
    kind = "layernorm" if len(weights) == 2 else "rmsnorm"
    return {"norm": kind + ("1p" if norms[0].shifted else "" if weights else "0")}


def _place_norms(reads: Sequence[str]) -> Fields:
    """Returns where norms are. reads: what each reads."""
    inputs, streams, results = (reads.count(word) for word in ("input", "stream", "block"))
    if results >= 2 and (inputs + streams == 0 or (inputs and streams)):
        return {"norm_place": "both" if inputs else "after"}
    if inputs and not streams:
        return {"parallel_residual": True, "shared_norm": inputs == 1}
    return {"norm_residual": True} if not inputs and streams == 2 else {}


# ---------------------------------------------------------------------------------------- what is left


def _describe_other(layer: LayerSteps, blocks: Sequence[LayerBlock], parameters: int) -> Fields:
    """Returns the fields of `Other` for what these blocks leave of a layer. parameters: their number."""
    taken = [step for block in blocks for step in block.products]
    left = [step for _, step in layer.products(taken)]
    mixers = [block.module for block in blocks if block.letter in MIXERS]
    known = {"", *(step.module for step in (*taken, *left))}
    known |= {step.module for _, step in layer.of_kind("norm", "experts")}
    works = [
        work
        for module, work in layer.part.work.items()
        if not blocks or not (module in known or _is_inside(module, mixers))
    ]
    mixing = [step for _, step in layer.of_kind("attention", "recurrence", "matmul")]
    mixing = [step for step in mixing if not _is_inside(step.module, mixers)]
    if not any(block.letter == "E" for block in blocks):
        left += [step for _, step in layer.of_kind("experts")]
    flops = sum(step.flops for step in left) + sum(_count_flops(layer, step) for step in mixing)
    return {
        "modules": _name_left(layer, taken) if blocks else (layer.part.name,),
        "parameters": parameters,
        "flops": (flops if blocks else layer.part.flops) / layer.tokens,
        "moved": sum(work.moved for work in works) / layer.tokens,
        "saved": sum(work.results for work in works) / layer.tokens,
        "mixes": bool(mixing),
    }


def _count_flops(layer: LayerSteps, step: Step) -> float:
    """Counts the FLOPs of attention, or of a matmul."""
    if step.step == "attention":
        return 2.0 * step.heads * layer.tokens**2 * (step.qk + step.v)
    return 2.0 * math.prod(step.sizes) if step.step == "matmul" else 0.0


def _name_left(layer: LayerSteps, taken: Sequence[Step]) -> tuple[str, ...]:
    """Names the largest parameters, without those of blocks and of norms as wide as the layer."""
    blocks = {step.parameter.rpartition(".")[0] for step in taken}
    blocks |= {step.module for _, step in layer.of_kind("experts", "recurrence")}
    sizes = {
        name: math.prod(shape)
        for name, shape in layer.parameters.items()
        if name.rpartition(".")[0] not in blocks and math.prod(shape) != layer.hidden
    }
    return tuple(sorted(sizes, key=lambda name: -sizes[name])[:4])


def _is_inside(module: str, outer: Sequence[str]) -> bool:
    """Returns whether a module is one of these, or inside of one."""
    return any(f"{module}.".startswith(f"{name}.") for name in outer)


def _make_shape(fields: Mapping[str, Any], hidden: int) -> Transformer:
    """Returns a model of a single layer of these fields."""
    ends = {"layers": 1, "hidden": hidden, "heads": 1, "vocab": 1, "seq": 2048}
    return Transformer.model_validate(ends | dict(fields))
