"""``meshcast import`` reads launch files, measurements and logs of other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from meshcast.experiments.cli.console import AsJson, check_place, check_suffix, emit
from meshcast.experiments.cli.failures import import_failure_log
from meshcast.experiments.cli.launch import LaunchFileOptions, import_launch
from meshcast.experiments.cli.measured_files import (
    Calibrations,
    ChangesOfJob,
    check_calibration_folder,
    load_long_form,
    quote_command,
)
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest

FAILURE_LOG = "failure-log"
LOGS = ("--skip", "--tokens", "--gpus")
TAKEN = {
    "nccl-tests": ("--operation", "--members"),
    "kineto": ("--rank",),
    "megatron-log": LOGS,
    "torchtitan-log": LOGS,
    FAILURE_LOG: ("--gpus", "--out"),
    "launch file": ("--gpus", "--cluster", "--model", "--out", "--set"),
}
"""Options of each format, besides those that all measurements have."""

FORMS = ("nccl-tests", "kineto", "megatron-log", "torchtitan-log")
OF_MEASUREMENTS = ("--job", "--calibration", "--set")
SPECIAL = ("--operation", "--members", "--rank", *LOGS, "--cluster", "--model")


class ImportOptions(LaunchFileOptions):
    """Options of ``meshcast import``."""

    form: Annotated[
        str,
        argument(
            "[PROGRAM]",
            "Without it FILE is a launch file, whose program is found. Of a launch file: megatron, torchtitan, "
            "trainer or another one of docs/launch-files.md; of measurements: nccl-tests, kineto, megatron-log or "
            "torchtitan-log; or failure-log: rates of failures.",
        ),
    ]
    file: Annotated[Path | None, argument("FILE", "Launch file or output of that program.", show_default=False)] = None
    out: Annotated[
        Path | None, option("--out", "Job to write, printed if not given; or measurement file to write.", "FILE")
    ] = None
    job: Annotated[Path | None, option("--job", "The job that ran, to forecast it.", "JOB")] = None
    calibration: Calibrations = None
    change: ChangesOfJob = ()
    operation: Annotated[str | None, option("--operation", "nccl-tests: the collective, if not recorded.")] = None
    members: Annotated[int | None, option("--members", "nccl-tests: number of ranks, if not recorded.")] = None
    rank: Annotated[int | None, option("--rank", "kineto: the traced rank, if not recorded.")] = None
    skip: Annotated[int | None, option("--skip", "logs: lines to leave out as warm-up.")] = None
    tokens: Annotated[int | None, option("--tokens", "torchtitan-log: tokens per step.")] = None
    gpus: Annotated[
        int | None, option("--gpus", "launch files, torchtitan-log, failure-log: number of GPUs.", min=1)
    ] = None
    cluster: Annotated[str | None, option("--cluster", "launch files: the cluster, e.g. dgx-h100:64.", "NODE:N")] = None
    model: Annotated[str | None, option("--model", "launch files: the model, if the file has none.", "MODEL")] = None
    as_json: AsJson = False


def import_(options: ImportOptions) -> None:
    """Converts a launch file to a job, measurements to a measurement file, or a log to rates of failures."""
    from meshcast.simulator.formats.launch.programs.registry import list_formats

    form, known = options.form, (*list_formats(), *FORMS, FAILURE_LOG)
    is_detected = options.file is None
    file = options.file or _find_file(form, known)
    if not is_detected and form not in known:
        raise PlanError("FORM", "there is no format of this name", nearest(form, known), form)
    if options.out is not None:
        suffixes = (".json",) if form in FORMS else (".yaml", ".yml", ".json")
        check_suffix(options.out, suffixes, "a measurement file" if form in FORMS else "a job")
    if form in FORMS and not is_detected:
        _refuse_others(options, SPECIAL, form)
        _import_measurement(options, file)
    elif form == FAILURE_LOG:
        _refuse_others(options, (*OF_MEASUREMENTS, *SPECIAL), form)
        import_failure_log(file, options.gpus, options.out, options.as_json)
    else:
        _refuse_others(options, (*OF_MEASUREMENTS, *SPECIAL), "launch file")
        named = {"cluster": options.cluster, "model": options.model}
        changes = [f"{key}={word}" for key, word in named.items() if word is not None]
        program = None if is_detected else form
        import_launch(program, file, options.out, (*changes, *options.change), options.gpus, options.as_json)


def _refuse_others(options: ImportOptions, special: Sequence[str], form: str) -> None:
    """Raises PlanError for an option that is not for this format."""
    options.refuse_others(special, TAKEN[form], options.form, f"It takes {', '.join(TAKEN[form])}")


def _import_measurement(options: ImportOptions, file: Path) -> None:
    """Writes a measurement file."""
    from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
    from meshcast.validation.measurements.import_trace import import_trace
    from meshcast.validation.measurements.import_training_log import import_training_log

    form, out = options.form, options.out or Path("measured.json")
    check_calibration_folder(options.calibration)
    if out.absolute().parent.is_dir():
        check_place(out, "--out")
    job = load_long_form(options.job, options.change) if options.job is not None else None
    words: dict[str, Any] = {"job": job, "calibration": options.calibration, "command": quote_command()}
    words |= options.find_stated(TAKEN[form])
    if form == "nccl-tests":
        measurement = import_nccl_tests(file, **words)
    elif form == "kineto":
        if job is None:
            raise PlanError("--job", "a trace is compared with the job that ran", "Name its file: --job job.yaml")
        measurement = import_trace(file, **words)
    else:
        measurement = import_training_log(file, form.removesuffix("-log"), **words)  # type: ignore[arg-type]
    measurement.write(out)
    if options.as_json:
        emit(measurement.model_dump(mode="json"))
    else:
        say(f"wrote {out}: {len(measurement.rows)} rows", err=True)


def _find_file(word: str, programs: Sequence[str]) -> Path:
    """Returns the file of ``import FILE``. Raises PlanError for a program without a file, and for no file."""
    if word in programs:
        raise PlanError("FILE", "missing", f"Write meshcast import {word} FILE")
    if not Path(word).exists():
        rule = "there is no such file, nor a program of this name"
        raise PlanError("FILE", rule, f"Name a launch file, or PROGRAM and FILE: {', '.join(programs)}", word)
    return Path(word)
