"""Random tables, graphs and stages, and brute force over them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise, product

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph
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
    costs = ((table.value(one), table.cost(one).nbytes) for one in every_assignment(table))
    return min((value for value, nbytes in costs if nbytes <= memory), default=np.inf)


def draw_stages(seed: int, layers: int, gpus: int) -> StageTable:
    """Stages of 1 to `gpus` GPUs; larger ones take longer, and fewer stages may follow them."""
    rng = np.random.default_rng(seed)
    options = tuple(StageOption(count, {"gpus": count}) for count in range(1, gpus + 1))
    own = rng.integers(5, 60, layers) / 7.0
    seconds = np.full((layers, layers, gpus), np.inf)
    behind = np.full((layers, layers, gpus), -1)
    for first in range(layers):
        for last in range(first, layers):
            for option in range(gpus):
                speed = (option + 1) * rng.uniform(0.6, 1.0)
                seconds[first, last, option] = own[first : last + 1].sum() / speed
                behind[first, last, option] = rng.integers(-1, 3) + 3 * (option + 1) // (last - first + 1)
    return StageTable(options, seconds, seconds / 3, np.where(np.isfinite(seconds), seconds / 4, np.inf), behind)


def stages_by_brute_force(table: StageTable, gpus: int, microbatches: int) -> float:
    """The least objective over all cuts and options."""
    best = np.inf
    for number in range(1, min(table.layers, gpus) + 1):
        for cuts in combinations(range(1, table.layers), number - 1):
            borders = [0, *cuts, table.layers]
            for options in product(range(len(table.options)), repeat=number):
                if sum(table.options[one].gpus for one in options) != gpus:
                    continue
                places = [(borders[i], borders[i + 1] - 1, options[i]) for i in range(number)]
                if any(table.behind[place] < number - 1 - i for i, place in enumerate(places)):
                    continue
                own = [float(table.seconds[place]) for place in places]
                best = min(best, sum(own) + (microbatches - 1) * max(own))
    return best


def draw_graph(seed: int, nodes: int = 7, chain: bool = False) -> LayerGraph:
    """A graph whose nodes have seconds on two kinds of devices, and bytes of weights and outputs."""
    draw = random.Random(seed)
    edges = [(place, place + 1) for place in range(nodes - 1) if chain or draw.random() < 0.6]
    edges += [] if chain else [(a, b) for a in range(nodes) for b in range(a + 1, nodes) if draw.random() < 0.15]
    figures = {
        name: [float(draw.randint(1, most)) for _ in range(nodes)]
        for name, most in (("forward", 20), ("cpu", 60), ("parameters", 30), ("output", 6))
    }
    figures |= {"backward": [2 * one for one in figures["forward"]], "activations": figures["output"]}
    return LayerGraph([f"n{place}" for place in range(nodes)], edges, figures)
