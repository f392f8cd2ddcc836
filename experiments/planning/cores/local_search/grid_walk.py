"""Slapo's tuner: a walk over batch sizes, downwards, with a bisection of the share of recomputed layers at each.

It starts with the largest batch and everything recomputed; if that does not fit, batches are bisected. At each batch
the smallest share that fits is bisected from the one of the batch before on. It stops after so many measurements
without a gain (Chen et al. 2024, arXiv 2302.08005; awslabs/slapo, `slapo/autotune/tune.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class GridPoint(NamedTuple):
    """A batch size and a share of recomputed layers, with its throughput; 0: it does not fit."""

    batch: int
    share: float
    throughput: float


class GridWalk:
    """The walk over one grid.

    batches: in ascending order. shares: in descending order, so that later ones take more memory.
    measure: the throughput of a batch and a share; 0 if it does not fit or is not allowed.
    patience: measurements without a gain after which the walk stops.
    """

    def __init__(
        self,
        batches: Sequence[int],
        shares: Sequence[float],
        measure: Callable[[int, float], float],
        patience: int = 5,
    ) -> None:
        self.batches, self.shares, self.measure, self.patience = batches, shares, measure, patience
        self.visited: list[GridPoint] = []
        self.best: GridPoint | None = None
        self._idle = 0

    def run(self) -> GridPoint | None:
        """The best point that was measured; None if none fits."""
        largest, place = len(self.batches) - 1, 0
        if not self._try(self.batches[largest], self.shares[0]):
            largest, _ = self._bisect(0, largest - 1, lambda number: self._try(self.batches[number], self.shares[0]))
            self._idle = 0
        for number in range(largest, -1, -1):
            batch = self.batches[number]
            place, stopped = self._bisect(
                place,
                len(self.shares) - 1,
                lambda share, batch=batch: self._try(batch, self.shares[share]),  # type: ignore[misc]
            )
            if stopped:
                break
        return self.best

    def _try(self, batch: int, share: float) -> bool:
        """Measures a point; whether it fits."""
        point = GridPoint(batch, share, self.measure(batch, share))
        self.visited.append(point)
        if point.throughput > (self.best.throughput if self.best else 0.0):
            self.best, self._idle = point, 0
        else:
            self._idle += 1
        return point.throughput > 0

    def _bisect(self, low: int, high: int, fits: Callable[[int], bool]) -> tuple[int, bool]:
        """The last place that fits, or the one before `low` (not below 0), and whether patience has ended."""
        found = max(0, low - 1)
        while low <= high:
            middle = (low + high) // 2
            if fits(middle):
                found, low = middle, middle + 1
            else:
                high = middle - 1
            if self._idle >= self.patience:
                return found, True
        return found, False
