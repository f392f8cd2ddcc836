"""The plans near that of the job itself, from which its fields were opened: a search forecasts some of them first, so
that an early interruption leaves plans, too."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from meshcast.experiments.search.frontier.clusters import SearchedCluster
from meshcast.experiments.search.frontier.objectives import Incumbents
from meshcast.experiments.search.frontier.plan_search import ForecastPlan, has_memory
from meshcast.experiments.search.space.fields import FIELDS
from meshcast.experiments.search.space.membership import find_point
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.experiments.search.space.space import OF_OTHER_VALUES, WORDS, LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job

ENOUGH = 10
"""Plans that fit, after which the search begins."""

MAX_FORECASTS = 60
"""Most plans near that of a job that are forecast."""

Point = tuple[LayerGroup, Pipeline, StepChoice]
Values = dict[str, Any]


class _Neighbourhood(NamedTuple):
    """A plan whose neighbours have not been looked at: those of plans that fit first, the fastest before others."""

    too_large: bool
    seconds: float
    number: int
    values: Values


def find_near_plans(
    cluster: SearchedCluster, job: Job, shared: SharedWork, incumbents: Incumbents
) -> Iterator[tuple[Point, ForecastPlan]]:
    """Yields plans of a cluster that fit, from that of a job on by steps of a single field, with their points.

    job: on this cluster, with a plan. incumbents: of the search.
    """
    space, number, seen, forecasts, fitting = cluster.space, itertools.count(), set[Point](), 0, 0
    values = _take_nearest(space, read_short_form(job, space.named).values)
    waiting = [_Neighbourhood(True, math.inf, next(number), values)] if values else []
    while waiting:
        around = heapq.heappop(waiting).values
        for values in (around, *_list_neighbours(space, around)):
            point = find_point(space, values)
            if point in seen or not _holds(cluster, point):
                continue
            seen.add(point)
            changes, plan = space.changes(*point), space.job_of(*point)
            forecast = _forecast(plan, space, shared)
            forecasts += 1
            if forecast is not None:
                fits = has_memory(space, forecast)
                heapq.heappush(waiting, _Neighbourhood(not fits, forecast.step_time, next(number), values))
                if fits:
                    fitting += 1
                    objectives = incumbents.values(forecast, cluster.use)
                    yield point, ForecastPlan(changes, plan, 0.0, forecast, fits, objectives)
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


def _forecast(plan: Values, space: Space, shared: SharedWork) -> StepAndMemory | None:
    """Returns the forecast of a plan; None if it breaks a rule."""
    try:
        return forecast_step(load_job(plan, base=space.base), shared)
    except MeshcastError:
        return None


def _list_neighbours(space: Space, values: Values) -> Iterator[Values]:
    """Yields the values of plans with another word, or the next smaller or larger number, in a single open field."""
    for field in space.open:
        name = FIELDS[field]
        known = space.values[name]
        at = known.index(values[name]) if values[name] in known else 0
        near = known if name in WORDS else known[max(0, at - 1) : at + 2]
        yield from ({**values, name: value} for value in near if value != values[name])


def _holds(cluster: SearchedCluster, point: Point) -> bool:
    """Returns whether a cluster has a point, and the limits of the search admit it."""
    (group, pipeline, step), space = point, cluster.space
    if group not in cluster.sizes or pipeline not in space.pipelines(group):
        return False
    return step in space.choices(group, pipeline) and space.admits(group, pipeline, step)
