"""Calls of the host for an op: what a program does in Python and PyTorch to launch the kernels of a piece of work.

Programs differ, so the numbers stand in their profiles (`Framework.calls`); here is which of them a piece of work is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from meshcast.simulator.ir.ops import BYTES, Attention, Collective, Exchange, Gemm, Memory, Work

CallKind = Literal[
    "linear", "quantised-linear", "norm", "attention", "rope", "residual", "add", "activation", "cast", "collective",
    "vector", "other", "op",
]  # fmt: skip
"""Kinds of ops by what the host does for them. `vector` is the gradient of a vector of weights, such as a norm's or a
bias, which no product adds to the accumulated one; `op` is the mean op, whose time is `Framework.launch_s`."""

KINDS: Mapping[str, CallKind] = {
    **{"rms-norm": "norm", "norm": "norm", "rope": "rope", "residual": "residual", "add": "add", "cast": "cast"},
    **{"activation": "activation", "clamped-activation": "activation"},
}
"""Kinds of memory-bound operations, by `Memory.what`; others are `other`."""


class PassCalls(NamedTuple):
    """Calls of an op forward, for gradients of inputs, and for gradients of weights."""

    forward: float
    backward: float
    weights: float

    def of_phase(self, phase: str) -> float:
        """Returns the calls in a phase of `Op`."""
        return self.weights if phase == "W" else self.backward if phase == "B" else self.forward


def name_kind(work: Work) -> CallKind:
    """Returns the kind of an op."""
    match work:
        case Gemm():
            return "quantised-linear" if BYTES[work.dtype] <= 1 else "linear"
        case Attention():
            return "attention"
        case Memory():
            return KINDS.get(work.what, "other")
        case Collective() | Exchange():
            return "collective"
    return "other"
