"""Dynamic programming over the ideals of a graph: the partition of least bottleneck into contiguous pieces.

A plan is a chain of ideals from the empty one to the whole graph; the difference of two neighbours is the piece of one
stage (Tarnawski et al. 2020, arXiv 2006.16423; the antichain states of PipeDream, Narayanan et al. 2019, DOI
10.1145/3341301.3359646, section 3.1, are the ideals that are not empty, of graphs with one source).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class PieceOption(NamedTuple):
    """A way to run a piece.

    uses: resources of each kind that it takes.
    load: seconds of the piece between ideals a and b [ideals, ideals]; infinite where a is no part of b.
    """

    uses: tuple[int, ...]
    load: np.ndarray


class Piece(NamedTuple):
    """One piece of a partition: the ideals before and after it, and the number of its option."""

    before: int
    after: int
    option: int


class PiecePlan(NamedTuple):
    """Pieces in order, with the largest of their loads [s] and the number of table entries computed."""

    pieces: tuple[Piece, ...]
    value: float
    visited: int


def find_contained(ideals: np.ndarray) -> np.ndarray:
    """Whether ideal a is a proper part of ideal b [ideals, ideals]."""
    sizes = ideals.sum(axis=1)
    common = ideals.astype(np.int32) @ ideals.astype(np.int32).T
    return (common == sizes[:, None]) & (sizes[:, None] < sizes[None, :])


def differences(ideals: np.ndarray, figure: np.ndarray) -> np.ndarray:
    """The sum of a figure of nodes over the piece between ideals a and b; infinite where a is no part of b."""
    totals = ideals @ figure
    return np.where(find_contained(ideals), totals[None, :] - totals[:, None], np.inf)


class PartitionTable:
    """Least bottlenecks from one ideal to all others, for every amount of resources.

    options: ways to run a piece. resources: how many there are of each kind.
    start: the ideal to start from. exact: whether all resources must be used.
    """

    def __init__(
        self, options: Sequence[PieceOption], resources: tuple[int, ...], start: int = 0, exact: bool = False
    ) -> None:
        self.options, self.start, self.exact = tuple(options), start, exact
        self.visited = 0
        size = len(self.options[0].load)
        shape = tuple(count + 1 for count in resources)
        self.best = np.full((*shape, size), np.inf)
        self._links: dict[tuple[int, ...], np.ndarray] = {}
        for state in np.ndindex(*shape):
            if not exact or not any(state):
                self.best[(*state, start)] = 0.0
            links = np.full(size, -1)
            for number, option in enumerate(self.options):
                before = tuple(have - take for have, take in zip(state, option.uses, strict=True))
                if min(before) < 0 or before == state:
                    continue
                joined = np.maximum(self.best[before][:, None], option.load)
                self.visited += joined.size
                source = joined.argmin(axis=0)
                value = joined[source, np.arange(size)]
                better = value < self.best[state]
                self.best[state][better] = value[better]
                links[better] = source[better] * len(self.options) + number
            self._links[state] = links

    def value(self, ideal: int = -1, resources: Iterable[int] = ()) -> float:
        """The least bottleneck up to an ideal, by default the whole graph with all resources [s]."""
        return float(self.best[(*(tuple(resources) or self._all), ideal)])

    def plan(self, ideal: int = -1, resources: Iterable[int] = ()) -> PiecePlan | None:
        """The pieces up to an ideal, by default the whole graph with all resources; None if nothing fits."""
        state = tuple(resources) or self._all
        at = ideal % self.best.shape[-1]
        value = self.value(at, state)
        if not math.isfinite(value):
            return None
        pieces = []
        while at != self.start:
            source, number = divmod(int(self._links[state][at]), len(self.options))
            pieces.append(Piece(source, at, number))
            state = tuple(have - take for have, take in zip(state, self.options[number].uses, strict=True))
            at = source
        return PiecePlan(tuple(reversed(pieces)), value, self.visited)

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(size - 1 for size in self.best.shape[:-1])
