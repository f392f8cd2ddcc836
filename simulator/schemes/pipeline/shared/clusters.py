"""Clusters of micro-batches of unlike length, by how long their passes take (DynaPipe)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshcast.simulator.scheduling.schedule import Action, PassDurations

MOST_ROUNDS = 20
"""Rounds of k-means; few clusters in one dimension settle in less."""


def cluster_by_time(each: Sequence[PassDurations]) -> list[list[int]]:
    """Numbers of the micro-batches of every cluster, in order: k-means of the times of forward and backward passes on
    the first and the last device, from evenly spaced quantiles; four clusters, three of more than twenty micro-batches.

    each: durations of the passes of every micro-batch.
    """
    ends = (0, len(each[0].forward) - 1)
    times = np.array([[one.of(Action(stage, kind, 0)) for stage in ends for kind in ("F", "BW")] for one in each])
    count = min(len(each), 3 if len(each) > 20 else 4)
    by_time = times[np.argsort(times.sum(axis=1), kind="stable")]
    centres = np.unique(by_time[np.linspace(0, len(each) - 1, count).round().astype(int)], axis=0)
    for _ in range(MOST_ROUNDS):
        nearest = np.linalg.norm(times[:, None] - centres, axis=2).argmin(axis=1)
        centres = np.array([times[nearest == i].mean(axis=0) for i in np.unique(nearest)])
    return [np.flatnonzero(nearest == i).tolist() for i in np.unique(nearest)]
