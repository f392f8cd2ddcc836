"""Learns from measured steps: what the errors of their forecasts say of others of the same program and machine."""

from __future__ import annotations

from collections.abc import Sequence
from math import expm1

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.costs.step_posterior import MeasuredStep, StepPosterior, StepPrior, shipped_prior
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.step_features import find_features
from meshcast.validation.learning.posterior import MIN_ROWS, is_better
from meshcast.validation.published.answer import Answer

FARTHEST = 2.0
"""Times as long or as short as forecast that a step of the stated job can be: one of 998 published steps is more."""


@dataclass(frozen=True, eq=False)
class TimedJob:
    """A job, and what its steps took.

    name: of the file that says so, and the row.
    source: whose program and machine it ran on.
    job: that ran.
    seconds: of a step [s].
    """

    name: str
    source: str
    job: Job
    seconds: float


@dataclass(frozen=True, eq=False)
class LearntSteps:
    """What measured steps say.

    before: median absolute error of their forecasts.
    after: the same of forecasts that have not seen the step; None where nothing can be held back.
    posterior: what they say of others.
    """

    before: float
    after: float | None
    posterior: StepPosterior

    @property
    def is_used(self) -> bool:
        """Whether anything is certain enough to correct the forecast of one of these steps."""
        return any(self.posterior.correct(row.features).log_ratio for row in self.posterior.rows)


def learn_posterior(steps: Sequence[MeasuredStep], prior: StepPrior | None = None) -> LearntSteps:
    """Returns what measured steps say, judged on each of them by the others."""
    posterior = StepPosterior(steps, False, prior or shipped_prior())
    ratios, held_back = posterior.ratios, posterior.ratios - posterior.left_out
    before = _median_error(ratios)
    if len(steps) < MIN_ROWS:
        return LearntSteps(before, None, posterior)
    confirmed = is_better(np.abs(ratios) - np.abs(held_back))
    return LearntSteps(before, _median_error(held_back), StepPosterior(steps, confirmed, posterior.prior))


def _median_error(log_errors: np.ndarray) -> float:
    """Returns the median of |forecast / measured - 1|."""
    return float(np.median(np.abs(np.expm1(-log_errors))))


def forecast_timed(timed: Sequence[TimedJob], calibration: Calibration) -> list[MeasuredStep]:
    """Returns the steps of jobs beside their forecasts by the coefficients of a calibration.

    Raises PlanError for a step that is more than `FARTHEST` times as long or as short as forecast.
    """
    shared, steps = SharedWork(calibration), list[MeasuredStep]()
    for each in timed:
        report = simulate(each.job, shared_work=shared)
        if not 1 / FARTHEST < each.seconds / report.step_time < FARTHEST:
            rule = (
                f"its step of {each.seconds:.4g} s is forecast to take {report.step_time:.4g} s, which is another job's"
            )
            raise PlanError(each.name, rule, "Name the job that ran, or find the cause first: meshcast explain")
        steps.append(MeasuredStep(each.name, each.source, find_features(report), each.seconds, report.step_time))
    return steps


def describe_steps(learnt: LearntSteps) -> Answer:
    """Returns what was learnt of steps as ``meshcast learn --json`` prints it."""
    corrections = [learnt.posterior.correct(row.features) for row in learnt.posterior.rows]
    return {
        "rows": len(learnt.posterior.rows),
        "held_back": {"before": learnt.before, "after": learnt.after},
        "confirmed": learnt.posterior.confirmed,
        "steps": [
            {
                "name": row.name,
                "measured_s": row.measured,
                "forecast_s": row.forecast,
                "corrected_s": row.forecast * pull.factor,
                "change": expm1(pull.log_ratio),
            }
            for row, pull in zip(learnt.posterior.rows, corrections, strict=True)
        ],
    }
