"""``predict --jobs``: forecasts of many jobs from a file, a JSON object a line, answered in the same order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import Defect, MeshcastError, PlanError
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from meshcast.simulator.batch.families import Refused
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.engine.play import Engine
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.workers import collect_garbage_rarely
from meshcast.simulator.loading.load import read_job
from meshcast.simulator.report.peak_errors import MemoryFit, peak_error_of


def read_jobs(file: TextIO, name: str) -> Iterator[str]:
    """Yields the lines of a file or pipe as they come. Raises PlanError for a line longer than a description may be."""
    number = 0
    while line := file.readline(DESCRIPTION.nbytes):
        number += 1
        if len(line) == DESCRIPTION.nbytes:
            rule = f"a line of {DESCRIPTION.nbytes:,} characters or more is no job"
            raise PlanError(f"{name}:{number}", rule, "Write one JSON object a line")
        yield line


def forecast_lines(
    lines: Iterable[str],
    name: str,
    base: Path,
    changes: Sequence[str] = (),
    engine: Engine = "matrices",
    skip: bool = True,
    calibration: Calibration | None = None,
    brief: bool = False,
) -> Iterator[Fields]:
    """Yields answers of all lines that are not empty; the answer of an invalid line is its error.

    If meshcast itself fails on a line, the answer is a `Defect` with the job that reproduces it.

    name: the file in error messages.
    base: folder of relative paths in jobs.
    changes: fields that are set in every job first.
    engine, skip, calibration: see simulator.forecast.simulate.
    brief: answers are step time and memory alone, of the default engine; many plans of a job take a fraction of the
        time.
    """

    def begin() -> Callable[[Fields], Fields]:
        """Returns what answers jobs, which keeps what they share."""
        if brief:
            return _answer_briefly(changes, base, calibration)
        shared = SharedWork(calibration)
        return lambda stated: simulate(load_job(stated, changes, base), engine, skip, shared, calibration).to_dict()

    answer = begin()
    with collect_garbage_rarely():
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where, stated = f"{name}:{number}", Fields()
            try:
                stated = _parse_job(line)
                yield answer(stated)
            except MeshcastError as error:
                yield {"id": _job_id(stated), "line": number, "error": error.at(where).to_dict()}
            except Exception as error:  # a defect of meshcast costs a single line
                answer = begin()  # the failure may have left what is shared incomplete
                yield {"id": _job_id(stated), "line": number, "error": Defect.of(error, where).to_dict(), "job": stated}


def _answer_briefly(changes: Sequence[str], base: Path, calibration: Calibration | None) -> Callable[[Fields], Fields]:
    """Returns what answers jobs by step time and memory alone."""
    from meshcast.simulator.batch.grid import Grid  # loads a compiler where there is one

    grid = Grid(SharedWork(calibration), base)

    def answer(stated: Fields) -> Fields:
        forecast = grid.forecast(read_job(stated, changes).data if changes else stated)
        if isinstance(forecast, Refused):
            raise forecast.error
        plan, figures = forecast
        fit = MemoryFit(figures.held, figures.room, peak_error_of(plan.job.framework))
        memory = {
            "peak_allocated_gib": figures.peak_allocated / GIB,
            "peak_device_gib": figures.peak_device / GIB,
            "fits_probability": fit.probability,
        }
        return {"id": _job_id(stated), "status": fit.verdict, "step_time_s": figures.step_time, "memory": memory}

    return answer


def _job_id(stated: Fields) -> str | int | None:
    name = stated.get("id")
    return name if isinstance(name, str | int) else None


def progress(lines: Iterable[str], path: Path, wanted: bool) -> Iterator[str]:
    """Yields the same lines; on a terminal a progress bar follows them."""
    if not (wanted and sys.stderr.isatty()):
        yield from lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with path.open("rb") as file:
        total = sum(1 for _ in file)
    columns = TextColumn("jobs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield from bar.track(lines, total=total)


def _parse_job(line: str) -> Fields:
    try:
        stated = parse_json(line)
    except Unreadable as error:
        rule = f"not a job: {error.rule}"
        raise PlanError("", rule, error.remedy or "Write one job as one JSON object a line") from None
    if not isinstance(stated, dict):
        raise PlanError("", "a job is a mapping of keys to values", "Write one JSON object a line", stated)
    return stated
