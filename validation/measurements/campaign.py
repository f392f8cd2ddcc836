"""Campaigns: a list of measurements for one machine, run in one go after its calibration.

A campaign is a YAML file::

    title: purpose of the campaign
    calibrate: {processes: 2}        # see `Calibrate`
    jobs: {small: {model: ..., cluster: ..., batch: ...}, ...}
    runs:
      - {name: small-tp2, measure: distributed, job: small, set: {plan: {tp: 2}}, options: {steps: 10}}

Each run is one call of ``meshcast measure`` and writes ``<name>.json``. An interrupted campaign resumes: runs whose
files are complete are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hardware.errors import MeshcastError, PlanError, nearest
from hardware.load import read_yaml, validate_data
from simulator.costs.calibration.check import STEPS
from simulator.job.load import load_job
from validation.measurements.measurement import FileModel, Measurement, read

UNFINISHED = ("interrupted", "not finished")
"""First words of the notes of incomplete measurements."""

CALIBRATION = "calibration"
"""Subfolder of the campaign's output that holds the machine's calibration."""


class CampaignRun(FileModel):
    """One measurement.

    job: a name under the campaign's `jobs`.
    set: keys of the job to replace.
    options: keyword arguments of the measuring function.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    measure: Literal["kernels", "stages", "distributed", "collectives"]
    job: str
    set: dict[str, Any] = {}
    options: dict[str, Any] = {}


class Calibrate(FileModel):
    """The calibration before the runs.

    processes: number of devices for the collectives.
    refresh: measure the sustained rate of a step again before each run of stages or steps, for machines whose speed
        varies because they are shared.
    """

    processes: int = Field(default=2, ge=1)
    refresh: bool = False


class Campaign(FileModel):
    """The contents of a campaign file."""

    title: str
    device: Literal["cpu", "cuda"]
    calibrate: Calibrate = Calibrate()
    jobs: dict[str, dict[str, Any]]
    runs: tuple[CampaignRun, ...]

    def job(self, run: CampaignRun) -> dict[str, Any]:
        """Job of a run, with its keys replaced. Raises PlanError for a name that is not under `jobs`."""
        if run.job not in self.jobs:
            raise PlanError(
                f"runs {run.name} job", "the campaign has no job of this name", nearest(run.job, self.jobs), run.job
            )
        return {**self.jobs[run.job], **run.set}


def load(path: Path) -> Campaign:
    """Reads a campaign and checks all its jobs. Raises PlanError, ModelError or CatalogError for the first mistake."""
    data, text, where = read_yaml(path, str(path), PlanError)
    found: Campaign = validate_data(Campaign, data, where, PlanError, text=text)
    names = [run.name for run in found.runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{path} runs", "two runs have the same name, and so the same file", "Rename one", twice)
    for run in found.runs:
        load_job(found.job(run))
    return found


Measure = Callable[..., Any]


def run_all(
    campaign: Campaign,
    out: Path,
    measure_of: Callable[[str], Measure],
    calibrate: Callable[[str, Path, int], Any],
    refresh: Callable[[str, Path, int], Any],
    command: str,
) -> Iterator[tuple[CampaignRun, Measurement | str]]:
    """Calibrates the machine if `out` has no calibration yet, then yields each run with its measurement or its error.

    measure_of: measuring function of a kind of measurement.
    calibrate, refresh: functions of device, folder and number of processes.
    """
    folder = out / CALIBRATION
    if not (folder / f"{STEPS}.yaml").is_file():  # the last file that a calibration writes
        calibrate(campaign.device, folder, campaign.calibrate.processes)
    for run in campaign.runs:
        path = out / f"{run.name}.json"
        done = _read_complete(path)
        if done is None:
            if campaign.calibrate.refresh and run.measure in ("stages", "distributed"):
                refresh(campaign.device, folder, campaign.calibrate.processes)
            try:
                done = measure_of(run.measure)(
                    campaign.job(run), campaign.device, path, calibration=folder, command=command, **run.options
                )
            except MeshcastError as error:  # one failed run does not stop the campaign
                yield run, str(error)
                continue
        yield run, done


def _read_complete(path: Path) -> Measurement | None:
    """The measurement in a file; None if there is no file or it is incomplete."""
    if not path.is_file():
        return None
    found = read(path)
    complete = found.measured is not None and not any(note.startswith(UNFINISHED) for note in found.notes)
    return found if complete else None
