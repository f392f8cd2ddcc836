"""When parts of the cluster fail: renewal processes with exponential or Weibull times, and logs that are replayed.

n parts with exponential times of mean M fail together as a Poisson process of rate n / M. With Weibull times of shape k
every part has a clock: its time has the scale M / Gamma(1 + 1/k), and a part that fails is replaced by a new
one, whose clock begins at 0. Failures of the job as a whole take nodes at random, of those that it has.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Failure(NamedTuple):
    """A failure.

    time: when it happens, from the beginning of the run [s].
    component: the kind of part that fails.
    nodes: the nodes that the job loses, by their places in it; none if the same nodes start again.
    repair: time until they are back [s]; None: drawn.
    any_of: nodes of which others fail if these are missing already; 0: those alone.
    """

    time: float
    component: str
    nodes: tuple[int, ...] = ()
    repair: float | None = None
    any_of: int = 0


class FailureSource(Protocol):
    """Failures in the order of time; of a run."""

    def failures(self, rng: np.random.Generator) -> Iterator[Failure]: ...


class FailingUnits(NamedTuple):
    """Parts of a kind that fail.

    component: name.
    units: their number.
    mtbf: mean time between failures of a part [s].
    shape: of the Weibull distribution, 1: exponential.
    lost: nodes that a failure takes.
    nodes: all nodes of the job, over which the parts are spread evenly in their order.
    """

    component: str
    units: int
    mtbf: float
    shape: float
    lost: int
    nodes: int

    @property
    def rate(self) -> float:
        """Failures of all parts together per second, in the long run."""
        return self.units / self.mtbf

    @property
    def _scale(self) -> float:
        """Scale of the Weibull distribution [s]."""
        return self.mtbf / math.gamma(1 + 1 / self.shape)

    def survive(self, seconds: float) -> float:
        """Returns the share of the parts that live longer."""
        return math.exp(-(min(seconds / self._scale, 1e9) ** self.shape))

    def failures(self, rng: np.random.Generator) -> Iterator[Failure]:
        """Yields the failures of a run, without end."""
        for time, unit in self.times(rng):
            yield Failure(time, self.component, self.nodes_of(unit), any_of=self.nodes if self._is_job else 0)

    def times(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        """Yields when parts fail [s], each with the place of its part, without end."""
        return self._poisson(rng) if self.shape == 1.0 else self._renewals(rng)

    @property
    def _places(self) -> int:
        """Number of places over which failures are spread."""
        return self.nodes if self._is_job else self.units

    @property
    def _is_job(self) -> bool:
        """Whether the single unit is the job as a whole, which loses nodes."""
        return self.units == 1 < self.nodes and self.lost > 0

    def _poisson(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        time = 0.0
        while True:
            for gap, unit in zip(rng.exponential(1 / self.rate, 64), rng.integers(self._places, size=64), strict=True):
                time += gap
                yield float(time), int(unit)

    def _renewals(self, rng: np.random.Generator) -> Iterator[tuple[float, int]]:
        scale = self._scale
        clocks = [(float(time), unit) for unit, time in enumerate(scale * rng.weibull(self.shape, self.units))]
        heapq.heapify(clocks)
        while True:
            time, unit = clocks[0]
            yield time, int(rng.integers(self._places)) if self._is_job else unit
            heapq.heapreplace(clocks, (time + scale * float(rng.weibull(self.shape)), unit))

    def nodes_of(self, unit: int) -> tuple[int, ...]:
        """Returns the nodes that a failure of a part takes: that of the part, and those after it."""
        if not self.lost:
            return ()
        first = unit * self.nodes // self._places
        first = min(first, max(self.nodes - self.lost, 0))
        return tuple(range(first, min(first + self.lost, self.nodes)))


class FailureLog(NamedTuple):
    """Failures that have happened, for a replay."""

    entries: Sequence[Failure]

    def failures(self, rng: np.random.Generator) -> Iterator[Failure]:
        """Returns the failures of the log, the same in every run; rng is not used."""
        return iter(self.entries)
