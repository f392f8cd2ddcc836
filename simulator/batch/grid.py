"""Forecasts of grids of jobs: step time and memory of each, equal to those of `forecast_step`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.batch.families import Families, Refused
from meshcast.simulator.batch.forecaster import BatchForecaster
from meshcast.simulator.batch.loops.compiled import HAS_COMPILER
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory
from meshcast.simulator.forecast.workers import collect_garbage_rarely
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.report import Report


class Answered(NamedTuple):
    """A resolved plan with its step and memory."""

    plan: Plan
    figures: StepAndMemory


class Grid:
    """Forecasts jobs one after the other: what many of them share is made once. Plans that are plain are played by
    compiled loops where numba is installed.

    shared_work: lowered units, timetables and prices of earlier jobs.
    base: folder of relative paths in the jobs.
    """

    def __init__(self, shared_work: SharedWork | None = None, base: str | Path | None = None) -> None:
        shared = shared_work or SharedWork()
        self._families, self._forecaster = Families(shared, base), BatchForecaster(shared)

    def forecast(self, job: SomeFields) -> Answered | Refused:
        """Forecasts step and memory of a job, or says that it breaks a rule."""
        try:
            resolved = self._families.plan(job)
            if isinstance(resolved, Refused):
                return resolved
            plan, plain = resolved
            return Answered(plan, self._forecaster.answer(plan, plain and HAS_COMPILER))
        except MeshcastError as error:
            return Refused(job, error)

    def report(self, job: SomeFields) -> Report:
        """Forecasts a job. Raises PlanError, ModelError or CatalogError for a wrong one, as `simulate` does."""
        resolved = self._families.plan(job)
        if isinstance(resolved, Refused):
            raise resolved.error
        plan, plain = resolved
        return self._forecaster.report(plan, plain and HAS_COMPILER)


def forecast_jobs(jobs: Iterable[SomeFields], shared_work: SharedWork | None = None) -> Iterator[Answered | Refused]:
    """Yields the plan of every job with its step and memory, in order; of one that breaks a rule that it does.

    They equal those of `forecast_step` to 1e-9, and come faster where numba is installed.
    """
    grid = Grid(shared_work)
    with collect_garbage_rarely():
        for job in jobs:
            yield grid.forecast(job)
