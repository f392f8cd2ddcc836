"""What every kernel's price is built from: peak rates, partly filled waves, and two limits that meet smoothly.

All of it works on numbers and on arrays of numbers.
"""

from __future__ import annotations

from typing import Any

from hardware.errors import CatalogError
from hardware.gpu import GPU
from simulator.costs.coefficients import higher


def peak(gpu: GPU, dtype: str) -> float:
    """Dense FLOP/s of `gpu` in `dtype`."""
    for known, rate in gpu.peak.items():
        if known == dtype:
            return float(rate)
    rule = f"{gpu.name} has no peak rate for this number format"
    raise CatalogError(f"gpus/{gpu.name} peak", rule, f"Use one of {', '.join(gpu.peak)}", dtype)


def least(gpu: GPU, flops: Any, dtype: str, nbytes: Any) -> Any:
    """The time [s] that no kernel can beat: FLOPs at peak, bytes at the nominal speed of the memory."""
    return higher(nbytes / gpu.memory_bandwidth, flops / peak(gpu, dtype))


def waves(blocks: Any, multiprocessors: float, rounding: float) -> Any:
    """How often all multiprocessors are filled by `blocks`, of which the share `rounding` is rounded up.

    A whole last wave is paid for when it is rounded fully (1); kernels that split their last tiles pay less.
    """
    exact = blocks / multiprocessors
    return exact + rounding * (-(-exact // 1.0) - exact)


def together(compute: Any, memory: Any, sharpness: float = 3.0) -> Any:
    """Two limits of one kernel [s]: the larger one where one matters, their sum for `sharpness` 1, less for more."""
    return (compute**sharpness + memory**sharpness) ** (1 / sharpness)
