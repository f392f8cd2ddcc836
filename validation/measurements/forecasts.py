"""Forecasts of what is about to be measured: from the catalog, and from the machine's own calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from simulator.costs.calibration.calibration import DEVICE, Calibration
from simulator.costs.costs import Costs
from simulator.forecast.planning import resolve_plan
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.simulate import simulate
from simulator.ir.ops import Work
from simulator.job.load import load_job
from simulator.plan.plan import Plan
from simulator.report.metrics import Z90
from simulator.report.report import Report
from validation.measurements.measurement import Value


@dataclass(frozen=True)
class Forecaster:
    """One way to forecast a job. by: ``catalog`` or ``calibration``; folder: the calibration's, None: the shipped."""

    by: str
    job: Mapping[str, Any]
    folder: Path | None = None

    @cached_property
    def calibration(self) -> Calibration:
        return Calibration.from_folder(self.folder)

    @cached_property
    def plan(self) -> Plan:
        return resolve_plan(load_job(self.job), SharedWork(self.calibration))

    @cached_property
    def costs(self) -> Costs:
        """Prices of kernels as they are measured one by one."""
        job = self.plan.job
        return Costs(job.cluster, self.plan.mesh, job.framework.speeds, alone=True, calibration=self.calibration)

    def works(self, works: Iterable[Work]) -> Value:
        """Seconds of some works one after another; errors of works of one kind are taken to go together."""
        found = [self.costs.estimate(work) for work in works]
        total = sum(one.seconds for one in found)
        reach = Z90 * (sum(one.seconds * one.spread for one in found) / total if total else 0.0)
        return Value(value=total, low=total * math.exp(-reach), high=total * math.exp(reach))

    @cached_property
    def report(self) -> Report:
        """The forecast of the whole step."""
        return simulate(self.job, calibration=self.calibration)

    @property
    def step(self) -> Value:
        """Seconds of a step."""
        low, high = self.report.interval_90
        return Value(value=self.report.step_time, low=low, high=high)


def forecasters(job: Mapping[str, Any], calibration: Path | None) -> list[Forecaster]:
    """From the catalog; and from a calibration, with the device that it describes in place of the catalog's."""
    found = [Forecaster("catalog", job)]
    if calibration is not None:
        found.append(Forecaster("calibration", on_device(job, calibration), calibration))
    return found


def on_device(job: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """The job on the device that `folder` describes, where it does and the job's cluster is told by its GPU."""
    cluster, device = job.get("cluster"), folder / DEVICE
    if not device.is_file() or not isinstance(cluster, Mapping) or "gpu" not in cluster:
        return job
    return {**job, "cluster": {**cluster, "gpu": str(device)}}
