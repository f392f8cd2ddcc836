"""The record of a traced model: what its layers are made of, as plain data that is stored as JSON and read without
torch. Equal layers are recorded once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from meshcast.hardware.records import dataclass


class Work(NamedTuple):
    """Work of a module without the modules in it, for all tokens of a trace.

    Attributes:
        flops: of matrix products.
        moved: bytes that its operators read and write.
        results: bytes of their results.
    """

    flops: float = 0.0
    moved: float = 0.0
    results: float = 0.0


@dataclass(frozen=True)
class Step:
    """Something that runs, in a module.

    step: product (with a parameter), matmul (without), softmax, attention, experts, norm, rotation (of RoPE),
        recurrence, or cap (c tanh(x / c) of logits).
    module: name of the module that runs it.
    parameter: of a product.
    rows, inner, outer: of a product the rows, the contracted size and the width of the result; of a norm its rows.
    flops: of a product, or of experts.
    sizes: of a matmul its number of products, rows, columns and contracted size; of a softmax those of its result.
    heads, kv_heads, qk, v: heads of queries and of keys, and widths of a head of keys and of values.
    window, softcap, sinks, causal: of attention, as in `TransformerFields`.
    top_k, weights: experts of a token, and the shapes of the weights of all experts.
    width: of what a norm reads, or of the part of a head that is rotated.
    reads: what a norm reads: the input of the layer, the residual stream, or the result of a block.
    shifted: whether a norm stores its weight - 1.
    numbers: numbers that the module of a recurrence says.
    """

    step: str
    module: str
    parameter: str = ""
    rows: int = 0
    inner: int = 0
    outer: int = 0
    flops: float = 0.0
    sizes: Sequence[int] = ()
    heads: int = 0
    kv_heads: int = 0
    qk: int = 0
    v: int = 0
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    causal: bool = True
    top_k: int = 0
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict)
    width: int = 0
    reads: str = ""
    shifted: bool = False
    numbers: Mapping[str, int] = field(default_factory=dict)

    def to_plain(self) -> dict[str, object]:
        """Returns the fields that are not their defaults."""
        plain = vars(Step(self.step, self.module))
        return {key: value for key, value in vars(self).items() if key in ("step", "module") or value != plain[key]}


@dataclass(frozen=True)
class TracedPart:
    """A layer, or all that is outside of layers.

    name: class of the module.
    parameters: shapes of its parameters by name; those that an earlier layer has are left out.
    steps: what runs, in order.
    work: of its modules.
    """

    name: str
    parameters: Mapping[str, Sequence[int]]
    steps: Sequence[Step]
    work: Mapping[str, Work]

    @property
    def size(self) -> int:
        """Number of its parameters."""
        return sum(map(math.prod, self.parameters.values()))

    @property
    def flops(self) -> float:
        """FLOPs of all of its products."""
        return sum(work.flops for work in self.work.values())

    def to_plain(self) -> dict[str, object]:
        """Returns it as plain data."""
        return {**vars(self), "steps": [step.to_plain() for step in self.steps]}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> TracedPart:
        """Returns the part of plain data."""
        steps = tuple(Step(**step) for step in data["steps"])
        work = {name: Work(*amounts) for name, amounts in data["work"].items()}
        return cls(data["name"], data["parameters"], steps, work)


@dataclass(frozen=True)
class Record:
    """A traced model.

    tokens: tokens of the sequence of the trace.
    hidden: width of the residual stream.
    kinds: layers, each once.
    layers: the number of the kind of every layer.
    outside: what is outside of layers.
    dropout: the largest probability of dropout.
    """

    tokens: int
    hidden: int
    kinds: Sequence[TracedPart]
    layers: Sequence[int]
    outside: TracedPart
    dropout: float = 0.0

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(self.kinds[kind].size for kind in self.layers) + self.outside.size

    @property
    def flops(self) -> float:
        """FLOPs of the traced pass."""
        return sum(self.kinds[kind].flops for kind in self.layers) + self.outside.flops

    def to_json(self) -> str:
        """Returns the record as text."""
        kinds = [kind.to_plain() for kind in self.kinds]
        return json.dumps({**vars(self), "kinds": kinds, "outside": self.outside.to_plain()})

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Returns the record of a text."""
        data = json.loads(text)
        kinds = tuple(map(TracedPart.of, data["kinds"]))
        return cls(**data | {"kinds": kinds, "outside": TracedPart.of(data["outside"])})
