"""Measurement files: what real work took on a real machine, beside what was forecast before it was done.

A file is written twice. First with the forecasts and no samples, before anything is measured: from the catalog, and
from the machine's own calibration where there is one. Then with the raw samples. Nothing else of it changes in between,
so whoever reads it sees a blind forecast.
"""

from __future__ import annotations

import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import PlanError
from hardware.load import validated

VERSION = 1
"""Of the format. A file of another version is refused, not guessed at."""

Kind = Literal["kernels", "stages", "distributed", "collectives", "calibration"]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(Part):
    """Where it was measured. processors: cores that the processes may use. memory: of one device [bytes]."""

    device: Literal["cpu", "cuda"]
    name: str
    """Of the GPU or the processor, as it calls itself."""
    count: int = 1
    """Devices that took part."""
    processors: int | None = None
    memory: int | None = None
    system: str = ""
    driver: str | None = None
    clocks: dict[str, float] = {}
    """Clocks [MHz] by their names, before and after."""


class Value(Part):
    """A forecast with its 90 % interval, in the unit of its row."""

    value: float = Field(ge=0)
    low: float = Field(ge=0)
    high: float = Field(ge=0)


class Row(Part):
    """One thing that was measured, many times.

    group: what it is compared with others in (how kernels were launched, which degrees). forecasts: by whom
    (``catalog``, ``calibration``). samples: raw, in the order in which they were taken, in seconds or bytes; those of
    several processes at the same moment are one sample, of the slowest. instrument: with what. shape: sizes.
    """

    name: str
    group: str = ""
    quantity: Literal["seconds", "bytes"] = "seconds"
    forecasts: dict[str, Value] = {}
    samples: tuple[float, ...] = ()
    instrument: str = ""
    shape: dict[str, Any] = {}

    @property
    def measured(self) -> float | None:
        """The median of the samples; None before it was measured."""
        return statistics.median(self.samples) if self.samples else None

    @property
    def spread(self) -> float:
        """How far samples scatter: half of what holds the middle 80 % of them, relative to their median."""
        if len(self.samples) < 3 or not self.measured:
            return 0.0
        ordered = sorted(self.samples)
        cut = math.floor(len(ordered) * 0.1)
        return (ordered[-1 - cut] - ordered[cut]) / 2 / self.measured

    def error(self, by: str) -> float | None:
        """Forecast over measured, minus one; None where either is missing."""
        if by not in self.forecasts or not self.measured:
            return None
        return self.forecasts[by].value / self.measured - 1


class Measurement(Part):
    """A measurement file.

    versions: of python, torch, CUDA, NCCL, meshcast. command: what a user typed. job: in the form it was given.
    settings: how it was measured (warm-up, repeats, modes). calibration: the folder that the second forecast is from.
    forecast_written, measured: when, in UTC; the second is None until it is.
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
    rows: tuple[Row, ...] = ()

    def finished(self, rows: list[Row], notes: tuple[str, ...] = (), machine: Machine | None = None) -> Measurement:
        """The same with what was measured."""
        update: dict[str, Any] = {"rows": tuple(rows), "notes": (*self.notes, *notes), "measured": now()}
        if machine is not None:
            update["machine"] = machine
        return self.model_copy(update=update)

    def write(self, path: Path) -> Path:
        """Writes the file whole or not at all. Raises PlanError where it cannot."""
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text(self), "utf-8")
            partial.replace(path)
        except OSError as error:
            rule = f"it cannot be written ({error.strerror})"
            raise PlanError("--out", rule, "Name a file in a folder of yours", str(path)) from None
        return path


def now() -> str:
    """This moment in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def text(measurement: Measurement) -> str:
    """The file: one line a row, so that two files can be compared line by line."""
    data = measurement.model_dump(mode="json")
    rows = data.pop("rows")
    head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
    lines = ",\n  ".join(json.dumps(_rounded(row), ensure_ascii=False) for row in rows)
    return f'{head},\n "rows": [\n  {lines}\n ]\n}}\n' if rows else f'{head},\n "rows": []\n}}\n'


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Seven digits are more than any clock has."""
    exact = row["quantity"] == "bytes"
    return row | {"samples": [one if exact else float(f"{one:.7g}") for one in row["samples"]]}


def read(path: Path) -> Measurement:
    """Reads a measurement file. Raises PlanError where it is none."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise PlanError("--data", f"it cannot be read ({error.strerror})", "Name a file", str(path)) from None
    except (ValueError, RecursionError) as error:
        remedy = "Name a file that meshcast measure wrote"
        raise PlanError("--data", f"it is no JSON ({error})", remedy, str(path)) from None
    if not isinstance(data, dict) or "kind" not in data or "rows" not in data:
        rule = "it is no measurement: it has no kind and no rows"
        raise PlanError("--data", rule, "Name a file that meshcast measure wrote", str(path))
    if data.get("version") != VERSION:
        rule = f"this meshcast reads version {VERSION} of measurement files"
        raise PlanError(
            f"{path} version", rule, "Measure again, or use the meshcast that wrote it", data.get("version")
        )
    found: Measurement = validated(Measurement, data, str(path), PlanError)
    return found
