"""Measurement files written from the output of other programs.

Their forecast is computed after the measurement, so it is not blind; a note in the file says this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.report.version import product_version
from meshcast.validation.measurements.measurement import Kind, Machine, Measurement, MeasurementRow, utc_now

NOT_BLIND = "imported: the forecast was made after the measurement"


@dataclass(frozen=True)
class Origin:
    """Where an imported measurement comes from.

    path: file that the other program wrote.
    job: job that ran; None: nothing is forecast.
    calibration: folder of the calibration behind the second forecast.
    command: the command line of the import.
    """

    path: Path
    job: Mapping[str, Any] | None
    calibration: Path | None
    command: str

    def measurement(
        self,
        kind: Kind,
        title: str,
        machine: Machine,
        rows: Sequence[MeasurementRow],
        settings: Mapping[str, Any],
        notes: Sequence[str] = (),
        versions: Mapping[str, str] | None = None,
    ) -> Measurement:
        """Returns the measurement file; its time of measurement is the modification time of the imported file."""
        measured = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return Measurement(
            kind=kind,
            title=title,
            machine=machine,
            versions={"meshcast": product_version(), **(versions or {})},
            command=self.command,
            job=dict(self.job or {}),
            settings={"file": self.path.name, **settings},
            calibration=str(self.calibration) if self.calibration else None,
            forecast_written=utc_now(),
            measured=measured,
            notes=(NOT_BLIND, *notes),
            rows=tuple(rows),
        )
