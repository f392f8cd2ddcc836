"""Products of many groups in one call: the experts of a rank, with as many rows each as tokens chose them.

    seconds = root(compute^2 + traffic^2) + launch + each groups + longest (rows of the largest group)
    compute = waves (tm tn + edge (tm + tn)) k 2 multiprocessors / (rate peak (1 + edge (1/256 + 1/128)))
    waves   = exact + PARTLY (up(exact) - exact),   exact = sum over groups of tiles / multiprocessors
    traffic = parameters / (memory HBM) + activations / (moved clock multiprocessors)

over the best of some tiles tm x tn.

- The tiles of all groups are dealt to the multiprocessors in one go (persistent kernels: CUTLASS grouped GEMM,
  DeepGEMM), so waves count all tiles, but no tile holds rows of two groups: small and uneven groups pay for padding.
- A tile loads its operands through its rim, so narrow tiles take longer for their FLOPs (`edge`).
- Parameters of every group that has a row are read once, so few rows per group leave a kernel bound by memory; a
  weight gradient (layout nt) writes as much instead, and reads it before when it accumulates.
- Rows of inputs and results (16 bits before they are quantised) are gathered, padded, scattered or reduced with small
  loads: as many bytes per clock and multiprocessor (`moved`) on every GPU, as in memory.py. H100 and H200, which differ
  in their memory alone, take the same time for it.
- Where both limits are alike, neither hides all of the other: they meet as sides of a right angle. Exponents from 1.4
  to 2.7 and a depth of the pipeline (more k) fit no better.
- Programs that launch a kernel for each group (Transformer Engine on several streams) pay for `each`; kernels beside
  the products that walk through the rows of a group one after another (masked layouts) pay for `longest`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hardware.gpu import GPU
from simulator.costs.coefficients import ceil, coefficient, higher, lower, spread
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.memory import CLOCK
from simulator.costs.kernels.roofline import least, peak, together, waves
from simulator.ir.ops import BYTES, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 256), (64, 128), (32, 128), (16, 128))
"""Output tiles (rows, columns) that one multiprocessor computes at a time; the first is the widest."""
ROWS = tuple({rows: None for rows, _ in TILES})
COLUMNS = tuple({columns: None for _, columns in TILES})

PARTLY = 0.3
"""Share of the last, partly filled wave that is paid in full; from 0.1 to 0.5 fits differ by less than their errors."""


@dataclass(frozen=True, slots=True)
class GroupedLaw:
    """Coefficients of `seconds`."""

    memory: float = coefficient("share of the memory's bandwidth at which operands and results move", 0.5, 1.0, 0.85)
    edge: float = coefficient("what the rim of a tile costs [elements per row and column]", 0.1, 512.0, 30.0)
    weight_gradient: float = coefficient("rate of weight gradients against the other products", 0.3, 1.2, 0.9)
    launch: float = coefficient("what a call takes besides its groups [s]", 1e-7, 1e-4, 6e-6)
    rate: float = coefficient("share of the peak that the widest tile reaches", 0.05, 1.0, 0.8, "library")
    moved: float = coefficient("rows moved [bytes per clock and multiprocessor]", 0.2, 200.0, 7.0, "library")
    each: float = coefficient("what a group takes besides its work [s]", 1e-9, 2e-5, 1e-7, "library")
    longest: float = coefficient("what a row of the largest group takes besides [s]", 1e-12, 1e-7, 1e-9, "library")
    spread: float = 0.0
    spread_short: float = 0.0


def seconds(work: Gemm, gpu: GPU, law: GroupedLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a product or of many (arrays in `work`), and the part of them that is launch."""
    m, n, k, gradient = work.m, work.n, work.k, work.layout == "nt"
    groups = work.groups or ((work.batch, k if gradient else m),)
    down = {rows: work.batch * ceil(m, rows) if gradient else _tiles(groups, rows) for rows in ROWS}
    across = {columns: ceil(n, columns) for columns in COLUMNS}
    best: Any = math.inf
    for rows, columns in TILES:
        filled = waves(down[rows] * across[columns], gpu.multiprocessors, PARTLY)
        best = lower(best, filled * (rows * columns + law.edge * (rows + columns)))
    wide = 1 + law.edge * (1 / TILES[0][0] + 1 / TILES[0][1])
    rate = law.rate * (law.weight_gradient if gradient else 1.0) * wide * speed * peak(gpu, work.dtype)
    compute = best * k * 2 * gpu.multiprocessors / rate

    operand, result = BYTES[work.dtype], BYTES[work.out_dtype] * (2 if work.accumulate else 1)
    parameters = m * n * result if gradient else n * k * operand
    activations = (k * (m + n) if gradient else m * (k + n)) * BYTES["bf16"]
    clocks = gpu.multiprocessors * (gpu.clock or CLOCK)
    traffic = work.batch * (parameters / (law.memory * gpu.memory_bandwidth) + activations / (law.moved * clocks))
    launch = law.launch + law.each * work.batch
    return together(compute, traffic, 2.0) + law.longest * _largest(groups) + launch, launch


def price(work: Gemm, gpu: GPU, law: GroupedLaw, speed: float = 1.0) -> Estimate:
    """`speed`: rate of the multiprocessors against the calibrated one."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, law, speed)
    return Estimate(max(taken, least(gpu, work.flops, work.dtype, work.bytes)), spread(law, taken, launch))


# Groups of many products are arrays of sizes x products, or of products alone where all groups of one are alike.


def _tiles(groups: tuple[tuple[Any, Any], ...], rows: int) -> Any:
    """How many tiles of `rows` cover the rows of all groups."""
    total: Any = 0
    for count, size in groups:
        some: Any = count * ceil(size, rows)
        total = total + (some.sum(axis=0) if isinstance(some, np.ndarray) and some.ndim == 2 else some)
    return total


def _largest(groups: tuple[tuple[Any, Any], ...]) -> Any:
    """Rows of the largest group."""
    found: Any = 0
    for _, size in groups:
        found = higher(found, size.max(axis=0) if isinstance(size, np.ndarray) and size.ndim == 2 else size)
    return found
