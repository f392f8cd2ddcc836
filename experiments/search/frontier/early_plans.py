"""Points of a group that are likely to be among its best: a search forecasts some of them before their bounds are the
smallest of all, so that it has good plans early, and an interruption proves a small gap."""

from __future__ import annotations

import numpy as np

from meshcast.experiments.search.frontier.clusters import SearchedCluster
from meshcast.experiments.search.frontier.group_bounds import OpenGroup, group_by_overlap
from meshcast.experiments.search.frontier.near_plans import Point

ROOMY = 0.9
"""Share of the memory of a GPU up to which the bound of a pipeline leaves room: bounds of memory are below the forecast
by 4 % in the median of drawn plans (docs/search.md)."""

WORTH = 0.01
"""Share by which the bound of a group must be below the best plan for one of its points to be forecast early."""

FEW = 4
"""Pipelines of a group up to which it has no early plans: they are bounded one by one almost as soon."""

MOST_IN_VAIN = 20
"""Forecasts in a row that gave no better plan, after which none is made early."""


def choose_early(cluster: SearchedCluster, opened: OpenGroup) -> list[Point]:
    """Returns two points of a group at most, those with the smallest bounds that may fit: of each data scheme the
    pipeline with the smallest bound, and the first that leaves room in memory, are looked at.

    opened: the pipelines that may fit, in the order of their bounds of time.
    """
    every = np.arange(len(opened.places))
    roomy = every[opened.nbytes <= ROOMY * cluster.space.capacity]
    first = [at[np.unique(opened.schemes[at], return_index=True)[1]] for at in (every, roomy)]
    points = list[tuple[float, Point]]()
    for at in np.unique(np.concatenate(first)).tolist():
        pipeline = opened.pipeline(at)
        for steps in group_by_overlap(cluster.groups.steps(opened, at)):
            step = max(steps, key=lambda step: step.overlap_pp)
            bounds = cluster.groups.bound_before_states(opened.group, pipeline, [step])
            if bounds is not None and bounds[1] <= cluster.space.capacity:
                points.append((bounds[0], (opened.group, pipeline, step)))
    points.sort(key=lambda bounded: bounded[0])
    return [point for _, point in points[:2] if cluster.space.admits(*point)]
