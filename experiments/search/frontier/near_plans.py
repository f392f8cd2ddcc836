"""The plans near that of the job itself, from which its fields were opened, or in a large space near one that needs
little memory: a search forecasts some of them first, so that an early interruption leaves plans, too."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterator
from itertools import islice, product
from typing import Any, NamedTuple

from meshcast.experiments.search.frontier.clusters import SearchedCluster
from meshcast.experiments.search.frontier.objectives import Incumbents
from meshcast.experiments.search.frontier.plan_search import ForecastPlan, has_memory
from meshcast.experiments.search.space.fields import FIELDS
from meshcast.experiments.search.space.membership import find_point
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.experiments.search.space.space import (
    OF_OTHER_VALUES,
    SMALLER_LAST,
    WORDS,
    LayerGroup,
    Pipeline,
    Space,
    StepChoice,
    values_of_point,
)
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job

ENOUGH = 10
"""Plans that fit, after which the search begins."""

MAX_FORECASTS = 30
"""Most plans near that of a job that are forecast."""

Point = tuple[LayerGroup, Pipeline, StepChoice]
Values = dict[str, Any]


class _Neighbourhood(NamedTuple):
    """Values of plans near one, which have not been looked at: those near plans that fit first, the fastest before
    others; then near those that do not fit, the smallest before others.

    cost: time of the step [s], or memory [bytes].
    """

    too_large: bool
    cost: float
    number: int
    left: Iterator[Values]


def find_near_plans(
    cluster: SearchedCluster, job: Job | None, shared: SharedWork, incumbents: Incumbents
) -> Iterator[tuple[Point, ForecastPlan]]:
    """Yields plans of a cluster that fit, from that of a job on by steps of a single field, with their points.

    job: on this cluster, with a plan; None: from plans that need little memory. incumbents: of the search.
    """
    space, number, seen, forecasts, fitting = cluster.space, itertools.count(), set[Point](), 0, 0
    groups = {*space.groups()}

    def holds(point: Point) -> bool:
        return point[0] in groups and _holds(space, point)

    def look_around(values: Values, too_large: bool = True, cost: float = math.inf) -> _Neighbourhood:
        return _Neighbourhood(too_large, cost, next(number), _list_neighbours(space, values))

    if job is None:
        starts = _choose_small(space, groups)
    else:
        starts = [_take_nearest(space, read_short_form(job, space.named).values)]
    waiting = [_Neighbourhood(False, 0.0, next(number), iter([start])) for start in starts if start]
    waiting += [look_around(start) for start in starts if start]
    while waiting:
        around = heapq.heappop(waiting)
        if (values := next(around.left, None)) is None:
            continue
        heapq.heappush(waiting, around)
        point = find_point(space, values)
        if point in seen or not holds(point):
            continue
        seen.add(point)
        plan = forecast_early(cluster, point, shared, incumbents)
        forecasts += 1
        if plan is not None:
            cost = plan.forecast.step_time if plan.fits else plan.forecast.peak_device
            heapq.heappush(waiting, look_around(values, not plan.fits, cost))
            if plan.fits:
                fitting += 1
                yield point, plan
        if fitting == ENOUGH or forecasts == MAX_FORECASTS:
            return


def _take_nearest(space: Space, values: Values) -> Values:
    """Returns the values of a plan, where a space lacks them, as lists of modules, its last, which recomputes most."""
    nearest = dict(values)
    for name in space.fields.values():
        value, known = values.get(name), space.values[name]
        depends = name in OF_OTHER_VALUES or (name == "partition" and isinstance(value, tuple))
        if value is not None and value not in known and not depends:
            nearest[name] = known[-1]
    return nearest


def _choose_small(space: Space, groups: Collection[LayerGroup]) -> list[Values]:
    """Returns the values of plans that need little memory and whose tensor parallelism stays on fast links: of each
    number of stages a point with most expert ranks, and with the last data scheme, which shards most."""
    known, cluster = space.values, space.loaded.cluster
    near = [ranks for ranks in known["tp"] if ranks <= cluster.scale_up_domain] or known["tp"]
    least = {name: known[name][0] for name in space.fields.values()}
    least |= {name: known[name][-1] for name in SMALLER_LAST} | {"tp": near[-1]}
    starts: dict[int, Values] = {}
    for pp, ep in product(known["pp"], known["ep"][::-1]):
        group, *_ = find_point(space, least | {"pp": pp, "ep": ep})
        if pp in starts or group not in groups or cluster.gpus % (pp * ep * group.expert_tensor_ranks):
            continue
        pipelines = (pipeline for pipeline in space.pipelines(group) if pipeline.pp == pp)
        for pipeline in islice((pipeline for pipeline in pipelines if pipeline.recomputed is None), 1):
            steps = [step for step in space.choices(group, pipeline) if space.admits(group, pipeline, step)]
            if steps:
                last = max(known["data"].index(step.data) for step in steps)
                step = next(step for step in steps if step.data == known["data"][last])
                starts[pp] = values_of_point(group, pipeline, step)
    return [*starts.values()] or [least]


def forecast_early(
    cluster: SearchedCluster, point: Point, shared: SharedWork, incumbents: Incumbents
) -> ForecastPlan | None:
    """Returns the forecast of a point, without a bound; None if it breaks a rule. incumbents: of the search."""
    space = cluster.space
    changes, job = space.changes(*point), space.job_of(*point)
    try:
        forecast = forecast_step(load_job(job, base=space.base), shared, energy="energy" in incumbents.names)
    except MeshcastError:
        return None
    fits, values = has_memory(space, forecast), incumbents.values(forecast, cluster.use)
    return ForecastPlan(changes, job, 0.0, forecast, fits, values)


def _list_neighbours(space: Space, values: Values) -> Iterator[Values]:
    """Yields the values of a plan, then of those with another word, or the next smaller or larger number, in a single
    open field."""
    yield values
    for field in space.open:
        name = FIELDS[field]
        known = space.values[name]
        at = known.index(values[name]) if values[name] in known else 0
        near = known if name in WORDS else known[max(0, at - 1) : at + 2]
        yield from ({**values, name: value} for value in near if value != values[name])


def _holds(space: Space, point: Point) -> bool:
    """Returns whether a space has a point of one of its groups, and the limits of the search admit it."""
    group, pipeline, step = point
    if pipeline not in space.pipelines(group):
        return False
    return step in space.choices(group, pipeline) and space.admits(group, pipeline, step)
