"""Forecasts of published runs, one answer a run, on all cores.

An answer is plain data: what is printed with ``--json``. Runs are forecast in chunks, on any number of processes: who
forecasts a chunk changes nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from typing import Any

from hardware.errors import MeshcastError, shorten
from hardware.units import GIB
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.simulate import simulate
from simulator.report.report import Report
from validation.published.baseline import at_peak, peak_of
from validation.published.mapping import Mapped, mapped
from validation.published.rows import Row, Unread

Answer = dict[str, Any]

CHUNK = 16
"""Runs that are forecast with one workshop: neighbours of a file are alike and share what they have in common."""


def answers(runs: Sequence[Row | Unread], workers: int | None = None) -> Iterator[Answer]:
    """The answer to every run, in their order.

    workers: processes; one for each core if not given.
    """
    chunks = [runs[at : at + CHUNK] for at in range(0, len(runs), CHUNK)]
    count = min(workers or os.cpu_count() or 1, len(chunks))
    if count <= 1:
        yield from chain.from_iterable(map(_chunk, chunks))
        return
    # Ctrl-C reaches the whole group of processes: the parent alone heeds it.
    pool = ProcessPoolExecutor(count, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        yield from chain.from_iterable(pool.map(_chunk, chunks))
    finally:  # whoever interrupts waits for the chunks at work, not for those that wait
        pool.shutdown(cancel_futures=True)


def _chunk(runs: Sequence[Row | Unread]) -> list[Answer]:
    shop = SharedWork()
    return [answer(run, shop) for run in runs]


def answer(run: Row | Unread, shop: SharedWork | None = None) -> Answer:
    """The answer to one run: its forecast beside what was measured, or ``refused`` with the reason."""
    if isinstance(run, Unread):
        return _refused(run.id, run.reason) | {"source": None, "gpu": None, "class": None, "stack": None}
    told = _answer(run, shop)
    return told | {"source": run.source, "gpu": run.spec.gpu, "class": run.spec.kind, "stack": run.spec.stack}


def _answer(run: Row, shop: SharedWork | None) -> Answer:
    measured = run.measured.model_dump(exclude_none=True)
    try:
        job = mapped(run)
        report = simulate(job.job, shared_work=shop)
        return _predicted(run, job, report) | {"measured": measured}
    except MeshcastError as error:
        given = "" if error.value is None else f" is {shorten(error.value)}"
        return _refused(run.id, f"{error.where}{given}: {error.rule}") | {"measured": measured}
    except Exception as error:  # a defect of meshcast, which must cost one row and not all the others
        return _refused(run.id, f"meshcast failed: {type(error).__name__}: {error}") | {"measured": measured}


def _refused(name: str | None, reason: str) -> Answer:
    return {
        "id": name,
        "status": "refused",
        "reason": reason,
        "assumed": [],
        "predicted": None,
        "measured": {},
        "error": None,
        "memory_error": None,
        "peak": None,
        "at_peak_s": None,
        "baseline": None,
    }


def _predicted(run: Row, job: Mapped, report: Report) -> Answer:
    step, (low, high) = run.step_time, report.interval_90
    memory = _memory(run.spec.memory_kind, report) / GIB
    printed = run.measured.peak_memory_gib
    peak = peak_of(run.spec.precision)
    return {
        "id": run.id,
        "status": "predicted",
        "reason": None,
        "assumed": list(job.assumed),
        "predicted": {
            "step_time_s": report.step_time,
            "interval_90_s": [low, high],
            "peak_memory_gib": memory,
        },
        "measured": {},
        "error": report.step_time / step - 1 if step else None,
        "memory_error": memory / printed - 1 if printed else None,
        "peak": peak,
        "at_peak_s": at_peak(report, peak),
        "baseline": None,
    }


def _memory(kind: str | None, report: Report) -> float:
    """The peak in the words of the run [bytes]; of the whole device where it does not say."""
    if kind == "torch-allocated":
        return report.peak_allocated
    return report.peak_reserved if kind == "torch-reserved" else report.peak_device
