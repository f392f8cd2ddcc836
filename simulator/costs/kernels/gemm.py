"""Matrix products.

    compute = waves(tiles) x one tile,   one tile = 2 tm tn (k + depth) / (rate x peak / multiprocessors) x narrowness
    time    = cube root of (compute^3 + (bytes / (memory x HBM))^3) + launch

over the best of some tile shapes tm x tn. A tile pays for filling and draining its pipeline as if k were longer by
`depth`; narrow tiles read more per FLOP and so are slower than the widest: narrowness = (1 + edge (1/tm + 1/tn)) /
(the same of 256 x 128). FLOPs of a tile that hangs over the edge of the matrix are paid as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.gpu import GPU
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.roofline import least, peak, together, waves
from simulator.ops import BYTES, Gemm

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
"""Output tiles (rows, columns) that one multiprocessor computes at a time; the first is the widest."""


@dataclass(frozen=True, slots=True)
class GemmLaw:
    """Coefficients of `price`; calibration/*.yaml says what each one means."""

    rate: float
    rate_fp8: float
    depth: float
    edge: float
    rounding: float
    memory: float
    weight_gradient: float
    launch: float
    spread: float


def price(work: Gemm, gpu: GPU, law: GemmLaw, speed: float = 1.0) -> Estimate:
    """`speed`: rate of the multiprocessors against the calibrated one."""
    m, n, batch, flops = work.m, work.n, work.batch, work.flops
    if not flops:
        return NOTHING
    rate = law.rate_fp8 if BYTES[work.dtype] == 1 else law.rate
    if work.layout == "nt":
        rate *= law.weight_gradient
    each = (work.k + law.depth) * 2 * gpu.multiprocessors / (rate * speed * peak(gpu, work.dtype))
    wide = 1 + law.edge * (1 / TILES[0][0] + 1 / TILES[0][1])
    compute = min(
        waves(-(-m // tm) * -(-n // tn) * batch, gpu.multiprocessors, law.rounding) * (tm * tn + law.edge * (tm + tn))
        for tm, tn in TILES
    )
    memory = work.bytes / (law.memory * gpu.memory_bandwidth)
    seconds = together(compute * each / wide, memory) + law.launch
    return Estimate(max(seconds, least(gpu, flops, work.dtype, work.bytes)), law.spread)
