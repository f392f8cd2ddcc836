"""Forecasts of published runs on all cores: an answer for each run, the plain data of ``--json``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor
from itertools import chain
from typing import Any, TypeVar

from meshcast.hardware.errors import Defect, MeshcastError, PlanError, shorten
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.workers import open_pool
from meshcast.simulator.report.peak_errors import entry_of
from meshcast.simulator.report.report import Report
from meshcast.validation.published.baseline import peak_format, seconds_at_peak
from meshcast.validation.published.mapping import MappedJob, map_run
from meshcast.validation.published.misfits import explain_misfit
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun, Spec, UnreadableLine

Answer = dict[str, Any]
Run = TypeVar("Run")
Reply = TypeVar("Reply")

CHUNK = 16
"""Runs per task of the process pool. Neighbours in a file are similar, so the runs of a chunk reuse lowered stages."""


def answers(runs: Sequence[PublishedRun | UnreadableLine], workers: int | None = None) -> Iterator[Answer]:
    """Yields the answers to all runs, in order.

    workers: number of processes; None: as many as cores. The answers do not depend on it.
    """
    yield from map_chunks(_answer_chunk, runs, workers)


def map_chunks(
    answer_chunk: Callable[[Sequence[Run]], list[Reply]],
    runs: Sequence[Run],
    workers: int | None = None,
    size: int = CHUNK,
) -> Iterator[Reply]:
    """Yields the answers of a function to all runs, in order, on several processes.

    answer_chunk: takes the runs of a chunk, of which there are `size`, and can be pickled.
    """
    chunks = [runs[at : at + size] for at in range(0, len(runs), size)]
    count = min(workers or os.cpu_count() or 1, len(chunks))
    if count <= 1:
        yield from chain.from_iterable(map(answer_chunk, chunks))
        return
    try:
        with open_pool(count) as pool:
            yield from chain.from_iterable(pool.map(answer_chunk, chunks))
    except BrokenExecutor:
        rule = "a worker was killed, most likely for lack of memory"
        raise PlanError("--jobs", rule, "Run it again with fewer processes", count) from None


def _answer_chunk(runs: Sequence[PublishedRun | UnreadableLine]) -> list[Answer]:
    shared_work, replies = SharedWork(), []
    for run in runs:
        replies.append(answer(run, shared_work))
        if "job" in replies[-1]:  # the failure may have left it half made
            shared_work = SharedWork()
    return replies


Forecaster = Callable[[PublishedRun, SharedWork | None], tuple[MappedJob, Report]]
"""Makes the job of a run and its forecast."""


def answer(
    run: PublishedRun | UnreadableLine, shared_work: SharedWork | None = None, forecast: Forecaster | None = None
) -> Answer:
    """Returns the answer to a run: its forecast and what was measured, or status ``refused`` with the reason.

    forecast: default: `forecast_run`.
    If meshcast itself fails, the answer also has the `job` that reproduces it.
    """
    if isinstance(run, UnreadableLine):
        return _refusal_answer(run.id, run.reason) | {"source": None, "gpu": None, "class": None, "stack": None}
    reply = _answer_run(run, shared_work, forecast or forecast_run)
    return reply | {"source": run.source, "gpu": run.spec.gpu, "class": run.spec.kind, "stack": run.spec.stack}


def _answer_run(run: PublishedRun, shared_work: SharedWork | None, forecast: Forecaster) -> Answer:
    measured = run.measured.model_dump(exclude_none=True)
    try:
        job, report = forecast(run, shared_work)
        misfit = None if report.fits else explain_misfit(run, report)
        return _forecast_answer(run, job, report) | {"measured": measured, "misfit": misfit}
    except MeshcastError as error:
        stated = "" if error.value is None else f" is {shorten(error.value)}"
        return _refusal_answer(run.id, f"{error.where}{stated}: {error.rule}") | {"measured": measured}
    except Exception as error:  # a defect of meshcast costs a row, not the whole table
        return _refusal_answer(run.id, Defect.of(error).rule) | {"measured": measured, "job": _job_of(run)}


def _job_of(run: PublishedRun) -> dict[str, Any] | None:
    """Returns the job that reproduces a defect; None if the mapping of the run has failed."""
    try:
        return map_run(run).job
    except Exception:
        return None


def _refusal_answer(name: str | None, reason: str) -> Answer:
    return {
        "id": name,
        "status": "refused",
        "reason": reason,
        "assumed": [],
        "replaced": {},
        "misfit": None,
        "predicted": None,
        "measured": {},
        "error": None,
        "memory_error": None,
        "regime": None,
        "peak": None,
        "at_peak_s": None,
        "baseline": None,
    }


def _forecast_answer(run: PublishedRun, job: MappedJob, report: Report) -> Answer:
    step, (low, high) = run.step_time, report.interval_90
    memory = peak_memory(run.spec, report) / GIB
    printed = run.measured.peak_memory_gib
    peak = peak_format(run.spec.precision)
    return {
        "id": run.id,
        "status": "predicted",
        "reason": None,
        "assumed": list(job.assumed),
        "replaced": dict(job.replaced),
        "predicted": {
            "step_time_s": report.step_time,
            "interval_90_s": [low, high],
            "peak_memory_gib": memory,
            "peak_device_gib": report.peak_device / GIB,
            "capacity_gib": report.capacity / GIB,
            "fits": report.fits,
            "fits_probability": report.fit.probability,
            "room": report.fit.room,
            "spread": entry_of(report.job.framework.name, report.job.framework.regime),
        },
        "measured": {},
        "error": report.step_time / step - 1 if step else None,
        "memory_error": memory / printed - 1 if printed else None,
        "regime": report.regime,
        "peak": peak,
        "at_peak_s": seconds_at_peak(report, peak),
        "baseline": None,
    }


PRINTED = {"megatron-bridge": "torch-allocated"}
"""Counters that programs print (NVIDIA-NeMo/Megatron-Bridge @067f987df, scripts/performance/utils/evaluate.py:
mem-max-allocated-gigabytes)."""


def peak_memory(spec: Spec, report: Report) -> float:
    """Returns the peak memory by the counter that the run used [bytes]; if the run does not say, by that which its
    program prints, else of the whole device."""
    kind = PRINTED.get(spec.stack) if spec.memory_kind in (None, "unknown") else spec.memory_kind
    if kind == "torch-allocated":
        return report.peak_allocated
    return report.peak_reserved if kind == "torch-reserved" else report.peak_device
