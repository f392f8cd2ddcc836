"""Random tables, graphs and stages, and brute force over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.problem import UnknownPart
from meshcast.experiments.planning.profile import NetworkLevel
from meshcast.experiments.planning.stages import StageOption, StageTable
from meshcast.experiments.planning.table import Factor, FactorTable


def draw_table(seed: int, variables: int = 6, forbidden: float = 0.1) -> FactorTable:
    """A table of a chain with a few more factors of two and three variables; some combinations are not allowed."""
    rng = np.random.default_rng(seed)
    choices = {f"v{place}": tuple(range(int(rng.integers(1, 4)))) for place in range(variables)}
    names = list(choices)
    scopes = [(name,) for name in names] + list(pairwise(names))
    scopes += [tuple(rng.choice(names, size=int(rng.integers(2, 4)), replace=False)) for _ in range(2)]
    factors = []
    for scope in scopes:
        shape = [len(choices[str(name)]) for name in scope]
        seconds = rng.integers(0, 50, shape) / 7.0
        if len(scope) > 1:
            seconds = np.where(rng.random(shape) < forbidden, np.inf, seconds)
        once, nbytes = rng.integers(0, 20, shape) / 3.0, rng.integers(0, 9, shape) * 1.0
        factors.append(Factor(tuple(map(str, scope)), seconds, once, nbytes))
    return FactorTable(choices, factors, microbatches=int(rng.integers(1, 5)))


def every_assignment(table: FactorTable) -> Iterator[dict[str, int]]:
    """Yields all assignments of a table."""
    for options in product(*map(range, map(len, table.choices.values()))):
        yield dict(zip(table.choices, options, strict=True))


def weigh_memory(table: FactorTable, weight: float) -> FactorTable:
    """Returns the table whose objective counts memory, too, at a weight [s/byte]."""
    factors = [factor._replace(once=factor.once + weight * factor.nbytes) for factor in table.factors]
    return FactorTable(table.choices, factors, table.microbatches)


def best_by_brute_force(table: FactorTable, memory: float = np.inf) -> float:
    """The least objective of all assignments within the memory; infinite if none fits."""
    costs = ((table.value(options), table.cost(options).nbytes) for options in every_assignment(table))
    return min((value for value, nbytes in costs if nbytes <= memory), default=np.inf)


def draw_stages(seed: int, layers: int, gpus: int) -> StageTable:
    """Stages of 1 to `gpus` GPUs; larger ones take longer, and fewer stages may follow them."""
    rng = np.random.default_rng(seed)
    options = tuple(StageOption(count, {"gpus": count}) for count in range(1, gpus + 1))
    alone = rng.integers(5, 60, layers) / 7.0
    seconds = np.full((layers, layers, gpus), np.inf)
    behind = np.full((layers, layers, gpus), -1)
    for first in range(layers):
        for last in range(first, layers):
            for option in range(gpus):
                speed = (option + 1) * rng.uniform(0.6, 1.0)
                seconds[first, last, option] = alone[first : last + 1].sum() / speed
                behind[first, last, option] = rng.integers(-1, 3) + 3 * (option + 1) // (last - first + 1)
    return StageTable(options, seconds, seconds / 3, np.where(np.isfinite(seconds), seconds / 4, np.inf), behind)


Cell = tuple[int, int, int]
"""Of a stage its first layer, its last layer and its option."""


def cut_layers(layers: int, stages: int) -> list[list[int]]:
    """Returns the borders of all cuts of layers into stages."""
    return [[0, *cuts, layers] for cuts in combinations(range(1, layers), stages - 1)]


def every_pipeline(table: StageTable, gpus: int, fits: bool = True) -> list[list[Cell]]:
    """Returns all pipelines that use all GPUs. fits: only those whose stages have memory for those behind."""
    pipelines = []
    for number in range(1, min(table.layers, gpus) + 1):
        for borders in cut_layers(table.layers, number):
            for options in product(range(len(table.options)), repeat=number):
                if sum(table.options[option].gpus for option in options) == gpus:
                    cells = [(borders[place], borders[place + 1] - 1, option) for place, option in enumerate(options)]
                    if not fits or has_memory(table, cells):
                        pipelines.append(cells)
    return pipelines


def has_memory(table: StageTable, cells: list[Cell]) -> bool:
    return all(table.behind[cell] >= len(cells) - 1 - place for place, cell in enumerate(cells))


def pipeline_value(table: StageTable, cells: list[Cell], microbatches: int) -> float:
    """The step of 1F1B: the seconds of all stages, and the slowest for each further micro-batch."""
    seconds = [float(table.seconds[cell]) for cell in cells]
    return sum(seconds) + (microbatches - 1) * max(seconds)


def stages_by_brute_force(table: StageTable, gpus: int, microbatches: int) -> float:
    """The least objective over all cuts and options."""
    values = (pipeline_value(table, cells, microbatches) for cells in every_pipeline(table, gpus))
    return min(values, default=np.inf)


def draw_graph(seed: int, nodes: int = 7, chain: bool = False) -> LayerGraph:
    """A graph whose nodes have seconds on two kinds of devices, and bytes of weights and outputs."""
    draw = random.Random(seed)
    edges = [(place, place + 1) for place in range(nodes - 1) if chain or draw.random() < 0.6]
    edges += [] if chain else [(a, b) for a in range(nodes) for b in range(a + 1, nodes) if draw.random() < 0.15]
    figures = {
        name: [float(draw.randint(1, most)) for _ in range(nodes)]
        for name, most in (("forward", 20), ("cpu", 60), ("parameters", 30), ("output", 6))
    }
    figures |= {"backward": [2 * seconds for seconds in figures["forward"]], "activations": figures["output"]}
    return LayerGraph([f"n{place}" for place in range(nodes)], edges, figures)


class GraphProblem(UnknownPart):
    """A drawn graph on some devices, with figures in place of some of its own."""

    def __init__(
        self, graph: LayerGraph, gpus: int, levels: tuple[NetworkLevel, ...] = (), cpus: int = 0, **figures: Any
    ) -> None:
        self.name, self.gpus, self.levels = "drawn", gpus, levels
        self.settings: dict[str, Any] = {"devices": {"cpus": cpus}}
        self.memory = 1e9
        self._graph = LayerGraph(graph.names, graph.edges, {**graph.figures, **figures})

    def graph(self) -> LayerGraph:
        return self._graph


def draw_placement(seed: int, nodes: int, chain: bool = False) -> GraphProblem:
    """Two accelerators and a CPU that hold 0.7 of a graph each."""
    graph = draw_graph(seed, nodes, chain)
    weights, sent = graph.figures["parameters"], graph.figures["output"] / 4
    problem = GraphProblem(graph, 2, cpus=1, accelerator=graph.figures["forward"], send=sent, bytes=weights)
    problem.memory = float(weights.sum()) * 0.7
    return problem
