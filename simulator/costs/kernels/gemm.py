"""Matrix products.

    seconds = launch + (compute^s + moved^s)^(1/s),                                                s: `sharpness`
    compute = busy + (1 / sustained - 1) max(0, busy - settle)
    busy    = min over tiles and splits of   waves x (k / split + depth) x step + split x peer + fixup
    step    = max(2 (tm tn + area) / rate of a multiprocessor, operands of a step at the speed one can pull)
    moved   = (activation + weight) read from the L2 or the memory + result written

- The output is cut into tiles of tm x tn, one to a multiprocessor at a time; FLOPs of a tile that hangs over the edge
  are paid as well. Tiles come in waves, and a last wave that is not full costs up to a whole one (NVIDIA, "Matrix
  Multiplication Background User's Guide", tile and wave quantisation). `rounding` says how much of it: kernels of many
  shapes leave less.
- Filling and draining its pipeline costs a tile as much as `depth` more of k, and a step of its loop as much as `area`
  more elements of the tile: small tiles have a lower rate, also for their operands come through the L2 more often.
- Where there are fewer tiles than multiprocessors, k is split among several, which add up their partial sums in turn
  (Osama et al., "Stream-K", PPoPP 2023, arXiv 2301.03598: time = a + b + c iterations per block + d peers). The best
  split weighs the loop against the peers: split^2 = k step / peer.
- Large products meet the power limit: what lasts longer than `settle` runs at `sustained` of the rate before.
- Operands that lie in the L2 are read at its speed. What was used before this kernel is still there as long as all that
  passes in between fits: `between` products like this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware.gpu import GPU
from simulator.costs.coefficients import coefficient, spread
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.roofline import least, peak, together, waves
from simulator.ir.ops import BYTES, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (64, 64), (64, 32))
"""Output tiles (rows, columns); `rate` is that of the first. Blackwell's pairs of multiprocessors take two of these."""
WIDE = TILES[0][0] * TILES[0][1]

PULL = 5.0
"""A multiprocessor's speed of reading, in shares of the memory's for each: few of them can use all of it. Set by hand:
a fitted one moves the error of nine of ten rows by 0.2 points at most."""
PARTIAL = 8
"""Bytes that one element of a partial sum is written and read with."""
WEIGHTS = 6.0
"""Products of the same size between two uses of a weight, at least: benchmarks rotate weights through the L2, six sets
of them in the tables (ai-dynamo/aiconfigurator @095f58a51c4c). 3, 12 and 40 fit no better."""
STEEP = 6
"""How sharply operands leave the L2 when all that passes outgrows it: nearly at once, as in a cyclic walk. Set by hand;
2 and 3 fit worse."""


@dataclass(frozen=True, slots=True)
class GemmLaw:
    """Coefficients of `seconds`, as libraries of 16-bit products differ in them."""

    rate: float = coefficient(
        "share of the peak that a full wave of the widest tiles reaches", 0.2, 1.0, 0.8, "library"
    )
    launch: float = coefficient(
        "from the end of a kernel to the first useful cycle of the next [s]", 1e-7, 2e-5, 2.5e-6
    )
    settle: float = coefficient("what a product may take before the power limit tells [s]", 1e-4, 1e-1, 1e-3, "library")
    sustained: float = coefficient("rate at the power limit against the rate before", 0.3, 1.0, 0.85, "library")
    between: float = coefficient("products like it between two uses of an activation", 0.5, 20.0, 3.0, "library")
    depth: float = coefficient("filling and draining a tile's pipeline, as more of k [elements]", 1.0, 500.0, 60.0)
    area: float = coefficient("what a step of a tile costs besides, as more of its elements", 0.0, 16000.0, 2000.0)
    rounding: float = coefficient("share of the last, partly filled wave that is paid in full", 0.0, 1.0, 0.5)
    memory: float = coefficient("share of the memory's bandwidth that operands are read at", 0.5, 1.0, 0.85)
    write: float = coefficient("the same for writing the result", 0.3, 4.0, 0.7)
    cache: float = coefficient("reading from the L2, in shares of the memory's bandwidth", 1.0, 10.0, 2.0)
    sharpness: float = coefficient("how little compute and traffic hinder each other: 1 they add up", 1.0, 8.0, 2.5)
    fixup: float = coefficient("what splitting k costs at all [s]", 1e-7, 1e-5, 3e-6)
    peer: float = coefficient("adding up partial sums, in shares of the memory's bandwidth", 0.5, 50.0, 5.0)
    nn: float = coefficient("rate of the gradient of the input against the forward product", 0.8, 1.1, 0.98)
    nt: float = coefficient("rate of the gradient of the weight against the forward product", 0.8, 1.1, 0.96)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class Fp8GemmLaw(GemmLaw):
    """The same law of 8-bit products, whose libraries differ in other things.

    In 16 bits all of them call cuBLAS, and what they keep in the L2 tells them apart. In 8 bits they bring kernels of
    their own, which start and write their results in different ways.
    """

    launch: float = coefficient(
        "from the end of a kernel to the first useful cycle of the next [s]", 1e-7, 2e-5, 2.5e-6, "library"
    )
    settle: float = coefficient("what a product may take before the power limit tells [s]", 1e-4, 1e-1, 1e-3)
    between: float = coefficient("products like it between two uses of an activation", 0.5, 20.0, 3.0)
    write: float = coefficient("share of the memory's bandwidth that results are written at", 0.3, 4.0, 0.7, "library")


def seconds(work: Gemm, gpu: GPU, law: GemmLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a product or of many (arrays in `work`), and the part that is launch.

    speed: rate of the multiprocessors against the calibrated one.
    """
    busy = _busy(work, gpu, law, speed)
    arrays = isinstance(busy, np.ndarray)
    late = np.maximum(busy - law.settle, 0.0) if arrays else max(busy - law.settle, 0.0)
    compute = busy + (1 / law.sustained - 1) * late
    return together(compute, _moved(work, gpu, law), law.sharpness) + law.launch, law.launch


def price(work: Gemm, gpu: GPU, law: GemmLaw, speed: float = 1.0) -> Estimate:
    """Of one product."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, law, speed)
    return Estimate(max(taken, least(gpu, work.flops, work.dtype, work.bytes)), spread(law, taken, launch))


def _busy(work: Gemm, gpu: GPU, law: GemmLaw, speed: float) -> Any:
    """Seconds of the tensor cores, by the best tile."""
    m, n, k, batch = work.m, work.n, work.k, work.batch
    arrays = any(isinstance(one, np.ndarray) for one in (m, n, k, batch))
    low: Any = np.minimum if arrays else min
    high: Any = np.maximum if arrays else max
    number = gpu.multiprocessors
    relative = {"nn": law.nn, "nt": law.nt}.get(work.layout, 1.0)
    element = 2 * WIDE / (WIDE + law.area) * number / (law.rate * relative * speed * peak(gpu, work.dtype))
    pull = BYTES[work.dtype] / PULL * number / gpu.memory_bandwidth
    partial = PARTIAL / law.peer * number / gpu.memory_bandwidth
    best: Any = None
    for tm, tn in TILES:
        own_m, own_n = low(m, tm), low(n, tn)
        step = high((tm * tn + law.area) * element, (own_m + own_n) * pull)
        tiles = -(-m // tm) * -(-n // tn) * batch
        whole = waves(high(tiles, number), number, law.rounding) * (k + law.depth) * step
        peer = own_m * own_n * partial
        split = high(low((k * step / peer) ** 0.5, number / tiles), 2.0)
        parts = waves(high(tiles * split, number), number, law.rounding) * (k / split + law.depth) * step
        fastest = low(whole, parts + split * peer + law.fixup)
        best = fastest if best is None else low(best, fastest)
    return best


def _moved(work: Gemm, gpu: GPU, law: GemmLaw) -> Any:
    """Seconds of the traffic."""
    size, out = BYTES[work.dtype], BYTES[work.out_dtype] * (2 if work.accumulate else 1)
    activation, weight = work.batch * work.m * work.k * size, work.batch * work.n * work.k * size
    result = work.batch * work.m * work.n * out
    passing = (activation + weight + result) / gpu.l2
    warm = 1 / (1 + (law.between * passing) ** STEEP)
    weights = 1 / (1 + (max(law.between, WEIGHTS) * passing) ** STEEP)
    slow, fast, write = 1 / law.memory, 1 / law.cache, 1 / law.write
    read = activation * (slow + (fast - slow) * warm) + weight * (slow + (fast - slow) * weights)
    written = result * (max(write, slow) + (write - max(write, slow)) * warm)
    return (read + written) / gpu.memory_bandwidth
