"""The sections of a calibration: which law prices which kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hardware.gpu import GPU
from simulator.costs.estimate import Estimate
from simulator.costs.kernels import attention, cpu, gemm, grouped, memory
from simulator.ir.ops import BYTES, Attention, Gemm, Memory


def _as_measured(law: Any) -> Any:
    return law


class Section(NamedTuple):
    """seconds: of work on a GPU by a law, and the part of them that is launch; numbers or arrays. price: of one kernel.
    training: the law of the same kernels in a training step.
    """

    seconds: Callable[..., tuple[Any, Any]]
    price: Callable[..., Estimate]
    training: Callable[[Any], Any] = _as_measured


SECTIONS = {
    "gemm": Section(gemm.seconds, gemm.price),
    "gemm-fp8": Section(gemm.seconds, gemm.price),
    "grouped": Section(grouped.seconds, grouped.price),
    "attention": Section(attention.seconds, attention.price, attention.training),
    "memory": Section(memory.seconds, memory.price, memory.fused),
    "cpu-gemm": Section(cpu.gemm_seconds, cpu.price_gemm),
    "cpu-attention": Section(cpu.attention_seconds, cpu.price_attention),
    "cpu-memory": Section(cpu.memory_seconds, cpu.price_memory),
}
"""By section of a calibration."""

CORES = {
    "gemm": "cpu-gemm",
    "gemm-fp8": "cpu-gemm",
    "grouped": "cpu-gemm",
    "attention": "cpu-attention",
    "memory": "cpu-memory",
}
"""What a section is on the cores of a processor."""


def of_gpu(name: str, gpu: GPU) -> str:
    """The section that stands for `name` on this GPU."""
    return CORES[name] if gpu.architecture == "cpu" else name


def section_of(work: Gemm | Attention | Memory, gpu: GPU) -> str:
    """The section of a calibration that prices `work` on `gpu`."""
    if isinstance(work, Gemm):
        name = "grouped" if work.groups else "gemm" if BYTES[work.dtype] > 1 else "gemm-fp8"
    else:
        name = "attention" if isinstance(work, Attention) else "memory"
    return of_gpu(name, gpu)
