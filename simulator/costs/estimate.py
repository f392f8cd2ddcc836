"""What pricing a piece of work answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from simulator.ir.ops import Work


class Estimate(NamedTuple):
    """A time and how sure it is.

    seconds: how long the work occupies its stream. spread: standard deviation of log(measured / seconds). latency: how
    much later than the end of that those who wait for the result see it (transfers).
    """

    seconds: float
    spread: float
    latency: float = 0.0


NOTHING = Estimate(0.0, 0.0)
"""No work takes no time, for certain."""


TIERS = ("scale-up", "host", "network")
"""A GPU's own links: those of its domain, the one to its host, and its share of the node's ports."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a piece of work occupies while it runs, beside its stream: what it may have to share with others.

    moving: of its seconds alone, those in which bytes move; what comes before is latency, which others do not slow.
    links: of each of `TIERS`, the share that is busy meanwhile: 1 where nothing else would fit. A collective uses its
    links both ways, a message those out of its sender and into its receiver. multiprocessors: share of the GPU's that
    communication takes; of a kernel, the share without which it is slower.
    """

    moving: float = 0.0
    links: tuple[float, float, float] = (0.0, 0.0, 0.0)
    multiprocessors: float = 0.0


ALONE = Use()
"""Of work that shares nothing."""

FULL = Use(multiprocessors=1.0)
"""Of kernels that fill the GPU."""


Uses = Callable[[Work], Use]
"""What else than its stream a piece of work occupies."""
