"""Published steps by source, each beside its forecast as a stranger would tell it, without its source in any fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.step_posterior import MeasuredStep
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.metrics import REGIME
from meshcast.simulator.report.step_features import find_features
from meshcast.validation.published.answer import map_chunks
from meshcast.validation.published.fit.derivatives import forecast_shares
from meshcast.validation.published.fit.own_fits import forecast_stranger
from meshcast.validation.published.fit.refit import Row, corrections_without_source
from meshcast.validation.published.rows import PublishedRun
from meshcast.validation.published.stacks import FITTED_SOURCES


@dataclass(frozen=True)
class SourceStep:
    """A published step.

    step: beside its forecast.
    bias, sigma: of log(measured / forecast) by its regime, with all contributions.
    others: sigma of all contributions but that of its regime.
    """

    step: MeasuredStep
    bias: float
    sigma: float
    others: float


@dataclass(frozen=True)
class StrangerStep:
    """A published step, and the row of `forecast_shares`; None where its steps set no coefficient."""

    step: SourceStep
    row: Row | None


def forecast_sources(runs: Sequence[PublishedRun], workers: int | None = None) -> Iterator[StrangerStep | None]:
    """Yields the steps of all runs; None for one without a measured step or a forecast."""
    yield from map_chunks(_forecast_chunk, runs, workers)


def _forecast_chunk(runs: Sequence[PublishedRun]) -> list[StrangerStep | None]:
    shared = SharedWork()
    return [_forecast(run, shared) for run in runs]


def _forecast(run: PublishedRun, shared: SharedWork) -> StrangerStep | None:
    if run.step_time is None:
        return None
    try:
        report = forecast_stranger(run, shared)[1]
    except MeshcastError:
        return None
    step = MeasuredStep(run.id, run.source, find_features(report), run.step_time, report.step_time)
    others = math.hypot(*(sigma for name, sigma in report.sigmas.items() if name != REGIME))
    row = forecast_shares(run, shared) if run.source in FITTED_SOURCES else None
    return StrangerStep(SourceStep(step, report.residual.bias, report.sigma, others), row)


def group_sources(steps: Sequence[StrangerStep | None]) -> Mapping[str, list[SourceStep]]:
    """Returns the steps of each source, with coefficients that were fitted to all other sources."""
    rows = [step.row for step in steps if step is not None and step.row and step.row["shares"] is not None]
    corrections = dict(zip((row["id"] for row in rows), corrections_without_source(rows), strict=True))
    sources: dict[str, list[SourceStep]] = {}
    for stranger in steps:
        if stranger is not None:
            step = stranger.step.step
            forecast = step.forecast * math.exp(corrections.get(step.name, 0.0))
            without = replace(stranger.step, step=replace(step, forecast=forecast))
            sources.setdefault(step.source, []).append(without)
    return sources
