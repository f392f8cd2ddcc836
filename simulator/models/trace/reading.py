"""Describes a traced model by the fields of `Model`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from meshcast.hardware.errors import ModelError
from meshcast.simulator.models.model import Model
from meshcast.simulator.models.trace.layers import read_layer
from meshcast.simulator.models.trace.record import Record, Step
from meshcast.simulator.models.trace.steps import Fields, LayerSteps

ATTENTION = (
    *("heads", "kv_heads", "head_dim", "qk_layernorm", "qkv_bias", "proj_bias", "attention_gate", "rope_share"),
    *("positions", "bidirectional", "norm"),
)
"""Fields that layers without attention leave open: as other layers have them."""

DEFAULTS: Fields = {"heads": 1, "head_dim": 1, "positions": "none", "norm": "rmsnorm"}
"""Those that no layer says."""

MOST_NAMES = 4
"""Most modules outside of layers that are named."""


def read_record(record: Record, seq: int) -> Fields:
    """Returns the fields of the model of a record. seq: its default training sequence.

    Raises ModelError if it has no layers.
    """
    if not record.layers:
        rule = "its code runs no list of modules (torch.nn.ModuleList) with parameters, which would be its layers"
        raise ModelError("layers", rule, "Give the fields of `model:` themselves")
    kinds = [read_layer(LayerSteps(part, record.tokens, record.hidden)) for part in record.kinds]
    layers = [fields for kind in record.layers for fields in kinds[kind]]
    ends = _read_ends(record, seq)
    shape = _merge(layers) | {"layers": len(layers), "hidden": record.hidden, "seq": seq} | ends
    if any(step.step == "cap" and step.width == ends["vocab"] for step in record.outside.steps):
        shape["softcaps"] = (*(shape.get("softcaps") or ()), "logits")
    shape["dropout"] = record.dropout
    left = record.parameters - Model.model_validate(shape).parameters
    flops = record.outside.flops - 2.0 * record.tokens * record.hidden * ends["vocab"]
    if left or flops > 0:
        other = {"parameters": left, "flops": max(flops, 0.0) / record.tokens}
        shape["outside"] = {"modules": _name_outside(record, ends["vocab"]), **other}
    return shape


def _merge(layers: Sequence[Fields]) -> Fields:
    """Returns the fields of the model, which are those of most layers, with its other layers as variants. A model with
    experts has the fields of a layer with experts."""
    keys = [repr(sorted(fields.items())) for fields in layers]
    distinct, counts = dict(zip(keys, layers, strict=True)), Counter(keys)
    base = max(counts, key=lambda key: ("moe" in distinct[key], counts[key]))
    said = {name: value for fields in reversed(layers) for name, value in fields.items() if value is not None}
    usual = DEFAULTS | {name: said[name] for name in ATTENTION if name in said}
    open_fields: Fields = dict.fromkeys(name for fields in layers for name in fields)
    shape: Fields = {**open_fields, **usual, **distinct.pop(base)}
    variants = [
        {**open_fields, **usual, **fields, "numbers": tuple(i for i, other in enumerate(keys) if other == key)}
        for key, fields in distinct.items()
    ]
    if shape.get("ssm"):
        shape["ssm"] = shape["ssm"] | {"pattern": shape["ssm"]["pattern"] * len(layers)}
    return shape | ({"variants": variants} if variants else {})


def _find_head(record: Record) -> Step | None:
    """Returns the output layer: the widest product outside of the layers."""
    products = [step for step in record.outside.steps if step.step == "product" and step.inner == record.hidden]
    return max(products, key=lambda step: step.outer, default=None)


def _read_ends(record: Record, seq: int) -> Fields:
    """Returns the fields of what is outside of the layers: the vocabulary, positions, the output layer."""
    head, tables = _find_head(record), _find_tables(record)
    rows = max((rows for name, rows in tables.items() if head is None or name != head.parameter), default=0)
    vocab = head.outer if head else rows
    fields: Fields = {"vocab": vocab, "tied": head is None or rows < vocab}
    if any(tuple(shape) == (vocab,) for shape in record.outside.parameters.values()):
        fields["head"] = ("bias",)
    places = next((rows for name, rows in tables.items() if "pos" in name or "wpe" in name), 0)
    if places >= seq:
        fields |= {"positions": "learned", "position_rows": places}
    steps = [step.step for step in record.outside.steps if step.step != "norm" or step.width == record.hidden]
    fields["embedding_norm"] = "norm" in steps[: steps.index("layers") if "layers" in steps else 0]
    return fields


def _find_tables(record: Record) -> Mapping[str, int]:
    """Returns the rows of tables as wide as the stream outside of the layers, by name."""
    shapes = record.outside.parameters.items()
    return {name: shape[0] for name, shape in shapes if len(shape) == 2 and shape[1] == record.hidden}


def _name_outside(record: Record, vocab: int) -> tuple[str, ...]:
    """Names the largest modules outside of the layers that no field describes."""
    sizes: Counter[str] = Counter()
    for name, shape in record.outside.parameters.items():
        if tuple(shape) not in ((vocab, record.hidden), (record.hidden,)):
            sizes[".".join(name.split(".")[:2])] += math.prod(shape)
    return tuple(name for name, _ in sizes.most_common(MOST_NAMES))
