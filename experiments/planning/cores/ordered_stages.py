"""Partitions of layers over stages in a fixed order, with a cost table each: `simulator.plan.partition` on tables.

The largest cost of a stage is minimised (mCAP, Metis), or 1F1B's step: the sum of all stages and, for every further
micro-batch, the slowest of them (AMP, Li et al. 2022, arXiv 2210.07297, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import check_time
from meshcast.simulator.plan.partition import is_reachable, minimise_largest, minimise_step


class Partition(NamedTuple):
    """Layers of every stage, with the value of the objective and the number of table entries computed."""

    layers: tuple[int, ...]
    value: float
    visited: int


def partition_stages(costs: Sequence[np.ndarray], microbatches: int = 0) -> Partition | None:
    """Returns the partition whose largest cost is least, or that of the shortest step of so many micro-batches; None if
    all are infinite.

    costs: by stage, of the layers from first to last, both included [layers, layers].
    """
    check_time()
    # By the borders of a stage, its begin (row) and end (column); a stage without layers is not allowed.
    borders = len(costs[0]) + 1
    stacked = np.full((len(costs), borders, borders), np.inf)
    stacked[:, :-1, 1:] = costs
    stacked[:, np.tri(borders, dtype=bool)] = np.inf
    tables = [*stacked]
    if not is_reachable(tables):
        return None
    layers = minimise_step(tables, microbatches) if microbatches else minimise_largest(tables)
    chosen = costs_of(costs, layers)
    value = sum(chosen) + (microbatches - 1) * max(chosen) if microbatches else max(chosen)
    return Partition(tuple(layers), value, stacked.size)


def costs_of(costs: Sequence[np.ndarray], layers: Sequence[int]) -> list[float]:
    """Returns the cost of every stage of a partition."""
    ends = np.cumsum(layers).tolist()
    return [float(cost[end - count, end - 1]) for cost, end, count in zip(costs, ends, layers, strict=True)]
