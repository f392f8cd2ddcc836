"""Campaigns: a list of measurements for a machine, run at once after its calibration.

A campaign is a YAML file::

    title: purpose of the campaign
    calibrate: {processes: 2}        # see `Calibrate`
    jobs: {small: {model: ..., cluster: {gpu: auto, gpus: 2}, batch: ...}, ...}
    runs:
      - {name: small-tp2, measure: distributed, job: small, set: {plan: {tp: 2}}, options: {steps: 10}}

Each run is a call of ``meshcast measure`` and writes ``<name>.json``. ``gpu: auto`` is the GPU of this machine. An
interrupted campaign resumes: runs whose files are complete are skipped. With a limit of minutes it runs in slices: a
run begins only if it is expected to end in time, and the next call goes on with it.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import MeshcastError, PlanError, nearest
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import Field
from meshcast.simulator.costs.calibration.check import STEPS
from meshcast.simulator.loading.load import load_job
from meshcast.validation.measurements.measurement import FileModel, Measurement, describe_error, read

UNFINISHED = ("interrupted", "not finished")
"""First words of the notes of incomplete measurements."""

CALIBRATION = "calibration"
"""Subfolder of the campaign's output that holds the machine's calibration."""

AUTO, ANY_GPU = "auto", "h100-sxm"
"""Name of this machine's GPU in jobs, and the GPU in its place where jobs are only checked."""

OPTIONS = {
    "kernels": ("modes", "tps", "dtypes", "repeat", "warmup", "cold"),
    "stages": ("recompute", "repeat", "warmup"),
    "distributed": ("steps", "warmup", "check", "trace"),
    "collectives": ("sizes", "operations", "repeat", "warmup", "busy"),
}
"""Arguments of the measuring functions that a run may set, by kind of measurement."""


class CampaignRun(FileModel):
    """One measurement.

    job: a name under the campaign's `jobs`.
    set: keys of the job to replace.
    options: keyword arguments of the measuring function.
    minutes: expected duration.
    """

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    measure: Literal["kernels", "stages", "distributed", "collectives"]
    job: str
    set: dict[str, Any] = {}
    options: dict[str, Any] = {}
    minutes: float = Field(default=1.0, gt=0)


class Calibrate(FileModel):
    """The calibration before the runs.

    processes: largest number of devices for the collectives.
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

    def job(self, run: CampaignRun, gpu: str = ANY_GPU) -> dict[str, Any]:
        """Returns the job of a run, with its keys replaced. gpu: in place of ``auto``.

        Raises PlanError for a name that is not under `jobs`.
        """
        if run.job not in self.jobs:
            raise PlanError("job", "the campaign has no job of this name", nearest(run.job, self.jobs), run.job)
        job = {**self.jobs[run.job], **run.set}
        cluster = job.get("cluster")
        if isinstance(cluster, dict) and cluster.get("gpu") == AUTO:
            job["cluster"] = {**cluster, "gpu": gpu}
        return job

    def devices(self, run: CampaignRun) -> int:
        """Counts the devices that a run takes: of kernels and stages 1, whatever their job says."""
        if run.measure in ("kernels", "stages"):
            return 1
        return int(load_job(self.job(run)).cluster.gpus)


def load(path: Path) -> Campaign:
    """Reads a campaign and checks all its jobs. Raises PlanError, ModelError or CatalogError for the first mistake."""
    data, text, where = read_yaml(path, str(path), PlanError)
    campaign: Campaign = validate_data(Campaign, data, where, PlanError, text=text)
    names = [run.name for run in campaign.runs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{path} runs", "two runs have the same name, and so the same file", "Rename one", twice)
    for run in campaign.runs:
        for option in run.options:
            if option not in OPTIONS[run.measure]:
                remedy = nearest(option, OPTIONS[run.measure])
                raise PlanError(f"{path} runs {run.name} options", f"{run.measure} have no such option", remedy, option)
        try:
            load_job(campaign.job(run))
        except MeshcastError as error:
            raise error.at(f"{path} run {run.name}") from None
    return campaign


Measure = Callable[..., Any]


@dataclass(frozen=True)
class Tools:
    """Functions that measure on this machine, and its GPUs.

    measure_of: measuring function of a kind of measurement.
    calibrate, refresh: functions of device, folder and number of processes.
    gpu: from the folder of the calibration, name of this machine's GPU.
    devices: number of GPUs of this machine, or of cores; None: as many processes as a run asks for.
    """

    measure_of: Callable[[str], Measure]
    calibrate: Callable[[str, Path, int], Any]
    refresh: Callable[[str, Path, int], Any]
    gpu: Callable[[Path], str]
    devices: int | None


class Unmeasured(NamedTuple):
    """Why a run has no measurement.

    reason: for users.
    failed: whether it was to be measured; otherwise this machine cannot run it.
    """

    reason: str
    failed: bool = True


def run_all(
    campaign: Campaign, out: Path, tools: Tools, command: str, minutes: float | None = None
) -> Iterator[tuple[CampaignRun, Measurement | Unmeasured]]:
    """Calibrates the machine if `out` has no calibration yet, then yields each run with its measurement, or with the
    reason why there is none.

    minutes: limit after which no further run begins; those that are left out are not yielded.
    """
    begin, folder = time.monotonic(), out / CALIBRATION
    if not (folder / f"{STEPS}.yaml").is_file():  # the last file that a calibration writes
        tools.calibrate(campaign.device, folder, campaign.calibrate.processes)
    gpu = tools.gpu(folder)
    for run in campaign.runs:
        path = out / f"{run.name}.json"
        done = _read_complete(path)
        if done is None:
            if tools.devices is not None and (needed := campaign.devices(run)) > tools.devices:
                what, way = ("GPUs", "") if campaign.device == "cuda" else ("cores", "; --yes measures it all the same")
                reason = f"not measured: it needs {needed} {what}, and this machine has {tools.devices}{way}"
                yield run, Unmeasured(reason, failed=False)
                continue
            if minutes is not None and (time.monotonic() - begin) / 60 + run.minutes > minutes:
                return
            if campaign.calibrate.refresh and run.measure in ("stages", "distributed"):
                tools.refresh(campaign.device, folder, campaign.calibrate.processes)
            try:
                done = tools.measure_of(run.measure)(
                    campaign.job(run, gpu), campaign.device, path, calibration=folder, command=command, **run.options
                )
            except MeshcastError as error:
                yield run, Unmeasured(str(error))
                continue
            except Exception as error:  # a rented machine costs money: a failed run does not stop the campaign
                log = out / f"{run.name}.error.txt"
                write_file(log, "".join(traceback.format_exception(error)))
                yield run, Unmeasured(f"failed: {describe_error(error)} (whole error in {log})")
                continue
        yield run, done


def _read_complete(path: Path) -> Measurement | None:
    """Returns the measurement in a file; None if there is no file or it is incomplete."""
    if not path.is_file():
        return None
    measurement = read(path)
    complete = measurement.measured is not None and not any(note.startswith(UNFINISHED) for note in measurement.notes)
    return measurement if complete else None
