"""Side ops with their prices: gradient reductions, weight gathers and copies that run on streams of their own while a
task computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from meshcast.simulator.ir.ops import Op


@dataclass(eq=False)
class PricedSideOps:
    """Priced ops of one stream, which run one after another; see `simulator.ir.ops.SideOps`.

    params: numbers of the parameters of each op, concatenated.
    starts: index in `params` of the first parameter of each op.
    after: side ops that are issued earlier, and for each op the index of the one of them that it waits for; -1: none.
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
        """Time from the begin of each op until other ops see its result [s]."""
        return self.seconds + self.latency

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of parameters of each op."""
        return np.diff(self.starts, append=len(self.params))

    @cached_property
    def ends(self) -> np.ndarray:
        """Time from the begin of the first op to the end of each op if none waits [s]."""
        return np.cumsum(self.seconds)
