"""Grouped GEMM: the experts of a rank in a call, each with as many rows as tokens chose it.

    seconds = sqrt(compute^2 + traffic^2) + launch + group_overhead groups + row_overhead (rows of the largest group)
    compute = waves (tm tn + tile_edge (tm + tn)) k 2 multiprocessors
              / (peak_share peak (1 + tile_edge (1/256 + 1/128)))
    waves   = exact + WAVE_ROUNDING (up(exact) - exact),   exact = sum over groups of tiles / multiprocessors
    traffic = parameters / (memory_share HBM) + activations / (activation_rate clock multiprocessors)

with the best of some tiles tm x tn, or the tile that a program fixes (`Gemm.tile`).

- The tiles of all groups are distributed over the multiprocessors at once (persistent kernels: CUTLASS grouped GEMM,
  DeepGEMM), so waves count all tiles; but no tile holds rows of two groups: small and uneven groups pay for padding.
- A tile loads its operands along its edges, so narrow tiles take longer for their FLOPs (`tile_edge`); rows of the same
  token are loaded once.
- The parameters of every group with a row are read once, so kernels with few rows per group are bound by memory; a
  weight gradient (layout nt) writes that many instead, and reads them before when it accumulates.
- Rows of inputs and results (16 bits before they are quantised) are gathered, padded, scattered or reduced by small
  loads: the same bytes per clock and multiprocessor (`activation_rate`) on every GPU, as in memory.py. H100 and H200,
  which differ in their memory alone, take the same time for it.
- Where both limits are alike, neither hides all of the other: their squares add up. Exponents from 1.4 to 2.7 and a
  pipeline depth (more k) fit no better.
- Programs that launch a kernel for each group (Transformer Engine on several streams) pay `group_overhead`; kernels
  beside the GEMMs that process the rows of a group in turn (masked layouts) pay `row_overhead`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import ceil_div, coefficient, estimate_sigma, maximum, minimum
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.roofline import CLOCK, combine, count_waves, kernel_peak, lower_bound
from meshcast.simulator.ir.ops import BYTES, Gemm

TILES = ((256, 256, (128,)), (128, 128, (256, 128, 64)), (64, 64, (256, 128)), (32, 32, (128,)), (16, 16, (128,)))
"""Output tiles that a multiprocessor computes at a time: rows, rows that it loads, and columns of each; the first is
the largest."""

WAVE_ROUNDING = 0.3
"""Share of the last, partly filled wave that is paid in full; from 0.1 to 0.5 fits differ by less than their errors."""


@dataclass(frozen=True, slots=True)
class GroupedGemmCostModel:
    """Grouped GEMM: coefficients of `seconds`."""

    memory_share: float = coefficient(
        "share of the memory bandwidth at which operands and results move", 0.5, 1.0, 0.85
    )
    tile_edge: float = coefficient("cost of a tile's edges [elements per row and column]", 0.1, 512.0, 30.0)
    weight_gradient_rate: float = coefficient("rate of weight gradients against the other GEMMs", 0.3, 1.2, 0.9)
    launch: float = coefficient("overhead of a call [s]", 1e-7, 1e-4, 6e-6)
    peak_share: float = coefficient("share of the peak that the largest tile reaches", 0.05, 1.0, 0.8, "library")
    activation_rate: float = coefficient(
        "rate of moving rows [bytes per clock and multiprocessor]", 0.2, 200.0, 7.0, "library"
    )
    group_overhead: float = coefficient("overhead of a group [s]", 1e-9, 2e-5, 1e-7, "library")
    row_overhead: float = coefficient("overhead of a row of the largest group [s]", 1e-12, 1e-7, 1e-9, "library")
    sigma: float = 0.0
    sigma_short: float = 0.0


def seconds(work: Gemm, gpu: GPU, model: GroupedGemmCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of a call or of many (arrays in `work`), and the part of it that is launch.

    speed: rate of the multiprocessors against the calibrated rate.
    """
    gradient = work.layout == "nt"
    groups = work.groups or ((work.batch, work.k if gradient else work.m),)
    (height, _, (width,)) = TILES[0]
    edge = 1 + model.tile_edge * (1 / height + 1 / width)
    gradient_rate = model.weight_gradient_rate if gradient else 1.0
    rate = model.peak_share * gradient_rate * edge * speed * kernel_peak(gpu, work.dtype)
    compute = _tile_elements(work, groups, gpu, model) * work.k * 2 * gpu.multiprocessors / rate

    launch = model.launch + model.group_overhead * work.batch
    moving = combine(compute, _traffic_seconds(work, gpu, model), 2.0)
    return moving + model.row_overhead * _largest_group(groups) + launch, launch


def _tile_elements(work: Gemm, groups: tuple[tuple[Any, Any], ...], gpu: GPU, model: GroupedGemmCostModel) -> Any:
    """Counts elements of the tiles of a multiprocessor, edges included, with the best tile or that of the program."""
    best: Any = math.inf
    for rows, loaded, widths in (work.tile,) if work.tile else TILES:
        down = work.batch * ceil_div(work.m, rows) if work.layout == "nt" else _count_tiles(groups, rows)
        for columns in widths:
            waves = count_waves(down * ceil_div(work.n, columns), gpu.multiprocessors, WAVE_ROUNDING)
            best = minimum(best, waves * (rows * columns + model.tile_edge * (loaded + columns)))
    return best


def _traffic_seconds(work: Gemm, gpu: GPU, model: GroupedGemmCostModel) -> Any:
    """Seconds of reading parameters, or writing their gradients, and of moving the rows of activations."""
    m, n, k = work.m, work.n, work.k
    if work.layout == "nt":
        parameters, rows = m * n * BYTES[work.out_dtype] * (2 if work.accumulate else 1), k * (m + n)
    else:
        parameters, rows = n * k * BYTES[work.dtype], m * (k + n)
    reading = parameters / (model.memory_share * gpu.memory_bandwidth)
    moving = rows * BYTES["bf16"] / (model.activation_rate * (gpu.multiprocessors * (gpu.clock or CLOCK)))
    return work.batch * (reading + moving)


def price(work: Gemm, gpu: GPU, model: GroupedGemmCostModel, speed: float = 1.0) -> Estimate:
    """Estimates the time of a call. speed: rate of the multiprocessors against the calibrated rate."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, model, speed)
    bound = lower_bound(gpu, work.flops, work.dtype, work.bytes)
    return Estimate(max(taken, bound), estimate_sigma(model, taken, launch))


GROUP_TIME = {"tn": 1.05, "nn": 1.14, "nt": 1.32}
"""Time of the GEMMs of all groups, launched in turn on a few streams, over that of each alone, by layout:
medians of 30, 27 and 25 grouped GEMMs against the forecast of dense ones. 75 are of Transformer Engine on B200 (bf16,
128 to 9,832 rows a group, MooreThreads/SimuMax @4dcaae5), whose dense GEMMs are calibrated on the same machine; 7,
forward, of DeepGEMM in 8 bits on H800. Ten on A100 take 0.63 to 1.09 of their dense forecasts and are left out: nothing
is priced by these ratios there."""
GROUP_SIGMA = 0.16
"""Standard deviation of the logarithm of these ratios."""


def price_group_by_group(work: Gemm, price: Callable[[Gemm], Estimate]) -> Estimate:
    """Estimates the time of a call that launches a dense GEMM for each group, as Transformer Engine does.

    price: of a dense GEMM. One kernel of all groups, which no table has, takes as long as its groups alone.
    """
    prices = [(number, price(take_group(work, tokens))) for number, tokens in work.groups]
    total, sigma = (
        sum(number * estimate.seconds for number, estimate in prices),
        max(estimate.sigma for _, estimate in prices),
    )
    factor = 1.0 if work.one_kernel else GROUP_TIME[work.layout]
    return Estimate(factor * total, math.hypot(sigma, GROUP_SIGMA))


def take_group(work: Gemm, tokens: float) -> Gemm:
    """Returns the dense GEMM of a group of a call."""
    rows = {"k": tokens} if work.layout == "nt" else {"m": tokens}
    return replace(work, batch=1, groups=(), **rows)  # type: ignore[arg-type]


# The groups of many calls are arrays of sizes x calls, or of calls alone where all groups of a call are alike.


def _count_tiles(groups: tuple[tuple[Any, Any], ...], rows: Any) -> Any:
    """Counts tiles of `rows` rows that cover the rows of all groups."""
    total: Any = 0
    for count, size in groups:
        tiles: Any = count * ceil_div(size, rows)
        total = total + (tiles.sum(axis=0) if isinstance(tiles, np.ndarray) and tiles.ndim == 2 else tiles)
    return total


def _largest_group(groups: tuple[tuple[Any, Any], ...]) -> Any:
    """Returns the rows of the largest group."""
    largest: Any = 0
    for _, size in groups:
        largest = maximum(largest, size.max(axis=0) if isinstance(size, np.ndarray) and size.ndim == 2 else size)
    return largest
