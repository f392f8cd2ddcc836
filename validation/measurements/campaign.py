"""Campaigns: a calibration of the machine, then many measurements, one file each, taken up again where they stopped.

A campaign is a YAML file::

    title: what it shows
    calibrate: {processes: 2}        # see `Calibrate`
    jobs: {small: {model: ..., cluster: ..., batch: ...}, ...}
    runs:
      - {name: small-tp2, measure: distributed, job: small, set: {plan: {tp: 2}}, options: {steps: 10}}

Each run is one call of ``meshcast measure``; its file is ``<name>.json``. A file that is finished is not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardware.errors import MeshcastError, PlanError, nearest
from hardware.load import read_yaml, validated
from simulator.costs.calibration.check import STEPS
from simulator.job.load import load_job
from validation.measurements.measurement import Measurement, read

UNFINISHED = ("interrupted", "not finished")
"""How a note begins that says so."""

CALIBRATION = "calibration"
"""The folder of the machine's calibration, beside the measurements."""


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Run(Part):
    """One measurement. set: keys of the job that are replaced. options: of `measure`, by their names in Python."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    measure: Literal["kernels", "stages", "distributed", "collectives"]
    job: str
    set: dict[str, Any] = {}
    options: dict[str, Any] = {}


class Calibrate(Part):
    """processes: devices among which collectives are calibrated. refresh: what a step takes off the rate of kernels is
    measured again before each stage or step, on machines whose speed changes because others use them too."""

    processes: int = Field(default=2, ge=1)
    refresh: bool = False


class Campaign(Part):
    title: str
    device: Literal["cpu", "cuda"]
    calibrate: Calibrate = Calibrate()
    jobs: dict[str, dict[str, Any]]
    runs: tuple[Run, ...]

    def job(self, run: Run) -> dict[str, Any]:
        """The job of a run. Raises PlanError for a name that the campaign lacks."""
        if run.job not in self.jobs:
            raise PlanError(
                f"runs {run.name} job", "the campaign has no such job", nearest(run.job, self.jobs), run.job
            )
        return {**self.jobs[run.job], **run.set}


def load(path: Path) -> Campaign:
    """Reads a campaign and all its jobs. Raises PlanError, ModelError or CatalogError for the first thing wrong."""
    data, text, where = read_yaml(path, str(path), PlanError)
    found: Campaign = validated(Campaign, data, where, PlanError, text=text)
    names = [run.name for run in found.runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{path} runs", "two runs have one name, and so one file", "Rename one", twice)
    for run in found.runs:
        load_job(found.job(run))
    return found


Measure = Callable[..., Any]


def go(
    campaign: Campaign,
    out: Path,
    rooms: Callable[[str], Measure],
    calibrate: Callable[[str, Path, int], Any],
    refresh: Callable[[str, Path, int], Any],
    command: str,
) -> Iterator[tuple[Run, Measurement | str]]:
    """Calibrates if that is not done yet, then yields every run with its measurement, or with why there is none.

    rooms: what measures a kind. calibrate, refresh: device, folder, processes.
    """
    folder = out / CALIBRATION
    if not (folder / f"{STEPS}.yaml").is_file():  # which is written last
        calibrate(campaign.device, folder, campaign.calibrate.processes)
    for run in campaign.runs:
        path = out / f"{run.name}.json"
        done = _finished(path)
        if done is None:
            if campaign.calibrate.refresh and run.measure in ("stages", "distributed"):
                refresh(campaign.device, folder, campaign.calibrate.processes)
            try:
                done = rooms(run.measure)(
                    campaign.job(run), campaign.device, path, calibration=folder, command=command, **run.options
                )
            except MeshcastError as error:  # one that cannot be had says so, and the others go on
                yield run, str(error)
                continue
        yield run, done


def _finished(path: Path) -> Measurement | None:
    """What a file holds, where all of it was measured."""
    if not path.is_file():
        return None
    found = read(path)
    whole = found.measured is not None and not any(note.startswith(UNFINISHED) for note in found.notes)
    return found if whole else None
