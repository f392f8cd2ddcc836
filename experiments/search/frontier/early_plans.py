"""Points of a group that are likely to be among its best: a search forecasts some of them before their bounds are the
smallest of all, so that it has good plans early, and an interruption proves a small gap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from meshcast.experiments.search.frontier.clusters import SearchedCluster
from meshcast.experiments.search.frontier.group_bounds import OpenGroup, group_by_overlap
from meshcast.experiments.search.frontier.near_plans import Point

ROOMY = 0.9
"""Share of the memory of a GPU up to which the bound of a pipeline leaves room: bounds of memory are below the forecast
by 4 % in the median of drawn plans (docs/search.md)."""

WORTH = 0.01
"""Share by which the bound of a group must be below the best plan for one of its points to be forecast early."""

MOST_IN_VAIN = 20
"""Forecasts in a row that gave no better plan, after which none is made early."""


def choose_early(cluster: SearchedCluster, opened: OpenGroup) -> Iterator[Point]:
    """Yields a point of the pipeline of a group with the smallest bound, and of the first that leaves room in memory.

    opened: the pipelines that may fit, in the order of their bounds of time.
    """
    roomy = np.flatnonzero(opened.nbytes <= ROOMY * cluster.space.capacity)
    for at in dict.fromkeys([0, *roomy[:1].tolist()]):
        pipeline, best = opened.pipeline(at), (np.inf, None)
        for steps in group_by_overlap(cluster.groups.steps(opened, at)):
            bounds = cluster.groups.bound_before_states(opened.group, pipeline, steps)
            if bounds is not None and bounds[1] <= cluster.space.capacity and bounds[0] < best[0]:
                best = bounds[0], max(steps, key=lambda step: step.overlap_pp)
        if best[1] is not None and cluster.space.admits(opened.group, pipeline, best[1]):
            yield opened.group, pipeline, best[1]
