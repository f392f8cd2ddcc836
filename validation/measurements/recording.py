"""The frame of every measurement: checks its options, writes its forecasts, runs it, and adds the samples."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.version import find_commit
from meshcast.validation.measurements.cuda import Cuda
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.measurement import Kind, Machine, Measurement, MeasurementRow, utc_now

Progress = Callable[[str], None]
"""Takes a line of progress."""


def check_counts(**counts: tuple[int, int]) -> None:
    """Raises PlanError for the value of an option that is below its minimum. counts: both by the option's name."""
    for name, (value, least) in counts.items():
        if value < least:
            raise PlanError(f"--{name}", f"the minimum is {least}", f"Write {least} or more", value)


def check_names(option: str, names: Iterable[str], known: Collection[str], what: str) -> None:
    """Raises PlanError for a name that is not known. what: that the names are of, such as ``collective``."""
    for name in names:
        if name not in known:
            raise PlanError(option, f"there is no {what} of this name", nearest(name, [*known]), name)


def versions() -> dict[str, str]:
    """Returns the versions of the software that a measurement depends on."""
    versions_by_name = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        versions_by_name["meshcast"] = version("meshcast")
    except PackageNotFoundError:
        versions_by_name["meshcast"] = "unknown"
    if commit := find_commit():
        versions_by_name["commit"] = commit
    return versions_by_name | Cuda.versions()


def make_blind(
    kind: Kind,
    title: str,
    machine: Machine,
    job: Mapping[str, Any],
    rows: Iterable[MeasurementRow],
    settings: Mapping[str, Any],
    calibration: Path | None,
    command: str,
    notes: Iterable[str] = (),
) -> Measurement:
    """Makes the measurement that is written before anything runs: rows with forecasts and without samples."""
    return Measurement(
        kind=kind,
        title=title,
        machine=machine,
        versions=versions(),
        command=command,
        job=dict(job),
        settings=dict(settings),
        calibration=str(calibration) if calibration is not None else None,
        forecast_written=utc_now(),
        rows=tuple(rows),
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass
class Recording:
    """A measurement in progress.

    Attributes:
        measurement: complete after the block of `record`.
        rows: measured so far, in the order of the blind ones.
        notes: further ones.
        machine: with its states, where other processes watch them.
    """

    measurement: Measurement
    rows: list[MeasurementRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: Machine | None = None


@contextmanager
def record(blind: Measurement, out: Path, device: Device | None = None, writes: bool = True) -> Iterator[Recording]:
    """Writes a measurement before the block without samples, and after it with the rows that were recorded inside.

    An interrupt or a failed process is noted, and leaves in the file what was measured.
    device: whose states are monitored inside; None: other processes measure.
    writes: whether this process writes the file.
    """
    if writes:
        blind.write(out)
    recording = Recording(blind)
    with device.monitor() if device else nullcontext() as add_states:
        try:
            yield recording
        except (KeyboardInterrupt, PlanError) as error:
            stopped = isinstance(error, KeyboardInterrupt)
            why = "interrupted: rows without samples were not measured" if stopped else f"not finished: {error}"
            recording.notes.append(why)
            raise
        finally:
            rows = [*recording.rows, *blind.rows[len(recording.rows) :]]
            machine = add_states(blind.machine) if add_states else recording.machine
            recording.measurement = blind.with_samples(rows, tuple(recording.notes), machine)
            if writes:
                recording.measurement.write(out)
