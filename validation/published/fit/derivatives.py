"""How the forecast of a published run moves with the coefficients that its programs and GPUs could have.

    share(c) = d log(step) / d log(time of c)

by a second forecast with another factor, so that what is hidden behind other work counts for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.costs.regimes import least_known, step_class
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.report.metrics import REGIME
from meshcast.simulator.report.report import Report
from meshcast.validation.published.answer import Answer, map_chunks
from meshcast.validation.published.baseline import peak_format, seconds_at_peak
from meshcast.validation.published.fit.own_fits import forecast_without_fits, has_own_fits
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stacks import FALLBACK

FACTOR = 0.9
"""Time of the work of one kind in the second forecast over that in the first."""

RELATIVES = {
    "llm-foundry": "torchtitan",
    "megatron-deepspeed": "megatron-lm-2021",
    "megatron-lm-2021": "megatron-deepspeed",
}
"""Profile that is nearest to a known one, of those outside the family of `FALLBACK`."""

RATES = {"kernel": -1, "attention": -1, "memory_bound": 1, "communication": -1}
"""Factors of a framework, and whether time grows (1) or falls (-1) with them."""


def forecast_derivatives(runs: Sequence[PublishedRun], workers: int | None = None) -> Iterator[Answer]:
    """Derivatives of the forecasts of all runs; `shares` is None for one without a measured step or a forecast.

    Each row has the run's `source`, `stack`, `model`, `gpu`, `architecture`, `format` and `class` (`StepClass`);
    `log_ratio`, the logarithm of measured over forecast; `shares` by kind of work; `residuals`, see
    `forecast_residuals`; `efficiency`, the share of its peak rate that it reached; and `without_own`, the logarithm of
    measured over the forecast without what its own source has set (`own_fits`).
    """
    yield from map_chunks(_derive_chunk, runs, workers)


def _derive_chunk(runs: Sequence[PublishedRun]) -> list[Answer]:
    shared = SharedWork()
    return [derive(run, shared) for run in runs]


def derive(run: PublishedRun, shared: SharedWork) -> Answer:
    """One row; its shares are None without a forecast or a measured step."""
    found: Answer = {
        "id": run.id,
        "source": run.source,
        "stack": run.spec.stack,
        "model": run.model_name,
        "class": None,
    }
    found |= {"gpu": run.spec.gpu, "format": peak_format(run.spec.precision), "shares": None}
    if run.step_time is None:
        return found
    try:
        mapped, report = forecast_run(run, shared)
        job = mapped.job
        residuals = forecast_residuals(run, report, shared)
        unlike = forecast_without_fits(run, shared) if has_own_fits(run) else report
        step, given = report.step_time, job["framework"]
        framework = load_framework(given["name"], given["set"], given["release"])
        base = framework.kernel_traits.rates

        def share(changes: dict[str, Any]) -> float:
            changed = deepcopy(job)
            changed["framework"]["set"] |= changes
            return math.log(simulate(changed, shared_work=shared).step_time / step) / math.log(FACTOR)

        shares = {
            name: share({"rates": framework.rates | {name: base.get(name, 1.0) * FACTOR**sign}})
            for name, sign in RATES.items()
        }
        shares["launch"] = share({"launch_s": framework.launch_s * FACTOR})
    except MeshcastError:
        return found
    shares["overhead"] = framework.step_overhead_s / step
    shares["gemm"] = shares.pop("kernel") - shares["attention"]
    found["class"] = step_class(report.job.model.moe is not None, report.job.adapters is not None)
    found |= {"architecture": report.job.cluster.gpu.architecture, "log_ratio": math.log(run.step_time / step)}
    at_peak = seconds_at_peak(report, found["format"])
    found |= {"efficiency": at_peak / run.step_time if at_peak else None}
    found |= {"without_own": math.log(run.step_time / unlike.step_time)}
    return found | {"shares": shares, "residuals": residuals}


def forecast_residuals(run: PublishedRun, report: Report, shared: SharedWork) -> list[Answer]:
    """Residuals of a run in its regime and, where `RELATIVES` has its profile, in those it would be in without it.

    Without the profile its program is one of a known family, forecast by the profile of a relative; without its family
    it is an unknown program, forecast by `FALLBACK`. Each has `regime`, `log_ratio`, the logarithm of
    measured over forecast, and `others`: sigma of all contributions but that of the regime.
    """
    found = [(report.regime, report)]
    if near := RELATIVES.get(report.job.framework.name):
        found.append((least_known("family", report.regime), forecast_run(run, shared, near)[1]))
        found.append(("unknown", forecast_run(run, shared, FALLBACK)[1]))
    assert run.step_time is not None
    return [
        {
            "regime": regime,
            "log_ratio": math.log(run.step_time / one.step_time),
            "others": math.hypot(*(sigma for key, sigma in one.sigmas.items() if key != REGIME)),
        }
        for regime, one in found
    ]
