"""`meshcast.simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshcast.experiments.notebook.report import ForecastReport
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate as simulate_step
from meshcast.simulator.job.job import Job


def simulate(
    job: Job | str | Path | Mapping[str, Any],
    engine: Engine = "matrices",
    skip: bool = True,
    shared_work: SharedWork | None = None,
    calibration: Calibration | None = None,
) -> ForecastReport:
    """The forecast of one training step, or of the step of a forward-only job.

    job: a job, the path of a job file, or its mapping.
    engine: `matrices`, `sweep` and `simpy` give the same answer; `shared` adds contention for links and
    multiprocessors.
    skip: whether the engine may jump over a steady state that is proven to repeat.
    shared_work: lowered units, timetables and prices that many jobs share; a loop over plans of one model is faster.
    calibration: the coefficients of all costs; by default those of `shared_work`, or those that ship with meshcast.

    Raises PlanError, ModelError or CatalogError for a wrong job. A job that does not fit in memory is no error.
    """
    used = calibration or (shared_work.calibration if shared_work is not None else None)
    return ForecastReport.of(simulate_step(job, engine, skip, shared_work, calibration), used)
