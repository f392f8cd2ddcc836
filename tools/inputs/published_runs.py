"""Published runs that are forecast from their public launch file, beside the forecast from the structured row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.load import read_yaml
from meshcast.hardware.records import dataclass
from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.formats.launch.convert import compare_keys
from meshcast.simulator.formats.launch.keys import flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchOptions, reading_launch_files
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job, read_launch_job
from meshcast.validation.published.open_plans import forecast_run
from meshcast.validation.published.rows import PublishedRun, read
from tools.inputs.corpus import CORPUS, find_folder

COMPARED = ("plan.", "batch.", "precision.compute")
"""Beginnings of the keys that make up a plan."""

DETAILS = ("plan.expert.", "plan.tensor_overlap", "plan.data.reshard")
"""Beginnings of those that say how a library carries out a scheme of the plan."""


@dataclass(frozen=True)
class FileForecast:
    """A published run, forecast from its file.

    differing: keys of the plan in which the file and the row differ, with both values.
    details: keys of details of its schemes in which they differ.
    errors: forecast / measured - 1 of the step time, from the file and from the row.
    refusal: why the file was not forecast.
    """

    run: PublishedRun
    path: str
    differing: dict[str, tuple[Any, Any]]
    details: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    errors: tuple[float, float] | None = None
    refusal: str = ""


def forecast_published_files(folder: Path, runs: Path) -> Iterator[FileForecast]:
    """Forecasts the runs whose files lie in a folder. runs: file of the published runs."""
    rows = {run.id: run for run in read(runs) if isinstance(run, PublishedRun)}
    shared = SharedWork()
    for entry in read_yaml(CORPUS.parent / "published.yaml").data:
        inner = find_folder(folder, entry["repository"], entry["commit"], [entry["path"], *entry.get("companions", [])])
        if inner is not None and entry["row"] in rows:
            yield _forecast_file(rows[entry["row"]], entry, inner / entry["path"], shared)


def _forecast_file(run: PublishedRun, entry: dict[str, Any], path: Path, shared: SharedWork) -> FileForecast:
    name = f"{entry['repository']} {entry['path']}"
    changes = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in entry["given"].items()
    ]
    arguments = ("--recipe", entry["recipe"]) if "recipe" in entry else ()
    mapped, report = forecast_run(run, shared)
    try:
        with reading_launch_files(LaunchOptions(arguments=arguments)):
            job = load_job(read_launch_job(path, changes).data, base=path.parent)
        answer = simulate(job, shared_work=shared)
    except MeshcastError as error:
        return FileForecast(run, name, {}, refusal=str(error))
    errors = None
    if run.step_time:
        errors = (answer.step_time / run.step_time - 1, report.step_time / run.step_time - 1)
    differences = _compare_plans(load_job(mapped.job), job)
    details = {key: values for key, values in differences.items() if key.startswith(DETAILS)}
    differing = {key: values for key, values in differences.items() if key not in details}
    return FileForecast(run, name, differing, details, errors)


def _compare_plans(row: Job, file: Job) -> dict[str, tuple[Any, Any]]:
    """Returns the keys of the plan in which two jobs differ: what the row says, and what the file says."""
    differing = compare_keys(flatten_job(row), flatten_job(file))
    return {key: values for key, values in differing.items() if key.startswith(COMPARED)}
