"""The price of a piece of work: how long it takes, how certain that is, and what it occupies meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.ir.ops import Work


class Estimate(NamedTuple):
    """The duration of a piece of work, and its uncertainty.

    Attributes:
        seconds: how long the work occupies its stream [s].
        sigma: standard deviation of log(measured / seconds).
        latency: from the end of that until the receiver of a message has it [s].
    """

    seconds: float
    sigma: float
    latency: float = 0.0


NOTHING = Estimate(0.0, 0.0)
"""Empty work takes no time, for certain."""


TIERS = ("scale-up", "host", "network")
"""A GPU's links: of its scale-up domain, to its host, and its share of the node's ports."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a piece of work occupies besides its stream, and may have to share with other work.

    Attributes:
        moving: seconds in which bytes move when it runs alone; the rest is latency, which other work does not slow
            down.
        links: busy share of each of `TIERS` meanwhile; 1 leaves no room for others. A collective uses its links in both
            directions, a message those out of its sender and into its receiver.
        received: of messages between stages of different degrees, the busy share of the receiver's links; None:
            `links`.
        multiprocessors: share of the GPU's multiprocessors that communication takes; of a kernel, the share without
            which it slows down.
    """

    moving: float = 0.0
    links: tuple[float, float, float] = (0.0, 0.0, 0.0)
    multiprocessors: float = 0.0
    received: tuple[float, float, float] | None = None


ALONE = Use()
"""The use of work that shares nothing."""

FULL = Use(multiprocessors=1.0)
"""The use of kernels that fill the GPU."""


Uses = Callable[[Work], Use]
"""What a piece of work occupies besides its stream."""
