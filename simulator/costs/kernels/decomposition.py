"""Decompositions of a GEMM: how the iterations of its output tiles are divided among multiprocessors.

A tile of the output has k iterations, an iteration for each element of the contracted dim, which a multiprocessor or
several run. With t tiles on P multiprocessors, the multiprocessor that runs longest has

    data-parallel   up(t / P) k                      iterations: whole tiles, in whole waves
    split-k by s    up(t s / P) k / s                parts of tiles, whose s partial sums are added in turn
    stream-k        t k / P                          an even share; shares that end inside a tile add partial sums

and the GEMM keeps t k / (P x that) of its rate busy. Stream-K runs all but the last whole wave tile by tile, so that at
most two blocks share a tile; with fewer tiles than multiprocessors up to P / t share a tile, as many as pay off. Tiles
that fill their waves stay data-parallel. One block runs on a multiprocessor at a time; a share ends at any iteration.

Osama et al. 2023, "Stream-K", PPoPP, arXiv 2301.03598: sections 2 to 5; time = a + b [peers > 1] + c iterations of a
block + d (peers - 1). The hybrid and its choice of blocks: CUTLASS, threadblock_swizzle_streamk.h.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from meshcast.simulator.costs.coefficients import maximum, minimum

Decomposition = Literal["data-parallel", "split-k", "stream-k"]

MAX_SPLIT = 32
"""Largest number of parts in which split-K divides a tile."""


def longest_block(tiles: Any, k: Any, multiprocessors: float, decomposition: Decomposition, split: Any = 1) -> Any:
    """Iterations of the multiprocessor that runs longest. split: parts of a tile (split-K)."""
    if decomposition == "stream-k":
        return tiles * k / multiprocessors
    parts = split if decomposition == "split-k" else 1
    return _round_up(tiles * parts / multiprocessors) * k / parts


def loop_seconds(
    tiles: Any,
    k: Any,
    multiprocessors: float,
    decomposition: Decomposition,
    step: Any,
    fill: float,
    sharing: float,
    peer: Any,
) -> Any:
    """Seconds of the multiprocessor that runs longest.

    step: seconds of an iteration.
    fill: filling and draining the pipeline of a tile [iterations].
    sharing: overhead of tiles that several blocks share [s].
    peer: adding the partial sum of a further block of a tile [s].
    """
    waves = _round_up(tiles / multiprocessors)
    whole = (longest_block(tiles, k, multiprocessors, "data-parallel") + waves * fill) * step
    if decomposition == "data-parallel":
        return whole
    if decomposition == "split-k":
        best = whole
        for split in range(2, MAX_SPLIT + 1):
            most = longest_block(tiles, k, multiprocessors, "split-k", split)
            parts = _round_up(tiles * split / multiprocessors)
            best = minimum(best, (most + parts * fill) * step + sharing + (split - 1) * peer)
        return best
    # With fewer tiles than multiprocessors fewer blocks to a tile may be faster: the loop against adding partial sums.
    blocks = maximum(minimum(multiprocessors / tiles, (k * step / peer) ** 0.5), 1.0)
    few = (k / blocks + fill) * step + sharing + (_round_up(blocks) - 1) * peer
    many = (longest_block(tiles, k, multiprocessors, "stream-k") + waves * fill) * step + sharing + peer
    if isinstance(few + many, np.ndarray):
        return minimum(whole, np.where(tiles < multiprocessors, few, many))
    return minimum(whole, few if tiles < multiprocessors else many)


def _round_up(value: Any) -> Any:
    return -(-value // 1.0)
