"""Fields that a run leaves open: those of its plan, and those that its memory contradicts.

Whoever publishes a run has tuned it. So of micro-batches and chunks that are not printed the forecast is that of the
plan with the shortest forecast step among those that fit in memory. And what ran did fit: where no such plan does, a
field that is assumed is given its next likely value, the others as they were, up to the first with which the run fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.report.report import Report
from meshcast.validation.published.mapping import MappedJob, map_run, possible_chunks, possible_micro_batches
from meshcast.validation.published.rows import PublishedRun, Spec
from meshcast.validation.published.stacks import SPLITS_ACTIVATIONS

MAX_MICRO_BATCHES = 6
"""Micro-batches of a run that are tried, the smallest ones: larger ones save little, and seldom fit."""


Change = Callable[[dict[str, Any]], dict[str, Any]]
"""A job with other settings than those of its run."""

MakeJob = Callable[[PublishedRun, tuple[str, ...]], MappedJob]


def forecast_run(
    run: PublishedRun,
    shared_work: SharedWork | None = None,
    profile: str | None = None,
    change: Change | None = None,
) -> tuple[MappedJob, Report]:
    """Returns the job of a run and its forecast; where its plan is open, of the fastest plan that fits, with the next
    likely value of an assumed field where none does.

    profile: see `map_run`.
    change: of every job before it is forecast.
    Raises PlanError for a run that cannot be mapped, or none of whose plans is possible.
    """

    def forecast(run: PublishedRun, chosen: tuple[str, ...] = ()) -> tuple[MappedJob, Report]:
        return _forecast_open_plan(run, chosen, lambda row, fields: _map(row, fields, profile, change), shared_work)

    job, report = forecast(run)
    for field, value, spec in likely_values(run.spec, job.assumed) if not report.fits else ():
        with suppress(MeshcastError):
            other, fitting = forecast(run.model_copy(update={"spec": spec}), (field,))
            if fitting.fits:
                return replace(other, replaced=((field, value),)), fitting
    return job, report


def _forecast_open_plan(
    run: PublishedRun, fields: tuple[str, ...], make_job: MakeJob, shared_work: SharedWork | None
) -> tuple[MappedJob, Report]:
    """Returns the job of a run and its forecast; where its plan is open, of the fastest plan that fits.

    fields: of the run that were given a likely value. make_job: maps a run with fields that were chosen.
    """
    if run.spec.batch.micro is not None and run.spec.mesh.vpp is not None:
        job = make_job(run, fields)
        return job, simulate(job.job, shared_work=shared_work)
    forecasts: list[tuple[MappedJob, Report]] = []
    refused: MeshcastError | None = None
    for variant, chosen in _plans(run):
        try:
            job = make_job(variant, (*fields, *chosen))
            forecasts.append((job, simulate(job.job, shared_work=shared_work)))
        except MeshcastError as error:  # chunks that the schedule refuses
            refused = refused or error
    if not forecasts and refused is not None:
        raise refused
    return min(forecasts, key=lambda pair: (not pair[1].fits, pair[1].step_time))


def _map(run: PublishedRun, chosen: tuple[str, ...], profile: str | None, change: Change | None) -> MappedJob:
    mapped = map_run(run, chosen, profile)
    return replace(mapped, job=change(mapped.job)) if change else mapped


def likely_values(spec: Spec, assumed: tuple[str, ...]) -> Iterator[tuple[str, str, Spec]]:
    """Returns other values of fields that were assumed and change memory, the least change of a plan first: the field,
    the value in words, the spec with it."""
    if "grad_dtype" in assumed:
        yield "grad_dtype", "bf16", spec.model_copy(update={"grad_dtype": "bf16"})
    if "sharding" in assumed or (spec.sharding == "none" and "sharding:convention" in spec.filled):
        yield "sharding", "zero1", spec.model_copy(update={"sharding": "zero1"})
    if "shard_group" in assumed:
        ranks = spec.width("dp") * spec.width("cp")
        group = 2 * (spec.gpus_per_node or 1)
        while group <= ranks and ranks % group == 0:
            yield "shard_group", str(group), spec.model_copy(update={"shard_group": group})
            group *= 2
    if SPLITS_ACTIVATIONS in assumed and spec.width("tp") > 1:
        yield SPLITS_ACTIVATIONS, "true", spec.model_copy(update={SPLITS_ACTIVATIONS: True})
    for kind in ("selective", "full") if "recompute.kind" in assumed else ():
        yield "recompute.kind", kind, _recompute(spec, kind)
    if "recompute.modules" in assumed and "recompute.kind" not in assumed:
        yield "recompute.modules", "full", _recompute(spec, "full")


def _recompute(spec: Spec, kind: str) -> Spec:
    return spec.model_copy(update={"recompute": spec.recompute.model_copy(update={"kind": kind})})


def _plans(run: PublishedRun) -> Iterator[tuple[PublishedRun, tuple[str, ...]]]:
    """Yields the run with each possible micro-batch and number of chunks, and the fields that were chosen."""
    spec = run.spec
    chunks = possible_chunks(spec) if spec.mesh.vpp is None and spec.width("pp") > 1 else [spec.mesh.vpp]
    for number in chunks if len(chunks) > 1 else [spec.mesh.vpp]:
        mesh = spec.mesh.model_copy(update={"vpp": number})
        micros = possible_micro_batches(spec)[:MAX_MICRO_BATCHES] if spec.batch.micro is None else []
        for micro in micros if len(micros) > 1 else [spec.batch.micro]:
            batch = spec.batch.model_copy(update={"micro": micro})
            chosen = (*(["mesh.vpp"] * (len(chunks) > 1)), *(["batch.micro"] * (len(micros) > 1)))
            yield run.model_copy(update={"spec": spec.model_copy(update={"mesh": mesh, "batch": batch})}), chosen
