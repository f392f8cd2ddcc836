"""Graphs of operators on rows of channels, their algebraic substitutions, and their cost on some devices.

Substitutions are the kinds of Unity's that concern such operators (Unger et al. 2022, "Unity", OSDI 2022;
`substitutions/graph_subst_3_v2.json` and `create_linear_relu_merge` of flexflow/FlexFlow): linear layers that read the
same tensor become one, an activation becomes part of the linear layer before it, activations move behind a
concatenation, a concatenation of all parts of a tensor is that tensor, and sums are grouped otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.table import Factor, FactorTable


class AlgebraicOperator(NamedTuple):
    """An operator.

    kind: input, linear, relu, add, concat or split.
    inputs: names of the operators that it reads.
    width: channels of its output.
    weights: of a linear layer the names of the matrices beside each other in it, with their channels.
    first: of a split the first channel that it takes.
    relu: whether a linear layer ends with the activation.
    """

    kind: str
    inputs: tuple[str, ...] = ()
    width: int = 0
    weights: tuple[tuple[str, int], ...] = ()
    first: int = 0
    relu: bool = False


AlgebraicGraph = tuple[tuple[str, AlgebraicOperator], ...]
"""Operators by name, each behind those that it reads."""


def read_graph(operators: Mapping[str, Mapping[str, object]]) -> AlgebraicGraph:
    """Returns a graph of operators as a problem states them, in order: `kind`, `inputs`, and `width` of inputs and
    linear layers. Raises ValueError for an unknown kind or input."""
    known: dict[str, AlgebraicOperator] = {}
    for name, stated in operators.items():
        kind, inputs = str(stated["kind"]), tuple(map(str, stated.get("inputs", ())))  # type: ignore[call-overload]
        if kind not in OPTIONS or any(source not in known for source in inputs):
            raise ValueError(f"operator {name} is of kind {kind} and reads {inputs}; kinds are {', '.join(OPTIONS)}")
        widths = [known[source].width for source in inputs]
        width = int(stated.get("width", sum(widths) if kind == "concat" else widths[0] if widths else 0))  # type: ignore[call-overload]
        weights = ((name, width),) if kind == "linear" else ()
        known[name] = AlgebraicOperator(kind, inputs, width, weights)
    return tuple(known.items())


# ---------------------------------------------------------------------------------------------- substitutions


def list_substitutions(graph: AlgebraicGraph) -> Iterator[AlgebraicGraph]:
    """Yields all graphs a substitution away; they compute the same outputs."""
    nodes, readers = dict(graph), _readers(graph)
    for name, operator in graph:
        if operator.kind == "relu" and nodes[operator.inputs[0]].kind == "linear":
            yield from _fuse_activation(graph, name, operator.inputs[0])
        if operator.kind == "concat":
            yield from _move_activations(graph, name)
            yield from _join_parts(graph, name)
        if operator.kind == "add":
            yield from _group_sums(graph, name)
        same = [other for other in readers[name] if nodes[other].kind == "linear"]
        for place, linear in enumerate(same):
            for other in same[place + 1 :]:
                yield from _merge_linears(graph, linear, other)


def _readers(graph: AlgebraicGraph) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {name: [] for name, _ in graph}
    for name, operator in graph:
        for source in operator.inputs:
            readers[source].append(name)
    return readers


def _rebuild(
    graph: AlgebraicGraph, changed: Mapping[str, AlgebraicOperator | None], renamed: Mapping[str, str]
) -> AlgebraicGraph:
    """Returns a graph with changed, added and removed (None) operators, and inputs under their new names, in order."""
    nodes = {name: operator for name, operator in {**dict(graph), **changed}.items() if operator is not None}
    nodes = {
        name: operator._replace(inputs=tuple(renamed.get(source, source) for source in operator.inputs))
        for name, operator in nodes.items()
    }
    order: dict[str, AlgebraicOperator] = {}
    while len(order) < len(nodes):
        ready = [name for name in nodes if name not in order and all(source in order for source in nodes[name].inputs)]
        if not ready:
            raise ValueError("a substitution has made a cycle")
        order |= {name: nodes[name] for name in ready}
    return tuple(order.items())


def _merge_linears(graph: AlgebraicGraph, left: str, right: str) -> Iterator[AlgebraicGraph]:
    nodes = dict(graph)
    first, second = nodes[left], nodes[right]
    if first.relu == second.relu:
        joint, width = f"{left}+{right}", first.width + second.width
        merged = first._replace(width=width, weights=first.weights + second.weights)
        parts = {
            left: AlgebraicOperator("split", (joint,), first.width),
            right: AlgebraicOperator("split", (joint,), second.width, first=first.width),
        }
        yield _rebuild(graph, {joint: merged, **parts}, {})


def _fuse_activation(graph: AlgebraicGraph, name: str, linear: str) -> Iterator[AlgebraicGraph]:
    operator = dict(graph)[linear]
    if not operator.relu and _readers(graph)[linear] == [name]:
        yield _rebuild(graph, {linear: None, name: operator._replace(relu=True)}, {})


def _move_activations(graph: AlgebraicGraph, name: str) -> Iterator[AlgebraicGraph]:
    nodes, readers = dict(graph), _readers(graph)
    concat = nodes[name]
    if all(nodes[source].kind == "relu" and readers[source] == [name] for source in concat.inputs):
        inner = f"{name}'"
        before = concat._replace(inputs=tuple(nodes[source].inputs[0] for source in concat.inputs))
        gone = dict.fromkeys(concat.inputs)
        yield _rebuild(graph, {**gone, inner: before, name: AlgebraicOperator("relu", (inner,), concat.width)}, {})


def _join_parts(graph: AlgebraicGraph, name: str) -> Iterator[AlgebraicGraph]:
    nodes, readers = dict(graph), _readers(graph)
    parts = [nodes[source] for source in nodes[name].inputs]
    if not readers[name] or any(part.kind != "split" or part.inputs != parts[0].inputs for part in parts):
        return
    whole, ends = parts[0].inputs[0], np.cumsum([0, *(part.width for part in parts)]).tolist()
    if [part.first for part in parts] == ends[:-1] and ends[-1] == nodes[whole].width:
        gone = {source: None for source in nodes[name].inputs if readers[source] == [name]}
        yield _rebuild(graph, {**gone, name: None}, {name: whole})


def _group_sums(graph: AlgebraicGraph, name: str) -> Iterator[AlgebraicGraph]:
    nodes, readers = dict(graph), _readers(graph)
    left, right = nodes[name].inputs
    if nodes[left].kind == "add" and readers[left] == [name]:
        first, second = nodes[left].inputs
        inner = nodes[left]._replace(inputs=(second, right))
        yield _rebuild(graph, {left: inner, name: nodes[name]._replace(inputs=(first, left))}, {})


# ------------------------------------------------------------------------------------------------------ costs

ROWS, CHANNELS, WHOLE, SUMS = "rows", "channels", "whole", "sums"
"""Layouts of a tensor: split by rows or channels, whole on every device, or parts of its sums."""


class ParallelOption(NamedTuple):
    """How an operator is partitioned: the layouts of inputs, output, and of the gradients that it makes and needs."""

    needs: str
    makes: str
    gives: str
    wants: str


BY_ROWS = ParallelOption(ROWS, ROWS, ROWS, ROWS)
BY_CHANNELS = ParallelOption(CHANNELS, CHANNELS, CHANNELS, CHANNELS)
EVERYWHERE = ParallelOption(WHOLE, WHOLE, WHOLE, WHOLE)
COLUMNS = ParallelOption(WHOLE, CHANNELS, SUMS, CHANNELS)
CONTRACTED = ParallelOption(CHANNELS, SUMS, CHANNELS, WHOLE)

OPTIONS: Mapping[str, tuple[ParallelOption, ...]] = {
    "input": (BY_ROWS, EVERYWHERE),
    "linear": (BY_ROWS, COLUMNS, CONTRACTED, EVERYWHERE),
    "relu": (BY_ROWS, BY_CHANNELS, EVERYWHERE),
    "add": (BY_ROWS, BY_CHANNELS, EVERYWHERE),
    "concat": (BY_ROWS, EVERYWHERE),
    "split": (BY_ROWS, EVERYWHERE),
}
"""The partitions of every kind, as Unity's substitutions with partition, combine, replicate and reduce make them."""


class AlgebraicMachine(NamedTuple):
    """What operators cost.

    devices: their number. flops: of a device [1/s]. memory: its bandwidth [bytes/s]. link: of a device's link
    [bytes/s]. launch: of a kernel [s]. rows: of all tensors. element: of a number [bytes].
    """

    devices: int
    flops: float
    memory: float
    link: float
    launch: float
    rows: int
    element: float

    def move(self, source: str, target: str, width: int) -> float:
        """Returns the seconds between two layouts of a tensor; infinite where there is no way [s]."""
        count, nbytes = self.devices, self.rows * width * self.element
        ring = (count - 1) / count * nbytes / self.link
        if source == target or count == 1:
            return 0.0
        if target == SUMS:
            return float(np.inf)
        if source == WHOLE:
            return 0.0
        return {WHOLE: 2 * ring if source == SUMS else ring}.get(target, ring if source == SUMS else ring / count)

    def seconds(self, graph: Mapping[str, AlgebraicOperator], name: str, option: ParallelOption) -> float:
        """Returns the seconds of both passes of an operator, with the sums of weight gradients [s]."""
        operator = graph[name]
        if operator.kind in ("input", "split"):  # splits are views
            return 0.0
        share = 1 if option == EVERYWHERE else 1 / self.devices
        read = sum(graph[source].width for source in operator.inputs)
        if operator.kind != "linear":
            moved = 2 * self.rows * (read + operator.width) * self.element * share
            return 2 * self.launch + moved / self.memory
        weights = read * operator.width
        passes = 3 * max(
            2 * self.rows * weights * share / self.flops,
            (self.rows * (read + operator.width) + weights) * self.element * share / self.memory,
        )
        summed = 2 * (self.devices - 1) / self.devices * weights * self.element / self.link
        return 3 * self.launch + passes + (summed if option == BY_ROWS else 0.0)

    def table(self, graph: AlgebraicGraph) -> FactorTable:
        """Returns the table of the partitions of a graph: operators, and tensors between them in both passes. A linear
        layer that ends with an activation makes no parts of sums."""
        nodes = dict(graph)
        choices = {
            name: [option for option in OPTIONS[operator.kind] if not (operator.relu and option.makes == SUMS)]
            for name, operator in graph
        }
        factors = []
        for name, operator in graph:
            alone = np.array([self.seconds(nodes, name, option) for option in choices[name]])
            factors.append(Factor((name,), alone, 0 * alone, 0 * alone))
            for source in dict.fromkeys(operator.inputs):
                width, cells = nodes[source].width, np.zeros((len(choices[source]), len(choices[name])))
                for (i, before), (j, behind) in product(enumerate(choices[source]), enumerate(choices[name])):
                    cells[i, j] = self.move(before.makes, behind.needs, width) + self.move(
                        behind.gives, before.wants, width
                    )
                zeros = np.zeros(cells.shape)
                factors.append(Factor((source, name), cells, zeros, zeros))
        return FactorTable(choices, factors)


def compute_outputs(
    graph: AlgebraicGraph, inputs: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Computes the outputs of a graph, what nobody reads, by name. weights: of every stated linear layer."""
    values: dict[str, np.ndarray] = {}
    for name, operator in graph:
        read: Sequence[np.ndarray] = [values[source] for source in operator.inputs]
        if operator.kind == "input":
            values[name] = inputs[name]
        elif operator.kind == "linear":
            product_ = read[0] @ np.concatenate([weights[matrix] for matrix, _ in operator.weights], axis=1)
            values[name] = np.maximum(product_, 0.0) if operator.relu else product_
        elif operator.kind == "relu":
            values[name] = np.maximum(read[0], 0.0)
        elif operator.kind == "add":
            values[name] = read[0] + read[1]
        elif operator.kind == "concat":
            values[name] = np.concatenate(read, axis=1)
        else:
            values[name] = read[0][:, operator.first : operator.first + operator.width]
    readers = _readers(graph)
    return {name: value for name, value in values.items() if not readers[name]}
