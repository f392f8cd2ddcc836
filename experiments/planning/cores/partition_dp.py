"""Dynamic programming over partitions: the cheapest chain of pieces from a first state to every other state.

States are places between the layers of a chain, ideals of a graph or PipeDream's antichains; a piece joins two
states and uses resources, such as devices, stages or memory. The cost of a chain is the maximum of its pieces
(bottleneck) or their sum (path). Resources are named, by a key of the table; a single resource may be counted,
along an axis of its arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time

BLOCK = 2**16
"""Entries that are joined at once, so that they stay in a cache."""


class LastPiece(NamedTuple):
    """A way to end chains.

    before: named resources of the chains up to the piece.
    cost: of the piece between two states, infinite where it is not allowed [state before, state behind].
    option: what tells its way from others.
    units: of the counted resource that it uses.
    allowed: of how many units the chains up to it may be; None: of any.
    """

    before: Any
    cost: np.ndarray
    option: Any = 0
    units: int = 0
    allowed: np.ndarray | None = None


def start_costs(states: int, start: int = 0) -> np.ndarray:
    """Returns the costs of chains without a piece: 0 at the start, else infinite [states, 1]."""
    return np.where(np.arange(states) == start, 0.0, np.inf)[:, None]


class Piece(NamedTuple):
    """One piece of a partition: the states before and behind it, and its option."""

    before: int
    behind: int
    option: Any


class PartitionDP:
    """The least costs of chains by their resources, computed when they are asked for.

    begin: returns what chains without a piece cost, infinite where there is none [states, units].
    end: returns the last pieces of chains; of equal chains the first piece counts, from the first state.
    combine: how the costs of pieces make up the cost of a chain.
    visited: chains that were compared.
    """

    def __init__(
        self,
        begin: Callable[[Any], np.ndarray],
        end: Callable[[Any], Iterable[LastPiece]],
        combine: np.ufunc = np.maximum,
    ) -> None:
        self.begin, self.end, self.combine, self.visited = begin, end, combine, 0
        self._costs: dict[Any, np.ndarray] = {}

    def costs(self, resources: Any) -> np.ndarray:
        """Returns the least costs of chains [states, units]."""
        if resources not in self._costs:
            costs = self.begin(resources).copy()
            for piece in self.end(resources):
                check_time()
                self._join(self.costs(piece.before)[:, : costs.shape[1] - piece.units], piece, costs[:, piece.units :])
            self._costs[resources] = costs
        return self._costs[resources]

    def _join(self, before: np.ndarray, piece: LastPiece, costs: np.ndarray) -> None:
        """Lowers the costs of chains to those that end with a piece."""
        states, units = costs.shape
        width = max(1, BLOCK // max(1, states * units))
        for first in range(0, states, width):
            block = piece.cost[:, first : first + width]
            possible = np.isfinite(block)
            reached = np.flatnonzero(possible.any(axis=1))
            if not len(reached):
                continue
            rows = slice(reached[0], reached[-1] + 1)
            least = self.combine(block[rows, :, None], before[rows, None, :]).min(axis=0)
            self.visited += int(np.count_nonzero(possible)) * units
            if piece.allowed is not None:
                least[:, ~piece.allowed] = np.inf
            part = costs[first : first + width]
            np.minimum(part, least, out=part)

    def trace(self, resources: Any, state: int = -1, units: int = -1) -> list[Piece]:
        """Returns the pieces of the cheapest chain to a reached state, by default the last with all counted units."""
        costs = self.costs(resources)
        state, units = range(costs.shape[0])[state], range(costs.shape[1])[units]
        pieces: list[Piece] = []
        while self.begin(resources)[state, units] != self.costs(resources)[state, units]:
            last, resources, units = self._last_piece(resources, state, units)
            pieces.append(last)
            state = last.before
        return pieces[::-1]

    def _last_piece(self, resources: Any, state: int, units: int) -> tuple[Piece, Any, int]:
        """Returns the last piece of the cheapest chain, with the resources up to it."""
        for piece in self.end(resources):
            left = units - piece.units
            if left >= 0 and (piece.allowed is None or piece.allowed[left]):
                joined = self.combine(self.costs(piece.before)[:, left], piece.cost[:, state])
                source = int(joined.argmin())
                if joined[source] == self.costs(resources)[state, units]:
                    return Piece(source, state, piece.option), piece.before, left
        raise ValueError(f"no chain reaches state {state} with {resources}")
