"""From a job to a report: resolve the plan, lower every distinct stage, price the ops, play the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.engine.play import ENGINES, Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import play_job
from meshcast.simulator.ir.registry import add_scheme
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from meshcast.simulator.report.step_features import find_features


def simulate(
    job: Job | str | Path | Mapping[str, Any],
    engine: Engine = "matrices",
    skip: bool = True,
    shared_work: SharedWork | None = None,
    calibration: Calibration | None = None,
    schemes: Iterable[type[Scheme]] = (),
) -> Report:
    """Forecasts a training step, or the step of a forward-only job.

    job: a job, the path of a job file, or its mapping.
    engine: `matrices`, `sweep` and `simpy` give the same answer; `shared` adds contention for links and
    multiprocessors.
    skip: whether the engine may jump over a steady state that is proven to repeat, see `simulator.engine.play.play`.
    shared_work: lowered units, timetables and prices that many jobs share.
    calibration: the coefficients of all costs; by default those of `shared_work`, or those that ship with meshcast.
        What it has learnt from measured steps corrects the forecast where it is named here; searches know no such
        factor.
    schemes: classes of the caller that the plan of the job names beside ours, `MySchedule` as `pipeline/my-schedule`,
        until the process ends (`add_scheme`).

    Raises PlanError, ModelError or CatalogError for a wrong job. A job that does not fit in memory is no error.
    """
    if engine not in ENGINES:
        raise PlanError("engine", "there is no such engine", nearest(str(engine), ENGINES), engine)
    shared = shared_work or SharedWork(calibration)
    if calibration not in (None, shared.calibration):
        raise ValueError("shared work was priced with another calibration")
    for scheme in schemes:
        add_scheme(scheme)
    report = Report(*play_job(job if isinstance(job, Job) else load_job(job), shared, engine, skip))
    if calibration is not None and (posterior := calibration.step_posterior) is not None:
        report.correction = posterior.correct(find_features(report))
    return report
