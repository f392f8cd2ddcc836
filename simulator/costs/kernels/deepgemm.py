"""Output tiles of DeepGEMM's dense GEMMs in 8 bits with scales for blocks of 128 elements, as its code chooses them.

`get_layout_candidates` and `compare` in csrc/jit_kernels/heuristics/{sm90,sm100}.hpp (deepseek-ai/DeepGEMM @7f2a703 of
2026-04, the same up to @54e2261 of 2026-06), which sglang 0.5.14 builds: its times on Hopper follow this choice, not
the earlier choice (@0f5f266 of 2026-01). No kernel splits k. On Hopper the choice has the fewest cycles of L1 and L2 in
whole waves; on Blackwell the fewest waves, with two multiprocessors at work as a pair where that divides evenly.
sglang 0.5.10 on B300 may choose otherwise; its times fit this choice better than the best of six tiles.

Pairs of blocks on Hopper are left out of the tiles: a block without a partner runs alone, so nothing is rounded up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshcast.hardware.gpu import GPU
from meshcast.simulator.costs.coefficients import ceil_div
from meshcast.simulator.costs.kernels.fixed_tiles import FixedTile

STEP = 128
"""Elements of k, and bytes, of a step of a tile's loop."""
OUT = 2
"""Bytes of an element of the result."""
MATH_ROWS = {"hopper": 64, "blackwell": 128}
"""Least rows that the tensor cores compute at once, by architecture: a lower tile takes as long as these."""

SHARED_MEMORY, MAX_STAGES = 232448, 16
"""Bytes of a block's shared memory, and steps of k that are loaded ahead at most, on Hopper."""
L1_RATE, L2_RATE, MAX_L2_RATE = 128, 64, 8e6 / 1.3e3
"""Bytes per cycle of a multiprocessor from L1 and L2, and of all from L2, by which the code weighs tiles on Hopper."""

SPILLED_TILE = 128 * 192
"""Elements of a Hopper tile from which its sums take 192 registers of each of 256 threads."""
SPILLED_RATE = 0.28
"""Rate of kernels with such tiles that are compiled without pairs of blocks, which the code takes where a single wave
is enough: as if their registers, more than a thread has, went to memory. In pairs they run at the full rate. H100 says
0.27, H200 0.30; the 102 GEMMs are forecast with 5 % error (median), without this with 47 %."""


class _WeighedTile(NamedTuple):
    """A tile that the code weighs.

    Attributes:
        rows, columns: of the output.
        down, across: tiles of a cluster along the rows and the columns.
        allowed: for which GEMMs it may be taken (an array).
        computed: rows that the tensor cores compute.
    """

    rows: int
    columns: int
    down: int
    across: int
    allowed: np.ndarray
    computed: int


def deepgemm_tile(m: np.ndarray, n: np.ndarray, k: np.ndarray, gpu: GPU) -> FixedTile:
    """Returns the tiles of DeepGEMM for many GEMMs [m, k] x [k, n] on a Hopper or Blackwell GPU."""
    hopper = gpu.architecture == "hopper"
    candidates, rank = (_on_hopper, _rank_on_hopper) if hopper else (_on_blackwell, _rank_on_blackwell)
    best, tile = np.full((1 if hopper else 6, len(m)), np.inf), np.zeros((4, len(m)))
    for candidate in candidates(m, n, k):
        ranks = rank(candidate, m, n, k, int(gpu.multiprocessors))
        better = candidate.allowed & _precedes(ranks, best)
        size = np.array([candidate.computed, candidate.columns, candidate.down, candidate.across], float)
        best, tile = np.where(better, ranks, best), np.where(better, size[:, None], tile)
    rows, columns, down, across = tile
    if not hopper:
        return FixedTile(rows, columns, down, across)
    spilled = (rows * columns >= SPILLED_TILE) & (down * across == 1)
    return FixedTile(rows, columns, rate=np.where(spilled, SPILLED_RATE, 1.0))


def _precedes(ranks: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Compares two arrays of [keys, GEMMs] by the first key that differs."""
    less, equal = np.zeros(ranks.shape[1], bool), np.ones(ranks.shape[1], bool)
    for rank, other in zip(ranks, others, strict=True):
        less |= equal & (rank < other)
        equal &= rank == other
    return less


def _on_hopper(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> Iterator[_WeighedTile]:
    """Lists the tiles of Hopper in the order of the code, where the first of equals is taken."""
    for cluster in ((1, 1), (1, 2), (2, 1)):
        for rows, most in ((64, np.inf), (128, np.inf), (16, 16), (32, 32), (256, np.inf)):
            for columns in range(16, 193, 16):
                over = columns - STEP  # divides the columns where it divides STEP
                if over > 0 and (rows > STEP or STEP % over):
                    continue
                enough = _count_stages(rows, columns, k) >= (3 if rows * columns >= SPILLED_TILE else 4)
                yield _WeighedTile(rows, columns, *cluster, (m <= most) & enough, max(rows, MATH_ROWS["hopper"]))


def _count_stages(rows: int, columns: int, k: np.ndarray) -> np.ndarray:
    """Counts the steps of k whose operands and scales fit in a block's shared memory beside its result."""
    result = ceil_div(rows * columns * OUT, 1024) * 1024
    scales = ceil_div(ceil_div(k, STEP) * 4 * (1 if STEP % columns == 0 else 2), 8) * 8
    free = SHARED_MEMORY - result - MAX_STAGES * 16 - scales
    return np.minimum(free // ((rows + columns) * STEP + ceil_div(rows * 4, 128) * 128), MAX_STAGES)


def _rank_on_hopper(
    tile: _WeighedTile, m: np.ndarray, n: np.ndarray, k: np.ndarray, multiprocessors: int
) -> np.ndarray:
    """Computes the cycles of L1 or L2 in whole waves; clusters are not for a single wave."""
    blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.columns)
    waves = ceil_div(blocks, multiprocessors)
    result = tile.rows * tile.columns * OUT
    of_l2 = k * (tile.rows // tile.across + tile.columns // tile.down) + result
    of_l1 = k * (tile.rows + tile.computed + 2 * tile.columns) + 2 * result
    from_l2 = of_l2 * blocks // int(min(L2_RATE * multiprocessors, MAX_L2_RATE))
    busy, full = np.maximum(of_l1 * blocks // (L1_RATE * multiprocessors), from_l2), blocks / (waves * multiprocessors)
    cycles = np.floor(
        busy.astype(np.float32) / full.astype(np.float32)
    )  # the code's precision, in which some are equal
    return np.where((tile.down * tile.across > 1) & (waves <= 1), np.inf, cycles)[None]


def _on_blackwell(m: np.ndarray, n: np.ndarray, k: np.ndarray) -> Iterator[_WeighedTile]:
    """Lists the tiles of Blackwell, then those with swapped operands, whose columns the tensor cores take as rows."""
    for down in (1, 2):
        for rows, fewest, most in ((32, 0, 32), (64, 32, 64), (128, 64, np.inf)):
            fits = (m > fewest) & (m <= most) & (ceil_div(m, rows) % down == 0)
            for columns in (16, *range(32, 225, 32)):
                allowed = fits & ((k > 256) | (columns <= 128))
                yield _WeighedTile(rows, columns, down, 1, allowed, MATH_ROWS["blackwell"])
    for across in (1, 2):
        for rows in range(16, 241, 16):
            yield _WeighedTile(rows, 128, 1, across, ceil_div(n, 128) % across == 0, rows)


def _rank_on_blackwell(
    tile: _WeighedTile, m: np.ndarray, n: np.ndarray, k: np.ndarray, multiprocessors: int
) -> np.ndarray:
    """Ranks by a single wave, a pair, fewer waves, a fuller last wave, and smaller tiles."""
    blocks = ceil_div(m, tile.rows) * ceil_div(n, tile.columns)
    waves = ceil_div(blocks, multiprocessors)
    idle, pair = waves * multiprocessors - blocks, tile.down * tile.across
    edges, area = tile.rows + tile.columns, tile.rows * tile.columns
    return np.array(np.broadcast_arrays(waves > 1, -pair, waves, idle, edges, area), float)
