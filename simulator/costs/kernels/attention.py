"""Fused attention: blocks of queries that loop over keys on the multiprocessors, and traffic that is not hidden.

    score    = ((2 columns / (peak_share peak / multiprocessors))^p + (softmax_cost / (16 clock))^p)^(1/p)
                                                                                                    p: softmax_overlap
    block    = queries x keys x score + block_overhead
    compute  = max(waves x block + (longest block - block), idle_gpu_time x longest block)
               x (1 + power_limit_slowdown t / (t + 5 ms))
    operands = bytes / (memory_share HBM) x missed
    cache    = cache_writes x (bytes of keys and values, twice, + cache_write_bytes x positions) / (0.85 HBM) x missed
    seconds  = (compute^3 + operands^3)^(1/3) + exposed_traffic x operands + cache + launch

- A block of queries stays on a multiprocessor and loops over the keys that it attends to (FlashAttention-2,
  arXiv 2307.08691, section 3.2). It computes whole tiles, so the edge of a mask costs half a block more;
  `block_overhead` is what filling and draining its pipeline costs.
- A score costs 2 (qk + v) FLOPs and an exponential. Hopper's tensor cores make 512 times more FLOPs than its special
  function units make exponentials (FlashAttention-3, arXiv 2407.08608, section 3.1): softmax takes long where heads are
  narrow, tensor cores fast, or operands have 8 bits. Both overlap, the better the larger p is.
- The backward pass has five GEMMs instead of two, three of qk and two of v columns, and the same exponentials.
- Accumulators of values have 256 columns at most; wider heads compute their scores once for each 256.
- Blocks of equal length run in waves, of which the last is partly empty. With a causal mask the last blocks of the
  forward pass are among the longest, and the other multiprocessors idle during them (list scheduling: the mean and a
  further job). The backward pass of FlashAttention starts with them; in that of cuDNN the GPU waits for such a block at
  the end (`backward_tail`: a half, as its blocks have 64 rows): on an H200 time grows by equal steps from 4 to 96
  heads, from that of a single block on (validation/measured/h200). The longest block bounds the kernel; a GPU with
  little other work runs it at boost clock (`idle_gpu_time`).
- Kernels that run longer than the power limiter's delay slow down (`power_limit_slowdown`).
- Loads of the first tiles and stores of the last ones are hidden behind GEMMs of other blocks or are not
  (`exposed_traffic`). What fits into the L2 is still there when a benchmark repeats (`l2_resident`); in a training step
  the same is assumed.
- Serving programs write keys and values into a cache before attention (`cache_writes`); training does not.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import ceil_div, coefficient, estimate_sigma, maximum, minimum
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.roofline import CLOCK, combine, lower_bound, peak
from meshcast.simulator.ir.ops import BYTES, Attention

EXPONENTIALS = 16
"""Exponentials per clock and multiprocessor, by its special function units (FlashAttention-3, arXiv 2407.08608,
section 3.1: 3.9 T/s on an H100)."""

TILE = 128
"""Queries of a block: FlashAttention's tile at head width 128."""

STREAM = 0.85
"""Share of the memory bandwidth at which a cache is written: BabelStream reaches 0.83 to 0.89 on A100 to H200
(Azure/AI-benchmarking-guide @8fd0c6e1bd0f)."""

QUERY_GRADIENT = 12
"""Bytes of an element of the queries' gradient, which the backward pass accumulates in fp32: set to zero, read,
written (FlashAttention-2's dq_accum)."""

CHOSEN_SIGMA = {"": 0.0, "keys": 0.3, "blocks": 0.47}
"""Uncertainty of kernels over keys or blocks of keys that were chosen, and of the scores that choose them: priced as
those over a window and as fused attention of as many FLOPs, which no measurement of training checks. Two kernels of the
same attention to blocks differ 1.6 times in the mean of published cases (Flash Sparse Attention, arXiv 2508.18224,
abstract): ln 1.6."""

LIMITER_DELAY = 5e-3
"""Time for which a kernel may draw more than the power limit before the clock drops [s]. Set by hand; other times fit
no better."""


@dataclass(frozen=True, slots=True)
class AttentionCostModel:
    """Fused attention: coefficients of `seconds`."""

    softmax_cost: float = coefficient("softmax of a score, in exponentials of a special function unit", 0.5, 2.0, 1.5)
    softmax_overlap: float = coefficient("overlap of GEMMs and softmax: 1 for their sum", 1.0, 8.0, 3.0)
    wave_rounding: float = coefficient("share of the last wave of equal blocks that is rounded up", 0.0, 1.0, 0.75)
    block_overhead: float = coefficient("start and end of a block [s]", 1e-8, 1e-5, 2e-6)
    idle_gpu_time: float = coefficient("time of a block on an idle GPU against a busy one", 0.5, 1.1, 0.8)
    memory_share: float = coefficient("share of the memory bandwidth at which operands move", 0.3, 1.0, 0.95)
    l2_resident: float = coefficient("bytes found again in the L2, in sizes of the L2", 0.1, 5.0, 0.15)
    cache_write_bytes: float = coefficient("least cost of a position written to a cache [bytes]", 10.0, 2e4, 2e3)
    power_limit_slowdown: float = coefficient(
        "slowdown of kernels that run longer than the power limiter's delay", 0.0, 0.6, 0.15
    )
    backward_rate: float = coefficient("rate of the backward pass's GEMMs against the forward pass", 0.4, 1.3, 0.77)
    backward_tail: float = coefficient(
        "longest blocks of 128 rows that are waited for at the end of the backward pass", 0.0, 1.5, 0.2, neutral=0.0
    )
    peak_share: float = coefficient("share of the peak that the GEMMs reach", 0.1, 1.1, 0.65, "library")
    exposed_traffic: float = coefficient("share of the operands' traffic that is not hidden", 0.0, 5.0, 0.5, "library")
    cache_writes: float = coefficient("times that keys and values move to a cache", 0.0, 6.0, 0.5, "library")
    launch: float = coefficient("launch and overhead that do not depend on the work [s]", 2e-6, 4e-5, 1e-5, "library")
    sigma: float = 0.0
    sigma_short: float = 0.0


def without_cache_writes(model: AttentionCostModel) -> AttentionCostModel:
    """Returns the cost model of the same kernels in training, where no cache is written."""
    return replace(model, cache_writes=0.0)


def query_rows(gpu: GPU, width: Any) -> Any:
    """Queries of a block, by the width of heads.

    Blackwell: two tiles of 128, a single tile where the accumulators of wide heads fill the tensor memory. Hopper: two
    groups of 64, three up to head width 96 (FlashAttention-3). Before: 128, and 64 where wide heads fill the shared
    memory (FA2DetermineCtaTileQ of FlashInfer).
    """
    if gpu.architecture == "blackwell":
        return TILE + TILE * (width <= 128)
    if gpu.architecture == "hopper":
        return TILE + 64 * (width <= 96)
    return TILE - 64 * (width > 128)


def seconds(work: Attention, gpu: GPU, model: AttentionCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of a kernel or of many (arrays in `work`), and the part of it that is launch.

    speed: rate of GEMMs and softmax against the calibrated rate (clock, or older kernels).
    """
    score = _score_seconds(work, gpu, model) / speed
    most = query_rows(gpu, maximum(work.qk_dim, work.v_dim)) if not work.backward else TILE
    split = ceil_div(work.q, most)
    queries = minimum(ceil_div(ceil_div(work.q, 64), split) * 64, most)  # whole groups of 64, evenly on the blocks
    masked = work.share < 1.0
    # A sliding window that is full at every position covers kv (1 - sqrt(1 - 2 share)) keys; a causal mask ends at kv.
    longest = work.kv * (1 - maximum(1 - 2 * work.share, 0.0) ** 0.5)
    keys = minimum(work.kv * work.share + masked * queries / 2, longest)
    block, longest_block = queries * keys * score + model.block_overhead, queries * longest * score
    blocks = work.batch * work.heads * split / gpu.multiprocessors
    equal = maximum(2 * keys / longest - 1, 0.0)
    waves = blocks + model.wave_rounding * equal * (ceil_div(blocks, 1) - blocks)
    tail = model.backward_tail * longest_block if work.backward else queries * (longest - keys) * score
    compute = maximum(waves * block + tail, model.idle_gpu_time * longest_block + model.block_overhead)
    compute *= 1 + model.power_limit_slowdown * compute / (compute + LIMITER_DELAY)

    moved, written, cached = _traffic_bytes(work, model)
    missed = 1 / (1 + (model.l2_resident * gpu.l2 / (moved + written)) ** 2) / gpu.memory_bandwidth
    operands = moved / model.memory_share * missed
    total = combine(compute, operands) + model.exposed_traffic * operands + cached * missed + model.launch
    return total, model.launch


def _score_seconds(work: Attention, gpu: GPU, model: AttentionCostModel) -> Any:
    """Computes the seconds of a multiprocessor for a score: its share of the GEMMs, and its exponential."""
    rate = model.peak_share * peak(gpu, work.dtype) / gpu.multiprocessors
    if work.backward:
        columns = 3 * _tile_columns(work.qk_dim) + 2 * _tile_columns(work.v_dim)
        rate *= model.backward_rate
    else:
        columns = ceil_div(work.v_dim, 256) * work.qk_dim + work.v_dim
    gemms, softmax = 2 * columns / rate, model.softmax_cost / (EXPONENTIALS * (gpu.clock or CLOCK))
    return (gemms**model.softmax_overlap + softmax**model.softmax_overlap) ** (1 / model.softmax_overlap)


def _traffic_bytes(work: Attention, model: AttentionCostModel) -> tuple[Any, Any, Any]:
    """Bytes of the operands and results, of the cache that is written, and of the latter at the rate of a stream."""
    element, both = BYTES[work.dtype], work.qk_dim + work.v_dim
    rows, keys_and_values = work.batch * work.q * work.heads, work.batch * work.kv * work.kv_heads * both
    moved = (rows * both + keys_and_values) * element
    if work.backward:
        return 2 * moved + rows * work.qk_dim * QUERY_GRADIENT, 0.0, 0.0
    if not model.cache_writes:
        return moved, 0.0, 0.0
    written = keys_and_values * (2 + element)
    return moved, written, model.cache_writes * (written + model.cache_write_bytes * work.batch * work.kv) / STREAM


def _tile_columns(width: Any) -> Any:
    """Columns that the backward pass computes: beyond 128 in whole tiles."""
    return width + (width > TILE) * (ceil_div(width, TILE) * TILE - width)


def price(work: Attention, gpu: GPU, model: AttentionCostModel, speed: float = 1.0) -> Estimate:
    """Estimates the time of a kernel. speed: its rate against the calibrated rate (clock, or older kernels)."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, model, speed)
    bound = lower_bound(gpu, work.flops, work.dtype, work.bytes)
    sigma = math.hypot(estimate_sigma(model, taken, launch), CHOSEN_SIGMA[work.chosen])
    return Estimate(max(taken, bound), sigma)
