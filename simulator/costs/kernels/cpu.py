"""Kernels on one core of a processor, as torch runs them there: what stands in for a GPU where there is none.

    product    launch + ((padded FLOPs / (rate peak))^2 + (operands / memory)^2)^(1/2)
               padded FLOPs = 2 batch (m + edge) (n + edge) (k + depth)
    attention  launch + (FLOPs / (rate peak) + scores x softmax / clock) / (1 or backward)
    others     launch + max(bytes / (kind's rate x clock), bytes found / (cache x clock) + rest / memory)

- A product is computed in blocks that are packed to lie in the caches: what does not fill a block, and filling it, cost
  as much as more rows, columns and depth (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
  ACM TOMS 34, 2008).
- A core makes exponentials by polynomials, between the products of attention and not beside them.
- Everything else reads its operands, at the cache's speed if they fit, and computes at so many bytes a clock: norms sum
  up first, activations have transcendental functions, gathers jump.
- Nothing is asynchronous: `launch` is the call into torch, its checks, allocation, and the node of its graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hardware.gpu import GPU
from simulator.costs.coefficients import coefficient, higher, spread
from simulator.costs.estimate import NOTHING, Estimate
from simulator.costs.kernels.roofline import least, peak, together
from simulator.ir.ops import Attention, Gemm, Memory

CLOCK = 3e9
"""Of a core that does not tell it [Hz]."""


@dataclass(frozen=True, slots=True)
class CoreGemmLaw:
    """Coefficients of `gemm_seconds`."""

    rate: float = coefficient("share of the peak that large products reach", 0.05, 1.0, 0.8, "library")
    launch: float = coefficient("calling a product [s]", 1e-6, 2e-4, 8e-6, "library")
    edge: float = coefficient("packing and unfilled blocks, as more rows and columns", 0.0, 100.0, 4.0)
    depth: float = coefficient("filling a block, as more of k", 0.0, 200.0, 8.0)
    memory: float = coefficient("share of the memory's speed at which operands travel", 0.05, 4.0, 1.0)
    nn: float = coefficient("rate of the gradient of the input against the forward product", 0.6, 1.4, 1.0)
    nt: float = coefficient("rate of the gradient of the weight against the forward product", 0.6, 1.4, 1.0)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class CoreAttentionLaw:
    """Coefficients of `attention_seconds`."""

    rate: float = coefficient("share of the peak that the products reach", 0.05, 1.0, 0.6, "library")
    launch: float = coefficient("calling attention [s]", 1e-6, 5e-4, 3e-5, "library")
    softmax: float = coefficient("a score's softmax [clocks]", 0.05, 50.0, 1.5)
    backward: float = coefficient("rate of the backward pass against the forward one", 0.2, 2.0, 0.9)
    spread: float = 0.0
    spread_short: float = 0.0


@dataclass(frozen=True, slots=True)
class CoreMemoryLaw:
    """Coefficients of `memory_seconds`. Rates are in bytes a clock."""

    launch: float = coefficient("calling such a kernel [s]", 1e-6, 2e-4, 1e-5, "library")
    cache: float = coefficient("streams from the last-level cache", 0.5, 60.0, 10.0)
    holds: float = coefficient("share of the last-level cache that is found again", 0.05, 2.0, 0.5)
    norm: float = coefficient("layer norms", 0.2, 60.0, 6.0)
    rms: float = coefficient("RMS norms, of several kernels", 0.2, 60.0, 4.0)
    activation: float = coefficient("gated activations", 0.1, 60.0, 2.0)
    gelu: float = coefficient("plain activations", 0.1, 60.0, 1.0)
    rope: float = coefficient("rotary embeddings, with what joins heads in the backward pass", 0.1, 60.0, 3.0)
    loss: float = coefficient("softmax and cross-entropy", 0.1, 60.0, 4.0)
    gather: float = coefficient("gathers and scatters of rows", 0.1, 60.0, 4.0)
    adam: float = coefficient("the optimizer", 0.1, 60.0, 4.0)
    backward: float = coefficient("rate of backward passes against the forward one", 0.1, 4.0, 0.7)
    spread: float = 0.0
    spread_short: float = 0.0


RATE_OF = {
    "norm": "norm", "rms-norm": "rms", "softmax": "loss", "cross-entropy": "loss", "activation": "activation",
    "gelu": "gelu", "rope": "rope", "embedding": "gather", "permute": "gather", "router": "gather", "adam": "adam",
}  # fmt: skip
"""The coefficient of a kind of kernel; others are plain streams."""


SCALED = {("cross-entropy", True)}
"""Passes that scale what the other one made, and nothing else."""


def gemm_seconds(work: Gemm, gpu: GPU, law: CoreGemmLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a product or of many (arrays in `work`), and the part that is launch. Those of experts are called apart."""
    relative = {"nn": law.nn, "nt": law.nt}.get(work.layout, 1.0)
    padded = 2.0 * work.batch * (work.m + law.edge) * (work.n + law.edge) * (work.k + law.depth)
    compute = padded / (law.rate * relative * speed * peak(gpu, work.dtype))
    launch = law.launch * (work.batch if work.groups else 1)
    return together(compute, work.bytes / (law.memory * gpu.memory_bandwidth), 2.0) + launch, launch


def attention_seconds(work: Attention, gpu: GPU, law: CoreAttentionLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a kernel or of many, and the part that is launch."""
    scores = work.batch * work.heads * work.q * work.kv * work.share
    rate = law.backward * speed if work.backward else speed
    busy = work.flops / (law.rate * peak(gpu, work.dtype)) + scores * law.softmax / (gpu.clock or CLOCK)
    return busy / rate + law.launch, law.launch


def memory_seconds(work: Memory, gpu: GPU, law: CoreMemoryLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a kernel or of many, and the part that is launch."""
    nbytes, clock = work.read + work.write, gpu.clock or CLOCK
    found = 1.0 / (1.0 + (nbytes / (law.holds * gpu.l2)) ** 4)
    moved = nbytes * (found / (law.cache * clock) + (1.0 - found) / gpu.memory_bandwidth)
    named = None if (work.what, work.backward) in SCALED else RATE_OF.get(work.what)
    rate = clock * (law.backward if work.backward else 1.0)
    busy = higher(nbytes / (getattr(law, named) * rate), moved) if named else moved
    return busy / speed + law.launch, law.launch


def price_gemm(work: Gemm, gpu: GPU, law: CoreGemmLaw, speed: float = 1.0) -> Estimate:
    """Of one product; the caches of a core may hold all of its operands."""
    if not work.flops:
        return NOTHING
    taken, launch = gemm_seconds(work, gpu, law, speed)
    return Estimate(max(taken, least(gpu, work.flops, work.dtype, 0.0)), spread(law, taken, launch))


def price_attention(work: Attention, gpu: GPU, law: CoreAttentionLaw, speed: float = 1.0) -> Estimate:
    """Of one kernel."""
    if not work.flops:
        return NOTHING
    taken, launch = attention_seconds(work, gpu, law, speed)
    return Estimate(max(taken, least(gpu, work.flops, work.dtype, 0.0)), spread(law, taken, launch))


def price_memory(work: Memory, gpu: GPU, law: CoreMemoryLaw, traffic: float = 1.0) -> Estimate:
    """`traffic`: as of `simulator.costs.kernels.memory.price`."""
    if not work.bytes:
        return NOTHING
    taken, launch = memory_seconds(work, gpu, law, 1.0 / traffic)
    return Estimate(taken, spread(law, taken, launch))
