"""``meshcast validate`` and ``meshcast calibrate``: forecasts and coefficients against what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from experiments.console import AsJson, answering, check_place, emit, figure_files
from hardware.errors import PlanError, nearest

MEASURED = ("kernels", "collectives")
KINDS = ("pipeline", "published", *MEASURED)
LATER = ("stages", "distributed", "claims")
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
    kind: Annotated[str, typer.Argument(metavar="{pipeline|published|kernels|collectives}")],
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
) -> None:
    """Hold forecasts against what is known: schedules, published runs, tables of measured kernels and collectives."""
    with answering(as_json):
        from experiments import validating as held
        from experiments.page import show

        if kind in LATER:
            raise PlanError(
                "KIND", f"validating {kind} comes in a later release", f"Valid now: {', '.join(KINDS)}", kind
            )
        if kind not in KINDS:
            raise PlanError("KIND", "there is nothing of this name", nearest(kind, KINDS), kind)
        paths = [*(data or ()), *(more or ())]
        options = {"--plot": plot, "--jobs": workers, "--calibration": calibration}
        taken = {"pipeline": (), "published": ("--plot", "--jobs")}.get(kind, ("--plot", "--calibration"))
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


def _measured(kind: str, paths: Sequence[Path], as_json: bool, plot: str | None, calibration: Path | None) -> None:
    """``validate kernels`` and ``validate collectives``."""
    from experiments import measured
    from experiments.page import show

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
    kind: Annotated[str, typer.Argument(metavar="{kernels|collectives}")],
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
    as_json: AsJson = False,
) -> None:
    """Fit the coefficients of GPUs or links to tables of measurements, and write them as YAML."""
    with answering(as_json):
        from experiments import measured
        from experiments.page import show

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


def folder(path: Path | None) -> Path | None:
    """A folder of calibrations that is there, and that laws can be made of."""
    if path is None:
        return None
    if not path.is_dir():
        raise PlanError("--calibration", "there is no such folder", "Name the --out of meshcast calibrate", str(path))
    from simulator.costs.calibration import check

    check(path)
    return path
