"""What the file of ``meshcast report`` holds: plans of a sweep or a search, the answer of a forecast, or a job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from meshcast.experiments.sweeps.selection import LARGE, Row, check_rows, read_rows, varied_fields
from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, parse_json, read_text
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.figures import FIGURES, Figure
from meshcast.simulator.report.formatting import describe_value

SAME = 1e-9
"""Relative difference up to which the step time of an answer and of its job are the same."""

SEARCH_FIGURES = ("step_time_s", "tokens_per_s_per_gpu", "peak_device_gib", "cost")
"""Figures of a plan in the answer of ``search --json`` that rows of a sweep have, too."""


@dataclass(frozen=True)
class PlanRows:
    """Forecasts of many plans.

    name: of the file.
    rows: as in the file; every row has `status` and the varied fields.
    fields: the varied ones.
    job: the job whose fields vary; empty if the file does not state it.
    certificate: of a search; None of a sweep.
    excluded: points of a sweep that its `where` left out.
    """

    name: str
    rows: list[Row]
    fields: list[str]
    job: Mapping[str, Any]
    certificate: Mapping[str, Any] | None = None
    excluded: int = 0

    @cached_property
    def fitting(self) -> list[Row]:
        """Rows of plans that fit, the highest throughput of a GPU first."""
        fitting = [row for row in self.rows if row["status"] == "fits"]
        return sorted(fitting, key=lambda row: -(row.get("tokens_per_s_per_gpu") or 0.0))

    @cached_property
    def others(self) -> list[Row]:
        """Rows of plans that were forecast and are tight, or do not fit."""
        return [row for row in self.rows if row["status"] in LARGE]

    @cached_property
    def several(self) -> list[str]:
        """Varied fields that take several values."""
        return [name for name in self.fields if len({repr(row.get(name)) for row in self.rows}) > 1]

    @cached_property
    def figures(self) -> list[Figure]:
        """Figures that rows have a value of."""
        known = {name for row in self.rows for name, value in row.items() if value is not None}
        return [figure for figure in FIGURES.values() if figure.name in known]

    @property
    def statuses(self) -> Counter[str]:
        return Counter(row["status"] for row in self.rows)

    def describe(self, row: Row) -> str:
        """Describes a row by the values of the varied fields."""
        names = self.several or self.fields
        return ", ".join(f"{name.removeprefix('plan.')} {describe_value(row.get(name))}" for name in names)


class RowsNote(BaseModel):
    """What the metadata of a file of rows say of it, as far as a report shows it."""

    points: int | None = None
    fingerprint: dict[str, object] = {}
    certificate: dict[str, object] | None = None
    job: dict[str, object] = {}


def load_rows(path: Path) -> PlanRows:
    """Reads a Parquet file. Raises PlanError for a file that is no result of a sweep or a search."""
    import pyarrow.parquet as pq

    rows = read_rows(path)
    try:
        about = RowsNote.model_validate(json.loads((pq.read_schema(path).metadata or {}).get(b"meshcast", b"{}")))
    except ValueError:  # the rows are shown without it
        about = RowsNote()
    excluded = 0 if "shard" in about.fingerprint else max(0, (about.points or 0) - len(rows))
    return PlanRows(path.name, rows, varied_fields(rows), about.job, about.certificate, excluded)


def is_search_answer(data: Any) -> bool:
    """Says whether JSON data is an answer of ``search --json``."""
    return isinstance(data, dict) and isinstance(data.get("best"), list) and isinstance(data.get("certificate"), dict)


def read_answer(name: str, data: Mapping[str, Any]) -> PlanRows:
    """Reads the best plans of an answer of ``search --json``. Raises PlanError if it has none, or is damaged."""
    rows: list[Row] = []
    try:
        for index, plan in enumerate(data["best"]):
            figures = {figure: plan.get(figure) for figure in SEARCH_FIGURES}
            figures |= {"mfu_palm": plan["mfu"]["palm"], "interval_low_s": plan["interval_90_s"][0]}
            figures["interval_high_s"] = plan["interval_90_s"][1]
            rows.append({"index": index, **plan["plan"], "status": "fits", "reason": None, **figures})
        fields = list(dict.fromkeys(field for plan in data["best"] for field in plan["plan"]))
    except (LookupError, TypeError, AttributeError):
        rule = "its list `best` is not that of an answer of meshcast search --json"
        raise PlanError(name, rule, "Write the answer to a file again") from None
    check_rows(name, rows, "Write the answer of meshcast search --json to a file again")
    if not rows:
        raise PlanError(name, "the search found no plan that fits", "See its certificate: meshcast search")
    return PlanRows(name, [{**dict.fromkeys(fields), **row} for row in rows], fields, {}, data["certificate"])


def load_plans(path: Path) -> PlanRows | None:
    """Returns the plans of a Parquet file, or of an answer of ``search --json``; None for any other file."""
    if path.suffix.lower() in (".parquet", ".pq"):
        return load_rows(path)
    data = read_json(path)
    return read_answer(path.name, data) if is_search_answer(data) else None


def load_answer(path: Path) -> Mapping[str, Any] | None:
    """Returns the answer of ``predict --json`` in a file; None for any other file."""
    data = read_json(path)
    return data if isinstance(data, dict) and {"job", "step_time_s", "breakdown_s"} <= data.keys() else None


def load_answered_job(path: Path, answer: Mapping[str, Any], changes: Sequence[str] = ()) -> Job:
    """Loads the job of an answer.

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
    """Reads what a JSON file holds; None for a file that has another ending, or is not JSON."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        return parse_json(read_text(path, DESCRIPTION))
    except Unreadable:
        return None
