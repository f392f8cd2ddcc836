"""The plans that a search has forecast, each held against its lower bounds."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import ClusterUse, Incumbents
from meshcast.experiments.search.frontier.plan_runs import PlanRuns
from meshcast.hardware.errors import ModelError, PlanError
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step, play_job, summarise_step
from meshcast.simulator.job.job import Job, JobOrigin
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report

ROUNDING = 1e-9
"""Relative excess of a bound over a forecast that is rounding."""


class ForecastPlan(NamedTuple):
    """A plan that was forecast.

    changes: values of the open fields.
    job: the job as plain data.
    bound: lower bound of its step time [s].
    forecast: its step time and memory.
    fits: whether it has the memory that it may take.
    values: its objectives, in the order in which they are searched; infinite for runs that were not simulated.
    runs: its simulated runs; None unless the objective asks for them.
    """

    changes: dict[str, Any]
    job: dict[str, Any]
    bound: float
    forecast: StepAndMemory
    fits: bool
    values: tuple[float, ...]
    runs: PlanRuns | None = None


class SearchedJob(Protocol):
    """The job of a search without its open fields, and what its plans may take.

    job: as plain data.
    base: folder of its relative paths.
    open: the fields that vary.
    loaded: the job with some plan.
    """

    base: Path
    job: dict[str, Any]
    loaded: Job
    open: tuple[str, ...]

    @property
    def capacity(self) -> float:
        """Memory of a GPU that a plan may take by its forecast [bytes]."""

    @property
    def least_room(self) -> float:
        """How many times its need by the forecast a GPU or a host must have as memory."""

    @property
    def memory_risk(self) -> float:
        """Most probability of lacking memory that a plan may have."""


def has_memory(job: SearchedJob, forecast: StepAndMemory) -> bool:
    """Returns whether a plan has the memory that a search asks for."""
    return forecast.room >= job.least_room and forecast.held <= job.capacity


class PlanSearch(ABC):
    """The plans that a search has forecast.

    jobs: of the search, by cluster.
    shared: work that forecasts share.
    incumbents: the best plans so far.
    certificate: what is proven.
    top: number of plans that are kept.
    origin: the file of the job, for errors.
    """

    def __init__(
        self,
        jobs: Sequence[SearchedJob],
        shared: SharedWork,
        incumbents: Incumbents,
        certificate: Certificate,
        top: int,
        origin: JobOrigin,
    ) -> None:
        self.jobs, self.shared, self.incumbents, self.certificate = jobs, shared, incumbents, certificate
        self.top, self.origin = top, origin
        self.forecasts: list[ForecastPlan] = []
        self._best_values: tuple[float, ...] = (math.inf,)

    @property
    def space(self) -> SearchedJob:
        """The job on the first cluster."""
        return self.jobs[0]

    @property
    def best(self) -> list[ForecastPlan]:
        """The best plans, or the Pareto front, sorted by the first objective."""
        fitting_plans = (plan for plan in self.forecasts if plan.fits and math.isfinite(max(plan.values)))
        fitting = sorted(fitting_plans, key=lambda plan: plan.values)
        if len(self.certificate.objectives) == 1:
            return fitting[: self.top]
        front = {plan.values: plan for plan in reversed(fitting) if self.incumbents.is_kept(plan.values)}
        return [*reversed(front.values())]

    @abstractmethod
    def run(self, progress: Callable[[Certificate], None] = lambda _: None) -> Certificate:
        """Runs to the end, or until it is interrupted; `best` and the certificate hold what is proven by then."""

    def note(self, values: tuple[float, ...]) -> None:
        """Adds the objectives of a plan that fits."""
        self.incumbents.add(values)
        self.certificate.incumbent = min(self.certificate.incumbent, values[0])

    def raise_rule(self, job: dict[str, Any]) -> None:
        """Raises the error of a plan, where all of them break a rule. job: of this plan."""
        with locate_errors(*self.origin):
            try:
                forecast_step(load_job(job, base=self.jobs[0].base), self.shared)
            except (PlanError, ModelError) as error:
                count = self.certificate.invalid
                rule = f"all {count:,} plans of the space break a rule, the first one this: {error.rule}"
                raise type(error)(error.where, rule if count > 1 else error.rule, error.remedy, error.value) from None

    def forecast_plan(
        self,
        changes: dict[str, Any],
        job: dict[str, Any],
        bound: float,
        nbytes: float,
        use: ClusterUse,
        space: SearchedJob,
    ) -> tuple[ForecastPlan, Report] | None:
        """Forecasts a plan, and holds the forecast against its bounds [s] [bytes]; None if it breaks a rule.
        The report is that of the same forecast.

        changes: values of the open fields. job: with the plan. use: of its cluster. space: the job of the search.
        """
        certificate = self.certificate
        try:
            energy = "energy" in certificate.objectives
            report = Report(*play_job(load_job(job, base=space.base), self.shared))
            forecast = summarise_step(report, energy)
        except (PlanError, ModelError):
            certificate.invalid += 1
            return None
        certificate.exact += 1
        certificate.ratios.append((bound / forecast.step_time, nbytes / forecast.peak_device))
        if max(certificate.ratios[-1]) > 1 + ROUNDING:
            times = f"{bound:.6g} s over {forecast.step_time:.6g} s"
            memory = f"{nbytes / GIB:.4g} GiB over {forecast.peak_device / GIB:.4g} GiB"
            raise BoundViolation.of(changes, f"{times}, or {memory}")
        if (least := use.energy.bound(bound)) > forecast.joules * (1 + ROUNDING) and energy:
            raise BoundViolation.of(changes, f"{least:.6g} J over {forecast.joules:.6g} J")
        fits = has_memory(space, forecast)
        certificate.too_large += not fits
        values = self.incumbents.values(forecast, use)
        self.forecasts.append(plan := ForecastPlan(changes, job, bound, forecast, fits, values))
        if fits:
            self._note_step(plan)
        return plan, report

    def _note_step(self, plan: ForecastPlan) -> None:
        if plan.values < self._best_values:
            self._best_values, self.certificate.step = plan.values, plan.forecast.step_time


class CountInterrupted(KeyboardInterrupt):
    """Ctrl-C before a search began, as while its plans were counted: nothing is proven of them yet."""


class BoundViolation(PlanError):
    """A lower bound above the forecast of its plan: an error in meshcast, which makes the certificate void."""

    @classmethod
    def of(cls, changes: dict[str, Any], figures: str) -> BoundViolation:
        """Returns the error for a plan. figures: the bound over the forecast, with their unit."""
        fields = ", ".join(f"{name}={value}" for name, value in changes.items())
        rule = f"a lower bound is above the forecast of its plan ({figures}): {fields}"
        return cls("search", rule, "Please report it with the job: nothing is proven")
