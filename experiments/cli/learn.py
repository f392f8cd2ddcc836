"""``meshcast learn`` moves coefficients of the catalog by as much as a user's measurements say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.console import AsJson, emit_or_show
from meshcast.experiments.cli.measured_files import (
    Calibrations,
    ChangesOfJob,
    check_calibration_folder,
    check_writable_folder,
    list_files,
    load_long_form,
)
from meshcast.experiments.options import Options, argument, option
from meshcast.hardware.errors import PlanError


class LearnOptions(Options):
    """Options of ``meshcast learn``."""

    files: Annotated[
        tuple[Path, ...],
        argument("FILES", "Training logs, tables of steps, kernels and collectives, nccl-tests output."),
    ] = ()
    out: Annotated[Path, option("--out", "Folder for the calibration.", "FOLDER")] = Path("calibration")
    job: Annotated[
        Path | None, option("--job", "The job that a log is of, or on the cluster of nccl-tests.", "JOB")
    ] = None
    change: ChangesOfJob = ()
    calibration: Calibrations = None
    as_json: AsJson = False


def learn(options: LearnOptions) -> None:
    """Learns from measurements, judges it on rows held back, and writes what forecasts these better."""
    from meshcast.experiments.render.terminal.learning import page
    from meshcast.experiments.render.terminal.published import progress
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.validation.learning.learn import learn_files

    paths = list_files((), options.files)
    if not paths:
        raise PlanError("FILES", "no measurement is named", "Write meshcast learn run.log --job job.yaml")
    check_writable_folder(options.out)
    if options.out.is_dir() and any(options.out.glob("*.yaml")) and options.calibration != options.out:
        rule = "it holds a calibration, which would be overwritten"
        remedy = f"Go on from it with --calibration {options.out}, or name another folder"
        raise PlanError("--out", rule, remedy, str(options.out))
    calibration = Calibration.from_folder(check_calibration_folder(options.calibration))
    job = load_long_form(options.job, options.change) if options.job is not None else None
    answer = learn_files(paths, options.out, calibration, job, progress)
    emit_or_show(options.as_json, answer, lambda: page(answer, options.out))
