"""Reads what steps of jobs took: from training logs with the job or launch file that ran, and from tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field
from meshcast.simulator.formats.files import csv_rows
from meshcast.simulator.formats.logs.read import read_log
from meshcast.simulator.formats.logs.training_log import TrainingLog
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.validation.learning.steps import TimedJob
from meshcast.validation.measurements.import_training_log import WARMUP_LINES, step_seconds
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import STEP_SECONDS, PublishedRun, read

SOURCE = "this cluster"
"""Source of steps that name none."""

JOB_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh", ".slurm", ".sbatch", ".py")
"""Suffixes of job and launch files that lie beside a log, under its name."""

COLUMNS = ("job", "step_time_s")
"""Columns that a table of steps has; others are `name`, `source`, and fields of the job that a row changes."""

WHICH = "Name a table of steps"


class TimedRow(BaseModel):
    """A row of a table of steps.

    job: path of its job or launch file, relative to the table.
    set: changes to it, by field or as ``field=value``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    step_time_s: Annotated[float, Field(ge=STEP_SECONDS[0], le=STEP_SECONDS[1])]
    set: dict[str, object] | list[str] = {}
    name: str = ""
    source: str = SOURCE


class TimedTable(BaseModel):
    """A table of steps in YAML."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: Annotated[list[TimedRow], Field(min_length=1)]


def is_step_table(path: Path) -> bool:
    """Returns whether a CSV file has the columns of a table of steps."""
    if path.suffix != ".csv":
        return False
    rows = csv_rows(path, WHICH)
    return bool(rows) and {*COLUMNS} <= {*rows[0].cells}


def read_timed_jobs(path: Path) -> list[TimedJob]:
    """Returns the steps of a table: in CSV, in YAML, or published runs in JSONL. Raises PlanError for a faulty row."""
    if path.suffix == ".jsonl":
        return [*_read_published(path)]
    return [
        TimedJob(
            f"{path.name}: {row.name or number}",
            row.source,
            load_job(path.parent / row.job, row.set),
            row.step_time_s,
        )
        for number, row in enumerate(_read_rows(path), 1)
    ]


def _read_published(path: Path) -> Iterator[TimedJob]:
    for run in read(path):
        if not isinstance(run, PublishedRun):
            raise PlanError(str(path), run.reason, "Correct the line, or leave it out")
        if run.step_time is not None:
            yield TimedJob(run.id, run.source, load_job(forecast_run(run)[0].job), run.step_time)


def _read_rows(path: Path) -> list[TimedRow]:
    if path.suffix != ".csv":
        data = read_yaml(path, str(path)).data
        return validate_data(TimedTable, data, f"{path} ", PlanError).steps
    head, *lines = csv_rows(path, WHICH)
    rows = [_read_row(head.cells, line.cells, f"{path}:{line.line}") for line in lines if any(line.cells)]
    if not rows:
        raise PlanError(str(path), "it has no rows", f"A row has {', '.join(COLUMNS)}, and fields of the job")
    return rows


def _read_row(head: Sequence[str], cells: Sequence[str], where: str) -> TimedRow:
    if len(cells) != len(head):
        rule = f"it has {len(cells)} cells, and the head {len(head)}"
        raise PlanError(where, rule, "Give every column of the head a cell")
    named = {name: cell for name, cell in zip(head, cells, strict=True) if cell}
    seconds = _read_number(named.pop("step_time_s", ""), f"{where} step_time_s")
    stated = {name: named.pop(name) for name in ("job", "name", "source") if name in named}
    changes = [f"{field}={cell}" for field, cell in named.items()]
    return validate_data(TimedRow, {**stated, "step_time_s": seconds, "set": changes}, f"{where} ", PlanError)


def _read_number(cell: str, where: str) -> float:
    try:
        return float(cell)
    except ValueError:
        raise PlanError(where, "must be a number of seconds", "Correct the cell", cell) from None


def find_log(path: Path) -> TrainingLog | None:
    """Returns the training log in a file; None: it is none."""
    try:
        return read_log(path)
    except PlanError:
        return None


def time_log(log: TrainingLog, path: Path, stated: Mapping[str, object] | None) -> TimedJob:
    """Returns the median step of a log behind its first lines, and the job that ran: that which lies beside it under
    its name, or else the stated one. Raises PlanError for a log without a job, or with another global batch."""
    job = _find_job(path, stated)
    batch, gpus = job.batch, job.cluster.gpus
    kept = log.iterations[min(WARMUP_LINES, len(log.iterations) // 2) :]
    if odd := next((line for line in kept if line.samples and line.samples != batch.total), None):
        rule = f"the global batch of the job is {batch.total}, that of the log {odd.samples}"
        raise PlanError(odd.where, rule, "Name the job of this run: --job job.yaml")
    tokens = (batch.total or 0) * (batch.sequence or job.model.seq)
    seconds = [step_seconds(line, tokens, gpus, batch.total) for line in kept]
    return TimedJob(path.name, SOURCE, job, statistics.median(seconds))


def _find_job(path: Path, stated: Mapping[str, object] | None) -> Job:
    beside = [file for suffix in JOB_SUFFIXES if (file := path.with_suffix(suffix)).is_file() and file != path]
    if len(beside) > 1:
        rule = f"{' and '.join(file.name for file in beside)} could both be the job that ran"
        raise PlanError(str(path), rule, "Keep one of them beside the log, or name it: --job job.yaml")
    if beside:
        return load_job(beside[0])
    if stated is None:
        rule = "a log does not say which job ran"
        remedy = (
            f"Name its job or launch file: --job job.yaml, or put it beside the log: {path.with_suffix('.yaml').name}"
        )
        raise PlanError(str(path), rule, remedy)
    return load_job(dict(stated))
