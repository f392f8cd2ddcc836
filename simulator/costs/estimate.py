"""What pricing a piece of work answers."""

from __future__ import annotations

from typing import NamedTuple


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
