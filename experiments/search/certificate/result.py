"""What a search gives: the best plans with their whole forecasts, and the certificate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshcast.experiments.render.notebook.report import ForecastReport, simulate
from meshcast.experiments.search.certificate.comparison import ComparedPlan
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.objectives import OF_RUNS
from meshcast.experiments.search.frontier.plan_runs import PlanRuns, differ
from meshcast.experiments.search.frontier.plan_search import ForecastPlan, PlanSearch
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.formatting import describe_list
from meshcast.validation.published.measured_range.distance import Distance, distance_from_measured, widened_interval
from meshcast.validation.published.measured_range.envelope import published_envelope
from meshcast.validation.published.measured_range.excess import beyond_envelope, describe_envelope

if TYPE_CHECKING:
    import pandas

    from meshcast.experiments.search.certificate.smallest_need import SmallestNeed


class RankedPlan(NamedTuple):
    """One of the best plans.

    searched: as the search has it.
    report: its whole forecast.
    distance: from plans that somebody has run, if plans are ranked by the upper ends of their intervals.
    """

    searched: ForecastPlan
    report: ForecastReport
    distance: Distance | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The 90 % interval of the step [s], widened by `distance` if it is known."""
        if self.distance is None:
            return self.report.interval_90
        return widened_interval(self.report, self.distance)

    @property
    def gpu_hours(self) -> float:
        """GPU time of a step [h]."""
        return self.report.step_time * self.report.job.cluster.gpus / 3600

    @property
    def runs(self) -> PlanRuns | None:
        """Its simulated runs; None in a search by steps."""
        return self.searched.runs

    @property
    def changes(self) -> dict[str, Any]:
        """Values of the open fields, such as ``{"plan.tp": 4}``."""
        return self.searched.changes

    @property
    def job(self) -> dict[str, Any]:
        """The job with this plan as plain data: what a job file holds."""
        return self.searched.job

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan in the answer of ``search --json``."""
        robust = None
        if self.distance is not None:
            measured, words = self.distance.measured, str(self.distance)
            robust = {"interval_90_s": list(self.interval), "measured": measured, "distance": words}
        return {
            "plan": self.searched.changes,
            "step_time_s": self.report.step_time,
            "interval_90_s": list(self.report.interval_90),
            "tokens_per_s_per_gpu": self.report.tokens_per_s_per_gpu,
            "peak_device_gib": self.report.peak_device / GIB,
            "mfu": self.report.mfu,
            "cost": self.report.cost,
            "gpu_hours_per_step": self.gpu_hours,
            "kwh_per_step": self.report.energy.kwh,
            "robust": robust,
            "run": self.runs.to_dict() if self.runs is not None else None,
        }


@dataclass(frozen=True)
class SearchResult:
    """The best plans of a space.

    best: plans that fit, the best first, or the Pareto front of two objectives, in the order of the first objective;
        empty if none fits.
    certificate: what the space holds, what was cut by which bound, and the gap that is proven.
    forecasts: all plans that were forecast, those that do not fit included, in that order.
    compared: stated plans beside the best plan.
    top: number of plans that were asked for; 0 if it is not known.
    smallest: where no plan fits, that with the smallest need.
    """

    best: Sequence[RankedPlan]
    certificate: Certificate
    forecasts: Sequence[ForecastPlan] = ()
    compared: Sequence[ComparedPlan] = ()
    top: int = 0
    smallest: SmallestNeed | None = None

    def __repr__(self) -> str:
        certificate = self.certificate
        if not self.best:
            return f"<SearchResult: {certificate.plans:,} plans, none found that fits>"
        changes = ", ".join(f"{key} {describe_list(value)}" for key, value in self.best[0].changes.items())
        words = f"{certificate.plans:,} plans, {len(self.best):,} listed, gap {certificate.gap:.2%}"
        best, runs = f"{self.best[0].report.step_time:.4g} s a step", self.best[0].runs
        return f"<SearchResult: {words}; best {f'{runs.days:.4g} days' if runs else best} with {changes}>"

    def is_apart(self, plan: RankedPlan) -> bool:
        """Returns whether the simulated runs tell a plan and the best plan apart, by the first objective of runs."""
        by_days = next((name for name in self.certificate.objectives if name in OF_RUNS), "days") == "days"
        first, other = self.best[0].runs, plan.runs
        if first is None or other is None:
            return True
        return differ(first.seconds, other.seconds) if by_days else differ(first.costs, other.costs)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a row for each of the best plans, in order: open fields, then the columns of a sweep and of runs."""
        import pandas

        tables = [plan.report.to_frame() for plan in self.best]
        tables = [
            table.assign(**plan.runs.columns) if plan.runs else table
            for plan, table in zip(self.best, tables, strict=True)
        ]
        fields = pandas.DataFrame([plan.changes for plan in self.best])
        return pandas.concat([fields, pandas.concat(tables, ignore_index=True)], axis=1) if tables else fields

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer of ``search --json``."""
        envelope = published_envelope(self.best[0].report.job) if self.best else None
        beyond = beyond_envelope(self.best[0].report) if self.best else None
        best = [plan.to_dict() for plan in self.best]
        for i, (plan, answer) in enumerate(zip(self.best, best, strict=True)):
            if plan.runs is not None:
                answer["run"]["told_apart"] = i > 0 and self.is_apart(plan)
        return {
            "best": best,
            "front": best if len(self.certificate.objectives) > 1 else None,
            "certificate": self.certificate.to_dict(),
            "published_envelope": describe_envelope(envelope) if envelope else None,
            "beyond_envelope": str(beyond) if beyond else None,
            **({"compared": [plan.to_dict() for plan in self.compared]} if self.compared else {}),
        }


def rank(search: PlanSearch, robust: bool = False) -> list[RankedPlan]:
    """Returns the best plans of a search with their whole forecasts, the best first; of two objectives their Pareto
    front, in the order of the first objective.

    robust: of all plans that were forecast and fit, those that are best at the upper ends of their 90 % intervals,
    widened by the distance from plans that somebody has run.
    """
    if not robust:
        ranked = [RankedPlan(plan, _forecast_whole(search, plan)) for plan in search.best]
        by_memory = search.certificate.objectives[0] == "memory"  # fronts are searched in the order of the time
        return ranked[::-1] if by_memory and len(search.certificate.objectives) > 1 else ranked
    ranked = []
    for plan in sorted((plan for plan in search.forecasts if plan.fits), key=lambda plan: plan.values):
        if len(ranked) == search.top and plan.values[0] > _upper_end(ranked[-1]):
            break  # an interval ends above its step
        report = _forecast_whole(search, plan)
        ranked.append(RankedPlan(plan, report, distance_from_measured(report.play.plan)))
        ranked.sort(key=_upper_end)
        del ranked[search.top :]
    return ranked


def _upper_end(plan: RankedPlan) -> float:
    """Returns the objective, of time or GPU time, at the upper end of the interval of a plan."""
    return plan.interval[1] * plan.searched.values[0] / plan.searched.forecast.step_time


def _forecast_whole(search: PlanSearch, plan: ForecastPlan) -> ForecastReport:
    return simulate(load_job(plan.job, base=search.space.base), shared_work=search.shared)
