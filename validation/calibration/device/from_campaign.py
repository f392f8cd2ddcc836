"""``meshcast calibrate campaign``: fits the cost models to all that a campaign has measured, and writes a calibration.

Kernels are those of the campaign's own calibration and of its measurements of kernels: eager passes of a kernel each.
Links are fitted to all collectives. The sustained rate of a training step is that of the campaign's calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError
from meshcast.simulator.costs.calibration.calibration import DEVICE
from meshcast.simulator.costs.calibration.check import STEPS
from meshcast.simulator.ir.ops import Work
from meshcast.validation.calibration.device.describe import catalog_name
from meshcast.validation.calibration.device.fit_machine import fit_all
from meshcast.validation.kernels.works import work_of
from meshcast.validation.measurements.campaign import CALIBRATION
from meshcast.validation.measurements.measurement import Measurement, MeasurementRow, read
from meshcast.validation.measurements.row_errors import WORK

MODE = "eager"
"""Mode of the kernels that are fitted: that of the kernels of the calibration."""


def calibrate_from(folder: Path, out: Path) -> dict[str, Any]:
    """Fits the files of a campaign in `folder` and writes the calibration into `out`.

    Returns what was written, and the errors of the fits. Raises PlanError for a folder without a campaign.
    """
    calibrated = folder / CALIBRATION
    if not (calibrated / f"{STEPS}.yaml").is_file():
        rule = f"it has no {CALIBRATION}/{STEPS}.yaml, which a campaign writes first"
        raise PlanError("campaign", rule, "Name the --out of meshcast measure campaign", str(folder))
    paths = (calibrated / "measured.json", *sorted(folder.glob("*.json")))
    files = [read(path) for path in paths]
    base = files[0]
    pairs = [pair for path, measured in zip(paths, files, strict=True) for pair in _kernels(measured, path)]
    rows = (row for measured in files if _has_links(measured) for row in measured.rows)
    links = [row for row in rows if "operation" in row.shape and row.samples]
    out.mkdir(parents=True, exist_ok=True)
    for name in (DEVICE, f"{STEPS}.yaml"):
        if (calibrated / name).is_file():
            write_file(out / name, (calibrated / name).read_bytes())
    name = str(out / DEVICE) if (out / DEVICE).is_file() else catalog_name(base.machine)
    measured = base.model_copy(update={"rows": (*(row for row, _ in pairs), *links)})
    source = f"meshcast calibrate campaign on {base.machine.name}, torch {base.versions.get('torch', 'unknown')}"
    written = fit_all(measured, [work for _, work in pairs], name, source, out)
    written["files"].insert(1, str(out / f"{STEPS}.yaml"))
    title = f"{len(pairs):,} kernels and {len(links):,} collectives of a campaign on {base.machine.name}"
    return written | {"title": title, "device": str(out / DEVICE) if (out / DEVICE).is_file() else ""}


def _kernels(measured: Measurement, path: Path) -> Iterator[tuple[MeasurementRow, Work]]:
    """Yields measured rows of a kernel each, with its work."""
    for i, row in enumerate(measured.rows):
        fields: Any = row.shape if measured.kind == "calibration" else row.shape.get(WORK, {})
        where = f"{path} rows[{i}].shape"
        if not isinstance(fields, Mapping):
            raise PlanError(where, f"{WORK} must be a mapping of keys to values", "Measure again", fields)
        is_fitted = measured.kind == "calibration" or row.group.split()[-1:] == [MODE]
        if row.samples and is_fitted and (work := work_of(fields, where)):
            yield row, work


def _has_links(measured: Measurement) -> bool:
    """Returns whether collectives were measured as the calibration measures them: on a CPU between computations."""
    return measured.kind == "calibration" or measured.machine.device == "cuda" or bool(measured.settings.get("busy"))
