"""Import of training logs: the steps that a training program logged become a measurement file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from meshcast.hardware.errors import PlanError
from meshcast.simulator.formats.logs.read import LOG_FORMATS, read_log
from meshcast.simulator.formats.logs.training_log import Iteration
from meshcast.validation.measurements.forecasts import forecasters, without_interval
from meshcast.validation.measurements.imported_file import Origin
from meshcast.validation.measurements.measurement import Machine, Measurement, MeasurementRow

Framework = Literal["megatron", "torchtitan"]

LOGS: tuple[Framework, ...] = ("megatron", "torchtitan")
"""Frameworks whose logs are imported."""

WARMUP_LINES = 3
"""Default of `skip`: lines with compilation, first allocations and first connections."""


def import_training_log(
    path: Path,
    framework: Framework,
    job: Mapping[str, Any] | None = None,
    skip: int = WARMUP_LINES,
    tokens: int | None = None,
    gpus: int | None = None,
    calibration: Path | None = None,
    command: str = "",
) -> Measurement:
    """Imports the log of a training run.

    skip: number of first lines to leave out as warm-up.
    tokens, gpus: tokens per step and number of GPUs, without a job: torchtitan logs tokens/s of a single GPU, no times.
    Raises PlanError for a log that cannot be read, is too short, or has another global batch than the job.
    """
    if framework not in LOGS:
        raise PlanError("framework", f"logs of {', '.join(LOGS)} can be read", "Name one of them", framework)
    instrument = f"log of {LOG_FORMATS[framework].program}"
    iterations = read_log(path, framework).iterations
    kept = _skip_lines(iterations, skip)
    sources = forecasters(job, calibration) if job is not None else []
    if sources:
        report = sources[0].report
        tokens, gpus = tokens or report.tokens, gpus or report.job.cluster.gpus
        batch = report.job.batch.total
        if odd := next((iteration for iteration in kept if iteration.samples and iteration.samples != batch), None):
            rule = f"the job's global batch is {batch}, the log's is {odd.samples}"
            raise PlanError(odd.where, rule, "Name the job of this run, or a --skip past the batch-size ramp-up")
    rows = [
        MeasurementRow(
            name="step",
            forecasts={source.by: source.step for source in sources},
            samples=tuple(step_seconds(iteration, tokens, gpus) for iteration in kept),
            instrument=instrument,
            shape={"lines": len(kept), "first": kept[0].number, "last": kept[-1].number},
        )
    ]
    reserved = [iteration.reserved for iteration in kept if iteration.reserved is not None]
    notes = [f"the first {skip} of {len(iterations)} logged lines are left out as warm-up"]
    if reserved:
        peaks = {source.by: without_interval(source.report.peak_reserved) for source in sources}
        rows.append(
            MeasurementRow(
                name="peak reserved",
                quantity="bytes",
                forecasts=peaks,
                samples=tuple(reserved),
                instrument=instrument,
            )
        )
        notes.append("peak reserved: logged by one rank, forecast for the rank that needs most")
    gpu = sources[0].plan.job.cluster.gpu.name if sources else "unknown"
    return Origin(path, job, calibration, command).measurement(
        kind="distributed",
        title=f"a training run, from its {instrument}",
        machine=Machine(device="cuda", name=gpu, count=gpus or 1),
        rows=rows,
        settings={"skip": skip},
        notes=notes,
    )


def _skip_lines(iterations: Sequence[Iteration], skip: int) -> Sequence[Iteration]:
    """Returns the lines behind the first `skip`. Raises PlanError where none remains."""
    if skip < 0 or skip >= len(iterations):
        most = len(iterations) - 1
        lines = f"{most + 1:,} lines" if most else "one line"
        rule = f"the log has {lines} of iterations, and at least one must remain"
        raise PlanError("--skip", rule, f"Write 0 to {most:,}" if most else "Write --skip 0", skip)
    return iterations[skip:]


def step_seconds(
    iteration: Iteration, tokens: int | None = None, gpus: int | None = None, samples: int | None = None
) -> float:
    """Returns the seconds of an iteration: as logged, or from a throughput.

    tokens, samples: of a step. gpus: their number.
    Raises PlanError where these are unknown and the log has no times.
    """
    if iteration.seconds is not None:
        return iteration.seconds
    if iteration.samples_per_s is not None and (iteration.samples or samples):
        seconds = (iteration.samples or samples or 0) / iteration.samples_per_s
    elif not tokens or not gpus or iteration.tokens_per_s is None:
        rule = "this log gives tokens/s of one GPU and no times; tokens per step and number of GPUs are unknown"
        if iteration.samples_per_s is not None:
            rule = "this log gives sequences/s and no times; the global batch is unknown"
        raise PlanError(iteration.where, rule, "Name the job of the run, or add --tokens and --gpus")
    else:
        seconds = tokens / gpus / iteration.tokens_per_s
    if not isfinite(seconds):
        rule = "a step at this throughput would take longer than a number can say"
        raise PlanError(iteration.where, rule, "Leave the line out, or correct it", iteration.tokens_per_s)
    return seconds
