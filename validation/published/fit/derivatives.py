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
from meshcast.simulator.costs.regimes import Regime, least_known, step_class
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.report.metrics import REGIME
from meshcast.simulator.report.report import Report
from meshcast.validation.published.answer import Answer, map_chunks
from meshcast.validation.published.baseline import peak_format, seconds_at_peak
from meshcast.validation.published.fit.own_fits import forecast_stranger, forecast_without_fits, has_own_fits
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stacks import FALLBACK

FACTOR = 0.9
"""Returns the time of the work of a kind in the second forecast over that in the first."""

RELATIVES = {
    "llm-foundry": "torchtitan",
    "megatron-deepspeed": "megatron-lm-2021",
    "megatron-lm-2021": "megatron-deepspeed",
}
"""Returns the profile that is nearest to a known profile, of those outside the family of `FALLBACK`."""

RATES = {"kernel": -1, "attention": -1, "memory_bound": 1, "communication": -1}
"""Factors of a framework, and whether time grows (1) or falls (-1) with them."""


def forecast_derivatives(runs: Sequence[PublishedRun], workers: int | None = None) -> Iterator[Answer]:
    """Yields the derivatives of the forecasts of all runs; `shares` is None without a measured step or a forecast.

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
    """Returns a row; its shares are None without a forecast or a measured step."""
    row, report = _forecast_shares(run, shared)
    if report is None or run.step_time is None:
        return row
    try:
        without_fits = forecast_without_fits(run, shared) if has_own_fits(run) else report
        residuals = forecast_residuals(run, report, shared)
    except MeshcastError:
        return row | {"shares": None}
    at_peak = seconds_at_peak(report, row["format"])
    row |= {"efficiency": at_peak / run.step_time if at_peak else None}
    return row | {"without_own": math.log(run.step_time / without_fits.step_time), "residuals": residuals}


def forecast_shares(run: PublishedRun, shared: SharedWork) -> Answer:
    """Returns the row of a run without what other forecasts than that of the run itself say: see `derive`."""
    return _forecast_shares(run, shared)[0]


def _forecast_shares(run: PublishedRun, shared: SharedWork) -> tuple[Answer, Report | None]:
    row: Answer = {
        "id": run.id,
        "source": run.source,
        "stack": run.spec.stack,
        "model": run.model_name,
        "class": None,
    }
    row |= {"gpu": run.spec.gpu, "format": peak_format(run.spec.precision), "shares": None}
    if run.step_time is None:
        return row, None
    try:
        mapped, report = forecast_run(run, shared)
        shares = _find_shares(mapped.job, report.step_time, shared)
    except MeshcastError:
        return row, None
    row["class"] = step_class(report.job.model.moe is not None, report.job.adapters is not None)
    row |= {"architecture": report.job.cluster.gpu.architecture, "shares": shares}
    return row | {"log_ratio": math.log(run.step_time / report.step_time)}, report


def _find_shares(job: dict[str, Any], step: float, shared: SharedWork) -> dict[str, float]:
    """Returns the shares of all kinds of work. step: of the job [s]."""
    stated = job["framework"]
    framework = load_framework(stated["name"], stated["set"], stated["release"])
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
    shares["overhead"] = framework.step_overhead_s / step
    shares["gemm"] = shares.pop("kernel") - shares["attention"]
    return shares


def forecast_residuals(run: PublishedRun, report: Report, shared: SharedWork) -> list[Answer]:
    """Returns the residuals of a run in its regime, if its source is known, and in those in which strangers tell it.

    report: of the run with all its settings.

    A stranger leaves flags open, and has nothing that the source has set (`forecast_stranger`). Where `RELATIVES` has
    its profile, strangers tell the run without that, too: its program is then of a known family, forecast by the
    profile of a relative, or unknown, forecast by `FALLBACK`. Each has `regime`, `log_ratio`, the logarithm of
    measured over forecast, and `others`: sigma of all contributions but that of the regime.
    """
    reports: list[tuple[Regime, Report]] = [(report.regime, report)] if report.regime == "source" else []
    stranger = forecast_stranger(run, shared)[1]
    reports.append((stranger.regime, stranger))
    if near := RELATIVES.get(report.job.framework.name):
        reports.append((least_known("family", stranger.regime), forecast_stranger(run, shared, near)[1]))
        reports.append(("unknown", forecast_stranger(run, shared, FALLBACK)[1]))
    assert run.step_time is not None
    return [
        {
            "regime": regime,
            "log_ratio": math.log(run.step_time / forecast.step_time),
            "others": math.hypot(*(sigma for key, sigma in forecast.sigmas.items() if key != REGIME)),
        }
        for regime, forecast in reports
    ]
