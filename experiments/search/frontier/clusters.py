"""The clusters of a search: the points on each, their bounds, and the choices of their runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.group_bounds import GroupBounds
from meshcast.experiments.search.frontier.objectives import ClusterUse, Incumbents, simulates_runs
from meshcast.experiments.search.frontier.plan_runs import RunCounts
from meshcast.experiments.search.space.run_choices import make_choices
from meshcast.experiments.search.space.space import LayerGroup, Space
from meshcast.simulator.forecast.shared_work import SharedWork

NOTHING: Mapping[str, Any] = {}
"""No open fields of the run."""


MANY_UNITS = 200
"""Kinds of units up to which the kernels of all are bounded first."""


class SearchedCluster:
    """The points on a cluster, and their bounds.

    incumbents: with the objectives by which they are searched.
    """

    def __init__(
        self, space: Space, shared: SharedWork, incumbents: Incumbents, run_fields: Mapping[str, Any] = NOTHING
    ) -> None:
        self.space, self.runs = space, None
        if simulates_runs(incumbents.names):
            equal, priced = space.data_schemes.known.issuperset(space.values["data"]), "run-cost" in incumbents.names
            self.runs = make_choices(space.job, run_fields, space.base, equal, priced)
        self.bounds = PointBounds(space, shared)
        self.groups = GroupBounds(space, self.bounds, incumbents.by_memory)
        self.use = ClusterUse.of(space.loaded, incumbents.names)._replace(runs=self.runs)
        self.plans = 0
        self.sizes: dict[LayerGroup, int] = {}
        """Points of every group that has any."""

    def count(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Counts the points of a group after another: those of each, and those that limits exclude, by limit."""
        self.plans, self.sizes = 0, {}
        for group in self.space.groups():
            size, excluded = self.space.size(group), self.space.count_excluded(group)
            self.plans += size + sum(excluded.values())
            if size:
                self.sizes[group] = size
            yield size, excluded

    def kind_of_units(self, group: LayerGroup) -> LayerGroup:
        """Returns the group of which units are lowered for the bound of the kernels of `group`."""
        return self.bounds.prices.kind_of_units(group)

    @property
    def has_many_units(self) -> bool:
        """Whether it takes long to bound the kernels of all groups."""
        return len({self.kind_of_units(group) for group in self.space.groups()}) > MANY_UNITS


def stated_values(clusters: Sequence[SearchedCluster]) -> dict[str, list[Any]]:
    """Returns the values of the open fields over all clusters, as a job states them."""
    stated: dict[str, list[Any]] = {}
    for cluster in clusters:
        of_runs = cluster.runs.stated_values() if cluster.runs is not None else {}
        for name, values in (cluster.space.stated_values() | of_runs).items():
            known = stated.setdefault(name, [])
            known += [value for value in values if value not in known]
    return stated


def count_runs(clusters: Sequence[SearchedCluster]) -> RunCounts | None:
    """Returns what a search is to simulate; None if it is by steps."""
    every = [cluster.runs for cluster in clusters if cluster.runs is not None]
    if not every:
        return None
    seed = clusters[0].space.loaded.run.seed or 0
    return RunCounts(max(len(runs.choices) for runs in every), every[0].seeds, seed)
