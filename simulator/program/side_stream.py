"""Side ops at their prices: communication beside the parts of a task, such as gradient reduce-scatters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.ir.ops import Op


@dataclass(eq=False)
class PricedSideOps:
    """Priced ops on a stream of their own, one after another; see `simulator.ir.ops.SideOps`.

    params, starts: numbers of the parameters that each op belongs to, and where those of each op start.
    after: earlier side ops, and for each op here the place of the op there that it waits for; -1: none.
    """

    ops: list[Op]
    seconds: np.ndarray
    sigma: np.ndarray
    latency: np.ndarray
    params: np.ndarray
    starts: np.ndarray
    after: tuple[PricedSideOps, np.ndarray] | None = None

    @property
    def stream(self) -> str:
        return self.ops[0].stream

    @property
    def lasting(self) -> np.ndarray:
        """From the begin of every op until others see its result [s]."""
        return self.seconds + self.latency

    @cached_property
    def ends(self) -> np.ndarray:
        """End of each op if none waits, from the begin of the first [s]."""
        return np.cumsum(self.seconds)
