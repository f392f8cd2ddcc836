"""Fused attention.

    compute = waves(blocks) x multiprocessors / blocks x FLOPs / peak / (rate x s / (s + keys) x d / (d + head))
    time    = cube root of (compute^3 + (bytes / (0.85 HBM))^3) + launch

s = kv x share: keys that a query meets on average. Each block of queries walks over its keys and pays for begin, end
and diagonal as if there were `keys` more of them. d: the mean of the two head widths. The exponentials of the scores
do not grow with d and take as long as the products of `head` more columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from hardware.gpu import GPU
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.roofline import least, peak, together, waves
from simulator.ops import Attention

QUERIES = 128
"""Queries that one multiprocessor takes at a time: FlashAttention's block at head width 128 (arXiv 2407.08608)."""

STREAM = 0.85
"""Share of the memory's nominal speed that operands are read at: BabelStream reaches 0.83 to 0.89 on A100 to H200
(Azure/AI-benchmarking-guide @8fd0c6e1bd0f)."""


@dataclass(frozen=True, slots=True)
class AttentionLaw:
    """Coefficients of `price`; calibration/*.yaml says what each one means."""

    rate: float
    keys: float
    head: float
    rounding: float
    backward: float
    launch: float
    spread: float


def price(work: Attention, gpu: GPU, law: AttentionLaw, speed: float = 1.0) -> Estimate:
    """`speed`: rate of the kernel against the calibrated one (clock, or an older generation of kernels)."""
    flops = work.flops
    if not flops:
        return NOTHING
    width, met = (work.qk_dim + work.v_dim) / 2, work.kv * work.share
    rate = law.rate * speed * (law.backward if work.backward else 1.0)
    rate *= met / (met + law.keys) * width / (width + law.head)
    blocks = work.batch * work.heads * -(-work.q // QUERIES)
    part = waves(blocks, gpu.multiprocessors, law.rounding) * gpu.multiprocessors / blocks
    memory = work.bytes / (STREAM * gpu.memory_bandwidth)
    seconds = together(part * flops / (rate * peak(gpu, work.dtype)), memory) + law.launch
    return Estimate(max(seconds, least(gpu, flops, work.dtype, work.bytes)), law.spread)
