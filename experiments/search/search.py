"""Best-first branch and bound over the points of a space.

Groups wait with a cheap bound, their pipelines and points with better ones; the smallest bound is opened first: a group
into its pipelines, a pipeline into its points, a point into its exact forecast. The search ends when no bound is left
below the best plans found: nothing that was not forecast can be faster in the model.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from experiments.search.bounds import Bounds
from experiments.search.groups import GroupBounds, Known, OpenGroup
from experiments.search.space import LayerGroup, Pipeline, Space, StepChoice
from hardware.errors import ModelError, PlanError
from hardware.units import GIB
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.step import StepAndMemory, forecast_step
from simulator.job.load import load_job
from simulator.job.locate import locate_errors

ROUNDING = 1e-9
"""Relative excess of a bound over a forecast that is rounding."""

NEAR = 0.05
"""Share of the best step by which plans that are kept may be slower: further ones are forecast only on the way."""


class FoundPlan(NamedTuple):
    """A plan that was forecast.

    changes: values of the open fields. job: the job as plain data. bound: lower bound of its step time [s].
    forecast: its step time and memory.
    """

    changes: dict[str, Any]
    job: dict[str, Any]
    bound: float
    forecast: StepAndMemory


@dataclass
class Certificate:
    """What a search has proven.

    plans: distinct executions in the space. fields: values of the open fields.
    excluded: points that a limit of the search excludes, by limit (`experiments.search.limits`).
    memory_margin: share of the memory of a GPU that must stay free.
    invalid: points that break a rule. memory_bound: points whose memory bound exceeds the GPU. time_bound: points whose
        time bound is not below the best plan found. exact: points that were forecast, `too_large` of them over memory.
    groups: groups of points, `opened` of them bounded point by point.
    incumbent: step time of the best plan found [s]. open_bound: the smallest bound among points that were not forecast
        [s].
    ratios: of every forecast, bounds of time and of memory over the forecast.
    cpu: CPU time [s]. complete: whether the search ended by itself.
    """

    plans: int
    fields: dict[str, list[Any]]
    groups: int
    excluded: dict[str, int] = field(default_factory=dict)
    memory_margin: float = 0.0
    opened: int = 0
    invalid: int = 0
    memory_bound: int = 0
    time_bound: int = 0
    exact: int = 0
    too_large: int = 0
    incumbent: float = math.inf
    open_bound: float = math.inf
    ratios: list[tuple[float, float]] = field(default_factory=list)
    cpu: float = 0.0
    complete: bool = False

    @property
    def gap(self) -> float:
        """Share of the step by which a plan that was not forecast may be faster than the best one found."""
        if not math.isfinite(self.incumbent):
            return 1.0
        return max(0.0, 1.0 - self.open_bound / self.incumbent)

    def to_dict(self) -> dict[str, Any]:
        """The certificate in the answer of ``search --json``."""
        finite = math.isfinite(self.incumbent)
        return {
            "space": {"name": "fields of the plan", "plans": self.plans, "fields": self.fields},
            "excluded": self.excluded,
            "memory_margin": self.memory_margin,
            "cut": {"invalid": self.invalid, "memory_bound": self.memory_bound, "time_bound": self.time_bound},
            "exact": self.exact,
            "too_large": self.too_large,
            "groups": {"all": self.groups, "opened": self.opened},
            "incumbent_s": self.incumbent if finite else None,
            "open_bound_s": self.open_bound if math.isfinite(self.open_bound) else None,
            "gap": self.gap,
            "audited": len(self.ratios),
            "violations": 0,
            "complete": self.complete,
            "cpu_s": self.cpu,
        }


class Search:
    """A search for the plan with the shortest step that fits in memory.

    space: the points. within: gap at which the search may end. top: number of plans that are kept. shared: work that
    forecasts share, with the calibration of all costs. origin: path and text of the job file, for errors.
    """

    def __init__(
        self,
        space: Space,
        within: float = 0.0,
        top: int = 10,
        shared: SharedWork | None = None,
        origin: tuple[str, str] = ("", ""),
    ) -> None:
        self.space, self.within, self.top, self.origin = space, within, top, origin
        self.shared = shared or SharedWork()
        self.bounds = Bounds(space, self.shared)
        self.groups = GroupBounds(space, self.bounds)
        self.best: list[FoundPlan] = []
        self.forecasts: list[FoundPlan] = []
        sizes = {group: space.size(group) for group in space.groups()}
        excluded = {name: 0 for name in ("where", "near_measured")}
        for group in sizes:
            for name, count in space.count_excluded(group).items():
                excluded[name] += count
        self.sizes = {group: size for group, size in sizes.items() if size}
        plans = sum(sizes.values()) + sum(excluded.values())
        self.capacity = space.capacity
        self.certificate = Certificate(plans, space.stated_values(), len(self.sizes), excluded, space.memory_margin)
        self._number = itertools.count()
        self._heap: list[tuple[float, int, _Item]] = []

    def run(self, progress: Callable[[Certificate], None] = lambda _: None) -> Certificate:
        """Runs to the end, or until it is interrupted; `best` and the certificate hold what is proven by then.

        Raises PlanError or ModelError if every point breaks a rule: that of the first one.
        """
        began, found = time.process_time(), self.certificate
        # Bound of what is taken up and not in the queue: nothing is known of groups that have not entered it yet.
        taken = 0.0
        try:
            for group in self.sizes:
                self._push(self.bounds.bound_kernels(group), group)
            taken = math.inf
            while self._heap and self._heap[0][0] < self._limit():
                taken = self._heap[0][0]
                bound, _, item = heapq.heappop(self._heap)
                if isinstance(item, _Point):
                    self._forecast(item)
                elif isinstance(item, _Variants):
                    for step in item.steps:
                        self._bound(_OnePipeline(item.group, item.seconds, item.pipeline, [step]))
                elif isinstance(item, _OnePipeline):
                    self._bound(item)
                elif isinstance(item, _Pipelines):
                    self._bound_next(item, bound)
                elif isinstance(item, OpenGroup):
                    self._refine(item, bound)
                else:
                    self._open(item, bound)
                taken = math.inf
                found.open_bound = self._heap[0][0] if self._heap else found.incumbent
                found.cpu = time.process_time() - began
                progress(found)
            if found.invalid and found.invalid == found.plans - sum(found.excluded.values()):
                self._explain_rule()
            found.complete = True
            left = sum(self._count(item) for _, _, item in self._heap)
        except KeyboardInterrupt:
            left = found.plans - sum(found.excluded.values()) - found.invalid - found.memory_bound - found.exact
        found.time_bound = left
        found.open_bound = min((one[0] for one in self._heap), default=found.incumbent)
        found.open_bound = min(found.open_bound, taken)
        found.cpu = time.process_time() - began
        return found

    def _explain_rule(self) -> None:
        """Raises the error of the first point, where all of them break a rule."""
        group = next(iter(self.sizes))
        pipeline = next(one for one in self.space.pipelines(group) if self.space.choices(group, one))
        job = self.space.job_of(group, pipeline, self.space.choices(group, pipeline)[0])
        with locate_errors(*self.origin):
            try:
                forecast_step(load_job(job, base=self.space.base), self.shared)
            except (PlanError, ModelError) as error:
                count = self.certificate.invalid
                rule = f"all {count:,} plans of the space break a rule, the first one this: {error.rule}"
                raise type(error)(error.where, rule if count > 1 else error.rule, error.remedy, error.value) from None

    def _limit(self) -> float:
        """The bound from which on nothing is of interest [s]: no plan that is faster by more than the gap, and none of
        those that are kept."""
        if not self.best:
            return math.inf
        kept = self.best[-1].forecast.step_time if len(self.best) == self.top else math.inf
        return min(kept, self.certificate.incumbent * (1 + NEAR)) * (1 - self.within)

    def _push(self, bound: float, item: _Item) -> None:
        heapq.heappush(self._heap, (bound, next(self._number), item))

    def _count(self, item: _Item) -> int:
        """Number of points of an item of the queue."""
        if isinstance(item, LayerGroup):
            return self.sizes[item]
        if isinstance(item, OpenGroup):
            return int(item.points.sum())
        return 1 if isinstance(item, _Point) else item.left

    def _open(self, group: LayerGroup, bound: float) -> None:
        """Bounds the pipelines of a group by its kernels."""
        opened, invalid = self.groups.open(group)
        self.certificate.opened += 1
        self.certificate.invalid += invalid
        if opened is not None:
            self._push(max(bound, float(opened.seconds[0])), opened)

    def _refine(self, opened: OpenGroup, bound: float) -> None:
        """Bounds the pipelines of a group more closely, or leaves out those that do not fit in memory."""
        refined = self.groups.refine(opened)
        left = int(opened.points.sum() - (refined.points.sum() if refined else 0))
        # Without memory of its units a group breaks a rule.
        asks_memory = opened.known is Known.WITHOUT_RECOMPUTE
        if asks_memory and self.bounds.unit_memory(opened.group) is not None:
            self.certificate.memory_bound += left
        else:
            self.certificate.invalid += left
        if refined is None:
            return
        whole = Known.PASSES if opened.group.recompute != "none" else Known.MEMORY
        if refined.known is whole:
            self._push_pipelines(_Pipelines(refined), bound)
        else:
            self._push(max(bound, float(refined.seconds[0])), refined)

    def _push_pipelines(self, pipelines: _Pipelines, bound: float) -> None:
        if pipelines.at < len(pipelines.opened.places):
            self._push(max(bound, float(pipelines.opened.seconds[pipelines.at])), pipelines)

    def _bound_next(self, pipelines: _Pipelines, bound: float) -> None:
        """Bounds the next one of some pipelines by the order of its passes."""
        opened, at = pipelines.opened, pipelines.at
        pipeline, steps = opened.pipeline(at), self.groups.steps(opened, at)
        pipelines.at += 1
        if self.space.admits(opened.group, pipeline, steps[0]):
            chains = max(bound, self.bounds.bound_chains(opened.group, pipeline))
            self._push(chains, _OnePipeline(opened.group, chains, pipeline, steps))
        else:
            self.certificate.excluded["near_measured"] += len(steps)
        self._push_pipelines(pipelines, bound)

    def _bound(self, one: _OnePipeline) -> None:
        """Bounds points with one data scheme."""
        group, bound, pipeline, steps = one
        found = self.bounds.bound_points(group, pipeline, steps)
        if found is None:
            self.certificate.invalid += len(steps)
        elif found[1] > self.capacity:
            self.certificate.memory_bound += len(steps)
        elif len(steps) == 1:
            self._push(bound := max(bound, found[0]), _Point(group, pipeline, steps[0], bound, found[1]))
        else:
            self._push(bound := max(bound, found[0]), _Variants(group, bound, pipeline, steps))

    def _forecast(self, point: _Point) -> None:
        """Forecasts a point, and holds the forecast against its bounds."""
        group, pipeline, step, bound, nbytes = point
        found, changes = self.certificate, self.space.changes(group, pipeline, step)
        job = self.space.job_of(group, pipeline, step)
        try:
            forecast = forecast_step(load_job(job, base=self.space.base), self.shared)
        except (PlanError, ModelError):
            found.invalid += 1
            return
        found.exact += 1
        found.ratios.append((bound / forecast.step_time, nbytes / forecast.peak_device))
        if max(found.ratios[-1]) > 1 + ROUNDING:
            raise BoundViolation(changes, bound, nbytes, forecast)
        self.forecasts.append(made := FoundPlan(changes, job, bound, forecast))
        if not forecast.fits or forecast.peak_device > self.capacity:
            found.too_large += 1
            return
        self.best.append(made)
        self.best.sort(key=lambda one: one.forecast.step_time)
        del self.best[self.top :]
        found.incumbent = self.best[0].forecast.step_time


class BoundViolation(PlanError):
    """A lower bound above the forecast of its plan: an error in meshcast, which makes the certificate void."""

    def __init__(self, changes: dict[str, Any], bound: float, nbytes: float, forecast: StepAndMemory) -> None:
        fields = ", ".join(f"{name}={value}" for name, value in changes.items())
        times = f"{bound:.6g} s over {forecast.step_time:.6g} s"
        memory = f"{nbytes / GIB:.4g} GiB over {forecast.peak_device / GIB:.4g} GiB"
        rule = f"a lower bound is above the forecast of its plan ({times}, or {memory}): {fields}"
        super().__init__("search", rule, "Please report it with the job: nothing is proven")


class _Point(NamedTuple):
    """A point with its bounds by the order of its passes [s], [bytes]."""

    group: LayerGroup
    pipeline: Pipeline
    step: StepChoice
    seconds: float
    nbytes: float


class _OnePipeline(NamedTuple):
    """A pipeline of a group with one data scheme, bounded by the order of its passes [s], and its points."""

    group: LayerGroup
    seconds: float
    pipeline: Pipeline
    steps: list[StepChoice]

    @property
    def left(self) -> int:
        """Number of points."""
        return len(self.steps)


class _Variants(_OnePipeline):
    """Points that differ in what overlaps between the passes, with a bound of all [s]."""


@dataclass(eq=False)
class _Pipelines:
    """The pipelines of a group with their data schemes, those from `at` on still to be bounded by the order of their
    passes."""

    opened: OpenGroup
    at: int = 0

    @property
    def left(self) -> int:
        """Number of points."""
        return int(self.opened.points[self.at :].sum())


_Item = LayerGroup | OpenGroup | _Pipelines | _OnePipeline | _Variants | _Point
"""What waits in the queue."""
