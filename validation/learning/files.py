"""Recognises measurements: which reader a file is for, by what stands in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats import nccl_tests
from meshcast.simulator.loading.load import load_job
from meshcast.validation.calibration.collectives import tables as collectives
from meshcast.validation.calibration.collectives.recorded import Recorded, make_samples, read_recorded
from meshcast.validation.calibration.kernels import tables as kernels
from meshcast.validation.calibration.tables.table import LibraryTable
from meshcast.validation.learning.steps import TimedJob
from meshcast.validation.learning.timed_jobs import find_log, is_step_table, read_timed_jobs, time_log
from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests

KINDS = (
    "tables of kernels or collectives (CSV), output of nccl-tests, measurement files of collectives (JSON), "
    "training logs, tables of step times (CSV, YAML), published runs (JSONL)"
)
"""What can be learnt from, in words."""


def read_evidence(path: Path, job: Mapping[str, object] | None) -> LibraryTable | Recorded | list[TimedJob]:
    """Returns the table of a file: its `samples`, each with a `source`; or the steps of jobs.

    job: that a log is of, or whose cluster nccl-tests ran on; None: none is named. Raises PlanError for a file that is
    none of `KINDS`.
    """
    if path.suffix in (".yaml", ".yml", ".jsonl") or is_step_table(path):
        return read_timed_jobs(path)
    if path.suffix == ".json" and not _is_nccl_json(path):
        return read_recorded(path)
    if ".csv" in path.suffixes:
        return _read_table(path)
    log = find_log(path)
    return [time_log(log, path, job)] if log is not None else _read_nccl_tests(path, job)


def _is_nccl_json(path: Path) -> bool:
    try:
        return bool(nccl_tests.read(path, None, None))
    except PlanError:
        return False


def _read_table(path: Path) -> LibraryTable:
    try:
        return kernels.read(path)
    except PlanError as error:
        try:
            return collectives.read(path)
        except PlanError:
            raise error from None


def _read_nccl_tests(path: Path, job: Mapping[str, object] | None) -> Recorded:
    if job is None:
        rule = "output of nccl-tests does not say which links and GPUs it ran on"
        raise PlanError(str(path), f"{rule}; learnt from are {KINDS}", "Name a job on this cluster: --job job.yaml")
    measured = import_nccl_tests(path)
    cluster = load_job(dict(job)).cluster
    samples = make_samples(measured.rows, lambda members: cluster, cluster.gpu.name, "nccl-tests")
    return Recorded(samples, path.name)
