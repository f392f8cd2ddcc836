"""``meshcast measure`` runs torch work on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from meshcast.experiments.cli.campaign import run_campaign
from meshcast.experiments.cli.console import AsJson, check_place, emit_or_show
from meshcast.experiments.cli.measured_files import (
    Calibrations,
    ChangesOfJob,
    check_calibration_folder,
    load_long_form,
    quote_command,
    require_torch,
)
from meshcast.experiments.cli.measuring import find_measuring
from meshcast.experiments.options import Options, argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest

KINDS = ("kernels", "stages", "distributed", "collectives", "campaign")
TAKEN = {
    "kernels": ("--mode", "--tp", "--dtype", "--repeat", "--warmup"),
    "stages": ("--recompute", "--repeat", "--warmup"),
    "distributed": ("--steps", "--warmup", "--trace", "--check", "--yes"),
    "collectives": ("--size", "--operation", "--repeat", "--warmup", "--yes"),
    "campaign": ("--minutes", "--yes"),
}
"""Options of each kind of measurement, besides the common ones."""

SPECIAL = tuple({flag for flags in TAKEN.values() for flag in flags})
PLURAL = {"mode": "modes", "tp": "tps", "dtype": "dtypes", "size": "sizes", "operation": "operations"}


class MeasureOptions(Options):
    """Options of ``meshcast measure``."""

    kind: Annotated[str, argument("KIND", f"{', '.join(KINDS[:-1])} or {KINDS[-1]}.", words=KINDS)]
    job: Annotated[Path, argument("JOB", "A job file, YAML or JSON; or a campaign file.")]
    device: Annotated[str | None, option("--device", "Device to measure; cuda if not given.", "cpu|cuda")] = None
    out: Annotated[Path | None, option("--out", "Measurement file to write; of a campaign a FOLDER.", "FILE")] = None
    calibration: Calibrations = None
    change: ChangesOfJob = ()
    mode: Annotated[tuple[str, ...], option("--mode", "kernels: launch modes.", "eager|cuda-graph|compile")] = ()
    tp: Annotated[tuple[int, ...], option("--tp", "kernels: tensor-parallel degrees; may be repeated.", "N")] = ()
    dtype: Annotated[tuple[str, ...], option("--dtype", "kernels: number formats.", "fp32|bf16|fp8")] = ()
    recompute: Annotated[
        tuple[str, ...], option("--recompute", "stages: recomputations to measure.", "none|selective|full")
    ] = ()
    steps: Annotated[int | None, option("--steps", "distributed: timed steps.", "N")] = None
    repeat: Annotated[int | None, option("--repeat", "Samples of each quantity.", "N")] = None
    warmup: Annotated[int | None, option("--warmup", "Untimed runs before the first sample.", "N")] = None
    size: Annotated[tuple[int, ...], option("--size", "collectives: sizes of the buffer.", "BYTES")] = ()
    operation: Annotated[tuple[str, ...], option("--operation", "collectives: which ones.", "NAME")] = ()
    trace: Annotated[
        Path | None, option("--trace", "distributed: file for rank 0's Kineto trace of a step.", "FILE")
    ] = None
    check: Annotated[bool | None, option("--check/--no-check", "distributed: compare with serial training first.")] = (
        None
    )
    minutes: Annotated[float | None, option("--minutes", "campaign: begin no run that would end later.", "M")] = None
    yes: Annotated[
        bool | None, option("--yes", "Start processes beyond the cores or the memory of a CPU, too, otherwise refused.")
    ] = None
    as_json: AsJson = False


def measure(options: MeasureOptions) -> None:
    """Measures real torch work of a job on this machine, and writes it together with its blind forecast."""
    kind = options.kind
    if kind not in KINDS:
        raise PlanError("KIND", "there is no kind of this name", nearest(kind, KINDS), kind)
    options.refuse_others(SPECIAL, TAKEN[kind], kind, f"It takes {', '.join(TAKEN[kind])}")
    require_torch()
    if kind == "campaign":
        if options.device is not None or options.calibration is not None or options.change:
            rule = "a campaign names its device and jobs, and makes its own calibration"
            raise PlanError("measure campaign", rule, "Leave out --device, --calibration and --set")
        run_campaign(options.job, options.out or Path("measured"), options.minutes, options.as_json, bool(options.yes))
        return
    check_calibration_folder(options.calibration)
    file = options.out or Path("measured.json")
    for path, flag in ((file, "--out"), (options.trace, "--trace")):
        if path is not None and path.absolute().parent.is_dir():
            check_place(path, flag)
    job, device = load_long_form(options.job, options.change), options.device or "cuda"
    stated = {PLURAL.get(name, name): value for name, value in options.find_stated(TAKEN[kind]).items()}
    if kind in ("distributed", "collectives"):
        stated["crowded"] = stated.pop("yes", False)
    measure_kind = find_measuring(kind)
    measurement = measure_kind(job, device, file, calibration=options.calibration, command=quote_command(), **stated)
    if os.environ.get("RANK", "0") == "0":
        _show(measurement, file, options)


def _show(measurement: Any, file: Path, options: MeasureOptions) -> None:
    """Prints a measurement, or how far its forecast is off."""
    from meshcast.experiments.render.terminal.measurements import page, validate_files

    if options.kind == "collectives" and not options.as_json:
        say(f"wrote {file}: {len(measurement.rows)} rows", err=True)
        return
    emit_or_show(
        options.as_json,
        lambda: measurement.model_dump(mode="json"),
        lambda: page(validate_files(options.kind, [file])),
    )
