"""Frameworks: the habits of real code bases, as data.

An algorithm is a scheme; how an implementation goes about it is a field here. One YAML file a framework.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import PlanError, nearest
from hardware.load import read_yaml, validated
from hardware.shared import shared

Format = Literal["fp32", "bf16", "fp16"]
QuantisedRecipe = Literal["fp8-delayed", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise", "fp8", "mxfp8", "nvfp4"]
"""Formats of the products of linear layers alone; everything else stays in bf16."""


FUSED_KERNEL_TIME = 1.2
"""Time of fused memory-bound kernels against the calibrated ones: of Megatron-Core's, fitted on 20 published runs."""


class FrameworkPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class CommunicationOverlap(FrameworkPart):
    """Which communication runs beside computation."""

    dp: bool
    """Gradient buckets are reduced behind the last backward pass, ZeRO-1 weights gathered ahead of first use."""
    pp: bool
    """A device goes on computing while its activations are sent; otherwise it waits for each send."""
    gradients: bool = True
    """Gradients of activations are exchanged beside the weight gradients of the linear behind, otherwise after."""
    tp: bool = False
    """Communication of tensor parallelism runs beside products, shard by shard: a plan that does not say how gets
    tensor/async-tp."""
    ep: bool = False
    """Gradients of tokens leave their experts beside the experts' weight gradients, otherwise behind them."""


class Bucket(FrameworkPart):
    """Gradient buckets hold max(elements, elements_per_rank x data-parallel ranks) elements."""

    elements: float = Field(gt=0, le=1e15)
    elements_per_rank: float = Field(ge=0, le=1e15)


class LossKernels(FrameworkPart):
    """Bytes per logit of the cross-entropy kernels: moved forward and backward, and kept in between."""

    forward: int = Field(ge=0)
    backward: int = Field(ge=0)
    kept: int = Field(ge=0)


class ProcessMemory(FrameworkPart):
    """What the process takes beyond its tensors."""

    reserved_share: float = Field(ge=1, le=100)
    """Reserved by the allocator over allocated at the peak."""
    context_gib: float = Field(ge=0, le=1e6)
    """CUDA context, NCCL and library buffers outside the allocator [GiB]."""


class Framework(FrameworkPart):
    """The habits of one code base."""

    name: str
    title: str
    source: str
    weights: Format
    """Format of the compute weights and activations."""
    quantised: QuantisedRecipe | Literal[""] = ""
    """Format of the products of linear layers, where it is not that of the weights."""
    gradients: Format
    """Format in which gradients are accumulated and reduced."""
    main_weights: Format
    """Format of the optimizer's own copy of the weights."""
    moments: Format
    attention: Literal["flash", "unfused"]
    """``flash``: a fused kernel without scores in memory."""
    gathers_apart: bool = False
    """Weights that FSDP gathers arrive in a buffer of a unit and are copied out of it, their gradients into another;
    the buffer lives until the next unit's has come (FSDP2). Otherwise they are used where they arrive."""
    fused_gradients: bool
    """Weight gradients are added to those that persist by the kernels that make them; otherwise they are made aside."""
    regather: bool
    """Gathered inputs of linears are kept as shards, and gathered again for the weight gradient."""
    vocab_multiple: int = Field(ge=1)
    """The embedding is padded to a multiple of this times tp."""
    overlap: CommunicationOverlap
    bucket: Bucket
    loss: LossKernels
    memory: ProcessMemory
    rates: dict[str, float]
    """Residual rates of kernels against the calibrated ones: see simulator.costs."""
    launch_s: float = Field(ge=0, le=1)
    """Time of the host to issue one op [s]: where the GPU is faster, it waits for the host."""
    cuda_graphs: bool
    """Ops are replayed from graphs: issuing them takes no time of the host."""
    compile: bool = False
    """A graph compiler fuses what lies between products: memory-bound kernels take `FUSED_KERNEL_TIME` times the
    calibrated ones at most.
    """
    step_overhead_s: float = Field(ge=0, le=1e6)
    """Constant time a step: data loading, logging, launch ramp [s]."""
    spread: float = Field(ge=0, le=3)
    """Standard deviation of log(measured / predicted) of the step that the habits leave unexplained."""
    spread_experts: float = Field(ge=0, le=3)
    """The same that is added for models with experts: their many small kernels, and a host that waits for token counts,
    are not described."""

    @property
    def effective_rates(self) -> dict[str, float]:
        """The rates as the kernels run."""
        fused = {"memory_bound": min(FUSED_KERNEL_TIME, self.rates.get("memory_bound", 1.0))} if self.compile else {}
        return self.rates | fused

    def __hash__(self) -> int:  # cheap, and `rates` is a dict; equal frameworks are equal in these
        return hash((self.name, self.weights, self.gradients, self.main_weights, self.moments, self.attention))


FILES = resources.files("simulator.job") / "frameworks"


@cache
def framework_names() -> tuple[str, ...]:
    """The frameworks that have a file."""
    return tuple(sorted(f.name[:-5] for f in FILES.iterdir() if f.name.endswith(".yaml")))


@cache
def _file(name: str) -> dict[str, Any]:
    return dict(read_yaml(FILES / f"{name}.yaml").data)


def load_framework(name: str, changes: dict[str, Any] | None = None, where: str = "framework") -> Framework:
    """The framework `name` with the fields in `changes` set (nested as in its file); equal ones are the same object.

    Raises PlanError for an unknown name, field or value.
    """
    if name not in framework_names():
        raise PlanError(f"{where}.name", "no such framework", nearest(name, framework_names()), name)
    fields = _merged(_file(name), changes or {})
    return shared(Framework, fields, lambda: validated(Framework, fields, f"{where}.set", PlanError))


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    both = {k: _merged(base[k], v) for k, v in changes.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return {**base, **changes, **both}
