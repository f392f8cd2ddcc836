"""Forecasts stated plans, and holds them against the best plan of a search and against its space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.experiments.explain.comparison import ForecastComparison
from meshcast.experiments.search.certificate.settings import differing_settings, find_other_task
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.plan_search import ROUNDING, has_memory
from meshcast.experiments.search.space.fields import FIELDS, has_open_fields
from meshcast.experiments.search.space.membership import OutsideField, list_outside, state_value
from meshcast.experiments.search.space.short_form import ShortForm, describe_part, read_short_form
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import summarise_step
from meshcast.simulator.job.job import NO_FILE, Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.report.report import Report

IMPLIED = tuple(f"plan.{key.name}" for key in PLAN_KEYS.values() if key.part == "layers" and key.name != "recompute")
"""Fields that, as those of overlap, are not named where a single plan has them: another field implies it."""

Source = str | Path | Mapping[str, Any]
"""Path of a job file, or its mapping."""


class StatedPlan(NamedTuple):
    """A plan to compare.

    name: its file, or the id of its job.
    job: as loaded.
    """

    name: str
    job: Job


@dataclass(frozen=True)
class ComparedPlan:
    """A stated plan beside the best plan of a search.

    name: file of the stated plan, or id of its job.
    report: its forecast.
    fits: whether it fits in the memory that plans of the search may take.
    best: the forecast of the fastest plan of the search; None: none fits.
    shortest: no plan of the space has a shorter step, as far as is proven [s].
    differences: fields that differ, with their values in the best plan and in the stated plan.
    outside: fields of the stated plan outside of the space; empty if the space holds it.
    restated: the forecast of the plan with the same values in short form, which lacks what no search varies; None if
        that is the plan itself, or if there is no such plan.
    """

    name: str
    report: Report
    fits: bool
    best: Report | None
    shortest: float
    differences: dict[str, tuple[Any, Any]]
    outside: tuple[OutsideField, ...]
    restated: Report | None = None

    @property
    def inside(self) -> bool:
        return not self.outside

    @property
    def factor(self) -> float | None:
        """Step over that of the best plan."""
        return self.report.step_time / self.best.step_time if self.best else None

    @property
    def factor_at_most(self) -> float | None:
        """Step over the shortest that the space may have, as far as is proven: the factor if the gap is 0."""
        return self.report.step_time / self.shortest if self.best and self.shortest else None

    @property
    def forecasts(self) -> ForecastComparison | None:
        """Both forecasts, the best plan first."""
        return ForecastComparison((self.best, self.report)) if self.best else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in the answer of ``search --compare --json``; of pairs the best plan is the first."""
        both, again = self.forecasts, self.restated
        return {
            "plan": self.name,
            "step_time_s": self.report.step_time,
            "interval_90_s": list(self.report.interval_90),
            "factor": self.factor,
            "factor_at_most": self.factor_at_most,
            "mfu": self.report.mfu,
            "peak_device_gib": [self.best.peak_device / GIB if self.best else None, self.report.peak_device / GIB],
            "fits": self.fits,
            "inside": self.inside,
            "outside": [field.to_dict() for field in self.outside],
            "differences": [{"field": field, "values": list(pair)} for field, pair in self.differences.items()],
            "breakdown_s": {key: list(pair) for key, pair in both.parts.items()} if both else {},
            "memory_gib": {key: list(pair) for key, pair in both.memory.items()} if both else {},
            "restated": {"step_time_s": again.step_time, "fits": again.fits} if again else None,
        }


def load_plans(search: Search, plans: Sequence[Source], base: Path | None = None) -> list[StatedPlan]:
    """Returns the jobs of stated plans.

    base: folder of relative paths in mappings; default: the current folder.
    Raises PlanError for a job that leaves fields open, or whose model, cluster, batch or trained parameters are others
    than those of the search; and for a search of another objective than the step time, or of several clusters.
    """
    searched = search.space.loaded
    if plans and (search.certificate.objectives != ("time",) or len(search.clusters) > 1):
        rule = "a plan is compared with the shortest step on its cluster"
        objectives = ",".join(search.certificate.objectives)
        several = f"this is a search of {len(search.clusters)} clusters" if len(search.clusters) > 1 else ""
        rule += f", and {several or f'the objective of this search is {objectives}'}"
        raise PlanError("compare", rule, "Search one cluster, with the objective time")
    return [_load_plan(searched, source, number, base) for number, source in enumerate(plans, 1)]


def _load_plan(searched: Job, plan: Source, number: int, base: Path | None) -> StatedPlan:
    read = read_job(plan)
    data = read.data
    name = str(data.get("id", f"plan {number}")) if isinstance(plan, Mapping) else str(plan)
    if has_open_fields(data):
        rule = "it leaves fields open, and a single plan is compared"
        raise PlanError(f"{name} plan", rule, "Give every field of its plan a value")
    job = load_job(plan, base=base if isinstance(plan, Mapping) else None)
    if (difference := find_other_task(searched, job)) is not None:
        words, field, value, theirs = difference
        rule = f"{words} must be that of the search, and there it is {theirs}"
        raise PlanError(f"{name} {field}", rule, "Compare plans of one task, or search this job", value)
    with locate_errors(*(read.origin if not isinstance(plan, Mapping) else NO_FILE)):
        resolve_plan(job)
    return StatedPlan(name, job)


def compare_plans(search: Search, plans: Sequence[StatedPlan]) -> list[ComparedPlan]:
    """Returns stated plans beside the fastest of a search. Raises PlanError for a faster plan of its space."""
    if not plans:
        return []
    fastest = search.best[0].job if search.best else None
    best = simulate(load_job(fastest, base=search.space.base), shared_work=search.shared) if fastest else None
    return [_compare(search, plan, best) for plan in plans]


def _compare(search: Search, plan: StatedPlan, best: Report | None) -> ComparedPlan:
    searched, job = search.space.loaded, plan.job
    form, report = read_short_form(job, search.space.named), simulate(job, shared_work=search.shared)
    fits = has_memory(search.space, summarise_step(report))
    settings = differing_settings(searched, job)
    outside = list_outside(search.space, form) + [
        OutsideField(field, value, [theirs], f"the job of the search has {state_value(theirs)}")
        for field, (theirs, value) in settings.items()
    ]
    shortest = min(search.certificate.open_bound, search.certificate.incumbent)
    if not outside and fits and report.step_time < shortest * (1 - ROUNDING):
        rule = f"a plan of the space takes {report.step_time:.6g} s, and none should take less than {shortest:.6g} s"
        raise PlanError(plan.name, rule, "Please report it with both jobs: nothing is proven")
    differing = {} if best is None else _differing_fields(best.job, form) | settings
    restated = None
    if form.job is not None and form.others:
        restated = simulate(load_job(form.job, base=job.folder), shared_work=search.shared)
    return ComparedPlan(plan.name, report, fits, best, shortest, differing, tuple(outside), restated)


def _differing_fields(best: Job, form: ShortForm) -> dict[str, tuple[Any, Any]]:
    """Returns fields of the best plan and of a stated plan that differ, with their values in both."""
    best_values, other = read_short_form(best, form.named).by_field(), form.by_field()
    pairs = {field: (best_values.get(field), other.get(field)) for field in FIELDS}
    for field in (*IMPLIED, *(name for name in FIELDS if not name.startswith("plan."))):
        if None in pairs[field]:
            del pairs[field]
    pairs |= {field: (describe_part(best.plan, field), value) for field, (value, _) in form.others.items()}
    return {field: pair for field, pair in pairs.items() if pair[0] != pair[1]}
