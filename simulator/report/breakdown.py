"""Where the time of one device goes: an exclusive account that adds up to the step, and what was hidden beside it.

Computation never overlaps itself, so it counts in full. What is left of the step is filled by communication, axis
after axis in the order of `EXPOSED`: an axis is exposed for as long as it runs beside neither computation nor an axis
before it. Then comes waiting for the host, and what is left is bubble.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulator.engine.occupancy import Occupied, measure
from simulator.ir.ops import COMPUTE
from simulator.program.categories import COMPUTING, EXPOSED, HOST, KINDS
from simulator.program.program import Program

ROUNDING = 1e-12
"""Part of a step, and number of seconds, below which an account is rounding."""


@dataclass
class Breakdown:
    """Seconds of one device by what they were spent on; all but `hidden` add up to `step`."""

    step: float
    parts: dict[str, float] = field(default_factory=dict)
    """gemm, attention, memory_bound, optimizer, the exposed axes, host, bubble, idle."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication that ran beside computation (or beside communication that was counted), by axis."""

    def __rmul__(self, share: float) -> Breakdown:
        """The account of a share of a step."""
        parts, hidden = ({key: share * time for key, time in one.items()} for one in (self.parts, self.hidden))
        return Breakdown(share * self.step, parts, hidden)

    def __add__(self, other: Breakdown) -> Breakdown:
        """One account of both."""
        both = ((self.parts, other.parts), (self.hidden, other.hidden))
        sums = [{key: one.get(key, 0.0) + two.get(key, 0.0) for key in one | two} for one, two in both]
        return Breakdown(self.step + other.step, *sums)


def breakdown(
    program: Program, step: float, occupied: Occupied, device: int, sums: np.ndarray | None = None
) -> Breakdown:
    """The account of `device` from 0 to `step`. sums: `SUMS` of all devices as played; as priced if not given."""
    parts = dict.fromkeys((*COMPUTING, *EXPOSED, HOST, "bubble", "idle"), 0.0)
    seconds, _, lasting, _ = (program.sums if sums is None else sums)[device].T.tolist()
    parts |= dict(zip(KINDS, seconds, strict=True)) | dict.fromkeys(EXPOSED, 0.0)
    left = step - sum(parts.values())
    covered = list(occupied.get(COMPUTE, ()))
    for axis in (*EXPOSED, HOST):
        if axis in occupied:
            covered += occupied[axis]
            now = min(left, max(0.0, step - measure(covered)))
            parts[axis], left = left - now, now
    # What is left of many sums and differences is no time when it is no more than their rounding.
    parts["bubble" if program.devices > 1 else "idle"] = left if left > ROUNDING * max(step, 1.0) else 0.0
    busy = dict(zip(KINDS, lasting, strict=True))
    hidden = {axis: busy[axis] - parts[axis] for axis in EXPOSED}
    hidden = {axis: time for axis, time in hidden.items() if time > max(1e-9 * parts[axis], ROUNDING)}
    return Breakdown(step, parts, hidden)
