"""What a source has set by its own step times, and its forecast without that.

Two kinds of knowledge stand in a profile or a cluster:

    facts   what code, a document or a log states: which kernels, buffers and collectives a program has, that its host
            waits for every launch, the links of a node. A source that is left out still has them, as any user has.
    fits    coefficients that were fitted to measured steps. Those fitted to steps of the source that is left out are
            replaced by what other sources, or a document, say of the same quantity.

Profiles name their fits under `fitted`, nodes by `kind: fitted`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshcast.hardware.load import load
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.kernels.gemm import UNALIGNED_RATE
from meshcast.simulator.costs.kernels.libraries import RELATIVE_LIBRARIES as LIBRARIES
from meshcast.simulator.costs.kernels.libraries import RELATIVE_ON
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.report.report import Report
from meshcast.validation.published.clusters import forget_cluster
from meshcast.validation.published.mapping import MappedJob, map_run
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stranger import as_stranger


@dataclass(frozen=True)
class OwnFit:
    """A coefficient that was fitted to the steps of a source.

    program: the framework profile that has it; empty for a constant of all of them.
    field: of a profile; ``rates.`` and the name of a factor.
    value: what others say of it.
    architecture: of the GPUs that it was fitted on, where it holds for these alone.
    """

    program: str
    field: str
    value: Callable[[], float]
    architecture: str = ""


BLOOM, FOUNDRY = "megatron-deepspeed", "llm-foundry"

OWN_FITS: dict[str, tuple[OwnFit, ...]] = {
    "bloom": (
        # Host time of an op in Python: that of the oldest Megatron-Core, fitted to 46 runs of other sources.
        OwnFit(BLOOM, "launch_s", lambda: load_framework("megatron-core", release="2025-01").launch_s),
        OwnFit(BLOOM, "step_overhead_s", lambda: load_framework("megatron-lm-2021").step_overhead_s),
        # cuBLAS, "Tensor Core Usage", says which products lack tensor cores. Then CUDA cores at their peak are left.
        OwnFit("", "rates.unaligned", lambda: 1 / UNALIGNED_RATE),
    ),
    "mlperf": (
        # The least mean error on 141 of its runs (`stacks.STACKS`), against what DGX Cloud's runs say, too.
        OwnFit("", "step_overhead_s", lambda: load_framework("megatron-core").step_overhead_s),
    ),
    "foundry": (
        # Triton by its authors' range, against the fitted rate.
        OwnFit(
            FOUNDRY,
            "rates.attention",
            lambda: LIBRARIES["triton"].rate / RELATIVE_ON["triton", "hopper"].rate,
            "hopper",
        ),
    ),
}
"""Fits to steps of a single source. Those to steps of many sources are fitted again without it, see `refit.FITTED`."""


def has_own_fits(run: PublishedRun) -> bool:
    """Returns whether the forecast of a run uses what was fitted to its own source."""
    return run.source in OWN_FITS


def forecast_without_fits(run: PublishedRun, shared: SharedWork) -> Report:
    """Returns the forecast of a run without the coefficients that its own source has set, and with all facts.

    The node of its cluster has no fitted properties either: it is any node of these GPUs with this network.
    Raises PlanError as `forecast_run`.
    """
    cluster = map_run(forget_cluster(run)).job["cluster"]
    return forecast_run(run, shared, change=lambda job: forget_fits(run, job) | {"cluster": cluster})[1]


def forecast_stranger(
    run: PublishedRun, shared: SharedWork | None = None, profile: str | None = None
) -> tuple[MappedJob, Report]:
    """Returns the job of a run as a stranger would tell it, and its forecast without what its source has set.

    profile: see `map_run`.
    Raises PlanError as `forecast_run`.
    """
    return forecast_run(as_stranger(run), shared, profile, lambda job: forget_fits(run, job))


def forget_fits(run: PublishedRun, job: dict[str, Any]) -> dict[str, Any]:
    """Returns a job without the coefficients of its profile that the source of a run has set."""
    stated = job["framework"]
    profile = load_framework(stated["name"], stated["set"], stated["release"])
    changes: dict[str, Any] = {}
    for fitted in OWN_FITS.get(run.source, ()):
        if fitted.program not in ("", stated["name"]):
            continue
        if fitted.architecture not in ("", load("gpus", run.spec.gpu or "").architecture):
            continue
        if fitted.field.startswith("rates."):
            rates = changes.setdefault("rates", dict(profile.rates))
            rates[fitted.field.removeprefix("rates.")] = fitted.value()
        else:
            changes[fitted.field] = fitted.value()
    return job | {"framework": stated | {"set": stated["set"] | changes}} if changes else job
