"""Output tiles of GEMMs in 8 bits with a scale a row, which libraries built on CUTLASS choose by tables.
Those of DeepGEMM, with block scales, are in deepgemm.py.

cuBLASLt has a kernel for every size; sgl-kernel and torch._scaled_mm compile a few, and their code says which kernel
runs. A tile is what a multiprocessor computes at a time. Blocks of a cluster start together on a group of
multiprocessors (GPC), so the tiles of a GEMM are rounded up to whole clusters, and multiprocessors that fill none idle;
operands are loaded once for the blocks of a cluster that share them.

sgl-kernel: `fp8_scaled_mm` in sgl-kernel/csrc/gemm/fp8_gemm_kernel.cu (sgl-project/sglang @350439a; sm89, sm100), on
Hopper since pull request 25532 of 2026-05 (csrc/cutlass_extensions/gemm/fp8_gemm_sm90_dispatch.cuh), whose kernels for
few tokens swap the operands. Times of H100 double at 129 rows, as that table says and the earlier table does not.
torch: aten/src/ATen/native/cuda/RowwiseScaledMM.cu (pytorch/pytorch @01386a0; sm90, sm100, and sm120 without clusters).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.coefficients import Number, ceil_div, maximum, minimum
from meshcast.simulator.ir.ops import BYTES, Gemm

GROUPS = 8
"""Groups of multiprocessors (GPC) of a Hopper or Blackwell GPU; a cluster lies within a group. Of Blackwell's 148, 152
and 160 multiprocessors 128, 128 and 160 then run clusters of four: with all of them, sgl-kernel's 1,401 GEMMs on B200
are forecast with 6.8 instead of 6.2 % error (median), on GB200 with 5.7 instead of 5.5 %."""


class FixedTile(NamedTuple):
    """The output tile of a kernel, of a GEMM or (arrays) of many.

    Attributes:
        rows, columns: that a multiprocessor computes at a time.
        cluster_rows, cluster_columns: blocks of a cluster along the rows and the columns of the output.
        rate: of the kernel against others of its library.
        down_first: whether blocks take the tiles of a column in turn, then those of the next column (CUTLASS's
            GemmIdentityThreadblockSwizzle of 1).
        stream_k: whether blocks share tiles so that all end together.
    """

    rows: Number
    columns: Number
    cluster_rows: Number = 1
    cluster_columns: Number = 1
    rate: Number = 1.0
    down_first: bool = False
    stream_k: bool = False

    def count_tiles(self, m: Number, n: Number) -> Number:
        """Counts the tiles of an [m, n] output in whole clusters."""
        down = ceil_div(m, self.rows * self.cluster_rows) * self.cluster_rows
        return down * ceil_div(n, self.columns * self.cluster_columns) * self.cluster_columns

    def count_passes(self, m: Number, n: Number, multiprocessors: float) -> Number:
        """Counts how often all rows of the activation are read, by waves of blocks that take the tiles in turn."""
        columns = ceil_div(n, self.columns) * minimum(ceil_div(m, self.rows) / multiprocessors, 1.0)
        return maximum(columns, 1.0) if self.down_first else 1.0

    def count_slots(self, multiprocessors: float) -> Number:
        """Counts the multiprocessors that run whole clusters; two always share a pair."""
        size = self.cluster_rows * self.cluster_columns
        whole = multiprocessors / GROUPS // size * size * GROUPS
        if isinstance(size, np.ndarray):
            return np.where(size > 2, whole, multiprocessors)
        return whole if size > 2 else multiprocessors


ANY = math.inf

SGL_KERNEL = {
    "ada": (
        (1, 8192, FixedTile(16, 64)),
        (1, ANY, FixedTile(32, 64)),
        (16, 8192, FixedTile(16, 64)),
        (64, 16384, FixedTile(32, 64)),
        (64, ANY, FixedTile(16, 64)),
        (128, 16384, FixedTile(64, 64)),
        (128, ANY, FixedTile(32, 64)),
        (256, 8192, FixedTile(128, 64)),
        (256, 16384, FixedTile(64, 128)),
        (256, ANY, FixedTile(128, 64)),
        (ANY, ANY, FixedTile(128, 128)),
    ),
    "hopper": (
        (16, 1280, FixedTile(16, 64, 2)),
        (16, ANY, FixedTile(16, 64)),
        (64, 1280, FixedTile(16, 64, 4)),
        (32, ANY, FixedTile(32, 64)),
        (64, ANY, FixedTile(64, 64)),
        (128, 4096, FixedTile(64, 64)),
        (128, ANY, FixedTile(64, 128, 2)),
        (ANY, ANY, FixedTile(128, 128, 2)),
    ),
    "blackwell": (
        (16, ANY, FixedTile(64, 64, 1, 4)),
        (64, ANY, FixedTile(64, 64)),
        (256, ANY, FixedTile(64, 128, 2)),
        (ANY, ANY, FixedTile(128, 128, 2, 2)),
    ),
}
"""Tiles of sgl-kernel by architecture: the most rows and columns of an output, in the order in which they are asked
for. On Blackwell the tiles of two multiprocessors that compute a tile together are written as two."""


def sgl_kernel_tile(m: Number, n: Number, architecture: str) -> FixedTile:
    """Returns the tile of sgl-kernel's GEMM with an [m, n] output, numbers or arrays."""
    rules = SGL_KERNEL[architecture]
    fits = [(m <= most_m) & (n <= most_n) for most_m, most_n, _ in rules]
    if isinstance(m, np.ndarray):
        sizes = zip(*(tile[:-2] for _, _, tile in rules), strict=True)
        tile = FixedTile(*(np.select(fits, values) for values in sizes))
    else:
        tile = next(tile for fit, (_, _, tile) in zip(fits, rules, strict=True) if fit)
    return tile._replace(down_first=architecture == "ada")


TENSORRT_LLM_ON_ADA = FixedTile(32, 128, down_first=True)
"""Tile of TensorRT-LLM's GEMMs with block scales on Ada, the only one: `gemm_dispatch_sm89` of cpp/tensorrt_llm/
kernels/cutlass_kernels/fp8_blockscale_gemm/fp8_blockscale_gemm_kernel.cuh (NVIDIA/TensorRT-LLM @eef8cda)."""

FIRST_OF_BOARDS = 12.0
"""Compute capability from which Blackwell's multiprocessors neither share loads nor compute in pairs: those of GeForce
and RTX PRO boards."""
LARGE = 4096
"""Rows and columns from which torch's GEMM has clusters along the longer side."""


def with_tile_of_training(work: Gemm, gpu: GPU) -> Gemm:
    """Returns a dense GEMM in 8 bits with a scale a row with the tile that training programs run, others as they are.

    On Ada torch's tiles for 257 rows and more are sgl-kernel's, by stream-K (ThreadblockSwizzleStreamK).
    """
    if work.scaling != "row" or work.groups or BYTES[work.dtype] != 1 or gpu.architecture not in SGL_KERNEL:
        return work
    if gpu.architecture == "ada":
        tile = sgl_kernel_tile(work.m, work.n, gpu.architecture)._replace(down_first=False, stream_k=True)
        return replace(work, tile=tile)
    return replace(work, tile=torch_rowwise_tile(work.m, work.n, gpu))


def torch_rowwise_tile(m: float, n: float, gpu: GPU) -> FixedTile:
    """Returns the tile of torch._scaled_mm with a scale a row, on Hopper and Blackwell.

    The output may be computed transposed; small tiles run if all of them fit on the GPU at once.
    """
    if gpu.compute_capability and gpu.compute_capability.value >= FIRST_OF_BOARDS:
        return FixedTile(64 if ceil_div(m, 64) * ceil_div(n, 128) <= gpu.multiprocessors else 128, 128)
    down, across = (64 * math.ceil(size / 64) for size in (m, n))
    cluster, transposed = _torch_cluster(down, across)
    rows, columns = (n, m) if transposed else (m, n)
    small = ceil_div(rows, 64 * cluster[0]) * ceil_div(columns, 128 * cluster[1]) <= gpu.multiprocessors // 2
    # On Blackwell a pair of multiprocessors computes 128 rows together, 64 each.
    height = 64 if small or (gpu.architecture == "blackwell" and cluster[0] == 2) else 128
    return FixedTile(128, height, cluster[1], cluster[0]) if transposed else FixedTile(height, 128, *cluster)


def _torch_cluster(m: int, n: int) -> tuple[tuple[int, int], bool]:
    """Returns torch's cluster for an [m, n] output of multiples of 64, and whether it is computed transposed."""
    for rows, columns, transposed in ((m, n, False), (n, m, True)):
        if rows == 64 and columns >= 3072:
            return (1, 2), transposed
        if rows == 192 and columns >= 4096:
            return (1, 2), not transposed
    odd_m, odd_n = m % 256 > 0, n % 256 > 0
    if odd_m != odd_n and m * n <= LARGE**2:
        return (2, 1), odd_m
    if odd_m and odd_n:
        return (2, 1), (m <= n) != (m * n <= 1024**2)
    if min(m, n) >= LARGE:
        return (2, 1), m < n
    return ((1, 2) if (m <= n) != (min(m, n) >= 2048) else (2, 1)), True
