"""The sections of a calibration for kernels: which cost model prices which work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.estimate import Estimate
from meshcast.simulator.costs.kernels import attention, cpu, eager, gemm, grouped, memory
from meshcast.simulator.ir.ops import BYTES, Attention, Gemm, Memory


def _as_measured(model: Any) -> Any:
    return model


class Section(NamedTuple):
    """The functions of a section.

    Attributes:
        seconds: time of work on a GPU by a cost model [s], and the part of it that is launch; numbers or arrays.
        price: the estimate of a kernel.
        in_training: from the cost model as measured to that of the same kernels in a training step.
    """

    seconds: Callable[..., tuple[Any, Any]]
    price: Callable[..., Estimate]
    in_training: Callable[[Any], Any] = _as_measured


SECTIONS = {
    "gemm": Section(gemm.seconds, gemm.price),
    "gemm-fp8": Section(gemm.seconds, gemm.price),
    "grouped": Section(grouped.seconds, grouped.price),
    "attention": Section(attention.seconds, attention.price, attention.without_cache_writes),
    "memory": Section(memory.seconds, memory.price, memory.fuse),
    "eager": Section(eager.seconds, eager.price),
    "cpu-gemm": Section(cpu.gemm_seconds, cpu.price_gemm),
    "cpu-attention": Section(cpu.attention_seconds, cpu.price_attention),
    "cpu-memory": Section(cpu.memory_seconds, cpu.price_memory),
}
"""By the names of sections."""

DENSE = ("gemm", "gemm-fp8")
"""Sections of GEMMs on a GPU whose decomposition a framework may state."""

CPU_SECTIONS = {
    "gemm": "cpu-gemm",
    "gemm-fp8": "cpu-gemm",
    "grouped": "cpu-gemm",
    "attention": "cpu-attention",
    "memory": "cpu-memory",
}
"""The section that takes the place of another on a CPU core."""


def section_on(name: str, gpu: GPU) -> str:
    """Returns the section that takes the place of `name` on this GPU."""
    return CPU_SECTIONS[name] if gpu.architecture == "cpu" else name


def section_of(work: Gemm | Attention | Memory | eager.EagerKernels, gpu: GPU) -> str:
    """Returns the section that prices `work` on `gpu`."""
    if isinstance(work, Gemm):
        name = "grouped" if work.groups else "gemm" if BYTES[work.dtype] > 1 else "gemm-fp8"
    elif isinstance(work, eager.EagerKernels):
        name = "eager"
    else:
        name = "attention" if isinstance(work, Attention) else "memory"
    return section_on(name, gpu)
