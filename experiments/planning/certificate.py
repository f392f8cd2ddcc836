"""What a planner has proven about its plan, in its own space and at its own prices."""

from __future__ import annotations

import math
from typing import NamedTuple


class PlanProof(NamedTuple):
    """A bound of the objective over the whole space of a planner.

    bound: no plan of the space has a lower objective.
    value: objective of the plan found.
    method: how the bound was obtained, for example ``elimination`` or ``branch and bound``.
    """

    bound: float
    value: float
    method: str

    @property
    def gap(self) -> float:
        """Share by which the plan may be worse than the best of the space."""
        if not math.isfinite(self.bound) or self.bound <= 0.0:
            return math.inf if self.value > self.bound else 0.0
        return max(0.0, self.value / self.bound - 1)

    @property
    def optimal(self) -> bool:
        """Whether no plan of the space is better, up to rounding."""
        return self.gap <= 1e-6
