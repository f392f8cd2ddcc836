"""Layer graphs: nodes in topological order, edges, and the states between which a partition cuts them.

States are ideals (sets of nodes that hold all predecessors of theirs), or PipeDream's antichains as the ideals that
they close.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

MAX_IDEALS = 20_000


class LayerGraph:
    """A directed graph of layers or operators without cycles.

    names: of the nodes.
    edges: pairs of places of nodes, from producer to reader.
    figures: of every node, by name of the figure (for example ``forward`` [s], ``output`` [bytes]) [nodes].
    Raises ValueError for a cycle, an edge to no node, or figures of another length.
    """

    def __init__(
        self, names: Sequence[str], edges: Iterable[tuple[int, int]], figures: Mapping[str, ArrayLike]
    ) -> None:
        self.names, self.edges = tuple(names), tuple(sorted({(int(a), int(b)) for a, b in edges}))
        self.figures = {name: np.asarray(values, float) for name, values in figures.items()}
        for name, values in self.figures.items():
            if len(values) != len(self.names):
                raise ValueError(f"figure {name} is of {len(values)} nodes, the graph has {len(self.names)}")
        if wrong := [edge for edge in self.edges if not all(0 <= node < len(self.names) for node in edge)]:
            raise ValueError(f"edge {wrong[0]} leads to no node; the graph has 0 to {len(self.names) - 1}")
        _ = self.order

    @cached_property
    def predecessors(self) -> list[list[int]]:
        """The producers that every node reads."""
        producers: list[list[int]] = [[] for _ in self.names]
        for source, target in self.edges:
            producers[target].append(source)
        return producers

    @cached_property
    def order(self) -> list[int]:
        left = [set(before) for before in self.predecessors]
        sorted_nodes: list[int] = []
        while len(sorted_nodes) < len(self.names):
            ready = [node for node, before in enumerate(left) if not before and node not in sorted_nodes]
            if not ready:
                raise ValueError(
                    f"the graph has a cycle through {self.names[next(i for i, b in enumerate(left) if b)]}"
                )
            sorted_nodes += ready
            for before in left:
                before.difference_update(ready)
        return sorted_nodes

    def ideals(self, most: int = MAX_IDEALS) -> np.ndarray:
        """Returns all ideals as rows of booleans, by size [ideals, nodes]. Raises ValueError for more than `most`."""
        need = [sum(1 << node for node in before) for before in self.predecessors]
        known, layer = {0}, [0]
        rows = [0]
        while layer:
            grown = {
                ideal | 1 << node
                for ideal in layer
                for node, wanted in enumerate(need)
                if not ideal >> node & 1 and ideal & wanted == wanted
            }
            layer = sorted(grown - known)
            known |= grown
            rows += layer
            if len(rows) > most:
                raise ValueError(f"the graph has more than {most} ideals: merge its branches")
        return np.array([[bool(row >> node & 1) for node in range(len(self.names))] for row in rows])

    @property
    def is_chain(self) -> bool:
        """Whether ideals are as many as places between nodes."""
        edges = set(self.edges)
        return all(pair in edges for pair in itertools.pairwise(self.order))


def find_contained(states: np.ndarray) -> np.ndarray:
    """Returns whether state a is a proper part of state b [states, states]."""
    sizes = states.sum(axis=1)
    common = states.astype(np.int32) @ states.astype(np.int32).T
    return (common == sizes[:, None]) & (sizes[:, None] < sizes[None, :])


def piece_totals(states: np.ndarray, figure: np.ndarray) -> np.ndarray:
    """Returns the sum of a figure of nodes over the piece between states a and b; infinite where a is no part of b."""
    totals = states @ figure
    return np.where(find_contained(states), totals[None, :] - totals[:, None], np.inf)


def antichain_states(graph: LayerGraph) -> np.ndarray:
    """Returns PipeDream's states: ideals in which every further source has a reader, by size [states, nodes]."""
    ideals = graph.ideals()
    readers: dict[int, list[int]] = {node: [] for node in range(len(graph.names))}
    for source, target in graph.edges:
        readers[source].append(target)
    sources = [node for node, before in enumerate(graph.predecessors) if not before]
    kept = np.ones(len(ideals), bool)
    for node in sources[1:]:
        kept &= ~ideals[:, node] | ideals[:, readers[node]].any(axis=1)
    first = ~ideals.any(axis=1) | ideals[:, sources[0]]
    return ideals[kept & first]


def output_bytes(graph: LayerGraph, states: np.ndarray) -> np.ndarray:
    """Returns the bytes that leave every state: of its last nodes, and of those before that others read, too."""
    nodes = len(graph.names)
    before = np.zeros((nodes, nodes), bool)  # [node, predecessor]
    for node in graph.order:
        for source in graph.predecessors[node]:
            before[node] |= before[source]
            before[node, source] = True
    shared = np.zeros((nodes, nodes), bool)
    for source, target in graph.edges:
        shared[:, source] |= before[:, source] & ~before[:, target] & (np.arange(nodes) != target)
    nbytes = []
    for state in states:
        last = state & ~before[state].any(axis=0)
        nbytes.append(float(((last | shared[last].any(axis=0)) * graph.figures["activations"]).sum()))
    return np.array(nbytes)
