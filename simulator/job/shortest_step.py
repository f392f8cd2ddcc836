"""Micro-batches of padded samples for the shortest step of a pipeline, by dynamic programming (DynaPipe).

Only samples next to each other, sorted by length, share a micro-batch. With p stages, micro-batches of times t_k on a
stage, and d replicas that they are dealt to, a step takes about

    (p - 1) max t_k + sum t_k / d

For every limit of the longest time, f(n) = min over i of f(i) + t(i, n) with t(i, n) <= limit gives the partition of
the first n samples of the smallest sum; of all limits that of the shortest step is kept.

The time of r sequences of l tokens is estimated as r l + h tokens take at length l: h tokens are those at which matrix
products reach half of their rate. So short samples are joined although padding grows.

References: Jiang et al. 2024, arXiv 2311.10418, section 4, and dynapipe/data_opt/dp_helper.cpp of
awslabs/optimizing-multitask-training-through-dynamic-pipelines, which interpolates a profile in place of the estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf

import numpy as np

LIMITS = 32
"""Limits of the longest time that are tried, evenly spaced by their logarithms."""


def partition_samples(
    lengths: Sequence[int], most: int, stages: int, replicas: int, ranks: int, seconds: Callable[[int, int], float]
) -> list[range]:
    """Returns the samples of every micro-batch of the shortest step, as ranges of indices.

    lengths: padded, from the longest to the shortest.
    most: tokens of a micro-batch of a rank.
    stages: of the pipeline.
    replicas: to which micro-batches are dealt.
    ranks: that run micro-batches of the same size at a time, of whose samples each has an equal number.
    seconds: estimated time of some sequences of a length, in any unit; it grows with the number of sequences.
    """
    costs = {}  # by length: times of 1, 2, ... samples of all ranks
    for length in set(lengths):
        rows = max(1, most // length)
        costs[length] = np.repeat([seconds(row, length) for row in range(1, rows + 1)], ranks)
    each = [costs[length][: len(lengths) - i] for i, length in enumerate(lengths)]
    least = max(float(times[0]) for times in each)
    limits = np.geomspace(least, max(float(times[-1]) for times in each), LIMITS) * (1 + 1e-12)
    best, parts = inf, list[range]()
    for limit in limits:
        borders, total, longest = _shortest(each, limit)
        step = (stages - 1) * longest + total / replicas
        if step < best * (1 - 1e-12):
            best, parts = step, [range(*pair) for pair in pairwise(borders)]
    return parts


def _shortest(each: Sequence[np.ndarray], limit: float) -> tuple[list[int], float, float]:
    """Returns the borders of the partition of the least sum of times, none above the limit; that sum, and the longest
    time.

    each: for every first sample, the times of micro-batches of 1, 2, ... samples.
    """
    count = len(each)
    total, start = np.full(count + 1, inf), np.zeros(count + 1, int)
    total[0] = 0.0
    for i, times in enumerate(each):
        fits = times[: int(np.searchsorted(times, limit, side="right"))]
        ends = slice(i + 1, i + 1 + len(fits))
        better = total[i] + fits < total[ends]
        total[ends] = np.where(better, total[i] + fits, total[ends])
        start[ends] = np.where(better, i, start[ends])
    borders = [count]
    while borders[-1]:
        borders.append(int(start[borders[-1]]))
    borders.reverse()
    longest = max(each[i][j - i - 1] for i, j in pairwise(borders))
    return borders, float(total[-1]), float(longest)
