"""PipeDream's states of a graph of layers: antichains, by the ideals that they close."""

from __future__ import annotations

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph


def states_of(graph: LayerGraph) -> np.ndarray:
    """PipeDream's states: ideals in which every further source has a reader. [states, nodes], the empty one first."""
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
    """Bytes that leave every state: of its last nodes, and of nodes before one of these that others read, too."""
    nodes = len(graph.names)
    before = np.zeros((nodes, nodes), bool)  # [node, predecessor]
    for node in graph.order:
        for source in graph.predecessors[node]:
            before[node] |= before[source]
            before[node, source] = True
    shared = np.zeros((nodes, nodes), bool)
    for source, target in graph.edges:
        shared[:, source] |= before[:, source] & ~before[:, target] & (np.arange(nodes) != target)
    found = []
    for state in states:
        last = state & ~before[state].any(axis=0)
        found.append(float(((last | shared[last].any(axis=0)) * graph.figures["activations"]).sum()))
    return np.array(found)
