"""``meshcast validate`` and ``meshcast calibrate``: forecasts and coefficients against what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.console import AsJson, answering, check_place, emit, figure_files
from hardware.errors import PlanError, nearest

MEASURED = ("kernels", "collectives")
FILES = ("stages", "distributed", "trace")
KINDS = ("pipeline", "published", *MEASURED, *FILES)
TRACED = ("--calibration", "--job", "--rank", "--step")
LATER = ("claims",)
"""Kinds of validation that have a contract and no code yet."""

Data = Annotated[
    list[Path] | None,
    typer.Option("--data", metavar="FILE", help="What was measured, or cases of pipelines; may be repeated."),
]
More = Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="More files of --data.")]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FOLDER", help="Calibrations that come before those of meshcast."),
]


def validate(
    kind: Annotated[str, typer.Argument(metavar="{pipeline|published|kernels|collectives|stages|distributed|trace}")],
    more: More = None,
    data: Data = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw forecast against measured: a .png or .svg, or FOLDER/."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--jobs", metavar="N", min=1, help="Processes; one for each core if not given.")
    ] = None,
    calibration: Calibration = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="JOB", help="trace: the job that was traced.")] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="trace: whose it is.")] = None,
    step: Annotated[int | None, typer.Option("--step", metavar="N", help="trace: which of the steps it marks.")] = None,
) -> None:
    """Hold forecasts against what is known: schedules, published runs, tables of kernels, what was measured here."""
    with answering(as_json):
        from experiments.pages import published as held
        from experiments.pages.forecast import show

        if kind in LATER:
            raise PlanError(
                "KIND", f"validating {kind} comes in a later release", f"Valid now: {', '.join(KINDS)}", kind
            )
        if kind not in KINDS:
            raise PlanError("KIND", "there is nothing of this name", nearest(kind, KINDS), kind)
        paths = [*(data or ()), *(more or ())]
        options = {
            "--plot": plot, "--jobs": workers, "--calibration": calibration,
            "--job": job, "--rank": rank, "--step": step,
        }  # fmt: skip
        recorded = kind in ("stages", "distributed") or (kind in MEASURED and _json(paths))
        known = {"pipeline": (), "published": ("--plot", "--jobs"), "trace": ("--plot", *TRACED)}
        taken = ("--plot",) if recorded else known.get(kind, ("--plot", "--calibration"))
        for option, given in options.items():
            if given is not None and option not in taken:
                raise PlanError(option, f"validating {kind} takes no such option", "Leave it out", str(given))
        if kind == "pipeline":
            answer, table = held.pipeline(paths)
            if as_json:
                emit(answer)
            else:
                show(table)
            return
        if recorded:
            _recorded(kind, paths, as_json, plot)
            return
        if kind == "trace":
            _trace(paths, job, as_json, plot, (folder(calibration), rank, step))
            return
        if kind in MEASURED:
            _measured(kind, paths, as_json, plot, calibration)
            return
        files = figure_files(plot, held.FIGURES) if plot is not None else {}
        answer, missing = held.published(paths, workers)
        held.draw(answer, files)
        if as_json:
            emit(answer)
        else:
            show(held.published_page(answer))
        if missing:
            typer.echo(f"meshcast: interrupted, {missing:,} runs are not answered", err=True)
            raise KeyboardInterrupt


def _json(paths: Sequence[Path]) -> bool:
    """Whether these are measurement files, not tables. Refuses a mixture."""
    found = [path.suffix == ".json" for path in paths]
    if any(found) and not all(found):
        other = paths[found.index(False)]
        raise PlanError("--data", "tables and measurement files are held apart", "Name one kind at a time", str(other))
    return bool(found) and found[0]


def _recorded(kind: str, paths: Sequence[Path], as_json: bool, plot: str | None) -> None:
    """Measurement files of ``meshcast measure``."""
    from experiments.pages import measurements
    from experiments.pages.forecast import show

    if not paths:
        remedy = f"Name files of meshcast measure {kind}: --data measured.json"
        raise PlanError("--data", f"{kind} need measurement files", remedy)
    files = figure_files(plot, measurements.FIGURES) if plot is not None else {}
    answer = measurements.validated(kind, paths)
    measurements.draw(answer, files)
    if as_json:
        emit(answer)
    else:
        show(measurements.page(answer))


def _trace(paths: Sequence[Path], job: Path | None, as_json: bool, plot: str | None, more: tuple[Any, ...]) -> None:
    """A real trace beside the simulated one of the same step."""
    from experiments.pages import traces as tracing
    from experiments.pages.forecast import show

    if len(paths) != 1 or job is None:
        rule = "one trace is compared with the job that ran"
        raise PlanError("validate trace", rule, "Write meshcast validate trace TRACE --job JOB")
    files = figure_files(plot, tracing.FIGURES) if plot is not None else {}
    found = tracing.compared(paths[0], job, *more)
    tracing.draw(found, files)
    if as_json:
        emit(found.to_dict())
    else:
        show(tracing.page(found))


def _measured(kind: str, paths: Sequence[Path], as_json: bool, plot: str | None, calibration: Path | None) -> None:
    """``validate kernels`` and ``validate collectives``."""
    from experiments.pages import calibration as measured
    from experiments.pages.forecast import show

    wanted(paths, kind)
    files = figure_files(plot, measured.FIGURES) if plot is not None else {}
    answer, held = measured.validated(kind, paths, folder(calibration))
    measured.draw(kind, held, files)
    if files and not held:
        typer.echo("meshcast: no row is forecast, so nothing is drawn", err=True)
    if as_json:
        emit(answer)
    else:
        show(measured.page(kind, answer["summary"]))


def calibrate(
    kind: Annotated[str | None, typer.Argument(metavar="[kernels|collectives]")] = None,
    more: More = None,
    data: Data = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Write one file for each GPU or kind of link there.")
    ] = Path("calibration"),
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="Of this GPU or link; may be repeated.")
    ] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out/--no-leave-out", help="Also fit without each library, and tell how it fares.")
    ] = True,
    device: Annotated[
        str | None, typer.Option("--device", metavar="{cpu|cuda}", help="Measure this machine instead of tables.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, help="--device: that collectives run among; 1: none.")
    ] = 2,
    as_json: AsJson = False,
) -> None:
    """Fit the coefficients of GPUs or links to tables of measurements, or to this machine, and write them as YAML."""
    with answering(as_json):
        from experiments.pages import calibration as measured
        from experiments.pages.forecast import show

        if device is not None:
            if kind is not None or data or more or only:
                rule = "this machine is calibrated by what it measures itself"
                raise PlanError("--device", rule, "Leave out KIND, --data and --only, or --device", device)
            needs_torch()
            writable(out)
            told = measured.on_device(device, out, processes)
            if as_json:
                emit(told)
            else:
                show(measured.device_page(told, out))
            return
        if kind is None:
            raise PlanError("KIND", "it is needed without --device", f"Write {' or '.join(MEASURED)}")
        if kind not in MEASURED:
            raise PlanError("KIND", "there is nothing of this name", nearest(kind, MEASURED), kind)
        paths = [*(data or ()), *(more or ())]
        wanted(paths, kind)
        writable(out)
        told = measured.calibrated(kind, paths, out, only or (), leave_out)
        if as_json:
            emit(told)
        else:
            show(measured.calibrated_page(told, out))
        if told["missing"]:
            typer.echo(f"meshcast: interrupted, not fitted: {', '.join(told['missing'])}", err=True)
            raise KeyboardInterrupt


def writable(out: Path) -> None:
    """Refuses, before the work, a folder that files cannot be written to."""
    if out.exists() and not out.is_dir():
        raise PlanError("--out", "it is no folder", "Name a folder: it is made if it is not there", str(out))
    if not out.exists() and not out.absolute().parent.is_dir():
        raise PlanError("--out", f"there is no folder {out.parent}", "Make it, or name a folder in one", str(out))
    check_place((out if out.is_dir() else out.absolute().parent) / f".meshcast-{os.getpid()}", "--out")


def wanted(paths: Sequence[Path], kind: str) -> None:
    """Refuses to work on nothing."""
    if not paths:
        raise PlanError("--data", f"{kind} need tables of measurements", "Name CSV files: --data gemm_h100.csv.gz")


def needs_torch() -> None:
    """Refuses real work without torch."""
    if find_spec("torch") is None:
        rule = "torch is not installed, and real work needs it"
        raise PlanError("torch", rule, "Install it: pip install 'meshcast[torch]'")


def folder(path: Path | None) -> Path | None:
    """A folder of calibrations that is there, and that laws can be made of."""
    if path is None:
        return None
    if not path.is_dir():
        raise PlanError("--calibration", "there is no such folder", "Name the --out of meshcast calibrate", str(path))
    from simulator.costs.calibration.check import check_folder

    check_folder(path)
    return path
