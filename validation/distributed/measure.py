"""``measure distributed`` and ``measure collectives``: a forecast is written, then processes are started."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hardware.errors import PlanError, nearest
from simulator.ir.ops import Collective, Transfer
from simulator.plan.plan import Plan
from simulator.report.metrics import Z90
from validation.distributed import collectives, launch, serial, trainer
from validation.measurements.device import Device, versions
from validation.measurements.forecasts import Forecaster, forecasters
from validation.measurements.measurement import ForecastValue, Measurement, MeasurementRow, utc_now

Say = Callable[[str], None]
"""Takes a line of progress."""

AXIS = "world"
"""The only axis of the plan that collectives alone are forecast with."""


def aloud(line: str) -> None:
    """Progress for people, beside the answer."""
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
    say: Say = aloud,
) -> Measurement:
    """Times whole training steps of `job` and watches their memory, one process a rank, and writes `out`.

    check: sharded training is first compared with serial training, where one device has the memory for that. trace:
    where to write rank 0's Kineto trace of one more step. Under torchrun only rank 0 writes. Raises PlanError for a job
    that the reference trainer does not run, and where a process fails; interrupted, it writes what it has.
    """
    _counts(steps=(steps, 1), warmup=(warmup, 1))
    own = forecasters(job, calibration)
    plan = own[0].plan
    trainer.check(plan)
    if trace is not None and not trace.resolve().parent.is_dir():
        raise PlanError("--trace", "there is no such folder", "Name a file in a folder of yours", str(trace))
    one = _device(device)
    launch.check(plan.mesh.world, device)
    machine = one.machine(plan.mesh.world)
    notes, checked = [], check and serial.affordable(plan, machine.memory)
    if check and not checked:
        notes.append("not compared with serial training: one device has not the memory for the whole model")
    begun = Measurement(
        kind="distributed",
        title=f"{plan.job.model.name} on {plan.mesh.world} x {machine.name}, {_axes(plan)}",
        machine=machine,
        versions=versions(),
        command=command,
        job=plan.job.to_dict(),
        settings={"steps": steps, "warmup": warmup, "device": device, "check": checked},
        calibration=str(calibration) if calibration else None,
        forecast_written=utc_now(),
        notes=(*notes, *_remarks(device)),
        rows=tuple(_rows(plan, own, device)),
    )
    task = {"what": "steps", "job": dict(job), "device": device, "steps": steps, "warmup": warmup, "check": checked}
    task["trace"] = str(trace.resolve()) if trace else None

    def finished(found: list[dict[str, Any]]) -> Measurement:
        peaks = next((one["peaks"] for one in found if "peaks" in one), ())
        rows = _rows(plan, own, device, [one["step"] for one in found if "step" in one], peaks)
        return begun.with_samples(rows, tuple(str(serial.Check(**one["check"])) for one in found if "check" in one))

    return _through(begun, out, task, plan.mesh.world, finished, say)


def _rows(
    plan: Plan,
    own: Sequence[Forecaster],
    device: str,
    steps: Sequence[float] = (),
    peaks: Sequence[Mapping[str, Any]] = (),
) -> list[MeasurementRow]:
    """The step's time, and the memory of every rank; a GPU's allocator tells what it reserves, too."""
    batch, group = plan.job.batch, _axes(plan)
    shape = {**plan.mesh.named_axes, "micro": batch.micro, "sequence": batch.sequence, "global": batch.total}
    clock = "perf_counter from a barrier to the device's end, slowest rank"
    forecasts = {one.by: one.step for one in own}
    rows = [
        MeasurementRow(
            name="step", group=group, forecasts=forecasts, samples=tuple(steps), instrument=clock, shape=shape
        )
    ]
    kinds = ["allocated", "reserved"] if device == "cuda" else ["allocated"]
    for rank in range(plan.mesh.world):
        at = rank // plan.mesh.stride(plan.pipeline_axis) % plan.shape.p if plan.shape.p > 1 else 0
        found = peaks[rank] if peaks else {}
        for kind in kinds:
            row = MeasurementRow(
                name=f"rank {rank} peak {kind}",
                group=group,
                quantity="bytes",
                forecasts={one.by: _memory(one, at, kind) for one in own},
                samples=(found[kind],) if found else (),
                instrument=found.get("instrument", ""),
                shape={"rank": rank, "pipeline device": at},
            )
            rows.append(row)
    return rows


def _memory(own: Forecaster, at: int, kind: str) -> ForecastValue:
    """Bytes at the peak of a pipeline device; a forecast of memory has no interval."""
    share = own.plan.job.framework.memory.reserved_share if kind == "reserved" else 1.0
    nbytes = own.report.play.peaks[at].total * share
    return ForecastValue(value=nbytes, low=nbytes, high=nbytes)


def _axes(plan: Plan) -> str:
    """``pp 2 x tp 2``; axes of one are left out."""
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
    say: Say = aloud,
) -> Measurement:
    """Times collectives among all ranks of `job`'s cluster, and writes `out`.

    sizes: bytes of the largest buffer on one rank, as nccl-tests counts them. busy: each after some work of the ranks'
    own, see `collectives.timed`. Raises PlanError as `measure`.
    """
    _counts(repeat=(repeat, 1), warmup=(warmup, 0), **{f"size {size}": (size, 1) for size in sizes})
    for operation in operations:
        if operation not in collectives.OPERATIONS:
            rule = "no such collective"
            raise PlanError("--operations", rule, nearest(operation, collectives.OPERATIONS), operation)
    world = forecasters(job, None)[0].plan.mesh.world
    if world < 2:
        raise PlanError("cluster.gpus", "one rank has nobody to talk to", "Write 2 or more", world)
    entry = {"use": "data/ddp", "over": AXIS}
    alone = {**job, "plan": {"mesh": {AXIS: world}, "schemes": [entry]}, "batch": {"global": world}}
    own = forecasters(alone, calibration)
    one = _device(device)
    launch.check(world, device)
    machine = one.machine(world)
    begun = Measurement(
        kind="collectives",
        title=f"collectives of {world} x {machine.name}",
        machine=machine,
        versions=versions(),
        command=command,
        job=own[0].plan.job.to_dict(),
        settings={"repeat": repeat, "warmup": warmup, "device": device, "calls": collectives.CALLS, "busy": busy},
        calibration=str(calibration) if calibration else None,
        forecast_written=utc_now(),
        notes=_remarks(device),
        rows=tuple(_row(own, operation, size, world, ()) for operation in operations for size in sizes),
    )
    task: dict[str, Any] = {"what": "collectives", "device": device, "busy": busy}
    task |= {"operations": list(operations), "sizes": list(sizes)}

    def finished(found: list[dict[str, Any]]) -> Measurement:
        samples = {(one["operation"], one["bytes"]): one["seconds"] for one in found if "operation" in one}
        pairs = [(operation, size) for operation in operations for size in sizes]
        return begun.with_samples([_row(own, *pair, world, samples.get(pair, ())) for pair in pairs])

    return _through(begun, out, task | {"repeat": repeat, "warmup": warmup}, world, finished, say)


def _row(own: Sequence[Forecaster], operation: str, size: int, world: int, samples: Sequence[float]) -> MeasurementRow:
    return MeasurementRow(
        name=f"{operation} {size}",
        forecasts={one.by: _price(one, operation, size, world) for one in own},
        samples=tuple(samples),
        instrument=f"{collectives.CALLS} calls in a row from a barrier, slowest rank",
        shape={"operation": operation, "bytes": size, "members": world},
    )


def _price(own: Forecaster, operation: str, size: int, world: int) -> ForecastValue:
    """Seconds of a collective; of a message until it is there."""
    if operation != "send_recv":
        return own.estimate_works([Collective(operation, size, (AXIS,))])
    one = own.costs.estimate(Transfer(size, AXIS, 0, world - 1))
    total, reach = one.seconds + one.latency, math.exp(Z90 * one.spread)
    return ForecastValue(value=total, low=total / reach, high=total * reach)


# ---------------------------------------------------------------------------------------- the protocol


def _through(
    begun: Measurement,
    out: Path,
    task: Mapping[str, Any],
    world: int,
    finished: Callable[[list[dict[str, Any]]], Measurement],
    say: Say,
) -> Measurement:
    """Writes `begun`, does the task, writes what `finished` makes of what was told; of an interrupted task, too."""
    speaks = launch.first()
    if speaks:
        begun.write(out)
        say(f"forecast written to {out}; starting {world} processes")
    found: list[dict[str, Any]] = []
    try:
        with closing(launch.run(task, world)) as pieces:
            for one in pieces:
                found.append(one)
                say(_line(one))
    except (KeyboardInterrupt, PlanError) as error:
        if speaks and found:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"not finished: {error}"
            done = finished(found)
            done.model_copy(update={"notes": (*done.notes, why)}).write(out)
            say(f"what was measured until then is in {out}")
        raise
    done = finished(found)
    if speaks:
        done.write(out)
    return done


def _line(told: Mapping[str, Any]) -> str:
    """What was told, for people."""
    if "check" in told:
        return str(serial.Check(**told["check"]))
    if "peaks" in told:
        return "peak allocated: " + ", ".join(f"{one['allocated'] / 2**20:,.1f} MiB" for one in told["peaks"])
    if "operation" in told:
        middle = sorted(told["seconds"])[len(told["seconds"]) // 2]
        return f"{told['operation']} {told['bytes']:,} bytes: {middle * 1e6:,.1f} us"
    if "trace" in told:
        return f"trace written to {told['trace']}"
    name, seconds = next(iter(told.items()))
    return f"{name}: {seconds * 1e3:,.1f} ms"


def _device(kind: str) -> Device:
    return Device.of(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" and launch.joined() else 0)


def _remarks(device: str) -> tuple[str, ...]:
    """What a reader should know about how the processes were started."""
    if device == "cpu" and launch.joined() and "GLIBC_TUNABLES" not in os.environ:
        return (f"started by hand: without GLIBC_TUNABLES={launch.FRUGAL} freed memory goes back to the system",)
    return ()


def _counts(**given: tuple[int, int]) -> None:
    """Raises PlanError for a count below what is needed."""
    for name, (value, least) in given.items():
        if value < least:
            raise PlanError(f"--{name}", f"at least {least} is needed", f"Write {least} or more", value)
