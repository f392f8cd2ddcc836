"""Partitions of layers over stages in a fixed order, each with costs of its own: `simulator.plan.partition` on tables.

The largest cost of a stage is minimised (mCAP, Metis), or 1F1B's step: the sum of all stages and, for every further
micro-batch, the slowest of them (AMP, Li et al. 2022, arXiv 2210.07297, section 3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshcast.simulator.plan.partition import is_reachable, minimise_largest, minimise_step


class Partition(NamedTuple):
    """Layers of every stage, with the value of the objective and the number of table entries."""

    layers: tuple[int, ...]
    value: float
    visited: int


def balance_stages(costs: Sequence[np.ndarray]) -> Partition | None:
    """The partition whose largest cost is least; None if all are infinite.

    costs: by stage, of the layers from first to last, both included [layers, layers].
    """
    tables = [_with_borders(one) for one in costs]
    if not is_reachable(tables):
        return None
    layers = minimise_largest(tables)
    return Partition(tuple(layers), max(costs_of(costs, layers)), sum(one.size for one in tables))


def shorten_step(costs: Sequence[np.ndarray], microbatches: int) -> Partition | None:
    """The partition of the least sum + (m - 1) x largest cost; see `balance_stages`."""
    tables = [_with_borders(one) for one in costs]
    if not is_reachable(tables):
        return None
    layers = minimise_step(tables, microbatches)
    own = costs_of(costs, layers)
    return Partition(tuple(layers), sum(own) + (microbatches - 1) * max(own), sum(one.size for one in tables))


def costs_of(costs: Sequence[np.ndarray], layers: Sequence[int]) -> list[float]:
    """The cost of every stage of a partition."""
    ends = np.cumsum(layers).tolist()
    return [float(cost[end - count, end - 1]) for cost, end, count in zip(costs, ends, layers, strict=True)]


def _with_borders(cost: np.ndarray) -> np.ndarray:
    """Costs by the borders of a stage, from one (row) to another (column); a stage without layers is not allowed."""
    layers = len(cost)
    found = np.full((layers + 1, layers + 1), np.inf)
    found[:layers, 1:] = np.where(np.less_equal(*np.indices(cost.shape)), cost, np.inf)
    return found
