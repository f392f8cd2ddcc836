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
from dataclasses import dataclass
from typing import Any

from meshcast.hardware.load import load
from meshcast.simulator.costs.kernels.gemm import UNALIGNED_RATE
from meshcast.simulator.costs.kernels.libraries import RELATIVE_LIBRARIES as LIBRARIES
from meshcast.simulator.costs.kernels.libraries import RELATIVE_ON
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.framework import load_framework
from meshcast.simulator.report.report import Report
from meshcast.validation.published.clusters import forget_cluster
from meshcast.validation.published.mapping import map_run
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun


@dataclass(frozen=True)
class OwnFit:
    """A coefficient that was fitted to the steps of one source.

    field: of the framework profile; ``rates.`` and the name of a factor.
    value: what others say of it.
    architecture: of the GPUs that it was fitted on, where it holds for these alone.
    """

    field: str
    value: Callable[[], float]
    architecture: str = ""


OWN_FITS: dict[str, tuple[OwnFit, ...]] = {
    "bloom": (
        # Host time of an op in Python: that of the oldest Megatron-Core, fitted to 46 runs of other sources.
        OwnFit("launch_s", lambda: load_framework("megatron-core", release="2025-01").launch_s),
        OwnFit("step_overhead_s", lambda: load_framework("megatron-lm-2021").step_overhead_s),
        # cuBLAS, "Tensor Core Usage", says which products lack tensor cores. Then CUDA cores at their peak are left.
        OwnFit("rates.unaligned", lambda: 1 / UNALIGNED_RATE),
    ),
    "foundry": (
        OwnFit("rates.memory_bound", lambda: load_framework("megatron-core").rates["memory_bound"]),
        # Triton by its authors' range, against the fitted rate.
        OwnFit("rates.attention", lambda: LIBRARIES["triton"].rate / RELATIVE_ON["triton", "hopper"].rate, "hopper"),
    ),
}
"""Fits to steps of one source alone. Those to steps of many sources are fitted again without it, see `refit.FITTED`."""


def has_own_fits(run: PublishedRun) -> bool:
    """Whether the forecast of a run uses what was fitted to its own source."""
    return run.source in OWN_FITS


def forecast_without_fits(run: PublishedRun, shared: SharedWork) -> Report:
    """The forecast of a run without the coefficients that its own source has set, and with all facts.

    The node of its cluster has no fitted properties either: it is any node of these GPUs with this network.
    Raises PlanError as `forecast_run`.
    """
    cluster = map_run(forget_cluster(run)).job["cluster"]

    def forget(job: dict[str, Any]) -> dict[str, Any]:
        given = job["framework"]
        profile = load_framework(given["name"], given["set"], given["release"])
        changes: dict[str, Any] = {}
        for own in OWN_FITS[run.source]:
            if own.architecture not in ("", load("gpus", run.spec.gpu or "").architecture):
                continue
            if own.field.startswith("rates."):
                changes.setdefault("rates", dict(profile.rates))[own.field.removeprefix("rates.")] = own.value()
            else:
                changes[own.field] = own.value()
        return job | {"cluster": cluster, "framework": given | {"set": given["set"] | changes}}

    return forecast_run(run, shared, change=forget)[1]
