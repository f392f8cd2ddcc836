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

FOUR_BIT_SHARE = 0.87
"""Share of its peak that a GEMM in 4 bits reaches, with a scale for 16 elements, over that of a GEMM in 8 bits with a
scale a tensor.

On equal shapes of at least 4,096 rows and 2^27 weights, 283 a board, the fastest of three libraries in 4 bits takes
1.71 times less on B200 and 1.78 on GB200 than TensorRT-LLM's kernels in 8 bits (medians), whose peak is half as high
(ai-dynamo/aiconfigurator @095f58a51c4c, systems/data: gemm of trtllm 1.3.0rc10 and rc20, sglang 0.5.10 and 0.5.14, vllm
0.24.0, the cast of the activation included). On B300 and GB300, whose peak in 4 bits is three times that in 8, the same
libraries take 1.84 and 1.70 times less, as kernels for B200 would; 12 training steps on them go with the share of
B200: 7 % mean error, 10 % if they went with these kernels."""


def peak(gpu: GPU, dtype: str) -> float:
    """Returns the dense peak rate of `gpu` in `dtype` [FLOP/s]."""
    for known, rate in gpu.peak.items():
        if known == dtype:
            return float(rate)
    rule = f"{gpu.name} has no peak rate for this number format"
    raise CatalogError(f"gpus/{gpu.name} peak", rule, f"Use one of {', '.join(gpu.peak)}", dtype)


def kernel_peak(gpu: GPU, dtype: str) -> float:
    """Returns the rate of which GEMMs in `dtype` reach the shares that are measured in 8 and 16 bits [FLOP/s]."""
    return peak(gpu, dtype) * (FOUR_BIT_SHARE if dtype == "fp4" else 1.0)


def lower_bound(gpu: GPU, flops: Any, dtype: str, nbytes: Any) -> Any:
    """Returns the time [s] that no kernel can beat: its FLOPs at peak, its bytes at the nominal memory bandwidth."""
    return maximum(nbytes / gpu.memory_bandwidth, flops / peak(gpu, dtype))


def count_waves(blocks: Any, multiprocessors: float, rounding: float) -> Any:
    """Waves of `blocks` over all multiprocessors.

    rounding: share of the last, partly filled wave that is paid in full: 1 rounds up to whole waves, 0 does not round.
    """
    exact = blocks / multiprocessors
    return exact + rounding * (-(-exact // 1.0) - exact)


def combine(compute: Any, memory: Any, sharpness: float = 3.0) -> Any:
    """Combines two limits [s] of a kernel to its time [s]: their sum for `sharpness` 1, towards the larger for more."""
    return (compute**sharpness + memory**sharpness) ** (1 / sharpness)
