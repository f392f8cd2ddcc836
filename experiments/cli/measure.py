"""``meshcast measure`` runs torch work on this machine; ``meshcast import`` reads other programs' measurements."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from meshcast.experiments.cli.console import WRONG, AsJson, answering, check_place, check_suffix, emit, one_of
from meshcast.experiments.cli.launch import import_launch, takes_launch_files
from meshcast.experiments.cli.validate import (
    Calibration,
    check_calibration_folder,
    check_writable_folder,
    require_torch,
)
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest

IN_PROCESS = ("kernels", "stages")
"""Kinds that run in the process that measures; others start processes of their own."""

SUMMARY = "comparison.txt"
"""File in the folder of a campaign with steps, stages, and the errors of all classes of rows."""

KINDS = ("kernels", "stages", "distributed", "collectives", "campaign")
TAKES = {
    "kernels": ("mode", "tp", "dtype", "repeat", "warmup"),
    "stages": ("recompute", "repeat", "warmup"),
    "distributed": ("steps", "warmup", "trace", "check"),
    "collectives": ("size", "operation", "repeat", "warmup"),
    "campaign": ("minutes",),
}
"""Options of each kind of measurement, besides the common ones."""

FORMS = ("nccl-tests", "kineto", "megatron-log", "torchtitan-log")
FAILURE_LOG = "failure-log"
IMPORTS = {
    "nccl-tests": ("operation", "members"),
    "kineto": ("rank",),
    "megatron-log": ("skip", "tokens", "gpus"),
    "torchtitan-log": ("skip", "tokens", "gpus"),
}
"""Options of each format to import, besides the common ones."""

Change = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job.")]


def measure(
    kind: Annotated[
        str,
        typer.Argument(metavar="KIND", help=f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.", autocompletion=one_of(*KINDS)),
    ],
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON; or a campaign file.")],
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="Device to measure; cuda if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Measurement file to write; of a campaign a FOLDER.")
    ] = None,
    calibration: Calibration = None,
    change: Change = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", metavar="eager|cuda-graph|compile", help="kernels: launch modes.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", metavar="N", help="kernels: tensor-parallel degrees; may be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="fp32|bf16|fp8", help="kernels: number formats.")
    ] = None,
    recompute: Annotated[
        list[str] | None,
        typer.Option("--recompute", metavar="none|selective|full", help="stages: recomputations to measure."),
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", metavar="N", help="distributed: timed steps.")] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", metavar="N", help="Samples of each quantity.")] = None,
    warmup: Annotated[
        int | None, typer.Option("--warmup", metavar="N", help="Untimed runs before the first sample.")
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option("--size", metavar="BYTES", help="collectives: sizes of the buffer.")
    ] = None,
    operation: Annotated[
        list[str] | None, typer.Option("--operation", metavar="NAME", help="collectives: which ones.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="distributed: file for rank 0's Kineto trace of a step."),
    ] = None,
    check: Annotated[
        bool | None, typer.Option("--check/--no-check", help="distributed: compare with serial training first.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", metavar="M", help="campaign: begin no run that would end later."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure real torch work of a job on this machine, and write it together with its blind forecast."""
    with answering(as_json):
        if kind not in KINDS:
            raise PlanError("KIND", "there is no kind of this name", nearest(kind, KINDS), kind)
        given = {
            "mode": mode, "tp": tp, "dtype": dtype, "recompute": recompute, "steps": steps, "repeat": repeat,
            "warmup": warmup, "size": size, "operation": operation, "trace": trace, "check": check,
            "minutes": minutes,
        }  # fmt: skip
        options = _select_options(kind, given, TAKES[kind])
        plural = {"mode": "modes", "tp": "tps", "dtype": "dtypes", "size": "sizes", "operation": "operations"}
        options = {plural.get(name, name): value for name, value in options.items()}
        require_torch()
        if kind == "campaign":
            if device is not None or calibration is not None or change:
                rule = "a campaign names its device and jobs, and makes its own calibration"
                raise PlanError("measure campaign", rule, "Leave out --device, --calibration and --set")
            _campaign(job, out or Path("measured"), minutes, as_json)
            return
        check_calibration_folder(calibration)
        file = out or Path("measured.json")
        for place, option in ((file, "--out"), (trace, "--trace")):
            if place is not None and place.absolute().parent.is_dir():
                check_place(place, option)
        long_form = _load_long_form(job, change or ())
        found = _measuring_function(kind)(
            long_form, device or "cuda", file, calibration=calibration, command=_command(), **options
        )
        _show_measurement(found, file, kind, as_json)


def _campaign(file: Path, out: Path, minutes: float | None, as_json: bool) -> None:
    """Runs a campaign, or a slice of it, and prints the errors of each kind of measurement.

    After each run its rows are compared with their forecasts in a page beside its file, ``NAME.txt``, and all errors so
    far in `SUMMARY` in the same folder.
    """
    from meshcast.experiments.render.terminal.forecast import show
    from meshcast.experiments.render.terminal.measurements import page, validate_files, write_page
    from meshcast.validation.calibration.device import calibrate
    from meshcast.validation.measurements import campaign
    from meshcast.validation.measurements.cuda import Cuda

    planned = campaign.load(file)
    check_writable_folder(out)
    done: dict[str, list[Path]] = {}
    answers: dict[str, dict[str, Any]] = {}
    total = len(planned.runs)
    call: Callable[..., Any] = _call_in_own_process if planned.device == "cuda" else operator.call
    tools = campaign.Tools(
        lambda kind: partial(call, _measure_kind, kind) if kind in IN_PROCESS else _measuring_function(kind),
        partial(call, _calibrate),
        partial(call, calibrate.refresh),
        lambda folder: calibrate.gpu_name(planned.device, folder),
        Cuda.count() if planned.device == "cuda" else None,
    )
    number, failed = 0, dict[str, str]()
    for number, (run, found) in enumerate(campaign.run_all(planned, out, tools, _command(), minutes), 1):
        if isinstance(found, campaign.Unmeasured):
            say(f"[{number}/{total}] {run.name}: {found.reason}", err=True)
            failed |= {run.name: found.reason} if found.failed else {}
            continue
        done.setdefault(run.measure, []).append(out / f"{run.name}.json")
        say(f"[{number}/{total}] {run.name}: {len(found.rows)} rows in {out / run.name}.json", err=True)
        write_page([validate_files(run.measure, done[run.measure][-1:])], out / f"{run.name}.txt")
        answers[run.measure] = validate_files(run.measure, done[run.measure])
        write_page(answers.values(), out / SUMMARY, brief=True)
    if number < total:
        say(f"{total - number} runs are left: run the same command again", err=True)
    if as_json:
        emit({"campaign": planned.title, "left": total - number, "failed": [*failed], **answers})
    else:
        for answer in answers.values():
            show(page(answer, brief=True))
    if failed:
        last = f"of {[*failed][-1]}: {[*failed.values()][-1]}"
        say(f"meshcast: {out}: {len(failed)} of {total} runs failed: {', '.join(failed)}; {last}", err=True)
        raise typer.Exit(WRONG)


def _call_in_own_process(function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Calls a function in a new process: what that holds of a GPU's memory, its context included, is gone afterwards.

    In the process of the campaign it would be missing in the measurements that follow, and count as theirs.
    """
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *given, **options).result()


def _measure_kind(kind: str, *given: Any, **options: Any) -> Any:
    return _measuring_function(kind)(*given, **options)


def _calibrate(device: str, folder: Path, processes: int) -> Any:
    from meshcast.experiments.render.terminal.published import progress
    from meshcast.validation.calibration.device.calibrate import calibrate

    return calibrate(device, folder, processes, progress)


def _select_options(kind: str, given: dict[str, Any], takes: Sequence[str]) -> dict[str, Any]:
    """The given options. Raises PlanError for one that `kind` does not take."""
    for name, value in given.items():
        if value is not None and name not in takes:
            known = ", ".join(f"--{one}" for one in takes)
            shown = value if isinstance(value, str | int) else str(value)
            raise PlanError(f"--{name}", f"{kind} takes no such option", f"It takes {known}", shown)
    return {name: value for name, value in given.items() if value is not None}


def _measuring_function(kind: str) -> Any:
    if kind == "kernels":
        from meshcast.validation.kernels.measure import measure as kernels

        return _with_progress(kernels)
    if kind == "stages":
        from meshcast.validation.stages.measure import measure as stages

        return _with_progress(stages)
    from meshcast.validation.distributed.measure import measure as steps
    from meshcast.validation.distributed.measure import measure_collectives

    return steps if kind == "distributed" else measure_collectives


def _with_progress(measuring: Any) -> Any:
    """A measuring function that prints its progress to stderr."""

    @wraps(measuring)
    def run(*given: Any, **options: Any) -> Any:
        return measuring(*given, progress=lambda line: say(line, err=True), **options)

    return run


def _load_long_form(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """A job in long form, with paths relative to the working directory."""
    from meshcast.simulator.loading.load import load_job

    found = load_job(path, changes).to_dict()
    for key in ("model", "cluster"):
        if isinstance(found[key], str) and (path.parent / found[key]).is_file():
            found[key] = str(path.parent / found[key])
    return found


def _command() -> str:
    """The command line, for the file."""
    return " ".join(["meshcast", *sys.argv[1:]])


def _show_measurement(found: Any, out: Path, kind: str, as_json: bool) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        emit(found.model_dump(mode="json"))
        return
    from meshcast.experiments.render.terminal.forecast import show
    from meshcast.experiments.render.terminal.measurements import page, validate_files

    if kind == "collectives":
        say(f"wrote {out}: {len(found.rows)} rows", err=True)
        return
    show(page(validate_files(kind, [out])))


# --------------------------------------------------------------------------------------------- import


def _find_file(word: str, programs: Sequence[str]) -> Path:
    """The file of ``import FILE``. Raises PlanError for a program without a file, and for no file."""
    if word in programs:
        raise PlanError("FILE", "missing", f"Write meshcast import {word} FILE")
    if not Path(word).exists():
        rule = "there is no such file, nor a program of this name"
        raise PlanError("FILE", rule, f"Name a launch file, or PROGRAM and FILE: {', '.join(programs)}", word)
    return Path(word)


@takes_launch_files
def import_(
    form: Annotated[
        str,
        typer.Argument(
            metavar="[PROGRAM]",
            help="Without it FILE is a launch file, whose program is found. Of a launch file: megatron, torchtitan, "
            "trainer or another one of docs/launch-files.md; of measurements: nccl-tests, kineto, megatron-log or "
            "torchtitan-log; or failure-log: rates of failures.",
        ),
    ],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Launch file or output of that program.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Job to write, printed if not given; or measurement file to write."),
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="JOB", help="The job that ran, to forecast it.")] = None,
    calibration: Calibration = None,
    change: Change = None,
    operation: Annotated[
        str | None, typer.Option("--operation", help="nccl-tests: the collective, if not recorded.")
    ] = None,
    members: Annotated[
        int | None, typer.Option("--members", help="nccl-tests: number of ranks, if not recorded.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="kineto: the traced rank, if not recorded.")] = None,
    skip: Annotated[int | None, typer.Option("--skip", help="logs: lines to leave out as warm-up.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="torchtitan-log: tokens per step.")] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=1, help="launch files, torchtitan-log, failure-log: number of GPUs.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NODE:N", help="launch files: the cluster, e.g. dgx-h100:64.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="launch files: the model, if the file has none.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert launch files and measurements of other programs."""
    with answering(as_json):
        from meshcast.simulator.formats.launch.programs.registry import FORMATS as LAUNCH_FORMATS

        known = (*LAUNCH_FORMATS, *FORMS, FAILURE_LOG)
        detected = file is None
        if file is None:
            file = _find_file(form, known)
        elif form not in known:
            raise PlanError("FORM", "there is no format of this name", nearest(form, known), form)
        if out is not None:
            of_job = form not in FORMS
            suffixes = (".yaml", ".yml", ".json") if of_job else (".json",)
            check_suffix(out, suffixes, "a job" if of_job else "a measurement file")
        others: dict[str, Any] = {"job": job, "calibration": calibration, "set": change, "operation": operation}
        others |= {"members": members, "rank": rank, "skip": skip, "tokens": tokens}
        if form == FAILURE_LOG:
            _select_options(form, {**others, "cluster": cluster, "model": model}, ("gpus", "out"))
            from meshcast.experiments.cli.failures import import_failure_log

            import_failure_log(file, gpus, out, as_json)
            return
        if detected or form in LAUNCH_FORMATS:
            _select_options(form, {**others, "set": None}, ("gpus", "cluster", "model", "out", "set"))
            named = {"cluster": cluster, "model": model}
            words = [f"{key}={word}" for key, word in named.items() if word is not None]
            import_launch(None if detected else form, file, out, (*words, *(change or ())), gpus, as_json)
            return
        out = out or Path("measured.json")
        given = {"operation": operation, "members": members, "rank": rank, "skip": skip, "tokens": tokens, "gpus": gpus}
        given |= {"cluster": cluster, "model": model}
        options = _select_options(form, given, IMPORTS[form])
        check_calibration_folder(calibration)
        if out.absolute().parent.is_dir():
            check_place(out, "--out")
        from meshcast.validation.measurements.import_nccl_tests import import_nccl_tests
        from meshcast.validation.measurements.import_trace import import_trace
        from meshcast.validation.measurements.import_training_log import import_training_log

        long_form = _load_long_form(job, change or ()) if job is not None else None
        common: dict[str, Any] = {"job": long_form, "calibration": calibration, "command": _command()}
        if form == "nccl-tests":
            found = import_nccl_tests(file, **common, **options)
        elif form == "kineto":
            if long_form is None:
                raise PlanError("--job", "a trace is compared with the job that ran", "Name its file: --job job.yaml")
            found = import_trace(file, **common, **options)
        else:
            found = import_training_log(
                file, "megatron" if form == "megatron-log" else "torchtitan", **common, **options
            )
        found.write(out)
        if as_json:
            emit(found.model_dump(mode="json"))
        else:
            say(f"wrote {out}: {len(found.rows)} rows", err=True)
