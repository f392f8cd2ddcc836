"""The options ``--trace`` and ``--snapshot`` of `predict`: checks of their paths before any work, and the files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.console import check_folder, check_place, unwritable, writing
from meshcast.experiments.options import option
from meshcast.hardware.errors import PlanError

if TYPE_CHECKING:
    from meshcast.simulator.report.report import Report

TRACES = (".json", ".json.gz")

Trace = Annotated[
    str | None,
    option(
        "--trace",
        "Write the step as a trace of torch's profiler, for Perfetto and HTA: one .json or .json.gz file, or "
        "FOLDER/ with a file for each stage.",
        "PATH",
    ),
]

Snapshot = Annotated[
    Path | None,
    option(
        "--snapshot",
        "Write the memory of each stage as a snapshot of torch's allocator (.pickle) for pytorch.org/memory_viz.",
        "FILE",
    ),
]


def check_paths(trace: str | None, snapshot: Path | None, job: Path) -> None:
    """Raises PlanError, before any work, for files of both options that cannot be written."""
    if trace is not None:
        _check_trace(trace, job)
    if snapshot is not None:
        _check_snapshot(snapshot, job)


def _check_trace(trace: str, job: Path) -> None:
    path = Path(trace)
    if names_folder(trace):
        if path.exists() and not path.is_dir():
            raise unwritable(path, "it is not a folder", "--trace")
        check_folder(path, "--trace")
        return
    if not path.name.lower().endswith(TRACES):
        remedy = f"Write {path.stem or 'trace'}.json.gz, or {path.stem or 'trace'}/ for a file of each stage"
        raise PlanError("--trace", "a trace is written as .json or .json.gz", remedy, trace)
    _check_file(path, "--trace", job)


def _check_snapshot(path: Path, job: Path) -> None:
    if path.suffix.lower() not in (".pickle", ".pkl"):
        remedy = f"Write {path.stem or 'memory'}.pickle"
        raise PlanError("--snapshot", "a snapshot is written as .pickle", remedy, str(path))
    _check_file(path, "--snapshot", job)


def _check_file(path: Path, option: str, job: Path) -> None:
    check_place(path, option)
    if path.exists() and job.exists() and path.samefile(job):
        raise unwritable(path, "it is the job", option)


def names_folder(trace: str) -> bool:
    """Returns whether the path of a trace names a folder."""
    return trace.endswith(("/", os.sep)) or (Path(trace).is_dir() and not trace.lower().endswith(TRACES))


def write_files(report: Report, trace: str | None, snapshot: Path | None) -> None:
    """Writes the files of both options. Raises PlanError for one that cannot be written."""
    if trace is not None:
        from meshcast.simulator.report.trace import write_rank_traces, write_trace

        with writing(Path(trace), "--trace"):
            (write_rank_traces if names_folder(trace) else write_trace)(report, trace)
    if snapshot is not None:
        from meshcast.simulator.report.tracing.memory_snapshot import write_snapshot

        with writing(snapshot, "--snapshot"):
            write_snapshot(report, snapshot)
