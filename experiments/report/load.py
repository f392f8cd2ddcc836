"""What a file given to ``meshcast report`` holds: plans of a sweep or a search, the answer of a forecast, or a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshcast.experiments.report.results.load import PlanRows, is_search_answer, load_rows, read_answer
from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job

SAME = 1e-9
"""Relative difference up to which the step time of an answer and of its job are the same."""


def load_plans(path: Path) -> PlanRows | None:
    """The plans of a Parquet file, or of an answer of ``search --json``; None for any other file."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return load_rows(path)
    data = read_json(path)
    return read_answer(path.name, data) if is_search_answer(data) else None


def load_answer(path: Path) -> Mapping[str, Any] | None:
    """The answer of ``predict --json`` in a file; None for any other file."""
    data = read_json(path)
    return data if isinstance(data, dict) and {"job", "step_time_s", "breakdown_s"} <= data.keys() else None


def load_answered_job(path: Path, answer: Mapping[str, Any], changes: Sequence[str] = ()) -> Job:
    """The job of an answer.

    An answer holds the figures of a forecast, not its timeline nor its ops, so its job is forecast again. Raises
    PlanError if the job cannot be read.
    """
    if not isinstance(answer["job"], dict):
        raise PlanError(str(path), "its `job` is no mapping of keys to values", "Name the job file instead")
    try:
        return load_job(answer["job"], changes, base=path.parent)
    except MeshcastError as error:
        rule = f"its `job` cannot be forecast again, and its figures alone do not suffice ({error})"
        raise PlanError(str(path), rule, "Name the job file instead") from None


def check_step_time(path: Path, answer: Mapping[str, Any], seconds: float) -> None:
    """Raises PlanError if an answer states another step time [s] than the forecast of its job."""
    stated = answer["step_time_s"]
    if isinstance(stated, int | float) and abs(stated - seconds) <= SAME * seconds:
        return
    rule = f"its step takes {stated} s, the forecast of its `job` {seconds} s"
    remedy = "It was made by another version, or with --set, --calibration or --engine: name the job file instead"
    raise PlanError(str(path), rule, remedy)


def read_json(path: Path) -> Any:
    """What a JSON file holds; None for a file that has another ending, or is not JSON."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        return parse_json(read_text(path, DESCRIPTION))
    except Unreadable:
        return None
