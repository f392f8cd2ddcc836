"""A bound of DAPPLE's latency over all sequences of stages, of which its search keeps one prefix each.

With T = F + B of the pivot, the rule that chooses it says that no stage behind it takes longer than T, and that a
stage before it is longer by (the seconds of the stages between) / (m - 1) at most. The latency is at least m T, the
seconds of the stages before the pivot, and what the first stage costs once a step. For an interval of T both limits
and the latency are relaxed to its ends, and what is left is a shortest path. Intervals whose bound is below the best
latency known are halved until they hold one T.
"""

from __future__ import annotations

import math

import numpy as np

from meshcast.experiments.planning.stages import StageTable

EVALUATIONS = 2_000
"""Intervals after which the bound so far counts."""


class LatencyBound:
    """Bounds of the latency of m micro-batches on exactly `gpus` GPUs; `intervals` counts those that were bounded."""

    def __init__(self, table: StageTable, gpus: int, microbatches: int) -> None:
        self.table, self.gpus, self.microbatches, self.intervals = table, gpus, microbatches, 0
        self.sizes = [option.gpus for option in table.options]
        self.usable = [number for number, size in enumerate(self.sizes) if size <= gpus]
        self.fits = np.isfinite(table.seconds) & (table.behind >= 0)

    def bound(self, known: float) -> float:
        """The least latency that stages may have, at most that of known ones [s]."""
        if self.microbatches == 1:
            return -math.inf  # any stage may be the pivot
        pivots = np.unique(self.table.seconds[self.fits])
        pivots = pivots[pivots <= known / self.microbatches]
        open_intervals = [(0, len(pivots))] if len(pivots) else []
        least = known
        while open_intervals:
            first, end = open_intervals.pop()
            value = self._bound_interval(float(pivots[first]), float(pivots[end - 1]), known)
            if value >= known:
                continue
            if end - first == 1 or self.intervals >= EVALUATIONS:
                least = min(least, value)
                continue
            middle = (first + end) // 2
            open_intervals += [(first, middle), (middle, end)]
        return least

    def _bound_interval(self, low: float, high: float, known: float) -> float:
        """The bound of plans whose pivot takes `low` to `high` seconds and whose latency is at most `known` [s]."""
        self.intervals += 1
        table = self.table
        prefixes = self._shorten_prefixes(self._limit_stages(low, high, known))
        covered = self._cover_rests(high)
        pivots = self.fits & (table.seconds >= low) & (table.seconds <= high)
        best = math.inf
        for number in self.usable:
            size = self.sizes[number]
            for first, last in np.argwhere(pivots[:, :, number]).tolist():
                before = prefixes[first, : self.gpus + 1 - size]
                feasible = covered[last + 1, self.gpus - size :: -1] if size < self.gpus else covered[last + 1, :1]
                own = self.microbatches * table.seconds[first, last, number]
                once = table.once[first, last, number] if first == 0 else 0.0
                best = min(best, float(np.where(feasible, before, np.inf).min() + own + once))
        return best

    def _limit_stages(self, low: float, high: float, known: float) -> list[float]:
        """The most seconds of the first, second ... stage before the pivot; the last limit holds for all others."""
        most = (known - low) / self.microbatches
        limits = [min(high, most)]
        while limits[-1] < most and len(limits) < self.table.layers:
            limits.append(min(high + sum(limits) / (self.microbatches - 1), most))
        return limits

    def _shorten_prefixes(self, limits: list[float]) -> np.ndarray:
        """The least sum of seconds of stages before the pivot, by layers and GPUs [layers + 1, gpus + 1]."""
        table, layers = self.table, self.table.layers
        seconds = np.where(self.fits, table.seconds, np.inf)
        costs = seconds.copy()
        costs[0] += np.where(np.isfinite(table.once[0]), table.once[0], 0.0)
        empty = np.full((layers + 1, self.gpus + 1), np.inf)
        empty[0, 0] = 0.0

        totals = empty.copy()
        allowed = np.where((seconds <= limits[-1]) & (table.behind >= len(limits)), costs, np.inf)
        for end in range(1, layers + 1):
            for number in self._options_of(allowed[:end, end - 1]):
                size = self.sizes[number]
                sums = allowed[:end, end - 1, number, None] + totals[:end, : self.gpus + 1 - size]
                np.minimum(totals[end, size:], sums.min(axis=0), out=totals[end, size:])
        for place in range(len(limits) - 1, 0, -1):
            allowed = np.where((seconds <= limits[place - 1]) & (table.behind >= place), costs, np.inf)
            farther, totals = totals, empty.copy()
            for number in self._options_of(allowed):
                size, own = self.sizes[number], allowed[:, :, number]
                for span in np.flatnonzero([np.isfinite(own.diagonal(one)).any() for one in range(layers)]).tolist():
                    sums = own.diagonal(span)[:, None] + farther[: layers - span, : self.gpus + 1 - size]
                    part = totals[span + 1 :, size:]
                    np.minimum(part, sums, out=part)
        return totals

    def _cover_rests(self, limit: float) -> np.ndarray:
        """Whether stages of at most `limit` seconds hold the layers from one on, on exactly so many GPUs
        [layers + 1, gpus + 1]."""
        layers = self.table.layers
        found = np.zeros((layers + 1, self.gpus + 1), bool)
        found[layers, 0] = True
        allowed = self.fits & (self.table.seconds <= limit)
        for first in range(layers - 1, -1, -1):
            for number in self.usable:
                size, last = self.sizes[number], np.flatnonzero(allowed[first, :, number])
                found[first, size:] |= found[last + 1, : self.gpus + 1 - size].any(axis=0)
        return found

    def _options_of(self, allowed: np.ndarray) -> list[int]:
        """The options that have a finite entry."""
        return [number for number in self.usable if np.isfinite(allowed[..., number]).any()]
