"""Runs that do not print their micro-batch or the chunks of their pipeline: the fastest of their plans that fits.

Whoever publishes a run has tuned it. So the forecast is that of the plan with the shortest forecast step among those
that fit in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report
from meshcast.validation.published.mapping import MappedJob, map_run, possible_chunks, possible_micro_batches
from meshcast.validation.published.rows import PublishedRun

MOST_MICRO_BATCHES = 6
"""Micro-batches of a run that are tried, the smallest ones: larger ones save little, and seldom fit."""


Change = Callable[[dict[str, Any]], dict[str, Any]]
"""A job with other settings than those of its run."""


def forecast_run(
    run: PublishedRun,
    shared_work: SharedWork | None = None,
    profile: str | None = None,
    change: Change | None = None,
) -> tuple[MappedJob, Report]:
    """The job of a run and its forecast; where its plan is open, of the fastest plan that fits.

    profile: see `map_run`.
    change: of every job before it is forecast.
    Raises PlanError for a run that cannot be mapped, or none of whose plans is possible.
    """
    if run.spec.batch.micro is not None and run.spec.mesh.vpp is not None:
        job = _map(run, (), profile, change)
        return job, simulate(job.job, shared_work=shared_work)
    found: list[tuple[MappedJob, Report]] = []
    refused: MeshcastError | None = None
    for one, chosen in _plans(run):
        try:
            job = _map(one, chosen, profile, change)
            found.append((job, simulate(job.job, shared_work=shared_work)))
        except MeshcastError as error:  # chunks that the schedule refuses
            refused = refused or error
    if not found and refused is not None:
        raise refused
    return min(found, key=lambda one: (not one[1].fits, one[1].step_time))


def _map(run: PublishedRun, chosen: tuple[str, ...], profile: str | None, change: Change | None) -> MappedJob:
    mapped = map_run(run, chosen, profile)
    return replace(mapped, job=change(mapped.job)) if change else mapped


def _plans(run: PublishedRun) -> Iterator[tuple[PublishedRun, tuple[str, ...]]]:
    """The run with each possible micro-batch and number of chunks, and the fields that were chosen."""
    spec = run.spec
    chunks = possible_chunks(spec) if spec.mesh.vpp is None and spec.width("pp") > 1 else [spec.mesh.vpp]
    for number in chunks if len(chunks) > 1 else [spec.mesh.vpp]:
        mesh = spec.mesh.model_copy(update={"vpp": number})
        micros = possible_micro_batches(spec)[:MOST_MICRO_BATCHES] if spec.batch.micro is None else []
        for micro in micros if len(micros) > 1 else [spec.batch.micro]:
            batch = spec.batch.model_copy(update={"micro": micro})
            chosen = (*(["mesh.vpp"] * (len(chunks) > 1)), *(["batch.micro"] * (len(micros) > 1)))
            yield run.model_copy(update={"spec": spec.model_copy(update={"mesh": mesh, "batch": batch})}), chosen
