"""Dynamic programming over layers: a strategy for every layer, of the least time within a memory.

least[v, s] is the least time of the layers so far in a memory of v units, with strategy s in the last of them; the next
layer adds its own time and the transition from its neighbour's strategy (Miao et al. 2022, arXiv 2211.13878, equation
1). Without a memory limit this is Viterbi's algorithm.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class LayerPath(NamedTuple):
    """A strategy of every layer, with their time [s] and the number of table entries computed."""

    strategies: tuple[int, ...]
    seconds: float
    visited: int


def choose_strategies(
    seconds: np.ndarray, nbytes: np.ndarray, transitions: np.ndarray, memory: float, units: int = 1000
) -> LayerPath | None:
    """The strategies of least time whose bytes fit into a memory; None if none do.

    seconds, nbytes: of every layer in every strategy [layers, strategies].
    transitions: seconds between a layer's strategy and the next one's [strategies, strategies].
    memory: for all layers [bytes]. units: parts of it that are told apart; a layer takes whole ones.
    """
    layers, strategies = seconds.shape
    if math.isinf(memory):
        sizes, units = np.zeros(seconds.shape, int), 0
    else:
        if memory < 0:
            return None
        # A rounding error of the division must not cost a unit.
        sizes = np.ceil(nbytes / max(memory, 1e-300) * units - 1e-9).astype(int)
    least = np.zeros((units + 1, strategies))
    choices = np.zeros((layers, units + 1, strategies), int)
    for layer in range(layers):
        joined = least[:, :, None] + (transitions if layer else 0 * transitions)[None]
        source = joined.argmin(axis=1)
        best = np.take_along_axis(joined, source[:, None], axis=1)[:, 0]
        least = np.full(best.shape, np.inf)
        for one in range(strategies):
            size = int(sizes[layer, one])
            if size <= units:
                least[size:, one] = best[: units + 1 - size, one] + seconds[layer, one]
                choices[layer, size:, one] = source[: units + 1 - size, one]
    last = int(least[units].argmin())
    value = float(least[units, last])
    if not math.isfinite(value):
        return None
    found, left = [last], units
    for layer in range(layers - 1, 0, -1):
        before = int(choices[layer, left, found[-1]])
        left -= int(sizes[layer, found[-1]])
        found.append(before)
    return LayerPath(tuple(reversed(found)), value, layers * (units + 1) * strategies**2)
