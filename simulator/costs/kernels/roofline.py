"""Building blocks of every kernel's price: peak rates, partly filled waves, and two limits that combine smoothly.

All functions work on numbers and on arrays.
"""

from __future__ import annotations

from typing import Any

from meshcast.hardware.errors import CatalogError
from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.coefficients import maximum

CLOCK = 1.9e9
"""Clock of a GPU whose catalog file has none [Hz]."""


def peak(gpu: GPU, dtype: str) -> float:
    """Dense peak rate of `gpu` in `dtype` [FLOP/s]."""
    for known, rate in gpu.peak.items():
        if known == dtype:
            return float(rate)
    rule = f"{gpu.name} has no peak rate for this number format"
    raise CatalogError(f"gpus/{gpu.name} peak", rule, f"Use one of {', '.join(gpu.peak)}", dtype)


def lower_bound(gpu: GPU, flops: Any, dtype: str, nbytes: Any) -> Any:
    """Time [s] that no kernel can beat: its FLOPs at peak, its bytes at the nominal memory bandwidth."""
    return maximum(nbytes / gpu.memory_bandwidth, flops / peak(gpu, dtype))


def count_waves(blocks: Any, multiprocessors: float, rounding: float) -> Any:
    """Waves of `blocks` over all multiprocessors.

    rounding: share of the last, partly filled wave that is paid in full: 1 rounds up to whole waves, 0 does not round.
    """
    exact = blocks / multiprocessors
    return exact + rounding * (-(-exact // 1.0) - exact)


def combine(compute: Any, memory: Any, sharpness: float = 3.0) -> Any:
    """Time [s] of a kernel with two limits [s]: their sum for `sharpness` 1, towards the larger one for more."""
    return (compute**sharpness + memory**sharpness) ** (1 / sharpness)
