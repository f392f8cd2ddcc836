"""Costs by one rate of compute and one of communication, for closed forms of schedules and messages."""

from __future__ import annotations

from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.ir.routing import slowest_rank


class IdealCosts:
    """One rate for FLOPs, free memory traffic, and communication that is free or has one rate and no latency.

    An all-reduce moves its buffer twice (it is a reduce-scatter and an all-gather), everything else once.

    Attributes:
        flops: rate of all compute [FLOP/s].
        communication: rate of all communication [bytes/s]; 0 makes it free.
    """

    def __init__(self, flops: float = 1.0, communication: float = 0.0) -> None:
        self.flops, self.communication = flops, communication

    def estimate(self, work: Work) -> Estimate:
        """Returns how long `work` takes, with a sigma of 0."""
        work = slowest_rank(work)
        moved = getattr(work, "nbytes", 0) * (2 if getattr(work, "operation", "") == "all_reduce" else 1)
        seconds = work.flops / self.flops + (moved / self.communication if self.communication else 0.0)
        return Estimate(seconds, 0.0)
