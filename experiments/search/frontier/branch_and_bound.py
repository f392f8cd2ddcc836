"""Best-first branch and bound over the points of a space.

Groups wait with a cheap bound, their pipelines and points with better ones; the smallest bound is opened first: a group
into its pipelines, a pipeline into its points, a point into its exact forecast. The search ends when no bound is left
that is better than the best plans: nothing that was not forecast can be better in the model. Of two objectives it
goes on until a plan of the front dominates everything that is left.

By the length or the price of runs, a plan that was forecast waits once more for each choice of its run, with the bound
of the forecast step; what comes first is simulated, with the same random numbers for all.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from meshcast.experiments.runs.seeds import RunSimulator
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.clusters import (
    MANY_UNITS,
    NOTHING,
    SearchedCluster,
    count_runs,
    stated_values,
)
from meshcast.experiments.search.frontier.early_plans import FEW, MOST_IN_VAIN, WORTH, choose_early
from meshcast.experiments.search.frontier.group_bounds import Known, OpenGroup, group_by_overlap
from meshcast.experiments.search.frontier.near_plans import Point, find_near_plans, forecast_early
from meshcast.experiments.search.frontier.objectives import ClusterUse, Incumbents
from meshcast.experiments.search.frontier.plan_runs import PlanRuns
from meshcast.experiments.search.frontier.plan_search import (
    ROUNDING,
    BoundViolation,
    CountInterrupted,
    ForecastPlan,
    PlanSearch,
)
from meshcast.experiments.search.space.empty_space import explain_empty, explain_excluded
from meshcast.experiments.search.space.run_choices import RunChoice
from meshcast.experiments.search.space.space import NOTHING_EXCLUDED, LayerGroup, Pipeline, Space, StepChoice
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.job import NO_FILE, Job, JobOrigin
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import make_run, replace_run_keys
from meshcast.simulator.runs.replicas import ForecastSteps

Groups = Sequence[tuple[SearchedCluster, LayerGroup]]

UNITS_AT_ONCE = 16
"""Of many kinds of units, how many are bounded before a plan is forecast."""

GROUPS_OF_A_REPORT = 50
"""Groups that are counted between two reports of progress: counting one takes no longer than reading the clock."""


CLOCK_SECONDS = 0.02
"""Time between two readings of the CPU time [s]: some systems take up to half a millisecond for one."""


class OtherProcesses(Protocol):
    """The plans of other processes that search the same space."""

    def send(self, values: tuple[float, ...]) -> None:
        """Tells them of a plan that fits."""

    def receive(self) -> Iterable[tuple[float, ...]]:
        """Returns the plans that they have met since."""

    def hearing_interrupts(self) -> AbstractContextManager[None]:
        """Returns the context in which Ctrl-C raises KeyboardInterrupt."""


class Search(PlanSearch):
    """A search for the best plans that fit in memory.

    spaces: the points, by cluster.
    within: gap at which the search may end.
    top: number of plans that are kept.
    objectives: a single objective, or two for their Pareto front (`experiments.search.frontier.objectives`).
    shared: work that forecasts share, with the calibration of all costs.
    origin: the file of the job, for errors.
    run_fields: open fields of the run, with their values or ``auto``.
    start: the job before its fields were opened: the plans near its plan are forecast first.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        within: float = 0.0,
        top: int = 10,
        objectives: tuple[str, ...] = ("time",),
        shared: SharedWork | None = None,
        origin: JobOrigin = NO_FILE,
        run_fields: Mapping[str, Any] = NOTHING,
        start: Job | None = None,
    ) -> None:
        work, incumbents = shared or SharedWork(), Incumbents(objectives, top, within)
        self.clusters = [SearchedCluster(space, work, incumbents, run_fields) for space in spaces]
        certificate = Certificate(
            plans=0,
            fields=stated_values(self.clusters),
            groups=0,
            objectives=objectives,
            excluded=dict(NOTHING_EXCLUDED),
            memory_margin=spaces[0].memory_margin,
            memory_risk=spaces[0].memory_risk,
            runs=count_runs(self.clusters),
            counting=True,
        )
        super().__init__(spaces, work, incumbents, certificate, top, origin)
        self.start = start
        self._early: dict[tuple[int, Point], ForecastPlan] = {}
        """Plans that fit and were forecast before the search has come to them, by cluster and point: near that of the
        job, or in groups with small bounds."""
        self._in_vain = 0
        """Early forecasts in groups that gave no better plan since the last one that did."""
        self._number = itertools.count()
        self._heap: list[_Waiting] = []
        self._taken: _Waiting | None = None
        """What is taken up and no longer in the queue."""
        self._outside: _Waiting | None = None
        """Stands for the groups that have not entered the queue: nothing is known of them."""
        self._left_out: list[np.ndarray] = []
        """Bounds of two objectives that a plan of the front would dominate if it were better by the gap [rows, 2]."""
        self.simulator = RunSimulator()
        self._refused: PlanError | None = None
        """Of the first run that breaks a rule."""
        self._dominated_runs = 0

    @property
    def space(self) -> Space:
        """The points of the first cluster."""
        return self.clusters[0].space

    def count(self, progress: Callable[[Certificate], None] = lambda _: None) -> None:
        """Counts the points of all groups once. Raises CountInterrupted, or PlanError if limits leave no points."""
        certificate = self.certificate
        if not certificate.counting:
            return
        began = time.process_time()

        def report() -> None:
            certificate.cpu = time.process_time() - began
            progress(certificate)

        certificate.plans, certificate.groups = 0, 0
        certificate.excluded = dict.fromkeys(certificate.excluded, 0)
        try:
            every = (counted for cluster in self.clusters for counted in cluster.count())
            for number, (size, excluded) in enumerate(every, 1):
                certificate.groups += size > 0
                certificate.plans += size + sum(excluded.values())
                for name, count in excluded.items():
                    certificate.excluded[name] += count
                if number % GROUPS_OF_A_REPORT == 0:
                    report()
            report()
        except KeyboardInterrupt:
            raise CountInterrupted from None
        certificate.counting = False
        if not certificate.plans:
            with locate_errors(*self.origin):
                raise explain_empty(self.space)
        if not certificate.admitted:
            raise explain_excluded(certificate.plans, certificate.excluded, self.space)

    def begin(self, progress: Callable[[Certificate], None] = lambda _: None) -> None:
        """Forecasts plans near that of the job before its fields were opened, which the search has from then on; if
        there is none, plans that need little memory where it takes long to count and to bound all groups."""
        for cluster in self.clusters:
            elsewhere = self.start is not None and cluster.space.loaded.cluster != self.start.cluster
            if cluster.runs is not None or elsewhere or (self.start is None and not cluster.has_many_units):
                continue
            for point, plan in find_near_plans(cluster, self.start, self.shared, self.incumbents):
                self._add_plan(cluster, point, plan)
                progress(self.certificate)

    def _add_plan(self, cluster: SearchedCluster, point: Point, plan: ForecastPlan) -> None:
        """Adds a plan that fits and that the search has not come to."""
        self._early[id(cluster), point] = plan
        self.note(plan.values)
        self._note_step(plan)

    def list_groups(self) -> list[tuple[SearchedCluster, LayerGroup]]:
        return [(cluster, group) for cluster in self.clusters for group in cluster.sizes]

    def run(
        self,
        progress: Callable[[Certificate], None] = lambda _: None,
        groups: Groups | None = None,
        others: OtherProcesses | None = None,
    ) -> Certificate:
        """Runs to the end, or until it is interrupted; `best` and the certificate hold what is proven by then.

        groups: those to search, if not all. others: of processes that search the others.
        Raises PlanError or ModelError if every point breaks a rule: that of the first point; and as `count` does.
        """
        self.count(progress)
        certificate = self.certificate
        began = time.process_time() - certificate.cpu
        entered = self.list_groups() if groups is None else groups
        points = sum(cluster.sizes[group] for cluster, group in entered) + sum(certificate.excluded.values())
        numbers = {(id(cluster), group) for cluster, group in entered}
        self._early = {key: plan for key, plan in self._early.items() if (key[0], key[1][0]) in numbers}

        read = 0.0

        def report() -> None:
            nonlocal read
            if (now := time.perf_counter()) - read >= CLOCK_SECONDS:  # the clock of a process takes long to read
                read, certificate.cpu = now, time.process_time() - began + self.simulator.cpu
            progress(certificate)

        try:
            with others.hearing_interrupts() if others is not None else nullcontext():
                self._divide(entered, others, report)
            if groups is None and certificate.invalid and certificate.invalid == certificate.admitted:
                self.explain_rule()
            runs = certificate.runs
            if self._refused is not None and runs and runs.invalid and not runs.simulated:
                raise self._refused
            certificate.time_bound += sum(map(self._count, self._heap)) - len(self._early)
            self._add_early()
            certificate.complete = True
        except KeyboardInterrupt:
            # Plans that were forecast early may be among those that are cut: they count once, as forecast.
            cut = sum(self._count(waiting) for waiting in self._heap if waiting.value >= self.incumbents.limit)
            certificate.time_bound += max(cut - len(self._early), 0)
            self._add_early()
            certificate.open = points - certificate.decided
        self._state_open_bounds()
        certificate.cpu = time.process_time() - began + self.simulator.cpu
        return certificate

    def _add_early(self) -> None:
        """Adds the plans that the search has not come to: they were forecast, too."""
        self.forecasts += self._early.values()
        self.certificate.exact += len(self._early)
        self._early = {}

    def _divide(self, groups: Groups, others: OtherProcesses | None, report: Callable[[], None]) -> None:
        """Takes up what has the smallest bound until no bound is better than the best plans.

        Groups enter some at a time: in a space of many of them a plan is forecast before the next ones are bounded,
        unless one is known.
        """
        certificate, batches = self.certificate, divide_groups(groups)
        for number, entering in enumerate(batches, 1):
            self._outside, certificate.open_bound = _Waiting(0.0, -1, self.clusters[0], 0.0, 0.0, None), 0.0
            self._enter(entering)
            report()
            if number == len(batches):
                self._outside = None
            exact = certificate.exact
            while self._heap and self._heap[0].value < self.incumbents.limit:
                if self._outside is not None and (certificate.exact > exact or certificate.incumbent < math.inf):
                    break
                for values in others.receive() if others is not None else ():
                    self.note(values)
                self._taken = self._heap[0]
                heapq.heappop(self._heap)
                self._take_up(self._taken, others)
                self._taken = None
                certificate.open_bound = self._heap[0].value if self._heap else certificate.incumbent
                if self._outside is not None:
                    certificate.open_bound = 0.0
                report()

    def _enter(self, groups: Groups) -> None:
        """Queues groups by the bounds of their operators."""
        for cluster, group in groups:
            nbytes = cluster.groups.least_memory(group) if "memory" in self.certificate.objectives else 0.0
            self._push(cluster, group, cluster.groups.bound_operators(group), nbytes)

    def _state_open_bounds(self) -> None:
        certificate = self.certificate
        waiting = [*self._heap, *(entry for entry in (self._taken, self._outside) if entry is not None)]
        certificate.open_bound = min((entry.value for entry in waiting), default=certificate.incumbent)
        self.open_bounds = self._bounds_of(waiting)
        if len(certificate.objectives) > 1:
            certificate.front_gap = self.incumbents.gap(self.open_bounds)
        if certificate.runs is not None:
            candidates = sum(isinstance(entry.item, _Candidate) for entry in waiting)
            certificate.runs.waiting = candidates + self._dominated_runs

    def explain_rule(self) -> None:
        """Raises the error of the first point, where all of them break a rule."""
        cluster, group = self.list_groups()[0]
        space = cluster.space
        pipeline = next(pipeline for pipeline in space.pipelines(group) if space.choices(group, pipeline))
        self.raise_rule(space.job_of(group, pipeline, space.choices(group, pipeline)[0]))

    def _push(self, cluster: SearchedCluster, item: _Item, seconds: float, nbytes: float) -> None:
        value = self.incumbents.bounds(seconds, nbytes, _use_of(cluster, item))[0]
        heapq.heappush(self._heap, _Waiting(value, next(self._number), cluster, seconds, nbytes, item))

    def _count(self, waiting: _Waiting) -> int:
        """Returns the number of points of an item of the queue."""
        item = waiting.item
        if isinstance(item, LayerGroup | _FittingGroup | _GroupOfPasses):
            return waiting.cluster.sizes[item if isinstance(item, LayerGroup) else item.group]
        if item is None or isinstance(item, _Candidate):
            return 0
        return 1 if isinstance(item, _Point) else item.left

    def _bounds_of(self, waiting: Iterable[_Waiting]) -> np.ndarray:
        """Returns the bounds of two objectives of what waits or was left out within the gap [rows, 2]."""
        if len(self.certificate.objectives) == 1:
            return np.zeros((0, 2))
        bounds = [
            np.stack(self.incumbents.bounds(*self._rows(entry), _use_of(entry.cluster, entry.item)), axis=1)
            for entry in waiting
        ]
        return np.concatenate([np.zeros((0, 2)), *bounds, *self._left_out])

    def _rows(self, waiting: _Waiting) -> tuple[np.ndarray, np.ndarray]:
        """Returns bounds of time and memory of what an item holds [rows] [s] [bytes]."""
        item, seconds, nbytes = waiting.item, np.zeros(1), np.zeros(1)
        if isinstance(item, _Pipelines):
            seconds, nbytes = item.opened.seconds[item.at :], item.opened.nbytes[item.at :]
        elif isinstance(item, OpenGroup):
            seconds, nbytes = item.seconds, item.nbytes
        return np.maximum(seconds, waiting.seconds), np.maximum(nbytes, waiting.nbytes)

    def _take_up(self, waiting: _Waiting, others: OtherProcesses | None) -> None:
        """Divides an item of the queue, bounds it more closely, or forecasts it."""
        _, _, cluster, seconds, nbytes, item = waiting
        if len(self.certificate.objectives) > 1:
            waiting = self._leave_dominated(waiting)
            if (item := waiting.item) is None:
                return
        if isinstance(item, _Point):
            self._forecast(cluster, item, seconds, nbytes, others)
        elif isinstance(item, _Candidate):
            self._simulate(cluster, item)
        elif isinstance(item, _Variants):
            for step in item.steps:
                self._bound(cluster, _OnePipeline(item.group, item.pipeline, [step]), seconds, nbytes)
        elif isinstance(item, _Family):
            self._bound(cluster, item, seconds, nbytes)
        elif isinstance(item, _OnePipeline):
            self._bound_families(cluster, item, seconds, nbytes)
        elif isinstance(item, _Pipelines):
            self._bound_next(cluster, item, seconds, nbytes)
        elif isinstance(item, OpenGroup):
            self._refine(cluster, item, seconds, nbytes, others)
        elif isinstance(item, _GroupOfPasses):
            self._open(cluster, item.group, seconds, nbytes)
        elif isinstance(item, _FittingGroup):
            least = max(seconds, cluster.groups.bound_passes(item.group))
            self._push(cluster, _GroupOfPasses(item.group), least, nbytes)
        elif isinstance(item, LayerGroup):
            least = max(seconds, cluster.groups.bound_fitting(item) or 0.0)
            if least < math.inf:
                self._push(cluster, _FittingGroup(item), least, nbytes)
            else:
                self.certificate.memory_bound += self._count(waiting)

    def _leave_dominated(self, waiting: _Waiting) -> _Waiting:
        """Returns what is left of an item without plans that the front dominates; its `item` is None without any."""
        item = waiting.item
        values = self.incumbents.bounds(*self._rows(waiting), _use_of(waiting.cluster, item))
        dominated = self.incumbents.dominates(values, self.incumbents.within)
        if not dominated.any():
            return waiting
        near = dominated & ~self.incumbents.dominates(values)
        self._left_out.append(np.stack(values, axis=1)[near])
        if isinstance(item, _Pipelines | OpenGroup):
            opened, at = (item.opened, item.at) if isinstance(item, _Pipelines) else (item, 0)
            self.certificate.time_bound += int(opened.points[at:][dominated].sum())
            left = opened.select(at + np.flatnonzero(~dominated))
            if not len(left.places):
                return waiting._replace(item=None)
            return waiting._replace(item=_Pipelines(left) if isinstance(item, _Pipelines) else left)
        self.certificate.time_bound += self._count(waiting)
        self._dominated_runs += isinstance(item, _Candidate)
        return waiting._replace(item=None)

    def _open(self, cluster: SearchedCluster, group: LayerGroup, seconds: float, nbytes: float) -> None:
        """Bounds the pipelines of a group."""
        opened, invalid = cluster.groups.open(group)
        self.certificate.opened += 1
        self.certificate.invalid += invalid
        if opened is not None:
            self._push(cluster, opened, *opened.least(0, seconds, nbytes))

    def _refine(
        self, cluster: SearchedCluster, opened: OpenGroup, seconds: float, nbytes: float, others: OtherProcesses | None
    ) -> None:
        """Bounds the pipelines of a group more closely, or leaves out those that do not fit in memory."""
        refined = cluster.groups.refine(opened)
        left = opened.left - (refined.left if refined is not None else 0)
        # Without memory of its units a group breaks a rule.
        if opened.known is Known.WITHOUT_RECOMPUTE and cluster.bounds.prices.unit_memory(opened.group) is not None:
            self.certificate.memory_bound += left
        else:
            self.certificate.invalid += left
        if refined is None:
            return
        whole = Known.PASSES if opened.group.recompute != "none" else Known.MEMORY
        if refined.known is whole:
            self._forecast_early(cluster, refined, others)
            self._push_pipelines(cluster, _Pipelines(refined), seconds, nbytes)
        else:
            self._push(cluster, refined, *refined.least(0, seconds, nbytes))

    def _forecast_early(self, cluster: SearchedCluster, opened: OpenGroup, others: OtherProcesses | None) -> None:
        """Forecasts a plan of a group with a small bound before the search comes to it."""
        alone = len(self.certificate.objectives) == 1 and cluster.runs is None and not opened.by_memory
        if not alone or len(opened.places) <= FEW or self._in_vain >= MOST_IN_VAIN:
            return
        least = self.incumbents.bounds(float(opened.seconds[0]), 0.0, cluster.use)[0]
        if least > self.incumbents.best * (1 - WORTH):
            return
        points = choose_early(cluster, opened)
        self._in_vain += not points
        for point in points:
            if (id(cluster), point) in self._early:
                continue
            before = self.incumbents.best
            if (plan := forecast_early(cluster, point, self.shared, self.incumbents)) is not None and plan.fits:
                self._add_plan(cluster, point, plan)
                if others is not None and self.incumbents.is_kept(plan.values):
                    others.send(plan.values)
            if self.incumbents.best < before:
                self._in_vain = 0
                return
            self._in_vain += 1

    def _push_pipelines(self, cluster: SearchedCluster, pipelines: _Pipelines, seconds: float, nbytes: float) -> None:
        opened, at = pipelines.opened, pipelines.at
        if at < len(opened.places):
            self._push(cluster, pipelines, *opened.least(at, seconds, nbytes))

    def _bound_next(self, cluster: SearchedCluster, pipelines: _Pipelines, seconds: float, nbytes: float) -> None:
        """Bounds the next of some pipelines by the order of its passes."""
        opened, at, group = pipelines.opened, pipelines.at, pipelines.opened.group
        pipeline, steps = opened.pipeline(at), cluster.groups.steps(opened, at)
        if cluster.space.admits(group, pipeline, steps[0]):
            chains = 0.0 if opened.by_memory else cluster.bounds.bound_chains(group, pipeline)
            bounds = max(seconds, chains, float(opened.seconds[at])), max(nbytes, float(opened.nbytes[at]))
            self._push(cluster, _OnePipeline(group, pipeline, steps), *bounds)
        else:
            self.certificate.excluded["near_measured"] += len(steps)
        self._push_pipelines(cluster, replace(pipelines, at=at + 1), seconds, nbytes)

    def _bound_families(
        self, cluster: SearchedCluster, candidates: _OnePipeline, seconds: float, nbytes: float
    ) -> None:
        """Bounds points with a data scheme, those with equal overlap of its collectives together, without states."""
        group, pipeline, every = candidates
        # Buckets beside the passes may take longer than a collective after them: neither bounds the other.
        for steps in group_by_overlap(every):
            least = cluster.groups.bound_before_states(group, pipeline, steps) or (seconds, nbytes)
            bounds = max(seconds, least[0]), max(nbytes, least[1])
            if bounds[1] > cluster.space.capacity:
                self.certificate.memory_bound += len(steps)
            else:
                self._push(cluster, _Family(group, pipeline, steps), *bounds)

    def _bound(self, cluster: SearchedCluster, points: _OnePipeline, seconds: float, nbytes: float) -> None:
        group, pipeline, steps = points
        least = cluster.bounds.bound_points(group, pipeline, steps)
        if least is None:
            self.certificate.invalid += len(steps)
            return
        bounds = max(seconds, least[0]), max(nbytes, least[1])
        if bounds[1] > cluster.space.capacity:
            self.certificate.memory_bound += len(steps)
        elif len(steps) == 1:
            self._push(cluster, _Point(group, pipeline, steps[0]), *bounds)
        else:
            self._push(cluster, _Variants(group, pipeline, steps), *bounds)

    def _forecast(
        self, cluster: SearchedCluster, point: _Point, seconds: float, nbytes: float, others: OtherProcesses | None
    ) -> None:
        """Forecasts a point; if it fits, adds the plan, or lets its runs wait with each choice."""
        changes, job = cluster.space.changes(*point), cluster.space.job_of(*point)
        forecast = self.forecast_plan(changes, job, seconds, nbytes, cluster.use, cluster.space)
        if forecast is None or not forecast[0].fits:
            return
        plan, report = forecast
        if self._early.pop((id(cluster), (*point,)), None) is not None:  # its values are known
            return
        if cluster.runs is None:
            self.note(plan.values)
            if others is not None and self.incumbents.is_kept(plan.values):
                others.send(plan.values)
            return
        known = ForecastSteps()
        for choice in cluster.runs.choices:
            candidate = _Candidate(plan, report, choice, cluster.use._replace(runs=cluster.runs.only(choice)), known)
            self._push(cluster, candidate, plan.forecast.step_time, plan.forecast.peak_device)

    def _simulate(self, cluster: SearchedCluster, candidate: _Candidate) -> None:
        """Simulates the runs of a plan with a choice, and holds them against their bound."""
        counts, plan, choice = self.certificate.runs, candidate.plan, candidate.choice
        assert counts is not None
        job = choice.apply(plan.job)
        try:
            run = make_run(replace_run_keys(candidate.report, load_job(job, base=cluster.space.base)), candidate.known)
            runs = PlanRuns.of(RunAnswer(run, self.simulator.run(run)))
        except PlanError as error:
            counts.invalid += 1
            self._refused = self._refused or error
            return
        counts.simulated += 1
        changes = plan.changes | choice.changes
        if (least := choice.least.seconds(plan.forecast.step_time)) > runs.mean_seconds * (1 + ROUNDING):
            raise BoundViolation.of(changes, f"{least:.6g} s over {runs.mean_seconds:.6g} s of the runs")
        values = self.incumbents.values(plan.forecast, cluster.use, runs)
        simulated = plan._replace(changes=changes, job=job, values=values, runs=runs)
        self.forecasts = [other for other in self.forecasts if other is not plan]
        self.forecasts.append(simulated)
        self._note_step(simulated)
        self.note(values)


def divide_groups(groups: Groups) -> list[Groups]:
    """Returns all groups, or groups of some kinds of units together where there are many kinds: in an order that mixes
    degrees, so that the first ones have some of the best plans."""
    by_kernels: dict[tuple[int, LayerGroup], list[tuple[SearchedCluster, LayerGroup]]] = {}
    for cluster, group in groups:
        by_kernels.setdefault((id(cluster), cluster.kind_of_units(group)), []).append((cluster, group))
    if len(by_kernels) <= MANY_UNITS:
        return [list(groups)]
    mixed = random.Random(0).sample([*by_kernels.values()], len(by_kernels))
    return [
        [pair for same in mixed[at : at + UNITS_AT_ONCE] for pair in same] for at in range(0, len(mixed), UNITS_AT_ONCE)
    ]


def _use_of(cluster: SearchedCluster, item: _Item | None) -> ClusterUse:
    """Returns what bounds of an item depend on besides its step and memory."""
    return item.use if isinstance(item, _Candidate) else cluster.use


class _FittingGroup(NamedTuple):
    """A group, bounded by the operators of its layers in pipelines that may fit in memory."""

    group: LayerGroup


class _GroupOfPasses(NamedTuple):
    """A group, bounded by its passes."""

    group: LayerGroup


class _Point(NamedTuple):
    """A point, bounded by the order of its passes."""

    group: LayerGroup
    pipeline: Pipeline
    step: StepChoice


class _Candidate(NamedTuple):
    """A plan that fits, with a choice of its run, which has not been simulated.

    known: forecasts of its steps without some of its replicas, for all choices.
    """

    plan: ForecastPlan
    report: Report
    choice: RunChoice
    use: ClusterUse
    known: ForecastSteps


class _OnePipeline(NamedTuple):
    """A pipeline of a group with a data scheme, bounded by the order of its passes, and its points."""

    group: LayerGroup
    pipeline: Pipeline
    steps: list[StepChoice]

    @property
    def left(self) -> int:
        return len(self.steps)


class _Family(_OnePipeline):
    """Points that differ in whether messages between stages overlap, bounded without their states."""


class _Variants(_OnePipeline):
    """Points that differ in whether messages between stages overlap, with a bound of all."""


@dataclass(frozen=True, eq=False)
class _Pipelines:
    """The pipelines of a group with their data schemes; the order of passes has not bounded those from `at` on."""

    opened: OpenGroup
    at: int = 0

    @property
    def left(self) -> int:
        """Number of points."""
        return int(self.opened.points[self.at :].sum())


_Item = (
    LayerGroup
    | _FittingGroup
    | _GroupOfPasses
    | OpenGroup
    | _Pipelines
    | _OnePipeline
    | _Family
    | _Variants
    | _Point
    | _Candidate
)
"""What waits in the queue."""


class _Waiting(NamedTuple):
    """An item of the queue with its bounds: of the first objective, of the step [s] and of the memory [bytes]."""

    value: float
    number: int
    cluster: SearchedCluster
    seconds: float
    nbytes: float
    item: _Item | None
