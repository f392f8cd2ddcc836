"""Forecasts of what is about to be measured: from the catalog, and from the machine's calibration."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.costs.calibration.calibration import DEVICE, Calibration
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.metrics import Z90
from meshcast.simulator.report.report import Report
from meshcast.validation.measurements.measurement import ForecastValue


def with_interval(value: float, sigma: float) -> ForecastValue:
    """Returns a forecast with its 90 % interval.

    sigma: standard deviation of log(measured / forecast).
    """
    half_width = Z90 * sigma
    return ForecastValue(value=value, low=value * math.exp(-half_width), high=value * math.exp(half_width))


def without_interval(value: float) -> ForecastValue:
    """Returns a forecast whose interval is empty: memory is forecast without interval."""
    return ForecastValue(value=value, low=value, high=value)


@dataclass(frozen=True)
class Forecaster:
    """Forecasts a job with a set of coefficients.

    by: ``catalog`` or ``calibration``.
    folder: folder of the calibration; None: the coefficients that ship with meshcast.
    """

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
        """Costs of kernels that are timed singly, outside a training step."""
        return self._make_costs(alone=True)

    @property
    def sustained_rate(self) -> float:
        """Rate of GEMMs and attention in the forecast step against the same kernels alone."""
        return self._make_costs(alone=False).kernels.sustained_rate(str(self.plan.job.precision.compute))

    def _make_costs(self, alone: bool) -> Costs:
        job = self.plan.job
        traits = replace(job.framework.kernel_traits, alone=alone)
        return Costs(job.cluster, self.plan.mesh, traits, self.calibration)

    def estimate_works(self, works: Iterable[Work]) -> ForecastValue:
        """Returns the seconds of works that run in order; their errors count as fully correlated."""
        estimates = [self.costs.estimate(work) for work in works]
        total = sum(estimate.seconds for estimate in estimates)
        return with_interval(
            total, sum(estimate.seconds * estimate.sigma for estimate in estimates) / total if total else 0.0
        )

    @cached_property
    def report(self) -> Report:
        """Forecast of the whole step."""
        return simulate(self.job, calibration=self.calibration)

    @property
    def step(self) -> ForecastValue:
        """Seconds of a step."""
        low, high = self.report.interval_90
        return ForecastValue(value=self.report.step_time, low=low, high=high)

    def peak_memory(self, device: int, counter: str) -> ForecastValue:
        """Returns the peak memory of a pipeline device [bytes].

        counter: ``allocated`` (tensors), ``reserved`` (by the caching allocator) or ``device`` (also the CUDA context
            and the buffers of libraries).
        """
        memory, peak = self.plan.job.framework.memory, self.report.play.peaks[device]
        states = sum(self.report.play.resting[device].values())
        nbytes = (
            peak.total if counter == "allocated" else memory.reserve(peak.total + peak.cached, states + peak.cached)
        )
        return without_interval(nbytes + (memory.context_gib * GIB if counter == "device" else 0.0))


def forecasters(job: Mapping[str, Any], calibration: Path | None) -> list[Forecaster]:
    """Returns a forecaster from the catalog and, with the folder of a calibration, another from that."""
    sources = [Forecaster("catalog", job)]
    if calibration is not None:
        sources.append(Forecaster("calibration", use_calibrated_gpu(job, calibration), calibration))
    return sources


def use_calibrated_gpu(job: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns the job with the device that `folder` describes as its GPU; unchanged if there is none or no
    `cluster.gpu`."""
    cluster, device = job.get("cluster"), folder / DEVICE
    if not device.is_file() or not isinstance(cluster, Mapping) or "gpu" not in cluster:
        return job
    return {**job, "cluster": {**cluster, "gpu": str(device)}}
