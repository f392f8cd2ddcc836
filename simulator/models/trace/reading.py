"""Describes a traced model by the fields of `Model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from meshcast.simulator.models.model import Model
from meshcast.simulator.models.trace.layers import LayerReading
from meshcast.simulator.models.trace.record import Record, count_elements

ATTENTION = (
    *("heads", "kv_heads", "head_dim", "qk_layernorm", "qkv_bias", "proj_bias", "attention_gate", "rope_share"),
    *("positions", "bidirectional", "norm"),
)
"""Fields that layers without attention leave open: as other layers have them."""

DEFAULTS = {"heads": 1, "head_dim": 1, "positions": "none", "norm": "rmsnorm"}
"""Those that no layer says."""


def read_record(record: Record, seq: int) -> dict[str, Any]:
    """Returns the fields of the model of a record. seq: its default training sequence."""
    kinds = [LayerReading(part, record.tokens, record.hidden).read() for part in record.kinds]
    layers = [fields for kind in record.layers for fields in kinds[kind]]
    ends = _read_ends(record, seq)
    shape = _merge(layers) | {"layers": len(layers), "hidden": record.hidden, "seq": seq} | ends
    model = Model.model_validate(shape)
    left = record.parameters - model.parameters
    flops = _outside_flops(record, ends) / record.tokens
    if left or flops:
        shape["outside"] = {"modules": _outside_modules(record, ends), "parameters": left, "flops": flops}
    return shape


def _merge(layers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of the model, which are those of most layers, with its other layers as variants."""
    keys = [repr(sorted(fields.items())) for fields in layers]
    counts = Counter(keys)
    with_experts = {key for key, fields in zip(keys, layers, strict=True) if "moe" in fields}
    base = max(counts, key=lambda key: (key in with_experts, counts[key]))
    shape = dict(layers[keys.index(base)])
    variants = [
        {**fields, "numbers": tuple(i for i, each in enumerate(keys) if each == key)}
        for key, fields in dict(zip(keys, layers, strict=True)).items()
        if key != base
    ]
    usual = {name: value for fields in reversed(layers) for name, value in fields.items() if value is not None}
    usual = DEFAULTS | {name: value for name, value in usual.items() if name in ATTENTION}
    shape = dict.fromkeys(name for fields in layers for name in fields) | usual | shape
    variants = [dict.fromkeys(shape) | usual | fields for fields in variants]
    if shape.get("ssm"):
        shape["ssm"] = shape["ssm"] | {"pattern": shape["ssm"]["pattern"] * len(layers)}
    return shape | ({"variants": variants} if variants else {})


def _read_ends(record: Record, seq: int) -> dict[str, Any]:
    """Returns the fields of what is outside of the layers: the vocabulary, positions, the output layer."""
    part, hidden = record.outside, record.hidden
    products = [step for step in part.steps if step["step"] == "product" and step["inner"] == hidden]
    head = max(products, key=lambda step: step["outer"], default=None)
    tables = {name: shape for name, shape in part.parameters.items() if len(shape) == 2 and shape[1] == hidden}
    rows = [shape[0] for name, shape in tables.items() if head is None or name != head["parameter"]]
    tied = head is not None and not (rows and max(rows) >= head["outer"])
    vocab = head["outer"] if head else max(rows, default=1)
    fields: dict[str, Any] = {"vocab": vocab, "tied": tied or head is None}
    if any(list(shape) == [vocab] for shape in part.parameters.values()):
        fields["head"] = ("bias",)
    places = [shape[0] for name, shape in tables.items() if "pos" in name or "wpe" in name]
    if places and places[0] >= seq:
        fields |= {"positions": "learned", "position_rows": places[0]}
    steps = [step["step"] for step in part.steps if step["step"] != "norm" or step["width"] == hidden]
    if "layers" in steps and "norm" in steps[: steps.index("layers")]:
        fields["embedding_norm"] = True
    return fields


def _outside_flops(record: Record, ends: Mapping[str, Any]) -> float:
    """Counts the FLOPs outside of the layers beside those of the output layer."""
    head = 2.0 * record.tokens * record.hidden * ends["vocab"]
    return max(0.0, sum(work.flops for work in record.outside.work.values()) - head)


def _outside_modules(record: Record, ends: Mapping[str, Any]) -> tuple[str, ...]:
    """Names the largest modules outside of the layers that no field describes."""
    sizes: Counter[str] = Counter()
    for name, shape in record.outside.parameters.items():
        if list(shape) not in ([ends["vocab"], record.hidden], [record.hidden]):
            sizes[".".join(name.split(".")[:2])] += count_elements(shape)
    return tuple(name for name, _ in sizes.most_common(4))
