"""``meshcast measure``: real torch work on this machine. ``meshcast import``: what other programs measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cli.console import AsJson, answering, check_place, emit
from experiments.cli.validate import Calibration, folder, needs_torch, writable
from hardware.errors import PlanError, nearest

KINDS = ("kernels", "stages", "distributed", "collectives", "campaign")
TAKES = {
    "kernels": ("mode", "tp", "dtype", "repeat", "warmup"),
    "stages": ("recompute", "repeat", "warmup"),
    "distributed": ("steps", "warmup", "trace", "check"),
    "collectives": ("size", "operation", "repeat", "warmup"),
    "campaign": (),
}
"""The options that each kind takes, besides those that all take."""

FORMS = ("nccl-tests", "kineto", "megatron-log", "torchtitan-log")
IMPORTS = {
    "nccl-tests": ("operation", "members"),
    "kineto": ("rank",),
    "megatron-log": ("skip", "tokens", "gpus"),
    "torchtitan-log": ("skip", "tokens", "gpus"),
}
"""The same of what is imported."""

Change = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job first.")
]


def measure(
    kind: Annotated[str, typer.Argument(metavar="{kernels|stages|distributed|collectives|campaign}")],
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON; or a campaign of many.")],
    device: Annotated[
        str | None, typer.Option("--device", metavar="{cpu|cuda}", help="What it runs on; cuda if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The measurement file; of a campaign a FOLDER.")
    ] = None,
    calibration: Calibration = None,
    change: Change = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", metavar="{eager|cuda-graph|compile}", help="kernels: how launched.")
    ] = None,
    tp: Annotated[
        list[int] | None, typer.Option("--tp", metavar="N", help="kernels: degrees; may be repeated.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", metavar="{fp32|bf16|fp8}", help="kernels: number formats.")
    ] = None,
    recompute: Annotated[
        list[str] | None, typer.Option("--recompute", metavar="{none|selective|full}", help="stages: each way apart.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", help="distributed: steps that are timed.")
    ] = None,
    repeat: Annotated[int | None, typer.Option("--repeat", metavar="N", help="Samples of each thing.")] = None,
    warmup: Annotated[int | None, typer.Option("--warmup", metavar="N", help="Times before the first sample.")] = None,
    size: Annotated[
        list[int] | None, typer.Option("--size", metavar="BYTES", help="collectives: of the buffer.")
    ] = None,
    operation: Annotated[
        list[str] | None, typer.Option("--operation", metavar="NAME", help="collectives: which of them.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="distributed: rank 0's Kineto trace of one step.")
    ] = None,
    check: Annotated[
        bool | None, typer.Option("--check/--no-check", help="distributed: compare with serial training first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run real torch work of a job on this machine, and write it beside what was forecast before."""
    with answering(as_json):
        if kind not in KINDS:
            raise PlanError("KIND", "there is nothing of this name", nearest(kind, KINDS), kind)
        given = {
            "mode": mode, "tp": tp, "dtype": dtype, "recompute": recompute, "steps": steps, "repeat": repeat,
            "warmup": warmup, "size": size, "operation": operation, "trace": trace, "check": check,
        }  # fmt: skip
        options = _taken(kind, given, TAKES[kind])
        plural = {"mode": "modes", "tp": "tps", "dtype": "dtypes", "size": "sizes", "operation": "operations"}
        options = {plural.get(name, name): value for name, value in options.items()}
        needs_torch()
        if kind == "campaign":
            if device is not None or calibration is not None or change:
                rule = "a campaign names its device and jobs, and calibrates by itself"
                raise PlanError("measure campaign", rule, "Leave out --device, --calibration and --set")
            _campaign(job, out or Path("measured"), as_json)
            return
        folder(calibration)
        file = out or Path("measured.json")
        for place, option in ((file, "--out"), (trace, "--trace")):
            if place is not None and place.absolute().parent.is_dir():
                check_place(place, option)
        told = _job(job, change or ())
        found = _room(kind)(told, device or "cuda", file, calibration=calibration, command=_command(), **options)
        _show(found, file, kind, as_json)


def _campaign(file: Path, out: Path, as_json: bool) -> None:
    """Calibrates and measures all that a campaign asks for, then shows every kind that was measured."""
    from experiments.pages.forecast import show
    from experiments.pages.measurements import page, validated
    from experiments.pages.published import progress
    from validation.calibration.device.calibrate import calibrate, refresh
    from validation.measurements import campaign

    planned = campaign.load(file)
    writable(out)
    done: dict[str, list[Path]] = {}
    total = len(planned.runs)
    runs = campaign.run_all(
        planned, out, _room, lambda device, to, n: calibrate(device, to, n, progress), refresh, _command()
    )
    for number, (run, found) in enumerate(runs, 1):
        if isinstance(found, str):
            typer.echo(f"[{number}/{total}] {run.name}: {found}", err=True)
            continue
        done.setdefault(run.measure, []).append(out / f"{run.name}.json")
        typer.echo(f"[{number}/{total}] {run.name}: {len(found.rows)} rows in {out / run.name}.json", err=True)
    answers = {kind: validated(kind, files) for kind, files in done.items()}
    if as_json:
        emit({"campaign": planned.title, **answers})
        return
    for answer in answers.values():
        show(page(answer, brief=True))


def _taken(kind: str, given: dict[str, Any], takes: Sequence[str]) -> dict[str, Any]:
    """The options that were given; refuses those that `kind` has no use for."""
    for name, value in given.items():
        if value is not None and name not in takes:
            known = ", ".join(f"--{one}" for one in takes)
            told = value if isinstance(value, str | int) else str(value)
            raise PlanError(f"--{name}", f"{kind} take no such option", f"They take {known}", told)
    return {name: value for name, value in given.items() if value is not None}


def _room(kind: str) -> Any:
    """What measures a kind."""
    if kind == "kernels":
        from validation.kernels.measure import measure as kernels

        return _with_progress(kernels)
    if kind == "stages":
        from validation.stages.measure import measure as stages

        return _with_progress(stages)
    from validation.distributed.measure import measure as steps
    from validation.distributed.measure import measure_collectives

    return steps if kind == "distributed" else measure_collectives


def _with_progress(measuring: Any) -> Any:
    def run(*given: Any, **options: Any) -> Any:
        return measuring(*given, progress=lambda line: typer.echo(line, err=True), **options)

    return run


def _job(path: Path, changes: Sequence[str]) -> dict[str, Any]:
    """The job in long form, with paths that start from here."""
    from simulator.job.load import load_job

    found = load_job(path, changes).to_dict()
    for key in ("model", "cluster"):
        if isinstance(found[key], str) and (path.parent / found[key]).is_file():
            found[key] = str(path.parent / found[key])
    return found


def _command() -> str:
    return " ".join(["meshcast", *sys.argv[1:]])


def _show(found: Any, out: Path, kind: str, as_json: bool) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        emit(found.model_dump(mode="json"))
        return
    from experiments.pages.forecast import show
    from experiments.pages.measurements import page, validated

    if kind == "collectives":
        typer.echo(f"wrote {out}: {len(found.rows)} rows", err=True)
        return
    show(page(validated(kind, [out])))


# --------------------------------------------------------------------------------------------- import


def import_(
    form: Annotated[str, typer.Argument(metavar="{nccl-tests|kineto|megatron-log|torchtitan-log}")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What that program wrote.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The measurement file.")] = Path("measured.json"),
    job: Annotated[Path | None, typer.Option("--job", metavar="JOB", help="What ran: it is forecast, too.")] = None,
    calibration: Calibration = None,
    change: Change = None,
    operation: Annotated[str | None, typer.Option("--operation", help="nccl-tests: where the file is silent.")] = None,
    members: Annotated[
        int | None, typer.Option("--members", help="nccl-tests: ranks, where the file is silent.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="kineto: whose trace it is.")] = None,
    skip: Annotated[int | None, typer.Option("--skip", help="logs: first lines that are warm-up.")] = None,
    tokens: Annotated[int | None, typer.Option("--tokens", help="torchtitan-log: of a step.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="torchtitan-log: of the run.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn what other programs measured into a measurement file."""
    with answering(as_json):
        if form not in FORMS:
            raise PlanError("FORM", "nothing of this name is read", nearest(form, FORMS), form)
        given = {"operation": operation, "members": members, "rank": rank, "skip": skip, "tokens": tokens, "gpus": gpus}
        options = _taken(form, given, IMPORTS[form])
        folder(calibration)
        if out.absolute().parent.is_dir():
            check_place(out, "--out")
        from validation.measurements.import_nccl_tests import import_nccl_tests
        from validation.measurements.import_trace import import_trace
        from validation.measurements.import_training_log import import_training_log

        told = _job(job, change or ()) if job is not None else None
        common: dict[str, Any] = {"job": told, "calibration": calibration, "command": _command()}
        if form == "nccl-tests":
            found = import_nccl_tests(file, **common, **options)
        elif form == "kineto":
            if told is None:
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
            typer.echo(f"wrote {out}: {len(found.rows)} rows", err=True)
