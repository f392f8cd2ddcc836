"""``meshcast measure stages``: what every device of a pipeline does, one after another on the one that is there."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hardware.errors import PlanError, nearest
from simulator.job.load import load_job
from simulator.plan.plan import Plan
from validation.kernels.modes import check_times
from validation.measurements.device import Device, versions
from validation.measurements.forecasts import Forecaster, forecasters
from validation.measurements.measurement import ForecastValue, Measurement, MeasurementRow, utc_now
from validation.reference.model import check
from validation.reference.orders import KINDS, action_orders
from validation.stages.replay import Played, Replay
from validation.stages.together import Turn, actions, price_of, step

RECOMPUTE = ("none", "selective", "full")

Said = Callable[[str], None]
"""Is told what is being measured."""


def measure(
    job: Mapping[str, Any],
    device: str,
    out: Path,
    recompute: Sequence[str] = (),
    repeat: int = 3,
    warmup: int = 1,
    calibration: Path | None = None,
    command: str = "",
    said: Said = lambda text: None,
) -> Measurement:
    """Forecasts the actions, the memory and the step of `job`, writes that to `out`, measures, and writes it again.

    recompute: none, selective, full, each measured by itself; what the job says if none is given. repeat, warmup:
    passes through the order of each device. An interrupt leaves in the file what was measured until then.
    Raises PlanError for a job or a device that there is not.
    """
    on = Device.of(device)
    check_times(warmup, repeat)
    variants = [Variant(forecasters(one, calibration), name) for one, name in _jobs(job, recompute)]
    for variant in variants:
        check(variant.plan)
        action_orders(variant.plan)
        _check_replicas(variant.plan)
    planned = [list(variant.rows(on)) for variant in variants]
    machine = on.machine()
    measurement = Measurement(
        kind="stages",
        title=f"Pipeline stages of {variants[0].plan.job.model.name} on {machine.name}",
        machine=machine.model_copy(update={"clocks": on.clocks("before")}),
        versions=versions(),
        command=command,
        job=dict(job),
        settings={"recompute": [variant.recompute for variant in variants], "warmup": warmup, "repeat": repeat},
        calibration=str(calibration) if calibration is not None else None,
        forecast_written=utc_now(),
        rows=tuple(row for rows in planned for row in rows),
    )
    measurement.write(out)
    rows: list[MeasurementRow] = []
    notes: list[str] = []
    try:
        for variant, waiting in zip(variants, planned, strict=True):
            found = Found(variant, on, warmup, repeat, said)
            try:
                found.measure()
            finally:
                notes += found.notes
                rows += [found.filled(row) for row in waiting]
    except KeyboardInterrupt:
        notes.append("interrupted: rows without samples were not measured")
        raise
    finally:
        clocks = {**measurement.machine.clocks, **on.clocks("after")}
        rows += measurement.rows[len(rows) :]
        measurement = measurement.with_samples(rows, tuple(notes), machine.model_copy(update={"clocks": clocks}))
        measurement.write(out)
    return measurement


def _jobs(job: Mapping[str, Any], recompute: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The job with each way to recompute in place of its own, and that way's name."""
    long = load_job(job).to_dict()["plan"]
    own = [one["use"] for one in long["schemes"] if one["use"].startswith("memory/")]
    if not recompute:
        yield job, own[0].removeprefix("memory/recompute-") if own else "none"
    for name in recompute:
        if name not in RECOMPUTE:
            raise PlanError("--recompute", "there is nothing of this name", nearest(name, RECOMPUTE), name)
        kept = [one for one in long["schemes"] if not one["use"].startswith("memory/")]
        more = [] if name == "none" else [{"use": f"memory/recompute-{name}"}]
        yield {**job, "plan": {**long, "schemes": [*kept, *more]}}, name


def _check_replicas(plan: Plan) -> None:
    """One device is one replica: it holds no shards of others."""
    for scheme in plan.family("data"):
        if (size := plan.mesh.size(scheme.over)) > 1 and scheme.use != "data/ddp":
            rule = f"one device does not show {scheme.use}, which divides states over replicas"
            remedy = "Measure it with meshcast measure distributed, or one replica here: dp = 1"
            raise PlanError(f"plan.{scheme.axes[0]}", rule, remedy, size)


@dataclass(frozen=True)
class Variant:
    """A job with one way to recompute."""

    forecasters: Sequence[Forecaster]
    recompute: str

    @property
    def plan(self) -> Plan:
        return self.forecasters[0].plan

    @property
    def group(self) -> str:
        return f"recompute {self.recompute}"

    def label(self, turn: Turn) -> str:
        """The name of the row of an action."""
        stage, kind = turn
        more = f" stage {stage}" if self.plan.shape.v > 1 else ""
        return f"device {self.device(stage)}{more} {kind}"

    def device(self, stage: int) -> int:
        return self.plan.device(stage)

    def rows(self, on: Device) -> Iterator[MeasurementRow]:
        """All rows, forecast and not measured yet."""
        known = {one.by: actions(one) for one in self.forecasters}
        turns = next(iter(known.values()))[0]
        for turn in sorted(turns, key=lambda turn: (self.device(turn[0]), turn[0], KINDS.index(turn[1]))):
            layers = len(self.plan.layers_of(turn[0]))
            shape = {"stage": turn[0], "layers": layers}
            yield self._row(self.label(turn), {by: found[turn] for by, (found, _) in known.items()}, shape)
        for device in range(self.plan.shape.p):
            updates = {by: found[device] for by, (_, found) in known.items()}
            yield self._row(f"device {device} optimizer", updates, {})
            for what in ("allocated", "reserved") if on.kind == "cuda" else ("allocated",):
                found = {one.by: _memory(one, device, what) for one in self.forecasters}
                yield self._row(f"device {device} peak {what}", found, {}, "bytes")
        yield self._row("step (put together)", {one.by: one.step for one in self.forecasters}, {})

    def _row(
        self, name: str, found: dict[str, ForecastValue], shape: dict[str, Any], quantity: Any = "seconds"
    ) -> MeasurementRow:
        return MeasurementRow(name=name, group=self.group, quantity=quantity, forecasts=found, shape=shape)


def _memory(forecaster: Forecaster, device: int, what: str) -> ForecastValue:
    """Bytes at the peak; no interval is forecast for them."""
    nbytes = forecaster.report.play.peaks[device].total
    if what == "reserved":
        nbytes *= forecaster.plan.job.framework.memory.reserved_share
    return ForecastValue(value=nbytes, low=nbytes, high=nbytes)


class Found:
    """What is measured of a variant, by the names of its rows."""

    def __init__(self, variant: Variant, on: Device, warmup: int, repeat: int, said: Said) -> None:
        self.variant, self.on, self.said = variant, on, said
        self.warmup, self.repeat = warmup, repeat
        self.samples: dict[str, tuple[list[float], str]] = {}
        self.notes: list[str] = []

    def filled(self, row: MeasurementRow) -> MeasurementRow:
        """The row with its samples, if there are any."""
        samples, instrument = self.samples.get(row.name, ([], ""))
        return row.model_copy(update={"samples": tuple(samples), "instrument": instrument})

    def measure(self) -> None:
        """Plays every device, then the step."""
        passes: list[list[Played]] = []
        for device in range(self.variant.plan.shape.p):
            self.said(f"{self.variant.group}: device {device}")
            try:
                passes.append(self._device(device))
            except torch.OutOfMemoryError:
                self.notes.append(f"{self.variant.group}: device {device} does not fit, so no step is put together")
                return
            # The next device begins with empty memory, as it would by itself.
            gc.collect()
            if self.on.kind == "cuda":
                torch.cuda.empty_cache()
        price = price_of(self.variant.forecasters[-1])
        steps = [self._step(price, list(some)) for some in zip(*passes, strict=True)]
        self.samples["step (put together)"] = steps, f"{CLOCK}; what is sent: as forecast"

    def _device(self, device: int) -> list[Played]:
        replay = Replay(self.variant.plan, device, self.on)
        for _ in range(self.warmup):
            replay.play()
        passes = [replay.play() for _ in range(self.repeat)]
        for turn in passes[0].seconds:
            seconds = [one for some in passes for one in some.seconds[turn]]
            self.samples[self.variant.label(turn)] = seconds, CLOCK
        self.samples[f"device {device} optimizer"] = [some.optimizer for some in passes], CLOCK
        with self.on.peak() as peak:
            replay.play()
        self.samples[f"device {device} peak allocated"] = [float(peak.allocated)], peak.instrument
        if peak.reserved is not None:
            self.samples[f"device {device} peak reserved"] = [float(peak.reserved)], peak.instrument
        return passes

    def _step(self, price: Any, devices: list[Played]) -> float:
        """A step of one pass of each device, every action at the median of its stage and kind."""
        seconds = {turn: statistics.median(some) for one in devices for turn, some in one.seconds.items()}
        return step(self.variant.plan, price, seconds, [one.optimizer for one in devices])


CLOCK = "time.perf_counter between synchronisations"
