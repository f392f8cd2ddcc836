"""Kernels bound by memory traffic: the slower of issuing the traffic and of moving it.

    seconds = launch + max(issue, moved)
    moved   = (read + (1 + writes) written) (1 - found) / (stream HBM) + bytes found / (cache clock multiprocessors)
    issue   = bytes / (rate clock multiprocessors)                                       elementwise kernels
    issue   = bytes / (reductions clock multiprocessors) + read (1 - found) / (stream HBM)         reductions
    found   = hot / (1 + (bytes / (holds L2))^4)

- A latency of `launch`, then bytes at a rate: few bytes cannot fill the memory system (the latency-bandwidth law of
  Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994).
- A load keeps few bytes in flight, and each multiprocessor keeps a number of loads in flight (Little's law; Volkov,
  "Understanding latency hiding on GPUs", 2016): kernels that load one element at a time move so many bytes per clock
  and multiprocessor, whatever the memory could do. That number is nearly the same on every GPU. Kernels with loads of
  16 bytes are bound by memory: `STREAM`.
- DRAM turns around between reads and writes: written bytes cost more than read ones (BabelStream: `dot`, which writes
  nothing, is 7-12 % faster than `copy` on A100, H100 and H200).
- What a benchmark's loop touched last is found in the L2 as long as it fits; a cyclic walk through more than that finds
  nothing, hence the steep end. One operand of a residual addition comes from the kernel before it, and its end is still
  there (`kept`). In a training step nothing is assumed to be found.
- A reduction has seen a whole row before it writes it: its first pass waits for memory, its second one runs from the
  L2, and neither hides the other.
- A cast of one vector a thread has as many blocks as vectors until its grid is full, and loops from there on, with more
  loads in flight: bound by memory (MAX_GRID_DIM in TensorRT-LLM, cpp/tensorrt_llm/common/cudaFp8Utils.cu).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hardware.gpu import GPU
from simulator.costs.coefficients import coefficient, higher, lower, spread
from simulator.costs.estimate import NOTHING, Estimate
from simulator.ir.ops import Memory

VECTOR = 64.0
"""Bytes per clock and multiprocessor that loads of 16 bytes ask for: what an L1 takes from the L2 in a clock."""

STREAM = {"hot": 0.0, "reductions": VECTOR, "elements": VECTOR}
"""Library coefficients of fused training kernels: cold, and as good as a stream (`fused`)."""

GRID = 3.0 * 65536 * 256 * 8
"""Bytes of a cast from 16 to 8 bits whose grid is full: blocks x threads x elements of a vector, three bytes each."""

CLOCK = 1.9e9
"""Of a GPU that does not tell it [Hz]."""


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Coefficients of `seconds`."""

    stream: float = coefficient("share of the memory's bandwidth that a stream of reads reaches", 0.5, 0.95, 0.9)
    writes: float = coefficient("what a written byte costs more than a read one", 0.15, 0.35, 0.2)
    cache: float = coefficient("what the L2 delivers [bytes per clock and multiprocessor]", 8.0, 80.0, 24.0)
    holds: float = coefficient("share of the L2 that a loop's working set may fill", 0.25, 2.0, 0.8)
    kept: float = coefficient("share of the L2 in which a residual addition finds what was just written", 0.0, 1.0, 0.2)
    gelu: float = coefficient("rate of plain activations against gated ones", 0.5, 3.0, 1.3)
    rope: float = coefficient("rate of rotary embeddings against gated activations", 0.3, 3.0, 0.9)
    gather: float = coefficient("rate of gathers of rows against gated activations", 0.1, 1.5, 0.3)
    whole: float = coefficient("launch that a reduction to one number has besides [s]", 1e-6, 2e-5, 6e-6)
    launch: float = coefficient("latency of a kernel [s]", 5e-7, 1e-5, 2e-6, "library")
    hot: float = coefficient("share found in the L2 of what fits into it", 0.0, 1.0, 0.7, "library")
    reductions: float = coefficient("issued by row reductions [bytes per clock and SM]", 3.0, VECTOR, 12.0, "library")
    elements: float = coefficient("issued by elementwise ones [bytes per clock and SM]", 3.0, VECTOR, 16.0, "library")
    spread: float = 0.0
    spread_short: float = 0.0


def fused(law: MemoryLaw) -> MemoryLaw:
    """The law of fused training kernels on the same GPU."""
    return replace(law, **STREAM)


REDUCTIONS = frozenset({"norm", "rms-norm", "softmax", "amax"})
VECTORISED = frozenset({"residual", "add"})
"""PyTorch's own: measured as streams in every library."""


def seconds(work: Memory, gpu: GPU, law: MemoryLaw, speed: float = 1.0) -> tuple[Any, Any]:
    """Of a kernel or of many (arrays in `work`), and the part of them that is launch."""
    read, written, what = work.read, work.write, work.what
    nbytes = read + written
    clocks = gpu.multiprocessors * (gpu.clock or CLOCK)
    memory = law.stream * gpu.memory_bandwidth
    found = law.hot / (1.0 + (nbytes / (law.holds * gpu.l2)) ** 4)
    if what == "residual":
        found = found + (law.hot - found) * lower(law.kept * gpu.l2 / higher(nbytes, 1.0), 1.0)
    moved = (read + (1.0 + law.writes) * written) * (1.0 - found) / memory + nbytes * found / (law.cache * clocks)
    launch = law.launch
    if what in REDUCTIONS:
        issue = nbytes / (law.reductions * clocks) + read * (1.0 - found) / memory
        if what == "amax":
            launch += law.whole
    elif what == "cast":
        issue = lower(nbytes, GRID) / (law.elements * clocks) + higher(nbytes - GRID, 0.0) / memory
    elif what in VECTORISED:
        issue = 0.0
    else:
        relative = {"gelu": law.gelu, "rope": law.rope, "embedding": law.gather}.get(what, 1.0)
        issue = nbytes / (law.elements * relative * clocks)
    return higher(issue, moved) / speed + launch, launch


def least(work: Memory, gpu: GPU) -> Any:
    """What nothing beats that comes from memory: the bytes at its speed."""
    return (work.read + work.write) / gpu.memory_bandwidth


def price(work: Memory, gpu: GPU, law: MemoryLaw, traffic: float = 1.0) -> Estimate:
    """`traffic`: bytes moved for each byte of the work (kernels that are less fused, or slower than a stream)."""
    if not work.bytes:
        return NOTHING
    taken, launch = seconds(work, gpu, law, 1.0 / traffic)
    return Estimate(max(taken, least(work, gpu)), spread(law, taken, launch))
