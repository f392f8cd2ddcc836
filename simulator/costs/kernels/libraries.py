"""Libraries whose kernels training programs run."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from meshcast.hardware.gpu import GPU
from meshcast.simulator.ir.ops import BYTES, Attention

TRAINING_LIBRARIES = {
    ("attention", "volta"): "flash-2",
    ("attention", "ampere"): "flash-2",
    ("attention", "ada"): "flash-2",
    ("attention", "hopper"): "flash-3",
    ("attention", "blackwell"): "transformer-engine",
    **{("gemm-fp8", architecture): "tensorrt-llm-fp8" for architecture in ("ada", "hopper", "blackwell")},
    **{("gemm-fp8", architecture): "aiter-fp8" for architecture in ("cdna3", "cdna4")},
    ("gemm", "blackwell"): "transformer-engine",
    ("grouped", "ampere"): "cutlass",
    ("grouped", "hopper"): "cutlass",
    ("grouped", "blackwell"): "transformer-engine",
}
"""Libraries of the kernels of today's training programs, by section of the cost model and GPU architecture, where
tables of measurements have them; otherwise the mean of all libraries is used, most of which serve inference.

GEMMs of Transformer Engine were measured in the layouts of training, weight gradients added in fp32. Those in 8 bits it
runs by cuBLASLt, as TensorRT-LLM does with a scale a tensor; the other tables are of CUTLASS and of block scales.
On CDNA the nearest to a scale a tensor are aiter's kernels with a scale a row; those with block scales take 1.7
times as long."""

ROWWISE_LIBRARIES = dict.fromkeys(("ada", "hopper", "blackwell"), "sglang-fp8")
"""Libraries of GEMMs in 8 bits with a scale a row of each operand, by GPU architecture. torch._scaled_mm runs these
by CUTLASS, those with a scale a tensor by cuBLAS (pytorch/pytorch #153555); measured is sgl-kernel's CUTLASS kernel
with a scale a token, whose coefficients are taken with torch's tiles (`fixed_tiles`). Seven public times on H100,
in which CUTLASS runs alone (pytorch/FBGEMM #2546, #2764), are forecast from -20 to +30 %, as far off as the rows of its
fit. Against a scale a tensor, 130 equal shapes take 1.21 times as long on H100 (median; p10 0.97, p90 1.97), 1.15 on
H200 and 1.16 on B200."""

AttentionLibrary = Literal["flash-1", "flash-2", "flash-3", "triton", "cudnn", "cudnn-fp8", "sdpa"]
"""Libraries of fused attention: FlashAttention 1 to 3, FlashAttention in Triton as of 2022 and 2023, cuDNN in 16 bits,
and in 8 (`fp8_dot_product_attention` of Transformer Engine); sdpa: what `scaled_dot_product_attention` of PyTorch 2.5
and later prefers, cuDNN from Hopper on and FlashAttention-2 before."""


class Relative(NamedTuple):
    """A library known by its rate against a measured library.

    library: that was measured.
    rate: rate of its kernels against that.
    sigma: standard deviation of the logarithm of `rate` over shapes.
    """

    library: str
    rate: float
    sigma: float


def _relative(library: str, slowest: float, fastest: float) -> Relative:
    """Returns the geometric middle of a published range of ratios, taken for nine of ten shapes."""
    return Relative(library, 1 / math.sqrt(slowest * fastest), math.log(fastest / slowest) / 3.29)


RELATIVE_LIBRARIES = {
    # FlashAttention-2 is 1.7 to 3.0 times faster than FlashAttention and 1.3 to 2.5 times faster than FlashAttention in
    # Triton, forward and backward, head widths 64 and 128, 512 to 16k positions (arXiv 2307.08691, section 4.1).
    "flash-1": _relative("flash-2", 1.7, 3.0),
    "triton": _relative("flash-2", 1.3, 2.5),
    # Measured in the forward pass of inference; training and its backward pass are assumed alike, with this sigma.
    "cudnn-fp8": Relative("tensorrt-llm-fp8", 1.0, 0.15),
}
"""Libraries of attention without measurements."""

RELATIVE_ON = {
    # Triton compiles for Hopper's tensor cores (wgmma) from 2.1 on, FlashAttention-2 does not use them: fitted on 40
    # runs of LLM Foundry on H100 with 512 to 65,536 positions, whose errors grow with the share of attention at others.
    ("triton", "hopper"): Relative("flash-2", 1 / 1.5, RELATIVE_LIBRARIES["triton"].sigma),
}
"""The same on a single architecture."""


def training_library(section: str, architecture: str, scaling: str) -> str:
    """Returns the library of the kernels of a training program; "" where no table has it. scaling: see
    `Gemm.scaling`."""
    if scaling == "row" and section == "gemm-fp8":
        return ROWWISE_LIBRARIES.get(architecture, "")
    return TRAINING_LIBRARIES.get((section, architecture), "")


def launches_each_group(dtype: str, architecture: str) -> bool:
    """Tells whether training programs run grouped GEMMs as a dense GEMM for each group.

    Transformer Engine does, by cuBLASLt (`multi_tensor_gemm`): measured in bf16 on B200, assumed in fewer bits and on
    Hopper, where DeepGEMM takes as long. In 16 bits on Hopper and before, grouped kernels of CUTLASS are measured.
    """
    return architecture == "blackwell" or (BYTES[dtype] < 2 and architecture in ROWWISE_LIBRARIES)


def attention_format(name: str) -> str:
    """Returns the number format in which a library computes attention; empty: that of its operands."""
    return "fp8" if name.endswith("-fp8") else ""


def attention_library(name: str, architecture: str) -> Relative:
    """Returns the measured library that stands for `name`; empty: that of today's training programs on the
    architecture."""
    if name == "sdpa":
        name = "cudnn" if architecture in ("hopper", "blackwell") else "flash-2"
    # On Blackwell Transformer Engine runs attention by cuDNN.
    same = not name or (name == "cudnn" and architecture == "blackwell")
    usual = Relative(TRAINING_LIBRARIES.get(("attention", architecture), "") if same else name, 1.0, 0.0)
    return RELATIVE_ON.get((name, architecture), RELATIVE_LIBRARIES.get(name, usual))


ORDERED_BLOCKS = 2.900 / 2.391
"""Time of a backward pass of attention whose blocks add to the gradient of the queries in a fixed order, over that of a
pass whose blocks add as they end.

source: Dao-AILab/flash-attention, pull request 1893 of 2025-09: FlashAttention-3 on Hopper, 8,192 positions, 16 heads
    of 128, causal, 2.900 ms by the order in use and 2.391 ms without order (before that 3.804). cuDNN's is assumed
    alike.
"""

COLUMN = 128
"""Keys of a block of columns of FlashAttention-2's backward pass."""


def slow_down_in_order(library: str, work: Attention, gpu: GPU) -> float:
    """Returns the time of a deterministic backward pass of attention over that of the usual pass.

    FlashAttention-2 and what came before have so many blocks that every multiprocessor gets a block, and each loops
    over columns of keys: ceil(multiprocessors / (batch x heads)) for each head (`run_flash_bwd_seqk_parallel` of
    csrc/flash_attn/src/flash_bwd_launch_template.h, Dao-AILab/flash-attention @0251105), which fill their rounds badly.
    """
    if not library.startswith(("flash-1", "flash-2", "triton")):
        return ORDERED_BLOCKS
    heads, columns = work.batch * work.heads, math.ceil(work.kv / COLUMN)
    loops = min(math.ceil(gpu.multiprocessors / heads), columns)
    rounds = math.ceil(loops * heads / gpu.multiprocessors)
    return max(1.0, rounds * math.ceil(columns / loops) * gpu.multiprocessors / (columns * heads))
