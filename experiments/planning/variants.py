"""Layers with variants (degree of tensor parallelism, recomputation), and the seconds of pieces made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.graph import LayerGraph


class LayerVariants(NamedTuple):
    """The variants of all layers at one degree of tensor parallelism [layers, variants].

    seconds: of a sample [s]. parameters: of one rank [bytes]. in_flight: for every micro-batch in flight [bytes].
    fixed: other memory [bytes]. edges: bytes of a sample over every edge, at its source and at its target [edges, 2].
    """

    seconds: np.ndarray
    parameters: np.ndarray
    in_flight: np.ndarray
    fixed: np.ndarray
    edges: np.ndarray


def read_variants(
    settings: Mapping[str, Any], graph: LayerGraph, edges: list[tuple[int, int]]
) -> dict[int, LayerVariants]:
    """The variants of a profile by degree; only degrees that all layers have.

    settings: of the profile, with ``variants``, ``sync`` and ``edge_bytes``. edges: in the order of ``edge_bytes``.
    """
    layers = len(graph.names)
    rows = np.array(settings["variants"], float)
    found = {}
    for degree in sorted({int(one) for one in rows[:, 1]}):
        own = rows[rows[:, 1] == degree]
        kinds = int(own[:, 2].max()) + 1
        if len(own) != layers * kinds:
            continue
        order = np.lexsort((own[:, 2], own[:, 0]))
        seconds, parameters, in_flight, fixed = (own[order, place].reshape(layers, kinds) for place in (3, 4, 5, 6))
        sent = np.repeat(np.array(settings["edge_bytes"], float)[:, None], 2, axis=1)
        for layer, own_degree, incoming, outgoing in settings["sync"]:
            if own_degree == degree:
                for end, extra in ((1, incoming), (0, outgoing)):
                    places = [place for place, edge in enumerate(edges) if edge[end] == layer]
                    sent[places, end] += extra
        found[degree] = LayerVariants(seconds, parameters, in_flight, fixed, sent)
    return found


def choose_variants(seconds: np.ndarray, memory: np.ndarray, limit: float) -> np.ndarray:
    """The least seconds of a piece, of one variant for each of its layers, within a memory; infinite if none fits.

    Starts from the fastest variants and takes the ones that save most bytes a second, until all fits: Piper's fast
    heuristic for its knapsack (Tarnawski et al. 2021, appendix), which may save more than it needs.
    seconds: [layers, variants]. memory: of several cases [cases, layers, variants]. Returns [cases].
    """
    layers = np.arange(seconds.shape[0])
    fastest = seconds.argmin(axis=1)
    start = memory[:, layers, fastest]
    saved = start[:, :, None] - memory
    price = seconds - seconds[layers, fastest][:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = np.where(saved > 1e-9, price[None] / saved, np.inf).reshape(len(memory), -1)
    order = np.argsort(rates, axis=1, kind="stable")
    useful = np.isfinite(np.take_along_axis(rates, order, axis=1))
    gains = np.where(useful, np.take_along_axis(saved.reshape(len(memory), -1), order, axis=1), 0.0)
    prices = np.where(useful, np.broadcast_to(price.ravel(), rates.shape)[np.arange(len(memory))[:, None], order], 0.0)
    excess = start.sum(axis=1) - limit
    before = np.cumsum(gains, axis=1) - gains
    taken = useful & (excess[:, None] - before >= 1e-9)
    found = seconds[layers, fastest].sum() + (prices * taken).sum(axis=1)
    return np.where(excess - (gains * taken).sum(axis=1) <= 1e-9, found, np.inf)
