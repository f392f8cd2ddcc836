"""Fused attention: blocks of queries that walk over keys on the multiprocessors, and the traffic they cannot hide.

    score    = ((2 columns / (rate x peak / multiprocessors))^p + (softmax / (16 clock))^p)^(1/p)
    walk     = queries x keys x score + block
    compute  = max(waves x walk + (longest walk - walk), alone x longest walk) x (1 + sag t / (t + 5 ms))
    operands = bytes / (memory x HBM) x missed
    cache    = copies x (bytes of keys and values, twice, + grain x positions) / (0.85 HBM) x missed
    seconds  = (compute^3 + operands^3)^(1/3) + exposed x operands + cache + launch

- A block of queries stays on a multiprocessor and walks over the keys it meets (FlashAttention-2, arXiv 2307.08691,
  section 3.2). It computes whole tiles, so a mask's edge costs half a block more; `block` is what each one needs
  besides to fill and drain its pipeline.
- A score costs 2 (qk + v) FLOPs and an exponential. Hopper's tensor cores make 512 times more FLOPs than its special
  function units make exponentials (FlashAttention-3, arXiv 2407.08608, section 3.1): softmax takes long where heads are
  narrow, tensor cores fast, or numbers of 8 bits. Both run at the same time, the better the larger p is.
- The backward pass has five products instead of two, three of qk and two of v columns, and the same exponentials.
- Accumulators of values take 256 columns at most; wider heads compute their scores once for each 256.
- Blocks of equal length run in waves, of which the last is partly empty. With a causal mask the last blocks forward are
  among the longest, and while they walk the other multiprocessors idle (list scheduling: the mean and one job more);
  backward they come first. No kernel is faster than its longest walk, which a GPU with little else to do runs at a
  higher clock (`alone`).
- Kernels that outlast the power limiter's delay slow down (`sag`).
- Loads of the first tiles and stores of the last ones hide behind other blocks' products or do not (`exposed`). What
  fits into the L2 is found there when a benchmark repeats (`resident`); in a step it is taken to be the same.
- Serving programs write keys and values into a cache before they attend (`copies`); training does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hardware.gpu import GPU
from simulator.costs.coefficients import ceil, coefficient, higher, lower, spread
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.roofline import least, peak, together
from simulator.ir.ops import BYTES, Attention

EXPONENTIALS = 16
"""Per clock and multiprocessor, by its special function units (FlashAttention-3, arXiv 2407.08608, section 3.1:
3.9 T/s on an H100)."""

CLOCK = 1.9e9
"""Of a GPU that does not tell it [Hz]."""

TILE = 128
"""Queries of a block: FlashAttention's tile at head width 128."""

STREAM = 0.85
"""Share of the memory's nominal speed that operands are read at: BabelStream reaches 0.83 to 0.89 on A100 to H200
(Azure/AI-benchmarking-guide @8fd0c6e1bd0f)."""

SUMS = 12
"""Bytes of each element of the queries' gradient, which the backward pass sums up in fp32: set to zero, read, written
(FlashAttention-2's dq_accum)."""

LIMITER = 5e-3
"""How long a kernel may draw more than the power limit before the clock gives way [s]. Set by hand; other times fit no
better."""


@dataclass(frozen=True, slots=True)
class AttentionLaw:
    """Coefficients of `seconds`."""

    softmax: float = coefficient("time of a score's softmax, in exponentials of a special function unit", 0.5, 2.0, 1.5)
    overlap: float = coefficient("how well products and softmax run at the same time: 1 not at all", 1.0, 8.0, 3.0)
    rounding: float = coefficient("share of the last wave of equal blocks that is rounded up", 0.0, 1.0, 0.75)
    block: float = coefficient("begin and end of a block [s]", 1e-8, 1e-5, 2e-6)
    alone: float = coefficient("time of a block on an idle GPU against a busy one", 0.5, 1.1, 0.8)
    memory: float = coefficient("share of the memory's speed at which operands travel", 0.3, 1.0, 0.95)
    resident: float = coefficient("bytes found again in the L2, in its sizes", 0.1, 5.0, 0.15)
    grain: float = coefficient("bytes that a position written to a cache costs at least", 10.0, 2e4, 2e3)
    sag: float = coefficient("how much longer kernels take that outlast the power limiter's delay", 0.0, 0.6, 0.15)
    backward: float = coefficient("rate of the products of the backward pass against the forward one", 0.4, 1.3, 0.77)
    rate: float = coefficient("share of the peak that the products reach", 0.1, 1.1, 0.65, "library")
    exposed: float = coefficient("part of the operands' travel that no products hide", 0.0, 5.0, 0.5, "library")
    copies: float = coefficient("times that keys and values travel to a cache besides", 0.0, 6.0, 0.5, "library")
    launch: float = coefficient("launch and what else does not depend on the work [s]", 2e-6, 4e-5, 1e-5, "library")
    spread: float = 0.0
    spread_short: float = 0.0


def training(law: AttentionLaw) -> AttentionLaw:
    """The law of the same kernels where no cache is written."""
    return replace(law, copies=0.0)


def rows(gpu: GPU, width: Any) -> Any:
    """Queries of a block.

    Blackwell: two tiles of 128, one where the accumulators of wide heads fill the tensor memory. Hopper: two groups of
    64, three up to head width 96 (FlashAttention-3). Before: 128, and 64 where wide heads fill the shared memory
    (FA2DetermineCtaTileQ of FlashInfer).
    """
    if gpu.architecture == "blackwell":
        return TILE + TILE * (width <= 128)
    if gpu.architecture == "hopper":
        return TILE + 64 * (width <= 96)
    return TILE - 64 * (width > 128)


def seconds(work: Attention, gpu: GPU, law: AttentionLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a kernel or of many (arrays in `work`), and the part of them that is launch.

    speed: rate of the products and the softmax against the calibrated one (clock, or older kernels).
    """
    one = law.rate * peak(gpu, work.dtype) / gpu.multiprocessors
    if work.backward:
        columns = 3 * _tiles(work.qk_dim) + 2 * _tiles(work.v_dim)
        one *= law.backward
    else:
        columns = ceil(work.v_dim, 256) * work.qk_dim + work.v_dim
    products, softmax = 2 * columns / one, law.softmax / (EXPONENTIALS * (gpu.clock or CLOCK))
    score = (products**law.overlap + softmax**law.overlap) ** (1 / law.overlap) / speed

    most = rows(gpu, higher(work.qk_dim, work.v_dim)) if not work.backward else TILE
    split = ceil(work.q, most)
    taken = lower(ceil(ceil(work.q, 64), split) * 64, most)  # whole groups of 64 queries, evenly on the blocks
    masked = work.share < 1.0
    # A window that is met at every position covers kv (1 - sqrt(1 - 2 share)) keys; a causal mask ends at all of them.
    longest = work.kv * (1 - higher(1 - 2 * work.share, 0.0) ** 0.5)
    keys = lower(work.kv * work.share + masked * taken / 2, longest)
    walk, end = taken * keys * score + law.block, taken * longest * score
    blocks = work.batch * work.heads * split / gpu.multiprocessors
    equal = higher(2 * keys / longest - 1, 0.0)
    waves = blocks + law.rounding * equal * (ceil(blocks, 1) - blocks)
    last = 0.0 if work.backward else taken * (longest - keys) * score  # backward, the longest blocks come first
    compute = higher(waves * walk + last, law.alone * end + law.block)
    compute *= 1 + law.sag * compute / (compute + LIMITER)

    element, both = BYTES[work.dtype], work.qk_dim + work.v_dim
    asked, kept = work.batch * work.q * work.heads, work.batch * work.kv * work.kv_heads * both
    moved, wrote, cached = (asked * both + kept) * element, 0.0, 0.0
    if work.backward:
        moved = 2 * moved + asked * work.qk_dim * SUMS
    elif law.copies:
        wrote = kept * (2 + element)
        cached = law.copies * (wrote + law.grain * work.batch * work.kv) / STREAM
    missed = 1 / (1 + (law.resident * gpu.l2 / (moved + wrote)) ** 2) / gpu.memory_bandwidth
    operands = moved / law.memory * missed
    return together(compute, operands) + law.exposed * operands + cached * missed + law.launch, law.launch


def _tiles(width: Any) -> Any:
    """Columns that the backward pass computes: beyond 128 in tiles of that many."""
    return width + (width > TILE) * (ceil(width, TILE) * TILE - width)


def price(work: Attention, gpu: GPU, law: AttentionLaw, speed: float = 1.0) -> Estimate:
    """`speed`: rate of the kernel against the calibrated one (clock, or an older generation of kernels)."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, law, speed)
    return Estimate(max(taken, least(gpu, work.flops, work.dtype, work.bytes)), spread(law, taken, launch))
