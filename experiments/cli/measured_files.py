"""What commands on measurements share: the options that name files, and checks before any work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import check_place
from meshcast.experiments.options import argument, option
from meshcast.hardware.errors import PlanError

MEASURED = ("kernels", "collectives")
"""Kinds of measurements that tables hold."""

Data = Annotated[tuple[Path, ...], option("--data", "Measurements, or pipeline cases; may be repeated.", "FILE")]
ChangesOfJob = Annotated[tuple[str, ...], option("--set", "Change a field of the job.", "FIELD=VALUE")]
More = Annotated[tuple[Path, ...], argument("FILE", "Further files, as with --data.")]
Calibrations = Annotated[
    Path | None, option("--calibration", "Calibrations to use before those of meshcast.", "FOLDER")
]


def list_files(data: Sequence[Path], more: Sequence[Path]) -> list[Path]:
    """Returns all files that are named. Raises PlanError for one that is named twice: its rows would count twice."""
    paths = [*data, *more]
    seen: dict[str, Path] = {}
    for path in paths:
        file = os.path.realpath(path)
        if file in seen:
            rule = "it is named twice" if seen[file] == path else f"it is the same file as {seen[file]}"
            raise PlanError("--data", rule, "Name each file once", str(path))
        seen[file] = path
    return paths


def check_writable_folder(out: Path) -> None:
    """Raises PlanError, before any work, for a folder that cannot be written to."""
    if out.exists() and not out.is_dir():
        raise PlanError("--out", "it is not a folder", "Name a folder; it is made if it does not exist", str(out))
    if not out.exists() and not out.absolute().parent.is_dir():
        raise PlanError("--out", f"there is no folder {out.parent}", "Make it, or name a folder in one", str(out))
    check_place((out if out.is_dir() else out.absolute().parent) / f".meshcast-{os.getpid()}", "--out")


def require_files(paths: Sequence[Path], kind: str) -> None:
    """Raises PlanError if no file is named."""
    if not paths:
        raise PlanError("--data", f"{kind} need tables of measurements", "Name CSV files: --data gemm_h100.csv.gz")


def require_torch() -> None:
    """Raises PlanError if torch is not installed."""
    if find_spec("torch") is None:
        rule = "it is not installed, and measuring needs it"
        raise PlanError("torch", rule, "Install it: pip install 'meshcast[torch]'")


def check_calibration_folder(path: Path | None) -> Path | None:
    """Returns the folder of a calibration, after a check of its files; None stays None."""
    if path is None:
        return None
    if not path.is_dir():
        raise PlanError("--calibration", "there is no such folder", "Name the --out of meshcast calibrate", str(path))
    from meshcast.simulator.costs.calibration.check import check_folder

    check_folder(path)
    return path


def tell_calibration(folder: Path | None) -> list[str]:
    """Returns what the files of a calibration hold, a sentence each: what it was learnt from, or fitted to."""
    if folder is None:
        return []
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.costs.calibration.check import DEVICE, LEARNT_STEPS, STEPS

    sentences, calibration = [], Calibration.from_folder(folder)
    by_hand = DEVICE, f"{STEPS}.yaml", f"{LEARNT_STEPS}.yaml"
    for file in sorted(file for file in folder.glob("*.yaml") if file.name not in by_hand):
        for name, section in calibration.sections(file.stem).items():
            common, shipped = section["common"], Calibration.shipped().sections(file.stem).get(name)
            if section == shipped:  # a learnt file repeats what it has not changed
                continue
            source = (
                common.get("learnt") or f"{common.get('source', 'an unnamed source')}, {common.get('rows', 0):,} rows"
            )
            sentences.append(f"{file}: {name}, {'learnt from' if 'learnt' in common else 'fitted to'} {source}")
    return sentences


def load_long_form(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Returns a job in long form, with paths relative to the working directory."""
    job = load_with_plan(path, tuple(changes)).to_dict()
    for key in ("model", "cluster"):
        if isinstance(job[key], str) and (path.parent / job[key]).is_file():
            job[key] = str(path.parent / job[key])
    return job


def quote_command() -> str:
    """Returns the command line, for the file."""
    return " ".join(["meshcast", *sys.argv[1:]])
