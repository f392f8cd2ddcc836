"""The sections of a calibration: which law prices which kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulator.costs.kernels import attention, gemm, grouped, memory
from simulator.ops import BYTES, Attention, Gemm, Memory

SECONDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "gemm": gemm.seconds,
    "gemm-fp8": gemm.seconds,
    "grouped": grouped.seconds,
    "attention": attention.seconds,
    "memory": memory.seconds,
}
"""By section of a calibration: seconds of work on a GPU by a law, and the part of them that is launch."""


def section_of(work: Gemm | Attention | Memory) -> str:
    """The section of a calibration that prices `work`."""
    if isinstance(work, Gemm):
        return "grouped" if work.groups else "gemm" if BYTES[work.dtype] > 1 else "gemm-fp8"
    return "attention" if isinstance(work, Attention) else "memory"
