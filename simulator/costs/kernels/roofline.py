"""What every kernel's price is built from: peak rates, partly filled waves, and two limits that meet smoothly."""

from __future__ import annotations

import math

from hardware.errors import CatalogError
from hardware.gpu import GPU


def peak(gpu: GPU, dtype: str) -> float:
    """Dense FLOP/s of `gpu` in `dtype`."""
    for known, rate in gpu.peak.items():
        if known == dtype:
            return float(rate)
    rule = f"{gpu.name} has no peak rate for this number format"
    raise CatalogError(f"gpus/{gpu.name} peak", rule, f"Use one of {', '.join(gpu.peak)}", dtype)


def least(gpu: GPU, flops: float, dtype: str, nbytes: float) -> float:
    """The time [s] that no kernel can beat: FLOPs at peak, bytes at the nominal speed of the memory."""
    bound = nbytes / gpu.memory_bandwidth
    return max(bound, flops / peak(gpu, dtype)) if flops else bound


def waves(blocks: float, multiprocessors: float, rounding: float) -> float:
    """How often all multiprocessors are filled by `blocks`, of which the share `rounding` is rounded up.

    A whole last wave is paid for when it is rounded fully (1); kernels that split their last tiles pay less.
    """
    exact = blocks / multiprocessors
    return exact + rounding * (math.ceil(exact) - exact)


def together(compute: float, memory: float) -> float:
    """Two limits of one kernel [s]: the larger one, and up to a quarter more where both matter."""
    return float((compute**3 + memory**3) ** (1 / 3))
