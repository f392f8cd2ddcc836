"""Measurement files: forecasts of what a machine is about to run, and the samples that were then measured.

A file is written twice: before the measurement with the forecasts (from the catalog, and from the machine's
calibration if there is any) and no samples, afterwards with the raw samples added and nothing else changed. The
forecasts in a file are therefore blind.
"""

from __future__ import annotations

import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from meshcast.hardware.documents.input_file import DATA, Unreadable, parse_json, read_text
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.hardware.load import validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field

VERSION = 1
"""Version of the file format; files of other versions are refused."""

Kind = Literal["kernels", "stages", "distributed", "collectives", "calibration"]


class FileModel(BaseModel):
    """Base of classes that are read from files: immutable, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class GPUState(FileModel):
    """State of a GPU at a time or over some time, from nvidia-smi; None where it does not tell."""

    sm_clock: float | None = None
    """Clock of the multiprocessors [MHz]."""
    memory_clock: float | None = None
    """Clock of the memory [MHz]."""
    power: float | None = None
    """Power draw [W]."""
    temperature: float | None = None
    """Temperature [degrees Celsius]."""
    throttled: tuple[str, ...] = ()
    """Reasons for which the clock was lowered."""


class Machine(FileModel):
    """The machine that was measured."""

    device: Literal["cpu", "cuda"]
    name: str
    """Model name of the GPU or processor."""
    count: int = 1
    """Number of devices that took part."""
    processors: int | None = None
    """CPU cores available to the processes."""
    memory: int | None = None
    """Memory of a device [bytes]."""
    system: str = ""
    driver: str | None = None
    states: dict[Literal["before", "during", "after"], GPUState] = {}
    """States of a GPU before the measurement, during it (medians of clocks, highest power), and after it."""


class ForecastValue(FileModel):
    """A forecast with its 90 % interval, in the unit of its row."""

    value: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)


class MeasurementRow(FileModel):
    """One measured quantity: its forecasts and its samples.

    group: rows that belong together (launch mode of kernels, degrees of a plan).
    forecasts: by source, ``catalog`` and ``calibration``.
    samples: raw samples in the order of measurement [s or bytes]; of several processes the slowest's.
    instrument: clock or counter that took the samples.
    shape: sizes of the operands, degrees, and the like.
    """

    name: str
    group: str = ""
    quantity: Literal["seconds", "bytes"] = "seconds"
    forecasts: dict[str, ForecastValue] = {}
    samples: tuple[float, ...] = ()
    instrument: str = ""
    shape: dict[str, Any] = {}

    @property
    def median(self) -> float | None:
        """Median of the samples; None before the measurement."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def scatter(self) -> float:
        """Half the width of the middle 80 % of the samples over their median; 0 for fewer than three."""
        if len(self.samples) < 3 or not self.median:
            return 0.0
        ordered = sorted(self.samples)
        tail = math.floor(len(ordered) * 0.1)
        return (ordered[-1 - tail] - ordered[tail]) / 2 / self.median

    def error(self, by: str) -> float | None:
        """Returns forecast over measured median, minus 1; None where either is missing."""
        if by not in self.forecasts or not self.median:
            return None
        return self.forecasts[by].value / self.median - 1


class Measurement(FileModel):
    """The contents of a measurement file.

    versions: of python, torch, CUDA, NCCL and meshcast.
    command: the command line that wrote the file.
    job: the measured job, as it was stated.
    settings: how it was measured (warm-up, repeats, launch modes).
    calibration: folder of the calibration behind the second forecast.
    forecast_written, measured: time of forecast and measurement (UTC); `measured` is None before the measurement.
    """

    version: Literal[1] = 1
    kind: Kind
    title: str
    machine: Machine
    versions: dict[str, str]
    command: str
    job: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    calibration: str | None = None
    forecast_written: str
    measured: str | None = None
    notes: tuple[str, ...] = ()
    rows: tuple[MeasurementRow, ...] = ()

    def with_samples(
        self, rows: list[MeasurementRow], notes: tuple[str, ...] = (), machine: Machine | None = None
    ) -> Measurement:
        """Returns a copy with the measured rows, further notes, and the time of measurement set to now."""
        update: dict[str, Any] = {"rows": tuple(rows), "notes": (*self.notes, *notes), "measured": utc_now()}
        if machine is not None:
            update["machine"] = machine
        return self.model_copy(update=update)

    def write(self, path: Path) -> Path:
        """Writes the file. Raises PlanError if it cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, to_json(self))
        except OSError as error:
            rule = f"it cannot be written ({error.strerror})"
            raise PlanError(
                "--out", rule, "Name a file in a folder that you may write to and that has room", str(path)
            ) from None
        return path


def utc_now() -> str:
    """Returns the current time in UTC, ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def to_json(measurement: Measurement) -> str:
    """Returns the text of the file, with each row on a separate line so that two files can be diffed."""
    data = measurement.model_dump(mode="json")
    rows = data.pop("rows")
    head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
    lines = ",\n  ".join(json.dumps(_round_samples(row), ensure_ascii=False) for row in rows)
    return f'{head},\n "rows": [\n  {lines}\n ]\n}}\n' if rows else f'{head},\n "rows": []\n}}\n'


def _round_samples(row: dict[str, Any]) -> dict[str, Any]:
    """Rounds seconds to seven digits, which is finer than any clock resolves."""
    exact = row["quantity"] == "bytes"
    return row | {"samples": [sample if exact else float(f"{sample:.7g}") for sample in row["samples"]]}


def read(path: Path) -> Measurement:
    """Reads a measurement file. Raises PlanError if it is none."""
    remedy = "Name a file that meshcast measure wrote"
    try:
        data = parse_json(read_text(path, DATA))
    except Unreadable as error:
        raise error.error(PlanError, "--data", remedy, str(path)) from None
    if not isinstance(data, dict) or "kind" not in data or "rows" not in data:
        raise PlanError("--data", "it is not a measurement file: kind or rows is missing", remedy, str(path))
    if data.get("version") != VERSION:
        rule = f"this meshcast reads version {VERSION} of measurement files"
        raise PlanError(
            f"{path} version", rule, "Measure again, or use the meshcast that wrote it", data.get("version")
        )
    measurement: Measurement = validate_data(Measurement, data, f"{path} ", PlanError)
    for i, row in enumerate(measurement.rows):
        _check_row(row, f"{path} rows[{i}]")
    return measurement


MIN_AMOUNT, MAX_AMOUNT = 1e-12, 1e18
"""Range of samples and forecasts other than 0 [s or bytes]: beyond it errors are infinite."""

MAX_MEMBERS = 10_000_000


def _check_row(row: MeasurementRow, where: str) -> None:
    """Raises PlanError for an amount that no clock or counter gives, and for fields of a collective of a wrong type."""
    amounts = {f"samples[{i}]": sample for i, sample in enumerate(row.samples)}
    for by, forecast in row.forecasts.items():
        amounts |= {f"forecasts.{by}.{key}": getattr(forecast, key) for key in ("value", "low", "high")}
    for place, amount in amounts.items():
        if amount and not MIN_AMOUNT <= amount <= MAX_AMOUNT:
            rule = f"{row.quantity} are 0, or from {MIN_AMOUNT:g} to {MAX_AMOUNT:g}"
            raise PlanError(f"{where}.{place}", rule, "Correct it, or measure again", amount)
    if "operation" not in row.shape:
        return
    if not isinstance(row.shape["operation"], str):
        raise PlanError(f"{where}.shape.operation", "it names a collective", "Measure again", row.shape["operation"])
    for key, most in (("bytes", MAX_AMOUNT), ("members", MAX_MEMBERS)):
        number = row.shape.get(key, 1)
        if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= most:
            rule = f"it must be a whole number from 1 to {most:.0e}"
            raise PlanError(f"{where}.shape.{key}", rule, "Correct it, or measure again", number)


def describe_error(error: Exception) -> str:
    """Returns the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
