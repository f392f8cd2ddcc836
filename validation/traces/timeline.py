"""The timeline of a device in a step, measured or simulated: slices of kernels and collectives by stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.engine.occupancy import measure
from meshcast.simulator.ir.ops import COMPUTE

UNATTRIBUTED = "communication"
"""Stream of collectives whose parallelism the trace does not tell (tensor, data, ...)."""

STREAMS = (COMPUTE, "tensor", "sequence", "expert", "data", "pipeline", UNATTRIBUTED)
"""All streams, in the order of tables and figures: computation, then communication by the family of its scheme."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A kernel, operator or collective.

    stream: of `STREAMS`; empty while the family of a collective is unknown.
    kind: class of the kernel, of `kernel_classes.CLASSES`.
    begin: start, from the start of the step [s].
    seconds: duration [s].
    calls: calls that this slice counts; 0 for a further interval of a call that another slice counts.
    """

    stream: str
    kind: str
    begin: float
    seconds: float
    name: str = ""
    calls: int = 1


@dataclass(frozen=True)
class Timeline:
    """A device in a step.

    span: duration of the step [s].
    start: moment of the trace at which it starts [s].
    """

    slices: tuple[Slice, ...]
    span: float
    start: float = 0.0

    @cached_property
    def sums(self) -> dict[tuple[str, str], tuple[float, int]]:
        """Seconds and calls of each (stream, class)."""
        sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
        for slice_ in self.slices:
            sums[slice_.stream, slice_.kind][0] += slice_.seconds
            sums[slice_.stream, slice_.kind][1] += slice_.calls
        return {key: (seconds, int(calls)) for key, (seconds, calls) in sums.items()}

    @cached_property
    def account(self) -> dict[str, float]:
        """Breakdown of the step into computation, exposed communication and idle time [s]; it adds up to the step."""
        compute = union_length(slice_ for slice_ in self.slices if slice_.stream == COMPUTE)
        busy = union_length(self.slices)
        return {"compute": compute, "exposed": busy - compute, "idle": max(0.0, self.span - busy)}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Communication by stream without computation beside it [s]; where two run at once it counts for the first."""
        before = [slice_ for slice_ in self.slices if slice_.stream == COMPUTE]
        covered, exposed = union_length(before), {}
        for stream in STREAMS:
            if stream != COMPUTE and (mine := [slice_ for slice_ in self.slices if slice_.stream == stream]):
                before += mine
                exposed[stream], covered = union_length(before) - covered, union_length(before)
        return exposed

    @property
    def calls(self) -> int:
        """Number of kernels launched."""
        return sum(slice_.calls for slice_ in self.slices)


def union_length(slices: Iterable[Slice]) -> float:
    """Returns the length of the union of the slices' intervals [s]."""
    spans = np.array([(slice_.begin, slice_.begin + slice_.seconds) for slice_ in slices])
    return measure([(spans[:, 0], spans[:, 1])]) if len(spans) else 0.0
