"""The record of a traced model: what its layers are made of, as plain data that is stored as JSON and read without
torch. Equal layers are recorded once."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from meshcast.hardware.records import dataclass

LAYER = re.compile(r"(.*?)\.(\d+)")
"""The name of a layer: a list of modules, and a number; of nested lists the outermost."""


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

    def __add__(self, other: Any) -> Work:
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Part:
    """A layer, or all that is outside of layers.

    name: class of the module.
    parameters: shapes of its parameters by name; those that an earlier part has are left out.
    steps: products with parameters, norms, attention, experts and other products in order, each with its module.
    work: of its modules.
    """

    name: str
    parameters: Mapping[str, Sequence[int]]
    steps: Sequence[Mapping[str, Any]]
    work: Mapping[str, Work]

    @property
    def size(self) -> int:
        """Number of its parameters."""
        return sum(count_elements(shape) for shape in self.parameters.values())


@dataclass(frozen=True)
class Record:
    """A traced model.

    tokens: tokens of the sequence of the trace.
    hidden: width of the residual stream.
    kinds: layers, each once.
    layers: the number of the kind of every layer.
    outside: what is outside of layers.
    """

    tokens: int
    hidden: int
    kinds: Sequence[Part]
    layers: Sequence[int]
    outside: Part

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(self.kinds[kind].size for kind in self.layers) + self.outside.size

    @property
    def flops(self) -> float:
        """FLOPs of the traced pass."""
        parts = [*(self.kinds[kind] for kind in self.layers), self.outside]
        return sum(work[0] for part in parts for work in part.work.values())

    def to_json(self) -> str:
        """Returns the record as text."""
        return json.dumps(self, default=vars)

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Returns the record of a text."""
        data = json.loads(text)
        data["kinds"] = [_read_part(part) for part in data["kinds"]]
        return cls(**{**data, "outside": _read_part(data["outside"])})


def _read_part(data: Mapping[str, Any]) -> Part:
    return Part(**{**data, "work": {name: Work(*work) for name, work in data["work"].items()}})


def count_elements(shape: Iterable[int]) -> int:
    """Counts the elements of a tensor of this shape."""
    elements = 1
    for size in shape:
        elements *= size
    return elements


class Trace(NamedTuple):
    """What is known behind the run of a module.

    Attributes:
        tokens: those of the sequence.
        classes: class of every module by name.
        parameters: shape of every parameter by name, each tensor once.
        steps: what ran, in order.
        work: of every module.
        norms: modules that normalise, each with whether it stores its weight - 1.
    """

    tokens: int
    classes: Mapping[str, str]
    parameters: Mapping[str, Sequence[int]]
    steps: Sequence[Mapping[str, Any]]
    work: Mapping[str, Work]
    norms: Mapping[str, bool]


def fold(trace: Trace) -> Record:
    """Returns the record of a trace, each kind of layer once."""
    prefix = _find_layers(trace)
    layers, outside, hidden = _split(trace, prefix)
    kinds: dict[str, int] = {}
    parts, numbers = list[Part](), list[int]()
    for part in layers:
        key = json.dumps(part, default=vars, sort_keys=True)
        if key not in kinds:
            kinds[key] = len(parts)
            parts.append(part)
        numbers.append(kinds[key])
    return Record(trace.tokens, hidden, tuple(parts), tuple(numbers), outside)


def _find_layers(trace: Trace) -> str:
    """Returns the name of the list of modules that has most parameters, of the outermost lists that run."""
    ran = {step["module"] for step in trace.steps if step["step"] == "enter"}
    sizes: Counter[str] = Counter()
    lists = {match[1] for name in ran if (match := LAYER.fullmatch(name))}
    for name, shape in trace.parameters.items():
        match = LAYER.match(name)
        if match and match[1] in lists:
            sizes[match[1]] += count_elements(shape)
    return max(sizes, key=lambda name: sizes[name], default="")


def _split(trace: Trace, prefix: str) -> tuple[list[Part], Part, int]:
    """Returns the layers in the order in which they run, what is outside of them, and the width of the stream."""
    inside = re.compile(re.escape(prefix) + r"\.(\d+)(?:\.(.*))?") if prefix else re.compile("(?!)")
    steps: list[tuple[str, list[Mapping[str, Any]]]] = []
    others, current, hidden = list[Mapping[str, Any]](), None, 0
    for step in trace.steps:
        match = inside.fullmatch(step.get("module", ""))
        if step["step"] == "enter" and match and match[2] is None:
            current = (step["module"], [step])
            others += [] if steps else [{"step": "layers", "module": ""}]
            steps.append(current)
            hidden = hidden or step["width"]
        elif step["step"] == "leave" and current and step["module"] == current[0]:
            current = None
        elif current is not None:
            current[1].append(step)
        else:
            others.append(step)
    taken: set[str] = set()
    ran = Counter(name for name, _ in steps)
    layers = [_make_layer(trace, name, own, taken, ran[name]) for name, own in steps]
    left = {name: shape for name, shape in trace.parameters.items() if name not in taken}
    work = {name: work for name, work in trace.work.items() if not inside.fullmatch(name)}
    outside = Part("", left, _clean(others, "", trace.norms, -1), work)
    return layers, outside, hidden


def _make_layer(trace: Trace, name: str, steps: Sequence[Mapping[str, Any]], taken: set[str], runs: int) -> Part:
    """Returns a layer, with the parameters that no layer before it has. taken: these. runs: how often it runs."""
    start = f"{name}."
    parameters = {
        key.removeprefix(start): shape
        for key, shape in trace.parameters.items()
        if key.startswith(start) and key not in taken
    }
    taken |= {start + key for key in parameters}
    work = {
        module.removeprefix(start) if module != name else "": Work(*(amount / runs for amount in work))
        for module, work in trace.work.items()
        if module == name or module.startswith(start)
    }
    return Part(trace.classes[name], parameters, _clean(steps[1:], start, trace.norms, steps[0]["of"]), work)


def _clean(
    steps: Sequence[Mapping[str, Any]], start: str, norms: Mapping[str, bool], entering: int
) -> list[dict[str, Any]]:
    """Returns the steps that say what a layer is, with names inside of it and without names of memory.

    entering: the memory of the input of the layer.
    """
    copies: dict[int, int] = {}
    stream, cleaned = {entering}, list[dict[str, Any]]()
    for step in steps:
        kind = step["step"]
        if kind == "copy":
            copies[step["to"]] = copies.get(step["of"], step["of"])
        elif kind == "sum":
            if any(copies.get(tensor, tensor) in stream for tensor in step["of"]):
                stream.add(step["to"])
        elif kind == "enter" and step["module"] in norms:
            tensor = copies.get(step["of"], step["of"])
            reads = "input" if tensor == entering else "stream" if tensor in stream else "block"
            norm = {"width": step["width"], "rows": step["rows"], "reads": reads, "shifted": norms[step["module"]]}
            cleaned.append({"step": "norm", "module": step["module"].removeprefix(start), **norm})
        elif kind not in ("enter", "leave"):
            names = {key: step[key].removeprefix(start) for key in ("module", "parameter") if key in step}
            names["module"] = "" if step["module"] + "." == start else names["module"]
            cleaned.append({**step, **names})
    return cleaned
