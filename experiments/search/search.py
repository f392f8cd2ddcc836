"""Best-first branch and bound over the points of a space.

Groups wait with a cheap bound, their points with a better one; the smallest bound is opened first: a group into its
points, a point into its exact forecast. The search ends when no bound is left below the best plan found: nothing that
was not forecast can be faster in the model.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from experiments.search.bounds import BoundedPoints, Bounds
from experiments.search.space import Group, Pipeline, Space, StepChoice
from hardware.errors import ModelError, PlanError
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.step import StepAndMemory, forecast_step
from simulator.job.load import load_job

ROUNDING = 1e-9
"""Relative excess of a bound over a forecast that is rounding."""


class Found(NamedTuple):
    """A plan that was forecast.

    changes: values of the open fields. bound: lower bound of its step time [s]. report: its forecast.
    """

    changes: dict[str, Any]
    job: dict[str, Any]
    bound: float
    bound_nbytes: float
    report: StepAndMemory


@dataclass
class Certificate:
    """What a search has proven.

    plans: distinct executions in the space. fields: values of the open fields.
    invalid: points that break a rule. over_memory: points whose memory bound exceeds the GPU. slower: points whose time
        bound is not below the best plan. exact: points that were forecast.
    incumbent: step time of the best plan [s]. open_bound: the smallest bound among points that were not forecast [s].
    audited: forecasts held against their bounds. cpu: CPU time [s].
    """

    plans: int
    fields: dict[str, list[Any]]
    invalid: int = 0
    over_memory: int = 0
    slower: int = 0
    exact: int = 0
    too_large: int = 0
    groups: int = 0
    opened: int = 0
    incumbent: float = np.inf
    open_bound: float = np.inf
    audited: int = 0
    tightness: list[tuple[float, float]] = field(default_factory=list)
    cpu: float = 0.0
    complete: bool = False

    @property
    def gap(self) -> float:
        """How much faster than the best plan found another one could be, as a share of the step."""
        if not np.isfinite(self.incumbent):
            return float("nan")
        return max(0.0, 1.0 - min(self.open_bound, self.incumbent) / self.incumbent)


class Search:
    """A search for the plan with the shortest step that fits in memory.

    space: the points. within: gap at which the search may end. top: number of plans that are kept.
    """

    def __init__(self, space: Space, within: float = 0.0, top: int = 10) -> None:
        self.space, self.within, self.top = space, within, top
        self.shared = SharedWork()
        self.bounds = Bounds(space, self.shared)
        self.best: list[Found] = []
        self.groups = space.groups()
        self.sizes = {group: space.size(group) for group in self.groups}
        self.certificate = Certificate(sum(self.sizes.values()), {f: self._values(f) for f in space.open})
        self.certificate.groups = len(self.groups)
        self.capacity = min(float(c.gpu.memory) for c in (space.loaded.cluster,))

    def _values(self, field_name: str) -> list[Any]:
        from experiments.search.space import FIELDS

        return [list(one) if isinstance(one, tuple) else one for one in self.space.values[FIELDS[field_name]]]

    def run(self, progress: Callable[[Certificate], None] = lambda _: None) -> Certificate:
        """Runs to the end, or until KeyboardInterrupt; `best` and the certificate hold what is proven by then."""
        began, found = time.process_time(), self.certificate
        heap: list[tuple[float, int, Any]] = []
        number = 0
        priced = set[Group]()
        for group in self.groups:
            heap.append((self.bounds.least(group), number, group))
            number += 1
        heapq.heapify(heap)
        try:
            while heap:
                bound, _, item = heap[0]
                if bound >= found.incumbent * (1 - self.within):
                    break
                if isinstance(item, Group) and item not in priced:
                    priced.add(item)
                    heapq.heapreplace(heap, (max(bound, self.bounds.better(item)), number, item))
                    number += 1
                elif isinstance(item, Group):
                    heapq.heappop(heap)
                    found.opened += 1
                    points = self._open(item)
                    if points is not None:
                        heapq.heappush(heap, (points.bound, number, points))
                        number += 1
                else:
                    self._forecast(item)
                    if item.advance():
                        heapq.heapreplace(heap, (item.bound, number, item))
                        number += 1
                    else:
                        heapq.heappop(heap)
                found.open_bound = heap[0][0] if heap else found.incumbent
                found.cpu = time.process_time() - began
                progress(found)
            found.complete = True
        except KeyboardInterrupt:
            pass
        found.open_bound = min((one[0] for one in heap), default=found.incumbent)
        for _, _, item in heap:
            found.slower += self.sizes[item] if isinstance(item, Group) else item.left
        found.cpu = time.process_time() - began
        return found

    def _open(self, group: Group) -> _Points | None:
        points = self.bounds.of(group)
        fits = points.nbytes <= self.capacity
        self.certificate.invalid += points.invalid
        self.certificate.over_memory += int((~fits).sum())
        order = np.flatnonzero(fits)
        order = order[np.argsort(points.seconds[order], kind="stable")]
        return _Points(group, points, order.tolist()) if len(order) else None

    def _forecast(self, points: _Points) -> None:
        """Forecasts the next point of a group, and holds the forecast against its bounds."""
        found, pipeline, step = self.certificate, *points.point
        changes = self.space.changes(points.group, pipeline, step)
        job = self.space.job_of(points.group, pipeline, step)
        try:
            report = forecast_step(load_job(job, base=self.space.base), self.shared)
        except (PlanError, ModelError):
            found.invalid += 1
            return
        found.exact += 1
        found.audited += 1
        nbytes = points.points.nbytes[points.order[points.at]]
        found.tightness.append((points.bound / report.step_time, nbytes / report.peak_device))
        self._audit(job, points.bound, report)
        if not report.fits:
            found.too_large += 1
            return
        self.best.append(Found(changes, job, points.bound, nbytes, report))
        self.best.sort(key=lambda one: one.report.step_time)
        del self.best[self.top :]
        found.incumbent = self.best[0].report.step_time

    def _audit(self, job: dict[str, Any], bound: float, report: StepAndMemory) -> None:
        if bound > report.step_time * (1 + ROUNDING):
            raise BoundViolation(f"bound {bound:.6g} s above the forecast {report.step_time:.6g} s of {job}")


class BoundViolation(AssertionError):
    """A lower bound above the forecast of its plan: an error in meshcast."""


class _Points:
    """The points of a group in the order of their bounds, those from `at` on still to be forecast."""

    def __init__(self, group: Group, points: BoundedPoints, order: list[int]) -> None:
        self.group, self.points, self.order, self.at = group, points, order, 0

    @property
    def bound(self) -> float:
        return float(self.points.seconds[self.order[self.at]])

    @property
    def point(self) -> tuple[Pipeline, StepChoice]:
        index = self.order[self.at]
        return self.points.pipelines[index], self.points.steps[index]

    @property
    def left(self) -> int:
        return len(self.order) - self.at

    def advance(self) -> bool:
        self.at += 1
        return self.at < len(self.order)
