"""States of a graph of layers, between which a partition cuts it: ideals, and PipeDream's antichains as the ideals that
they close."""

from __future__ import annotations

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph


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
    """Returns PipeDream's states: ideals in which every further source has a reader. [states, nodes], the empty one
    first."""
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
    """Returns the bytes that leave every state: of its last nodes, and of nodes before one of these that others read,
    too."""
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
