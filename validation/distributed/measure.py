"""``meshcast measure distributed`` and ``measure collectives``: writes the forecast, then runs the processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.ops import Collective, Transfer
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.distributed import collectives, launch, serial_check, trainer
from meshcast.validation.measurements.device import COUNTERS, Device
from meshcast.validation.measurements.forecasts import Forecaster, forecasters, with_interval
from meshcast.validation.measurements.measurement import ForecastValue, Machine, Measurement, MeasurementRow
from meshcast.validation.measurements.recording import (
    Progress,
    Recording,
    check_counts,
    check_names,
    make_blind,
    record,
)

AXIS = "world"
"""The only mesh axis of the plan with which single collectives are forecast."""


def print_progress(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------- training steps


def measure(
    job: Mapping[str, Any],
    device: str,
    out: Path,
    steps: int = 10,
    warmup: int = 3,
    calibration: Path | None = None,
    check: bool = True,
    trace: Path | None = None,
    command: str = "",
    progress: Progress = print_progress,
    crowded: bool = True,
) -> Measurement:
    """Measures time and peak memory of whole training steps with a process per rank, and writes `out`.

    steps, warmup: timed steps, and untimed steps before.
    check: first compare with serial training, if a single device has enough memory for it.
    trace: file for rank 0's Kineto trace of a further step.
    crowded: also start more processes than a CPU has cores, or memory for; see `launch.check_room`.
    Raises PlanError for a job that the reference trainer does not support, and if a process fails. An interrupted
    measurement is written as far as it got. Under torchrun only rank 0 writes.
    """
    check_counts(steps=(steps, 1), warmup=(warmup, 1))
    sources = forecasters(job, calibration)
    plan = sources[0].plan
    trainer.check(plan)
    trainer.check_graphs(plan, device)
    if trace is not None and not trace.resolve().parent.is_dir():
        raise PlanError("--trace", "its folder does not exist", "Name a file in an existing folder", str(trace))
    this_device = _device(device)
    launch.check_world_size(plan.mesh.world, device)
    machine = this_device.machine(plan.mesh.world)
    notes, checked = [], check and serial_check.fits_serially(plan, machine.memory)
    if check and not checked:
        notes.append("not compared with serial training: the whole model does not fit on one device")
    title = f"{plan.job.model.name} on {plan.mesh.world} x {machine.name}, {_plan_label(plan)}"
    settings = {"steps": steps, "warmup": warmup, "device": device, "check": checked}
    rows, notes = _rows(plan, sources, device), [*notes, *_remarks(device)]
    if not crowded:
        needed = sum(row.forecasts[sources[-1].by].value for row in rows if row.name.endswith("peak allocated"))
        launch.check_room(plan.mesh.world, machine, needed)
    blind = make_blind("distributed", title, machine, plan.job.to_dict(), rows, settings, calibration, command, notes)
    task = {"what": "steps", "job": dict(job), "device": device, "steps": steps, "warmup": warmup}
    task["trace"] = str(trace.resolve()) if trace else None
    # In separate processes: rank 0 holds the whole model for the comparison, which would count as reserved memory.
    first = [{"what": "checks", "jobs": [dict(job)], "device": device}] if checked else []

    def complete(recording: Recording, messages: list[dict[str, Any]]) -> None:
        """Adds what the ranks report to a recording: rows of steps and peaks, comparisons with serial training."""
        seconds = [message["step"] for message in messages if "step" in message]
        peaks = next((message["peaks"] for message in messages if "peaks" in message), ())
        recording.rows += _rows(plan, sources, device, seconds, peaks)
        checks = [serial_check.SerialCheck(**message["check"]) for message in messages if "check" in message]
        recording.notes += map(str, checks)

    return _run_and_record(blind, out, [*first, task], plan.mesh.world, complete, progress)


def _rows(
    plan: Plan,
    sources: Sequence[Forecaster],
    device: str,
    steps: Sequence[float] = (),
    peaks: Sequence[Mapping[str, Any]] = (),
) -> list[MeasurementRow]:
    """Returns rows for the step time and for the peak memory of every rank."""
    batch, group = plan.job.batch, _plan_label(plan)
    shape = {**plan.mesh.named_axes, "micro": batch.micro, "sequence": batch.sequence, "global": batch.total}
    clock = "perf_counter from a barrier to the device's end, slowest rank"
    forecasts = {source.by: source.step for source in sources}
    rows = [
        MeasurementRow(
            name="step", group=group, forecasts=forecasts, samples=tuple(steps), instrument=clock, shape=shape
        )
    ]
    kinds = COUNTERS if device == "cuda" else COUNTERS[:1]
    for rank in range(plan.mesh.world):
        at = rank // plan.mesh.stride(plan.ranks.pipeline_axis) % plan.shape.p if plan.shape.p > 1 else 0
        of_rank = peaks[rank] if peaks else {}
        for kind in kinds:
            row = MeasurementRow(
                name=f"rank {rank} peak {kind}",
                group=group,
                quantity="bytes",
                forecasts={source.by: source.peak_memory(at, kind) for source in sources},
                samples=(of_rank[kind],) if of_rank else (),
                instrument=of_rank.get("instrument", ""),
                shape={"rank": rank, "pipeline device": at},
            )
            rows.append(row)
    return rows


def _plan_label(plan: Plan) -> str:
    """Returns the degrees of the plan above 1: ``pp 2 x tp 2``."""
    return " x ".join(f"{axis} {size}" for axis, size in plan.mesh.named_axes.items() if size > 1) or "one device"


# ------------------------------------------------------------------------------------- collectives


def measure_collectives(
    job: Mapping[str, Any],
    device: str,
    out: Path,
    sizes: Sequence[int] = collectives.SIZES,
    operations: Sequence[str] = collectives.OPERATIONS,
    repeat: int = 20,
    warmup: int = 5,
    calibration: Path | None = None,
    busy: bool = False,
    command: str = "",
    progress: Progress = print_progress,
    crowded: bool = True,
) -> Measurement:
    """Measures single collectives among all ranks of the job's cluster, and writes `out`.

    sizes: bytes of the largest buffer on a rank, as nccl-tests counts them.
    repeat, warmup: samples, and untimed calls before.
    busy: ranks compute before each call, see `collectives.time_collectives`.
    crowded: as of `measure`.
    Raises PlanError as `measure` does.
    """
    check_counts(repeat=(repeat, 1), warmup=(warmup, 0), **{f"size {size}": (size, 1) for size in sizes})
    check_names("--operations", operations, collectives.OPERATIONS, "collective")
    world = forecasters(job, None)[0].plan.job.cluster.gpus
    if world < 2:
        raise PlanError("cluster.gpus", "a collective needs at least two ranks", "Write 2 or more", world)
    entry = {"use": "data/ddp", "over": AXIS}
    one_axis = {**job, "plan": {"mesh": {AXIS: world}, "schemes": [entry]}, "batch": {"global": world}}
    sources = forecasters(one_axis, calibration)
    this_device = _device(device)
    launch.check_world_size(world, device)
    machine = this_device.machine(world)
    if not crowded:
        launch.check_room(world, machine)
    title, long_form = f"collectives of {world} x {machine.name}", sources[0].plan.job.to_dict()
    calls = 1 if busy else collectives.CALLS_PER_SAMPLE[this_device.kind]
    settings = {"repeat": repeat, "warmup": warmup, "device": device, "calls": calls, "busy": busy}
    pairs, notes = [(operation, size) for operation in operations for size in sizes], _remarks(device)
    rows = (_row(sources, *pair, world, ()) for pair in pairs)
    blind = make_blind("collectives", title, machine, long_form, rows, settings, calibration, command, notes)
    task: dict[str, Any] = {"what": "collectives", "device": device, "busy": busy}
    task |= {"operations": list(operations), "sizes": list(sizes), "repeat": repeat, "warmup": warmup}

    def complete(recording: Recording, messages: list[dict[str, Any]]) -> None:
        samples = {
            (message["operation"], message["bytes"]): message["seconds"]
            for message in messages
            if "operation" in message
        }
        recording.rows += [_row(sources, *pair, world, samples.get(pair, ())) for pair in pairs]

    return _run_and_record(blind, out, [task], world, complete, progress)


def _row(
    sources: Sequence[Forecaster], operation: str, size: int, world: int, samples: Sequence[float]
) -> MeasurementRow:
    return MeasurementRow(
        name=f"{operation} {size}",
        forecasts={source.by: _forecast(source, operation, size, world) for source in sources},
        samples=tuple(samples),
        instrument="calls in a row from a barrier, mean over calls and ranks",
        shape={"operation": operation, "bytes": size, "members": world},
    )


def _forecast(source: Forecaster, operation: str, size: int, world: int) -> ForecastValue:
    """Returns the seconds of a collective, or of a message until its arrival."""
    if operation != "send_recv":
        return source.estimate_works([Collective(operation, size, (AXIS,))])
    estimate = source.costs.estimate(Transfer(size, AXIS, 0, world - 1))
    return with_interval(estimate.seconds + estimate.latency, estimate.sigma)


# ---------------------------------------------------------------------------------------- running and writing


def _run_and_record(
    blind: Measurement,
    out: Path,
    tasks: Sequence[Mapping[str, Any]],
    world: int,
    complete: Callable[[Recording, list[dict[str, Any]]], None],
    progress: Progress,
) -> Measurement:
    """Writes the blind forecast, runs the tasks in turn, and writes what `complete` records of their messages; also if
    they are interrupted."""
    writes, messages = launch.is_rank_zero(), list[dict[str, Any]]()
    with record(blind, out, writes=writes) as recording:
        if writes:
            progress(f"forecast written to {out}; starting {world} processes")
        try:
            with closing(launch.run_all(tasks, world)) as arriving:
                for message in arriving:
                    messages.append(message)
                    progress(_describe(message))
        finally:
            machines = (Machine(**message["machine"]) for message in messages if "machine" in message)
            recording.machine = next(machines, None)
            complete(recording, messages)
    return recording.measurement


def _describe(message: Mapping[str, Any]) -> str:
    """Returns a message of the worker as a line of progress."""
    if "check" in message:
        return str(serial_check.SerialCheck(**message["check"]))
    if "peaks" in message:
        return "peak allocated: " + ", ".join(f"{peak['allocated'] / 2**20:,.1f} MiB" for peak in message["peaks"])
    if "operation" in message:
        middle = sorted(message["seconds"])[len(message["seconds"]) // 2]
        return f"{message['operation']} {message['bytes']:,} bytes: {middle * 1e6:,.1f} us"
    if "machine" in message:
        during = message["machine"]["states"].get("during")
        return f"GPU: {during['sm_clock']} MHz, {during['power']} W" if during else "no state of a GPU"
    if "trace" in message:
        return f"trace written to {message['trace']}"
    name, seconds = next(iter(message.items()))
    return f"{name}: {seconds * 1e3:,.1f} ms"


def _device(kind: str) -> Device:
    """Returns the device of this process under torchrun; otherwise the first device, which other processes are going to
    use."""
    if kind == "cuda" and launch.under_torchrun():
        return Device.of(kind, int(os.environ.get("LOCAL_RANK", "0")))
    return Device.of(kind, select=False)


def _remarks(device: str) -> tuple[str, ...]:
    """Returns notes on how the processes were started."""
    if device == "cpu" and launch.under_torchrun() and "GLIBC_TUNABLES" not in os.environ:
        return (f"started without GLIBC_TUNABLES={launch.MALLOC_TUNABLES}: freed memory returns to the kernel",)
    return ()
