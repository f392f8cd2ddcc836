"""Operators of a module in the order of their execution, merged into layers: a layer graph with FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.imported.operator_works import PassWorks


@dataclass(frozen=True)
class ModuleOperator:
    """An operator of a traced module that computes something; views are no operators.

    name: in the trace. path: names of the submodules that call it, the outermost first; empty: the module's own.
    works: its kernels.
    reads: operators whose results it reads, by their place, each with the bytes that it reads of them.
    parameters: bytes of weights that it is the first to read.
    output: bytes of its results. kept: those of them that its gradient may need again.
    """

    name: str
    path: tuple[str, ...]
    works: PassWorks
    reads: tuple[tuple[int, int], ...]
    parameters: int
    output: int
    kept: int


def merge_operators(
    operators: Sequence[ModuleOperator], price: Callable[[PassWorks], tuple[float, float]], depth: int = 0
) -> LayerGraph:
    """Runs of operators of the same submodule as one layer each.

    Runs follow each other in the order of execution, so layers have no cycle; a submodule that others interrupt
    (the residual addition of a block, after its attention) has several.

    price: seconds of the kernels of both passes. depth: names of a path that tell submodules apart; 0: all.
    Returns a graph with the figures ``forward``, ``backward`` [s], ``forward_flops``, ``backward_flops``,
    ``parameters``, ``kept`` and ``activations`` (what other layers read of it, or else its last result) [bytes].
    """
    keys = [one.path[:depth] if depth else one.path for one in operators]
    runs = [[*group] for _, group in groupby(range(len(operators)), key=keys.__getitem__)]
    layer_of = {place: layer for layer, run in enumerate(runs) for place in run}
    edges, sent = set[tuple[int, int]](), [dict[int, int]() for _ in runs]
    for place, one in enumerate(operators):
        for source, nbytes in one.reads:
            layer = layer_of[source]
            if layer != layer_of[place]:
                edges.add((layer, layer_of[place]))
                known = sent[layer].get(source, 0)
                sent[layer][source] = min(operators[source].output, max(known, nbytes))
    rows: dict[str, list[float]] = {name: [] for name in FIGURES}
    for layer, run in enumerate(runs):
        own = [operators[place] for place in run]
        seconds = [price(one.works) for one in own]
        flops = [one.works.flops for one in own]
        for side, name in enumerate(("forward", "backward")):
            rows[name].append(sum(one[side] for one in seconds))
            rows[f"{name}_flops"].append(sum(one[side] for one in flops))
        rows["parameters"].append(sum(one.parameters for one in own))
        rows["kept"].append(sum(one.kept for one in own))
        rows["activations"].append(sum(sent[layer].values()) or own[-1].output)
    return LayerGraph(_name_layers([keys[run[0]] for run in runs]), edges, rows)


FIGURES = ("forward", "backward", "forward_flops", "backward_flops", "parameters", "kept", "activations")


def _name_layers(keys: Sequence[tuple[str, ...]]) -> list[str]:
    """Names of layers: the path, and the number of the run where a submodule has several."""
    seen: dict[tuple[str, ...], int] = {}
    several = {key for key in keys if keys.count(key) > 1}
    names = []
    for key in keys:
        seen[key] = seen.get(key, 0) + 1
        path = ".".join(key) or "module"
        names.append(f"{path}#{seen[key]}" if key in several else path)
    return names
