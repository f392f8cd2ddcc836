"""Memory-bound kernels: the slower of issuing the traffic and of moving it.

    seconds = launch + max(issued, moved, row)
    moved   = (read + (1 + write_penalty) written) (1 - hits) / (stream_share HBM) + bytes hits / (l2_rate clock SMs)
    issued  = bytes / (elementwise_rate clock SMs)                                          elementwise kernels
    issued  = bytes / (reduction_rate clock SMs) + read (1 - hits) / (stream_share HBM)     row reductions
    row     = bytes of a row / (block_rate clock)                                           a block a row
    hits    = l2_hits / (1 + (bytes / (l2_capacity L2))^4)

- A latency of `launch`, then bytes at a rate: few bytes cannot fill the memory system (the latency-bandwidth law of
  Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994).
- A load keeps few bytes in flight, and each multiprocessor (SM) keeps a number of loads in flight (Little's law;
  Volkov, "Understanding latency hiding on GPUs", 2016): kernels that load a single element at a time move a fixed
  number of bytes per clock and multiprocessor, whatever the memory could do. That number is nearly the same on every
  GPU. Kernels with loads of 16 bytes are bound by memory: `STREAM`.
- DRAM turns around between reads and writes: written bytes cost more than read ones (BabelStream: `dot`, which writes
  nothing, is 7-12 % faster than `copy` on A100, H100 and H200).
- What the loop of a benchmark touched last is still in the L2 as long as it fits; a cyclic access to more than that
  finds nothing, hence the steep end. One operand of a residual addition comes from the kernel before it, and the end of
  it is still there (`residual_hits`). In a training step nothing is assumed to be there.
- A reduction reads a whole row before it writes it: its first pass waits for memory, its second pass runs from the L2,
  and neither hides the other.
- Norms, gated activations and rotary embeddings of serving programs start a block for each token. A block issues a
  few bytes per clock, however idle the GPU: with fewer tokens than blocks fit on it, the kernel takes as long as a
  row does. Training steps have thousands of tokens.
- The two passes of a reduction wait for each other once more: `row_reduction`.
- A cast with a scale a row reads it twice; rows in flight that exceed the L2 come from memory again (`row-cast`).
- The kernels of the scan of a Mamba-1 block are bound by exponentials and products in fp32: `SELECTIVE_SCAN_RATE`.
- The kernels of the scan of a Mamba-2 block are Triton programs, bound by neither memory nor tensor cores: `SCAN_RATE`.
  Those of linear attention are priced at the same rate; their matrix products at the peak rate are a lower bound.
- Blocks start in turn: a kernel of very many small blocks takes as long as that (`BLOCK_STARTS`).
- A cast with a vector a thread has as many blocks as vectors until its grid is full, and loops from there on, with
  more loads in flight: bound by memory (MAX_GRID_DIM in TensorRT-LLM, cpp/tensorrt_llm/common/cudaFp8Utils.cu).
"""

from __future__ import annotations

import math
from dataclasses import replace

from meshcast.hardware.gpu import GPU
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.coefficients import Number, coefficient, estimate_sigma, maximum, minimum
from meshcast.simulator.costs.estimate import NOTHING, Estimate
from meshcast.simulator.costs.kernels.roofline import CLOCK
from meshcast.simulator.ir.ops import Memory

VECTOR = 64.0
"""Bytes per clock and multiprocessor that loads of 16 bytes ask for: what an L1 takes from the L2 in a clock."""

STREAM = {"l2_hits": 0.0, "reduction_rate": VECTOR, "elementwise_rate": VECTOR}
"""Library coefficients of fused training kernels: nothing in the L2, and as fast as a stream (`fuse`)."""

FULL_GRID = 3.0 * 65536 * 256 * 8
"""Bytes of a cast from 16 to 8 bits whose grid is full: blocks x threads x elements of a vector, three bytes each."""

SCAN_RATE = 4.4
"""Rate of the Triton kernels of the scan of a Mamba-2 block [bytes per clock and multiprocessor], about a quarter of
what the memory could do: loads are waited for, while few blocks share a multiprocessor. From training Mamba-2 models of
1.3 B parameters on A100, H200 and GB200 (state-spaces/mamba, issue 904), which say 3.4, 4.6 and 5.4 with chunks of 256
tokens."""

BLOCK_CAST_RATE = 7.7
"""Rate of casts to 8 bits with a scale for each 128 elements that load a single element at a time [bytes per clock and
multiprocessor], as other kernels that do so. GEMMs of tables whose n is 256 or less take 2.06 ps an element on H100 and
2.08 on H200, which differ in their memory alone (TensorRT-LLM), and 1.74 ps on B300 (sglang 0.5.10). All 835, 835 and
459 GEMMs of these libraries say 8, 8 and 7 (ai-dynamo/aiconfigurator @095f58a51c4c)."""

ROW_CAST_BLOCKS = 2 * 8
"""Rows for each multiprocessor from which a cast with a scale a row gives a row to a warp, and before to a block
(`sgl_per_token_quant_fp8` in sgl-kernel/csrc/gemm/per_token_quant_fp8.cu, sgl-project/sglang @0490047)."""
ROW_CAST_RESIDENT = {"block": 8, "warp": 64}
"""Rows that a multiprocessor with 2,048 threads holds at a time: in blocks of 256 threads, and in warps."""
FEWER_THREADS = {"ada": 1536 / 2048}
"""Threads that a multiprocessor of an architecture holds, over 2,048 (CUDA C++ Programming Guide, technical
specifications by compute capability)."""
ROW_CAST_SETS = 6
"""Sets of operands between which the benchmark of these GEMMs alternates (see `simulator.costs.kernels.gemm`)."""
ROW_CAST_WAVE = {"block": 1.2e-6, "warp": 2.3e-6}
"""Seconds of a wave of these rows beyond its traffic: two passes and a reduction wait for each other. Fitted with
`ROW_CAST_L2` on sgl-kernel's GEMMs, 1,401 each: 1.22 and 2.50 us on H100, 1.25 and 2.52 on H200, 1.15 and 2.17 on
B200."""
ROW_CAST_L2 = 0.76
"""Share of the L2 that the rows in flight may fill if the second pass is to find them there: H100 and H200 say 0.76,
B200 says 1.4 and fits 0.2 points worse with this."""

BLOCK_STARTS = {"group-cast": 2.1, "row-gather": 0.9}
"""Clocks of a whole GPU for each of many blocks that do little: casts to 8 bits with 256 bytes or more a block, as
`sgl_per_token_group_quant_8bit` starts them, and PyTorch's gathers of rows with a block of 32 threads a row. Fitted
with the tiles of DeepGEMM on the GEMMs of sglang 0.5.14: casts say 2.2 on H100, 2.3 on H200 and 2.1 or more on GB200,
gathers 0.8 on B200 and 0.95 on GB200."""

SELECTIVE_SCAN_RATE = 56.0
"""FLOPs of the kernels of the scan of a Mamba-1 block per clock and multiprocessor. Derived, not measured: an element
of the state and token has an exponential, of which a multiprocessor of any generation starts 16 a clock, and some dozen
other instructions in fp32, of which it starts 128 a clock (CUDA C++ Programming Guide, arithmetic instructions;
csrc/selective_scan/selective_scan_fwd_kernel.cuh). That is an eighth of a clock, of 7 FLOPs as they are counted."""

SELECTIVE_SCAN_SIGMA = 0.5
"""Standard deviation of the logarithm of that rate: whether exponentials and other instructions overlap, and how well
loads are hidden, is not known."""

SCAN_SIGMA = 0.3
"""Standard deviation of the logarithm of that rate: its spread over these GPUs, and the unknown rest of their steps."""

STREAMS_SIGMA = 0.3
"""The same of the kernels of several residual streams, which are priced as residual additions and not measured."""

DERIVED_SIGMA = {"scan": SCAN_SIGMA, "selective-scan": SELECTIVE_SCAN_SIGMA, "streams": STREAMS_SIGMA}
"""The same by kind of kernel, of those that no table measures."""


@dataclass(frozen=True, slots=True)
class MemoryBoundCostModel:
    """Memory-bound kernels: coefficients of `seconds`."""

    stream_share: float = coefficient("share of the memory bandwidth that a stream of reads reaches", 0.5, 0.95, 0.9)
    write_penalty: float = coefficient("extra cost of a written byte against a read one", 0.15, 0.35, 0.2)
    l2_rate: float = coefficient("rate of the L2 [bytes per clock and multiprocessor]", 8.0, 80.0, 24.0)
    l2_capacity: float = coefficient("share of the L2 that a loop's working set may fill", 0.25, 2.0, 0.8)
    residual_hits: float = coefficient("share of the L2 with what a residual addition finds of it", 0.0, 1.0, 0.2)
    gelu_rate: float = coefficient("rate of plain activations against gated ones", 0.5, 3.0, 1.3)
    rope_rate: float = coefficient("rate of rotary embeddings against gated activations", 0.3, 3.0, 0.9)
    gather_rate: float = coefficient("rate of gathers of rows against gated activations", 0.1, 1.5, 0.3)
    full_reduction: float = coefficient("extra launch of a reduction to one number [s]", 1e-6, 2e-5, 6e-6)
    row_reduction: float = coefficient("extra latency of a reduction of rows [s]", 0.0, 5e-6, 1e-6)
    block_rate: float = coefficient("issue rate of one block with a row of its own [bytes/clock]", 1.0, VECTOR, 6.0)
    launch: float = coefficient("latency of a kernel [s]", 5e-7, 1e-5, 2e-6, "library")
    l2_hits: float = coefficient("share found in the L2 of what fits into it", 0.0, 1.0, 0.7, "library")
    reduction_rate: float = coefficient("issue rate of row reductions [bytes/clock/SM]", 3.0, VECTOR, 12.0, "library")
    elementwise_rate: float = coefficient(
        "issue rate of elementwise kernels [bytes/clock/SM]", 3.0, VECTOR, 16.0, "library"
    )
    sigma: float = 0.0
    sigma_short: float = 0.0


def fuse(model: MemoryBoundCostModel) -> MemoryBoundCostModel:
    """Returns the cost model of fused training kernels on the same GPU."""
    return replace(model, **STREAM)


REDUCTIONS = frozenset({"norm", "rms-norm", "softmax", "amax"})
SLOW = {"scan": SCAN_RATE, "block-cast": BLOCK_CAST_RATE}
"""Rates of kernels that no coefficient describes [bytes per clock and multiprocessor]."""
VECTORISED = frozenset({"residual", "add", "streams"})
"""Kernels of PyTorch: measured as streams in every library."""


def seconds(work: Memory, gpu: GPU, model: MemoryBoundCostModel, speed: float = 1.0) -> tuple[Number, Number]:
    """Computes the time [s] of a kernel or of many (arrays in `work`), and the part of it that is launch.

    speed: rate of issuing and moving against the calibrated rate.
    """
    if work.what == "row-cast":
        return _row_cast_seconds(work, gpu, model, speed)
    read, written, what = work.read, work.write, work.what
    nbytes = read + written
    clocks = gpu.multiprocessors * (gpu.clock or CLOCK)
    memory = model.stream_share * gpu.memory_bandwidth
    hits = model.l2_hits / (1.0 + (nbytes / (model.l2_capacity * gpu.l2)) ** 4)
    if what == "residual":
        hits = hits + (model.l2_hits - hits) * minimum(model.residual_hits * gpu.l2 / maximum(nbytes, 1.0), 1.0)
    from_memory = (read + (1.0 + model.write_penalty) * written) * (1.0 - hits) / memory
    moved = from_memory + nbytes * hits / (model.l2_rate * clocks)
    launch = model.launch
    if what in REDUCTIONS:
        issued = nbytes / (model.reduction_rate * clocks) + read * (1.0 - hits) / memory
        launch = launch + (model.full_reduction if what == "amax" else model.row_reduction)
    elif what in ("cast", "group-cast"):
        rate = model.elementwise_rate * clocks
        issued = minimum(nbytes, FULL_GRID) / rate + maximum(nbytes - FULL_GRID, 0.0) / memory
    elif what == "selective-scan":
        issued = work.flops / (SELECTIVE_SCAN_RATE * clocks)
    elif what in SLOW:
        issued = nbytes / (SLOW[what] * clocks)
    elif what in VECTORISED:
        issued = 0.0
    else:
        rates = {"gelu": model.gelu_rate, "rope": model.rope_rate, "embedding": model.gather_rate}
        issued = nbytes / (model.elementwise_rate * rates.get(what, 1.0) * clocks)
    return maximum(maximum(issued, moved), _row_seconds(work, gpu, model)) / speed + launch, launch


def _row_cast_seconds(work: Memory, gpu: GPU, model: MemoryBoundCostModel, speed: float) -> tuple[Number, Number]:
    """Returns what `seconds` does for a cast with a scale a row: the kernel reads every row twice, for its maximum
    and for the cast, the second time from the L2 if the rows in flight fit into it."""
    of_warp, of_block = ((ROW_CAST_RESIDENT[kind], ROW_CAST_WAVE[kind]) for kind in ("warp", "block"))
    many = work.rows >= ROW_CAST_BLOCKS * gpu.multiprocessors
    resident, wave = (many * warp + (1 - many) * block for warp, block in zip(of_warp, of_block, strict=True))
    waves = work.rows / (resident * FEWER_THREADS.get(gpu.architecture, 1.0) * gpu.multiprocessors)
    in_flight = work.read * minimum(1.0 / waves, 1.0)
    missed = 1.0 / (1.0 + (ROW_CAST_L2 * gpu.l2 / in_flight) ** 4)
    of_sets = replace(model, l2_capacity=model.l2_capacity / ROW_CAST_SETS)
    taken, launch = seconds(Memory("cast", work.read * (1.0 + missed), work.write), gpu, of_sets, speed)
    return taken + waves * wave, launch


def _row_seconds(work: Memory, gpu: GPU, model: MemoryBoundCostModel) -> Number:
    """Returns the seconds that a block takes for a row, or of starting all blocks; 0 where `Memory.rows` is."""
    if work.what in BLOCK_STARTS:
        return work.rows * BLOCK_STARTS[work.what] / (gpu.clock or CLOCK)
    bytes_of_row = work.bytes / maximum(work.rows, 1.0) * minimum(work.rows, 1.0)
    return bytes_of_row / (model.block_rate * (gpu.clock or CLOCK))


def lower_bound(work: Memory, gpu: GPU) -> Number:
    """Returns the time [s] that no kernel with cold caches can beat: its bytes at the nominal memory bandwidth."""
    return (work.read + work.write) / gpu.memory_bandwidth


def price(work: Memory, gpu: GPU, model: MemoryBoundCostModel, traffic: float = 1.0) -> Estimate:
    """Estimates the time of a kernel.

    traffic: bytes moved for each byte of the work (kernels that are less fused, or slower than a stream).
    """
    if not work.bytes:
        return NOTHING
    taken, launch = seconds(work, gpu, model, 1.0 / traffic)
    sigma = estimate_sigma(model, taken, launch)
    sigma = math.hypot(sigma, DERIVED_SIGMA.get(work.what, 0.0))
    products = work.flops / gpu.peak["bf16"] if work.flops else 0.0
    return Estimate(max(taken, lower_bound(work, gpu), products), sigma)
