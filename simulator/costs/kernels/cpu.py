"""Kernels on a CPU core, as torch runs them there: a stand-in for a GPU where there is none.

    GEMM       launch + ((padded FLOPs / (peak_share peak))^2 + (operands / memory_share)^2)^(1/2)
               padded FLOPs = 2 batch (m + edge) (n + edge) (k + pipeline_depth)
    attention  launch + (FLOPs / (peak_share peak) + scores x softmax_cost / clock) / (1 or backward_rate)
    others     launch + max(bytes / (rate of the kind x clock), bytes in cache / (cache_rate clock) + rest / memory)

- A GEMM is computed in blocks that are packed to fit into the caches: blocks that are not full, and filling them, cost
  as much as more rows, columns and depth (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication",
  ACM TOMS 34, 2008).
- A core computes exponentials by polynomials, between the GEMMs of attention and not concurrently with them.
- All other kernels read their operands, at the cache's speed if they fit, and compute at a number of bytes per clock:
  norms reduce first, activations have transcendental functions, gathers jump.
- Nothing is asynchronous: `launch` is the call into torch, its checks, allocation, and the node of its graph.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import coefficient, estimate_sigma, maximum
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.roofline import combine, lower_bound, peak
from meshcast.simulator.ir.ops import Attention, Gemm, Memory

CLOCK = 3e9
"""Clock of a core whose description has none [Hz]."""


@dataclass(frozen=True, slots=True)
class CpuGemmCostModel:
    """GEMM on a core: coefficients of `gemm_seconds`."""

    peak_share: float = coefficient("share of the peak that large GEMMs reach", 0.05, 1.0, 0.8, "library")
    launch: float = coefficient("call of a GEMM [s]", 1e-6, 2e-4, 8e-6, "library")
    edge: float = coefficient("packing and unfilled blocks [rows and columns]", 0.0, 100.0, 4.0)
    pipeline_depth: float = coefficient("filling a block [elements of k]", 0.0, 200.0, 8.0)
    memory_share: float = coefficient("share of the memory bandwidth at which operands move", 0.05, 4.0, 1.0)
    nn_rate: float = coefficient("rate of the input gradient (NN) against the forward GEMM", 0.6, 1.4, 1.0)
    nt_rate: float = coefficient("rate of the weight gradient (NT) against the forward GEMM", 0.6, 1.4, 1.0)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuAttentionCostModel:
    """Attention on a core: coefficients of `attention_seconds`."""

    peak_share: float = coefficient("share of the peak that the GEMMs reach", 0.05, 1.0, 0.6, "library")
    launch: float = coefficient("call of attention [s]", 1e-6, 5e-4, 3e-5, "library")
    softmax_cost: float = coefficient("softmax of a score [clocks]", 0.05, 50.0, 1.5)
    backward_rate: float = coefficient("rate of the backward pass against the forward pass", 0.2, 2.0, 0.9)
    sigma: float = 0.0
    sigma_short: float = 0.0


@dataclass(frozen=True, slots=True)
class CpuMemoryBoundCostModel:
    """Other kernels on a core: coefficients of `memory_seconds`."""

    launch: float = coefficient("call of a kernel [s]", 1e-6, 2e-4, 1e-5, "library")
    cache_rate: float = coefficient("streams from the last-level cache [bytes/clock]", 0.5, 60.0, 10.0)
    cache_capacity: float = coefficient("share of the last-level cache that is found again", 0.05, 2.0, 0.5)
    layer_norm_rate: float = coefficient("layer norms [bytes/clock]", 0.2, 60.0, 6.0)
    rms_norm_rate: float = coefficient("RMS norms, of several kernels [bytes/clock]", 0.2, 60.0, 4.0)
    gated_rate: float = coefficient("gated activations [bytes/clock]", 0.1, 60.0, 2.0)
    gelu_rate: float = coefficient("plain activations [bytes/clock]", 0.1, 60.0, 1.0)
    rope_rate: float = coefficient("rotary embeddings, with joining heads when backward [bytes/clock]", 0.1, 60.0, 3.0)
    loss_rate: float = coefficient("softmax and cross-entropy [bytes/clock]", 0.1, 60.0, 4.0)
    gather_rate: float = coefficient("gathers and scatters of rows [bytes/clock]", 0.1, 60.0, 4.0)
    adam_rate: float = coefficient("the optimizer [bytes/clock]", 0.1, 60.0, 4.0)
    backward_rate: float = coefficient("rate of backward passes against the forward pass", 0.1, 4.0, 0.7)
    sigma: float = 0.0
    sigma_short: float = 0.0


RATE_OF = {
    "norm": "layer_norm_rate", "rms-norm": "rms_norm_rate", "softmax": "loss_rate", "cross-entropy": "loss_rate",
    "activation": "gated_rate", "expert-activation": "gated_rate", "gelu": "gelu_rate", "rope": "rope_rate",
    "embedding": "gather_rate",
    "permute": "gather_rate", "router": "gather_rate", "adam": "adam_rate",
}  # fmt: skip
"""The coefficient of a kind of kernel; others are plain streams."""


SCALING_ONLY = {("cross-entropy", True)}
"""Kinds and passes that scale what the other pass wrote, and compute nothing else."""


def gemm_seconds(work: Gemm, gpu: GPU, model: CpuGemmCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of a GEMM or of many (arrays in `work`), and the part of it that is launch; experts are
    called in turn."""
    layout_rate = {"nn": model.nn_rate, "nt": model.nt_rate}.get(work.layout, 1.0)
    padded = 2.0 * work.batch * (work.m + model.edge) * (work.n + model.edge) * (work.k + model.pipeline_depth)
    compute = padded / (model.peak_share * layout_rate * speed * peak(gpu, work.dtype))
    launch = model.launch * (work.batch if work.groups else 1)
    return combine(compute, work.bytes / (model.memory_share * gpu.memory_bandwidth), 2.0) + launch, launch


def attention_seconds(work: Attention, gpu: GPU, model: CpuAttentionCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of a kernel or of many (arrays in `work`), and the part of it that is launch."""
    scores = work.batch * work.heads * work.q * work.kv * work.share
    rate = model.backward_rate * speed if work.backward else speed
    busy = work.flops / (model.peak_share * peak(gpu, work.dtype)) + scores * model.softmax_cost / (gpu.clock or CLOCK)
    return busy / rate + model.launch, model.launch


def memory_seconds(work: Memory, gpu: GPU, model: CpuMemoryBoundCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of a kernel or of many (arrays in `work`), and the part of it that is launch."""
    nbytes, clock = work.read + work.write, gpu.clock or CLOCK
    hits = 1.0 / (1.0 + (nbytes / (model.cache_capacity * gpu.l2)) ** 4)
    moved = nbytes * (hits / (model.cache_rate * clock) + (1.0 - hits) / gpu.memory_bandwidth)
    named = None if (work.what, work.backward) in SCALING_ONLY else RATE_OF.get(work.what)
    rate = clock * (model.backward_rate if work.backward else 1.0)
    busy = maximum(nbytes / (getattr(model, named) * rate), moved) if named else moved
    return busy / speed + model.launch, model.launch


def _price(
    seconds: Callable[..., tuple[Any, Any]], work: Gemm | Attention, gpu: GPU, model: Any, speed: float = 1.0
) -> Estimate:
    """Estimates the time of a GEMM or of attention; the caches of a core may hold all of its operands."""
    if not work.flops:
        return NOTHING
    taken, launch = seconds(work, gpu, model, speed)
    bound = lower_bound(gpu, work.flops, work.dtype, 0.0)
    return Estimate(max(taken, bound), estimate_sigma(model, taken, launch))


price_gemm, price_attention = partial(_price, gemm_seconds), partial(_price, attention_seconds)


def price_memory(work: Memory, gpu: GPU, model: CpuMemoryBoundCostModel, traffic: float = 1.0) -> Estimate:
    """Estimates the time of a kernel. traffic: see `simulator.costs.kernels.memory.price`."""
    if not work.bytes:
        return NOTHING
    taken, launch = memory_seconds(work, gpu, model, 1.0 / traffic)
    return Estimate(taken, estimate_sigma(model, taken, launch))
