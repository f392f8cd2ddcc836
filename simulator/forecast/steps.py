"""The steps of many jobs: what a grid or a search asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.forecast.workers import collect_garbage_rarely
from meshcast.simulator.job.job import Job


def forecast_steps(
    jobs: Iterable[Job | str | Path | Mapping[str, Any]], shared_work: SharedWork | None = None, energy: bool = False
) -> list[StepAndMemory | MeshcastError]:
    """Computes what `forecast_step` does of many jobs, in their order; of a wrong job its error.

    Arguments as of `forecast_step`. What jobs have in common is made once, also without `shared_work`.
    """
    shared = shared_work or SharedWork()

    def forecast(job: Job | str | Path | Mapping[str, Any]) -> StepAndMemory | MeshcastError:
        try:
            return forecast_step(job, shared, energy)
        except MeshcastError as error:
            return error.with_traceback(None)  # whose frames hold the plan

    with collect_garbage_rarely():
        return [forecast(job) for job in jobs]
