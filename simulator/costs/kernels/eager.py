"""Memory-bound operations of eager PyTorch: each is several kernels, and every kernel reads and writes memory.

    seconds = kernels launch + bytes sqrt(1 / (stream_share HBM)^2 + 1 / (rate clock SMs)^2)

- `bytes` are those of all kernels of an operation: temporaries are written and read again. A framework states them
  as multiples of the bytes of a fused kernel, counted in its code (`Framework.eager`).
- PyTorch vectorises an elementwise kernel (loads of 16 bytes) only where all operands are contiguous and of the same
  number format (`vectorized_elementwise_kernel` in aten/src/ATen/native/cuda/CUDALoops.cuh); kernels on halves of a
  tensor and conversions load a single element at a time. Like a reduction of rows, such a kernel moves a fixed number
  of bytes per clock and multiprocessor, whatever the memory could do (Little's law; Volkov, "Understanding latency
  hiding on GPUs", 2016), so its rate holds for GPUs with other memory, too. Near the rate of the memory its latency
  grows: the two add as squares (of 458 kernels measured on an H100 and an H200, whose memories differ by 43 % and whose
  multiprocessors do not, the exponent fits as 2.1).

Operations that are not here (residual additions, GELU, zeroing) are single vectorised kernels:
`simulator.costs.kernels.memory` prices them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field
from meshcast.simulator.costs.coefficients import coefficient, estimate_sigma
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.memory import VECTOR
from meshcast.simulator.costs.kernels.roofline import CLOCK
from meshcast.simulator.ir.ops import Memory


def _rate(meaning: str, low: float, start: float) -> Any:
    """Declares a field of `EagerCostModel`; without measurements an operation is as fast as a stream."""
    return coefficient(f"{meaning} [bytes per clock and multiprocessor]", low, VECTOR, start, neutral=VECTOR)


class EagerPass(BaseModel):
    """One pass of an operation.

    kernels: their number.
    traffic: bytes that they read and write together, over those of a fused kernel.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    kernels: int = Field(ge=1, le=100)
    traffic: float = Field(gt=0, le=100)


class EagerPasses(BaseModel):
    """Both passes of an operation.

    elementwise: its kernels are conversions and products of its formula, each alone, not those that were measured, such
        as the only kernel of PyTorch's RMS norm; they run at the rate of conversions.
    vectorised: its kernels read and write whole tensors of a single format, not halves as those that were measured;
        they are as fast as a stream.
    fused: the framework has a fused kernel in place of them, which runs; a recipe may switch it off.
    reads_documents: the host reads the lengths of packed documents on the GPU before it launches them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    forward: EagerPass
    backward: EagerPass
    elementwise: bool = False
    vectorised: bool = False
    fused: bool = False
    reads_documents: bool = False


@dataclass(frozen=True, slots=True)
class EagerKernels:
    """The kernels of a pass of an operation.

    what: kind of the operation, as `Memory.what`.
    nbytes: bytes read and written by all kernels.
    kernels: their number.
    backward: whether they are those of the backward pass.
    elementwise: whether their rate is that of conversions (`EagerPasses`).
    vectorised: whether it is that of a stream.
    """

    what: str
    nbytes: float
    kernels: int
    backward: bool = False
    elementwise: bool = False
    vectorised: bool = False

    flops = 0.0


@dataclass(frozen=True, slots=True)
class EagerCostModel:
    """Memory-bound operations of eager PyTorch: coefficients of `seconds`."""

    stream_share: float = coefficient("share of the memory bandwidth that a kernel reaches at most", 0.4, 0.98, 0.85)
    norm_rate: float = _rate("rate of layer and RMS norms", 1.0, 9.0)
    activation_rate: float = _rate("rate of gated activations", 1.0, 7.0)
    rope_rate: float = _rate("rate of rotary embeddings", 1.0, 9.0)
    embedding_rate: float = _rate("rate of embeddings", 0.5, 7.0)
    loss_rate: float = _rate("rate of cross-entropy forward", 1.0, 9.0)
    loss_backward_rate: float = _rate("rate of cross-entropy backward", 1.0, 12.0)
    gather_rate: float = _rate("rate of copies of tokens to experts", 0.5, 9.0)
    bag_rate: float = _rate("rate of sums over copies of tokens", 0.2, 1.5)
    bias_rate: float = _rate("rate of gradients of biases", 1.0, 6.0)
    clip_rate: float = _rate("rate of norms and scaling of gradients", 1.0, 9.0)
    convert_rate: float = _rate("rate of conversions of number formats", 1.0, 8.0)
    launch: float = coefficient("latency of a kernel [s]", 5e-7, 1e-5, 3e-6, "library")
    sigma: float = 0.0
    sigma_short: float = 0.0


EagerOperation = Literal[
    "norm", "rms-norm", "activation", "expert-activation", "rope", "embedding", "cross-entropy", "permute", "unpermute",
    "router", "bias-gradient", "grad-norm", "convert", "dropout", "scale", "dequantise", "adam", "clamped-activation",
    "expert-bias",
]  # fmt: skip
"""Operations that may be several kernels, as `Memory.what` names them; unpermute: sums over the copies of tokens."""

RATE_OF = {
    "norm": "norm_rate",
    "rms-norm": "norm_rate",
    "activation": "activation_rate",
    "expert-activation": "activation_rate",
    "clamped-activation": "activation_rate",
    "expert-bias": "convert_rate",
    "rope": "rope_rate",
    "embedding": "embedding_rate",
    "cross-entropy": "loss_rate",
    "permute": "gather_rate",
    "unpermute": "bag_rate",
    "router": "gather_rate",
    "bias-gradient": "bias_rate",
    "grad-norm": "clip_rate",
    "adam": "",
    "dropout": "",
    "scale": "",
    "dequantise": "",
    "convert": "convert_rate",
}
"""Coefficient of a kind of operation; "": as fast as a stream."""


def make_eager_kernels(work: Memory, eager: Mapping[Any, EagerPasses]) -> EagerKernels | None:
    """Returns the kernels of `work` in a framework whose operations of these kinds are not fused; None for other
    kinds."""
    # Copies of tokens become more bytes; sums over the copies of a token become fewer.
    what = "unpermute" if work.what == "permute" and work.read > work.write else work.what
    passes = eager.get(what)
    if passes is None:
        return None
    eager_pass = passes.backward if work.backward else passes.forward
    nbytes = work.pace * eager_pass.traffic * work.bytes
    return EagerKernels(what, nbytes, eager_pass.kernels, work.backward, passes.elementwise, passes.vectorised)


def seconds(work: EagerKernels, gpu: GPU, model: EagerCostModel, speed: float = 1.0) -> tuple[Any, Any]:
    """Computes the time [s] of an operation or of many (arrays in `work`), and the part of it that is launch.

    speed: rate against the calibrated rate.
    """
    rate = "loss_backward_rate" if work.what == "cross-entropy" and work.backward else RATE_OF[work.what]
    rate = "" if work.vectorised else "convert_rate" if work.elementwise else rate
    memory = model.stream_share * gpu.memory_bandwidth
    second = 1.0 / memory
    if rate:
        second = math.hypot(second, 1.0 / (getattr(model, rate) * (gpu.clock or CLOCK) * gpu.multiprocessors))
    launch = model.launch * work.kernels
    return work.nbytes * second / speed + launch, launch


def price(work: EagerKernels, gpu: GPU, model: EagerCostModel, traffic: float = 1.0) -> Estimate:
    """Estimates the time of an operation. traffic: further factor on its bytes."""
    if not work.nbytes:
        return NOTHING
    taken, launch = seconds(work, gpu, model, 1.0 / traffic)
    return Estimate(taken, estimate_sigma(model, taken, launch))
