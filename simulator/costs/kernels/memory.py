"""Kernels bound by memory traffic: time = bytes / (stream x HBM) + launch."""

from __future__ import annotations

from dataclasses import dataclass

from hardware.gpu import GPU
from simulator.costs.estimate import NOTHING, Estimate
from simulator.ops import Memory


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Coefficients of `price`; calibration/*.yaml says what each one means."""

    stream: float
    launch: float
    spread: float


def price(work: Memory, gpu: GPU, law: MemoryLaw, traffic: float = 1.0) -> Estimate:
    """`traffic`: bytes moved for each byte of the work (kernels that are less fused, or slower than a stream)."""
    if not work.bytes:
        return NOTHING
    seconds = work.bytes / gpu.memory_bandwidth
    return Estimate(max(seconds, seconds * traffic / law.stream + law.launch), law.spread)
