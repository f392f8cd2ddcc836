"""What the approximated settings of a launch file may be worth: a second forecast of each bounds its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.verdicts import ApproximatedSetting
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.open_settings import widen
from meshcast.simulator.loading.load import load_job


@dataclass(frozen=True)
class BoundedApproximation:
    """An approximated setting with a second forecast.

    step_ratio: step time of that forecast over that of the job.
    more_gib: memory of a GPU that it needs more [GiB].
    """

    setting: ApproximatedSetting
    step_ratio: float
    more_gib: float

    @property
    def sigma(self) -> float:
        """Standard deviation of log(measured / forecast), if the truth lies anywhere between the two forecasts."""
        return abs(math.log(self.step_ratio)) / math.sqrt(3)

    def to_dict(self) -> dict[str, Any]:
        """Returns the setting in the answer of ``predict --json``."""
        return asdict(self.setting) | {"step_ratio": self.step_ratio, "more_gib": self.more_gib}

    def __str__(self) -> str:
        change = f"{self.step_ratio - 1:+.1%} of the step, {self.more_gib:+.1f} GiB"
        return f"{self.setting.shown}: {self.setting.why}; a forecast that follows it: {change}"


def bound_approximations(imported: ImportedJob, job: Job) -> list[BoundedApproximation]:
    """Forecasts the job of a launch file with each approximated setting followed, as far as a job can say it.

    A job that the other setting makes impossible (heads that the ranks do not divide) bounds nothing.
    """
    shared = SharedWork()
    if not imported.bounding:
        return []
    step = forecast_step(job, shared)
    bounded = []
    for setting, other in imported.bounding:
        try:
            second = forecast_step(load_job(other, base=job.folder), shared)
        except PlanError:
            continue
        more = (second.peak_device - step.peak_device) / GIB
        bounded.append(BoundedApproximation(setting, second.step_time / step.step_time, more))
    return bounded


def widen_interval(job: Job, bounded: Sequence[BoundedApproximation]) -> Job:
    """Returns the job whose interval holds the errors of these approximations in place of usual ones."""
    return widen(job, {entry.setting.shown: min(entry.sigma, 3.0) for entry in bounded})
