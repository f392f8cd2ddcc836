"""Cost model of GEMMs: tiles in waves, split k, operands from L2 or memory, and the power limit.

    seconds = launch + (compute^s + moved^s)^(1/s)                                               s: `overlap_sharpness`
    compute = busy + (1 / power_limited_rate - 1) max(0, busy - power_limit_delay)
    busy    = min over tiles and splits of   waves x (k / split + pipeline_depth) x step + split x peer + split_overhead
    step    = max(2 (tm tn + tile_overhead) / rate of a multiprocessor, operands of a step / its rate of reads)
    moved   = (activation + weight) read from L2 or memory + result written

- The output [m, n] is cut into tiles of tm x tn, a tile on a multiprocessor at a time; a tile that reaches over the
  edge takes as long as a whole tile. Tiles run in waves, a tile per multiprocessor, and a partly filled last wave takes
  as long as a whole wave (NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantisation). The
  model counts a share `wave_rounding` of that loss: libraries with many tile shapes lose less.
- A step is the work of a tile for an element of k. Filling and draining a tile's pipeline takes as long as
  `pipeline_depth` further steps, and every step as long as with `tile_overhead` further elements in the tile: small
  tiles run at a lower rate, also because their operands are read from the L2 more often.
- With fewer tiles than multiprocessors, k is split among several of them, which add up their partial sums in turn,
  `peer` seconds each
  (Osama et al., "Stream-K", PPoPP 2023, arXiv 2301.03598: time = a + b + c iterations per block + d peers). The best
  split balances the loop against the peers: split^2 = k step / peer.
- Large GEMMs reach the power limit: after `power_limit_delay` they run at `power_limited_rate` of the rate before.
- In fp32, on CUDA cores, filling a pipeline and the overhead of a step take the same time, so fewer elements.
- Batched GEMMs in 16 bits whose rows are no multiple of `ALIGNMENT` bytes run at `UNALIGNED_RATE` of the peak in fp32,
  dense ones on Hopper at `UNALIGNED_DENSE` of the rate of others.
- Operands in the L2 are read at its bandwidth. An operand is still in the L2 if the traffic since its last use, of
  `reuse_distance` GEMMs of this size, fits in it; the buffer of the result was written by the GEMM before.
- Tiles share the bandwidth of the L2 as far as all multiprocessors are at work; a single one reads at the rate of its
  port. On GPUs with slow memory tiles that are few run faster by this, and by the clock (`ALONE`).
- Kernels whose tile is known (`simulator.costs.kernels.fixed_tiles`) run in whole waves of whole clusters, without
  split k unless they are built with stream-K; the blocks of a cluster load what they share once. Where blocks take the
  tiles of a column in turn, every wave reads the activation anew, from memory if it does not fit into the L2.
- That is a library as it was measured, with its choice of kernels. Where a decomposition is stated, `busy` is the
  time of the longest block under it, with the best tile (`simulator.costs.kernels.decomposition`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import Number, ceil_div, coefficient, estimate_sigma, maximum, minimum
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.decomposition import Decomposition, loop_seconds
from meshcast.simulator.costs.kernels.fixed_tiles import FixedTile
from meshcast.simulator.costs.kernels.memory import VECTOR
from meshcast.simulator.costs.kernels.roofline import CLOCK, combine, count_waves, kernel_peak, lower_bound, peak
from meshcast.simulator.ir.ops import BYTES, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (64, 64), (64, 32))
"""Output tiles (rows, columns); `peak_share` is reached with the first. On Blackwell two multiprocessors share two."""
LARGEST_TILE = TILES[0][0] * TILES[0][1]

READ_RATE = 5.0
"""Rate at which a multiprocessor reads at most, in multiples of its share of the memory bandwidth.
Set by hand: a fitted value moves the 90th percentile of the error by 0.2 points at most."""
PARTIAL_SUM = 8
"""Bytes written and read per element of a partial sum."""
WEIGHT_REUSE = 6.0
"""Minimum number of GEMMs of the same size between two uses of a weight: benchmarks rotate weights through the L2, six
sets of them in the tables (ai-dynamo/aiconfigurator @095f58a51c4c). 3, 12 and 40 fit no better."""
EVICTION_SHARPNESS = 6
"""Exponent of the share of operands still in the L2, as the traffic since their last use exceeds its size: almost none,
as in cyclic accesses. Set by hand; 2 and 3 fit worse."""


ALIGNMENT = 16
"""Bytes that a row of an operand must be a multiple of for the tensor cores of a batched GEMM (cuBLAS, "Tensor Core
Usage")."""

UNALIGNED_RATE = 1.3
"""Rate of batched GEMMs without that alignment against the GPU's peak in fp32, which is that of its CUDA cores. Fitted
on 17 of BLOOM's tests on A100 (bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md): heads of 108
elements say 1.25, heads of 150 elements 1.35."""

UNALIGNED_DENSE = {"hopper": {"tn": 0.146, "nn": 0.196, "nt": 0.218}}
"""Rate of dense GEMMs in 16 bits without that alignment against aligned operands, by architecture and layout, where
cuBLAS runs kernels for the tensor cores of older GPUs that load a single element at a time
(`cutlass_75_tensorop_..._align1`): output layers of 50,257 tokens of two GPT-2 models, which differ by 1 to 6 %
(validation/measured/h200/output-layers-in-steps.json). On an A100 such a GEMM runs as fast as others (1,024 x 2,145 x
1,024, Azure/AI-benchmarking-guide @8fd0c6e1bd0f)."""


ALONE = {"ada": (0.6, 350 / 362e12)}
"""Time of a step of a tile that is alone on the GPU against one that computes beside tiles on all multiprocessors, and
the power [W] for each FLOP/s of the peak in 16 bits of the GPU that shows it, by architecture: a GPU that its power
holds back runs few tiles at boost clock. What it loses is taken to grow with the tiles, and to be less with more power.

On an L40S every library of GEMMs is slower by this (3,361 GEMMs): fits say 0.6 for sgl-kernel's tiles, 0.5 for cuBLAS
in 16 bits, and anything from 0.5 to 0.85 for the others; without it sgl-kernel's errors grow from 7.6 / 23 to 12 / 31 %
(median / p90). Attention's `idle_gpu_time` is 0.5 there. Other architectures: fits say 0.5 on H100, 0.8 on B200 and 0.9
on A100, with errors in 16 bits 0.4 points lower on H100, as they were on the others; their files were fitted without
it."""


@dataclass(frozen=True, slots=True)
class GemmCostModel:
    """GEMM in 16 bits: coefficients of `seconds`, with those of the library in which 16-bit libraries differ."""

    peak_share: float = coefficient(
        "share of the peak that a full wave of the largest tiles reaches", 0.2, 1.0, 0.8, "library"
    )
    launch: float = coefficient(
        "from the end of a kernel to the first useful cycle of the next [s]", 1e-7, 2e-5, 2.5e-6
    )
    power_limit_delay: float = coefficient(
        "time of a GEMM before the power limit takes effect [s]", 1e-4, 1e-1, 1e-3, "library"
    )
    power_limited_rate: float = coefficient(
        "rate at the power limit against the rate before it", 0.3, 1.0, 0.85, "library"
    )
    reuse_distance: float = coefficient(
        "GEMMs of this size between two uses of an activation", 0.5, 20.0, 3.0, "library"
    )
    pipeline_depth: float = coefficient("filling and draining a tile's pipeline [elements of k]", 1.0, 500.0, 60.0)
    tile_overhead: float = coefficient("overhead of a step of a tile [elements of the tile]", 0.0, 16000.0, 2000.0)
    wave_rounding: float = coefficient("share of the last, partly filled wave that is paid in full", 0.0, 1.0, 0.5)
    read_share: float = coefficient("share of the memory bandwidth at which operands are read", 0.5, 1.0, 0.85)
    write_share: float = coefficient("share of the memory bandwidth at which results are written", 0.3, 4.0, 0.7)
    l2_rate: float = coefficient("rate of reading from the L2 against the memory bandwidth", 1.0, 10.0, 2.0)
    overlap_sharpness: float = coefficient("overlap of compute and traffic: 1 for their sum", 1.0, 8.0, 2.5)
    split_overhead: float = coefficient("overhead of splitting k [s]", 1e-7, 1e-5, 3e-6)
    partial_sum_rate: float = coefficient("rate of adding partial sums against the memory bandwidth", 0.5, 50.0, 5.0)
    nn_rate: float = coefficient("rate of the input gradient (NN) against the forward GEMM", 0.8, 1.1, 0.98)
    nt_rate: float = coefficient("rate of the weight gradient (NT) against the forward GEMM", 0.8, 1.1, 0.96)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class Fp8GemmCostModel(GemmCostModel):
    """GEMM in 8 bits: the same formula, whose libraries differ in other coefficients.

    In 16 bits all libraries call cuBLAS, and what they keep in the L2 differs. In 8 bits each has separate
    kernels, which start and write their results differently.
    """

    launch: float = coefficient(
        "from the end of a kernel to the first useful cycle of the next [s]", 1e-7, 2e-5, 2.5e-6, "library"
    )
    power_limit_delay: float = coefficient("time of a GEMM before the power limit takes effect [s]", 1e-4, 1e-1, 1e-3)
    reuse_distance: float = coefficient("GEMMs of this size between two uses of an activation", 0.5, 20.0, 3.0)
    write_share: float = coefficient(
        "share of the memory bandwidth at which results are written", 0.3, 4.0, 0.7, "library"
    )


def seconds(
    work: Gemm,
    gpu: GPU,
    model: GemmCostModel,
    speed: float = 1.0,
    decomposition: Decomposition | None = None,
    tiles: Sequence[tuple[int, int]] = TILES,
) -> tuple[Number, Number]:
    """Computes the time [s] of a GEMM or of many (arrays in `work`), and the part of it that is launch.

    speed: rate of the multiprocessors against the calibrated rate.
    decomposition: of the output tiles; None: that of the measured library.
    tiles: of which the fastest is taken.
    """
    model = _on_cuda_cores(gpu, model) if work.dtype == "fp32" else model
    busy = _busy(work, gpu, model, speed, decomposition, tiles)
    over = busy - model.power_limit_delay
    limited = np.maximum(over, 0.0) if isinstance(busy, np.ndarray) else max(over, 0.0)
    compute = busy + (1 / model.power_limited_rate - 1) * limited
    return combine(compute, _traffic_seconds(work, gpu, model), model.overlap_sharpness) + model.launch, model.launch


def _on_cuda_cores(gpu: GPU, model: GemmCostModel) -> GemmCostModel:
    """Returns the model of 16-bit GEMMs for fp32: latencies take as long as they do there, at a lower rate."""
    slower = peak(gpu, "fp32") / max((peak(gpu, dtype) for dtype in ("bf16", "fp16") if dtype in gpu.peak), default=1.0)
    depth, overhead = model.pipeline_depth * min(1.0, slower), model.tile_overhead * min(1.0, slower)
    return replace(model, pipeline_depth=depth, tile_overhead=overhead)


def price(
    work: Gemm, gpu: GPU, model: GemmCostModel, speed: float = 1.0, decomposition: Decomposition | None = None
) -> Estimate:
    """Estimates the time of a GEMM."""
    if not work.flops:
        return NOTHING
    if not uses_tensor_cores(work) and "fp32" in gpu.peak:
        speed *= min(1.0, UNALIGNED_RATE * peak(gpu, "fp32") / peak(gpu, work.dtype))
    if work.batch == 1 and gpu.architecture in UNALIGNED_DENSE and not _rows_are_aligned(work):
        speed *= UNALIGNED_DENSE[gpu.architecture][work.layout]
    taken, launch = seconds(work, gpu, model, speed, decomposition)
    bound = lower_bound(gpu, work.flops, work.dtype, work.bytes)
    return Estimate(max(taken, bound), estimate_sigma(model, taken, launch))


def uses_tensor_cores(work: Gemm) -> bool:
    """Tells whether the rows of a GEMM's operands are aligned, or it is none of those for which that matters."""
    width = BYTES[work.dtype]
    return work.batch == 1 or width != 2 or not any(size * width % ALIGNMENT for size in (work.n, work.k))


def _rows_are_aligned(work: Gemm) -> bool:
    """Tells whether the rows of both operands and of the result, as they lie in memory, are aligned; of 16-bit
    operands."""
    width = BYTES[work.dtype]
    first = work.m if work.layout == "nt" else work.k
    return width != 2 or not any(size * width % ALIGNMENT for size in (first, work.n))


def _busy(
    work: Gemm,
    gpu: GPU,
    model: GemmCostModel,
    speed: float,
    decomposition: Decomposition | None,
    shapes: Sequence[tuple[int, int]],
) -> Number:
    """Computes the seconds of the tensor cores, with the best tile and split."""
    m, n, k, number = work.m, work.n, work.k, gpu.multiprocessors
    low, _ = _bounds(work)
    rates = _rates(work, gpu, model, speed)
    if work.tile and decomposition is None:
        return _fixed_tile_seconds(work, FixedTile(*work.tile), number, model, rates)
    best: Number = None
    for tm, tn in shapes:
        rows, columns = low(m, tm), low(n, tn)
        loop = _Loop(tm * tn + model.tile_overhead, rows + columns, rates)
        tiles, peer = -(-m // tm) * -(-n // tn) * work.batch, rows * columns * rates.partial_sum
        if decomposition is None:
            taken = _split_seconds(tiles, k, number, loop, peer, model, _bounds(work))
        else:
            of_model = model.pipeline_depth, model.split_overhead
            taken = loop_seconds(tiles, k, number, decomposition, loop.step(1.0), *of_model, peer)
        best = taken if best is None else low(best, taken)
    return best


class _Rates(NamedTuple):
    """Seconds of a multiprocessor.

    Attributes:
        element: for an element of a tile, with all multiprocessors at work.
        alone: the same on an otherwise idle GPU, over that.
        operand: for an element of an operand, with all multiprocessors at work.
        port: the same by its port to the L2.
        partial_sum: for an element of a partial sum.
    """

    element: float
    alone: float
    operand: float
    port: float
    partial_sum: float


class _Loop(NamedTuple):
    """The loop of a tile over k.

    Attributes:
        elements: of the tile, with what a step costs beside them.
        operands: elements of both operands that a step loads.
        rates: of a multiprocessor.
    """

    elements: Number
    operands: Number
    rates: _Rates

    def step(self, busy: Number) -> Number:
        """Computes the seconds of a step. busy: tiles at a time over multiprocessors."""
        rates, busy = self.rates, minimum(busy, 1.0)
        element = rates.element * (rates.alone + (1 - rates.alone) * busy)
        return maximum(self.elements * element, self.operands * maximum(rates.operand * busy, rates.port))


def _fixed_tile_seconds(
    work: Gemm, tile: FixedTile, multiprocessors: float, model: GemmCostModel, rates: _Rates
) -> Number:
    """Computes the seconds of the tensor cores with a tile: whole waves of clusters, or stream-K."""
    rows = minimum(work.m, tile.rows) / tile.cluster_columns
    columns = minimum(work.n, tile.columns) / tile.cluster_rows
    elements = (tile.rows * tile.columns + model.tile_overhead) / tile.rate
    tiles, slots = tile.count_tiles(work.m, work.n) * work.batch, tile.count_slots(multiprocessors)
    step = _Loop(elements, rows + columns, rates).step(1.0 if tile.stream_k else tiles / slots)
    if tile.stream_k:
        of_model = model.pipeline_depth, model.split_overhead
        return loop_seconds(tiles, work.k, slots, "stream-k", step, *of_model, rows * columns * rates.partial_sum)
    return ceil_div(tiles, slots) * (work.k + model.pipeline_depth) * step


def _bounds(work: Gemm) -> tuple[Number, Number]:
    """Chooses the functions for the smaller and the larger of two numbers, or arrays."""
    arrays = any(isinstance(size, np.ndarray) for size in (work.m, work.n, work.k, work.batch))
    return (np.minimum, np.maximum) if arrays else (min, max)


def _rates(work: Gemm, gpu: GPU, model: GemmCostModel, speed: float) -> _Rates:
    """Computes the rates of a GEMM on a multiprocessor."""
    number, size = gpu.multiprocessors, BYTES[work.dtype]
    layout_rate = {"nn": model.nn_rate, "nt": model.nt_rate}.get(work.layout, 1.0)
    rate = model.peak_share * layout_rate * speed * kernel_peak(gpu, work.dtype)
    element = 2 * LARGEST_TILE / (LARGEST_TILE + model.tile_overhead) * number / rate
    operand = size / READ_RATE * number / gpu.memory_bandwidth
    port = min(operand, size / (VECTOR * (gpu.clock or CLOCK)))
    partial_sum = PARTIAL_SUM / model.partial_sum_rate * number / gpu.memory_bandwidth
    return _Rates(element, _time_alone(gpu), operand, port, partial_sum)


def _time_alone(gpu: GPU) -> float:
    """Returns the time of a step on an otherwise idle GPU over that on a busy one (`ALONE`)."""
    if gpu.architecture not in ALONE or "bf16" not in gpu.peak:
        return 1.0
    share, power = ALONE[gpu.architecture]
    return min(1.0, share * gpu.power / gpu.peak["bf16"] / power)


def _split_seconds(
    tiles: Number,
    k: Number,
    multiprocessors: float,
    loop: _Loop,
    peer: Number,
    model: GemmCostModel,
    bounds: tuple[Any, Any],
) -> Number:
    """Computes the seconds of all tiles, each on a multiprocessor or, if that is faster, on the best number of them.

    peer: adding the partial sum of a further block of a tile [s].
    bounds: functions for the smaller and the larger of two numbers, or arrays.
    """
    low, high = bounds
    waves = count_waves(high(tiles, multiprocessors), multiprocessors, model.wave_rounding)
    step = loop.step(tiles / multiprocessors)
    whole = waves * (k + model.pipeline_depth) * step
    split = high(low((k * step / peer) ** 0.5, multiprocessors / tiles), 2.0)
    waves = count_waves(high(tiles * split, multiprocessors), multiprocessors, model.wave_rounding)
    parts = waves * (k / split + model.pipeline_depth) * loop.step(tiles * split / multiprocessors)
    return low(whole, parts + split * peer + model.split_overhead)


def _traffic_seconds(work: Gemm, gpu: GPU, model: GemmCostModel) -> Number:
    """Computes the seconds of the traffic to and from memory and L2."""
    size, out = BYTES[work.dtype], BYTES[work.out_dtype] * (2 if work.accumulate else 1)
    activation, weight = work.batch * work.m * work.k * size, work.batch * work.n * work.k * size
    result = work.batch * work.m * work.n * out
    passing = (activation + weight + result) / gpu.l2
    in_l2 = 1 / (1 + (model.reuse_distance * passing) ** EVICTION_SHARPNESS)
    weight_in_l2 = 1 / (1 + (max(model.reuse_distance, WEIGHT_REUSE) * passing) ** EVICTION_SHARPNESS)
    result_in_l2 = 1 / (1 + passing**EVICTION_SHARPNESS)  # each GEMM of a benchmark writes to the same buffer
    slow, fast, write = 1 / model.read_share, 1 / model.l2_rate, 1 / model.write_share
    read = activation * (slow + (fast - slow) * in_l2) + weight * (slow + (fast - slow) * weight_in_l2)
    written = result * (max(write, slow) + (write - max(write, slow)) * result_in_l2)
    return (read + _count_bytes_read_again(work, gpu, activation) * slow + written) / gpu.memory_bandwidth


def _count_bytes_read_again(work: Gemm, gpu: GPU, activation: Number) -> Number:
    """Counts the bytes of the activation that waves of a known tile read from memory after the first that read them."""
    if not work.tile:
        return 0.0
    passes = FixedTile(*work.tile).count_passes(work.m, work.n, gpu.multiprocessors)
    return activation * (passes - 1) / (1 + (gpu.l2 / activation) ** EVICTION_SHARPNESS)
