"""Time breakdown of a pipeline device: parts that add up to the step, and the communication that they hide.

Kernels of a device do not overlap, so computation counts in full. Communication is exposed while it overlaps neither
computation nor the communication of an axis that comes earlier in `EXPOSED`. Then comes waiting for the host; the rest
of the step is pipeline bubble.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.occupancy import Occupied, measure
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.categories import COMPUTING, EXPOSED, HOST, KINDS
from meshcast.simulator.program.program import Program

ROUNDING = 1e-12
"""Share of a step, and number of seconds, below which a part is only rounding error."""


@dataclass
class Breakdown:
    """Breakdown of a step on a device [s]: `parts` add up to `step`."""

    step: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of gemm, attention, memory_bound, optimizer, every exposed axis, host, bubble and idle."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Communication overlapped by computation or by exposed communication of another axis [s], by axis."""

    def __rmul__(self, share: float) -> Breakdown:
        """Scales every part; the weighted mean of steps needs it."""
        parts, hidden = ({key: share * time for key, time in times.items()} for times in (self.parts, self.hidden))
        return Breakdown(share * self.step, parts, hidden)

    def __add__(self, other: Breakdown) -> Breakdown:
        """Adds the parts of two breakdowns."""
        both = ((self.parts, other.parts), (self.hidden, other.hidden))
        sums = [{key: mine.get(key, 0.0) + theirs.get(key, 0.0) for key in mine | theirs} for mine, theirs in both]
        return Breakdown(self.step + other.step, *sums)


def breakdown(
    program: Program, step: float, occupied: Occupied, device: int, sums: np.ndarray | None = None
) -> Breakdown:
    """Returns the breakdown of `device` from 0 to `step` [s].

    occupied: busy intervals of the device by axis.
    sums: `SUMS` of all devices as the engine played them; as priced if None.
    """
    covered, lengths = list(occupied.get(COMPUTE, ())), dict[str, float]()
    for axis in (*EXPOSED, HOST):
        if axis in occupied:
            covered += occupied[axis]
            lengths[axis] = measure(covered)
    return account(step, (program.sums if sums is None else sums)[device], lengths, program.devices > 1)


def account(step: float, sums: np.ndarray, lengths: Mapping[str, float], pipelined: bool) -> Breakdown:
    """Returns the breakdown of a device from 0 to `step` [s].

    sums: `SUMS` of the device.
    lengths: by each axis that occurs, of the union of its intervals with those of the computation and of the axes
        before it [s].
    pipelined: whether there are other pipeline devices.
    """
    parts = dict.fromkeys((*COMPUTING, *EXPOSED, HOST, "bubble", "idle"), 0.0)
    seconds, _, lasting, _ = sums.T.tolist()
    parts |= dict(zip(KINDS, seconds, strict=True)) | dict.fromkeys((*EXPOSED, HOST), 0.0)
    left = step - sum(parts.values())
    for axis in (*EXPOSED, HOST):
        if axis in lengths:
            now = min(left, max(0.0, step - lengths[axis]))
            parts[axis], left = left - now, now
    # The rest is a difference of sums: below their rounding error it is zero.
    parts["bubble" if pipelined else "idle"] = left if left > ROUNDING * max(step, 1.0) else 0.0
    busy = dict(zip(KINDS, lasting, strict=True))
    hidden = {axis: busy[axis] - parts[axis] for axis in EXPOSED}
    hidden = {axis: time for axis, time in hidden.items() if time > max(1e-9 * parts[axis], ROUNDING)}
    return Breakdown(step, parts, hidden)


def slowest_device(sums: np.ndarray) -> int:
    """Returns the pipeline device that computes longest. sums: `SUMS` of all devices."""
    work = sums[:, : len(COMPUTING), 0].sum(axis=1).tolist()
    return max(range(len(work)), key=lambda d: (round(work[d], 9), -d))
