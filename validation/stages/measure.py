"""``meshcast measure stages``: runs the pipeline devices of a job in turn on a single real device."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.forecasts import Forecaster, forecasters
from meshcast.validation.measurements.measurement import ForecastValue, Measurement, MeasurementRow
from meshcast.validation.measurements.recording import Progress, check_counts, check_names, make_blind, record
from meshcast.validation.reference.model import check
from meshcast.validation.reference.orders import KINDS, action_orders
from meshcast.validation.stages.action_forecasts import StageAction, forecast_actions, make_price
from meshcast.validation.stages.assembled_step import assemble_step
from meshcast.validation.stages.replay import DeviceReplay, PlayedOrder

CLOCK = "time.perf_counter between synchronisations"

RECOMPUTE = ("none", "selective", "full")


def measure(
    job: Mapping[str, Any],
    device: str,
    out: Path,
    recompute: Sequence[str] = (),
    repeat: int = 3,
    warmup: int = 1,
    calibration: Path | None = None,
    command: str = "",
    progress: Progress = lambda text: None,
) -> Measurement:
    """Measures time and memory of a job's pipeline actions, device by device, and writes `out`.

    recompute: choices out of none, selective and full, each measured by itself; empty: that of the job.
    repeat, warmup: timed and untimed runs through the order of each device.
    An interrupted measurement is written as far as it got.
    Raises PlanError for a job that the reference trainer does not support, or a device that this machine does not have.
    """
    on = Device.of(device)
    check_counts(warmup=(warmup, 0), repeat=(repeat, 1))
    variants = [
        Variant(forecasters(variant_job, calibration), name) for variant_job, name in recompute_jobs(job, recompute)
    ]
    for variant in variants:
        check(variant.plan)
        action_orders(variant.plan)
        check_replicas(variant.plan)
    planned = [list(variant.rows(on)) for variant in variants]
    machine = on.machine()
    title = f"Pipeline stages of {variants[0].plan.job.model.name} on {machine.name}"
    rows = (row for rows in planned for row in rows)
    settings = {"recompute": [variant.recompute for variant in variants], "warmup": warmup, "repeat": repeat}
    blind = make_blind("stages", title, machine, job, rows, settings, calibration, command)
    with record(blind, out, on) as recording:
        for variant, waiting in zip(variants, planned, strict=True):
            samples = VariantSamples(variant, on, warmup, repeat, progress)
            try:
                samples.measure()
            finally:
                recording.notes += samples.notes
                recording.rows += [samples.add_samples(row) for row in waiting]
    return recording.measurement


def recompute_jobs(job: Mapping[str, Any], recompute: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields the job with each of the choices in `recompute` (that of the job if there are none), and the choice's
    name."""
    long = load_job(job).to_dict()["plan"]
    memory = [entry["use"] for entry in long["schemes"] if entry["use"].startswith("memory/")]
    if not recompute:
        yield job, memory[0].removeprefix("memory/recompute-") if memory else "none"
    check_names("--recompute", recompute, RECOMPUTE, "recomputation")
    for name in recompute:
        kept = [entry for entry in long["schemes"] if not entry["use"].startswith("memory/")]
        more = [] if name == "none" else [{"use": f"memory/recompute-{name}"}]
        yield {**job, "plan": {**long, "schemes": [*kept, *more]}}, name


def check_replicas(plan: Plan) -> None:
    """Raises PlanError for state that is sharded over replicas, which a single device cannot show."""
    for scheme in plan.family("data"):
        if (size := plan.mesh.size(scheme.over)) > 1 and scheme.use != "data/ddp":
            rule = f"one device cannot show {scheme.use}, which shards state over replicas"
            remedy = "Measure it with meshcast measure distributed, or one replica here: dp = 1"
            raise PlanError(f"plan.{scheme.axes[0]}", rule, remedy, size)


@dataclass(frozen=True)
class Variant:
    """A job with a choice of recomputation.

    forecasters: from the catalog, and from a calibration if there is any.
    recompute: of `RECOMPUTE`.
    """

    forecasters: Sequence[Forecaster]
    recompute: str

    @property
    def plan(self) -> Plan:
        return self.forecasters[0].plan

    @property
    def group(self) -> str:
        return f"recompute {self.recompute}"

    def label(self, action: StageAction) -> str:
        """Returns the name of an action's row."""
        stage, kind = action
        more = f" stage {stage}" if self.plan.shape.v > 1 else ""
        return f"device {self.device(stage)}{more} {kind}"

    def device(self, stage: int) -> int:
        return self.plan.model_parts.device(stage)

    def rows(self, on: Device) -> Iterator[MeasurementRow]:
        """Yields all rows with their forecasts, before the measurement."""
        forecasts = {forecaster.by: forecast_actions(forecaster) for forecaster in self.forecasters}
        actions = next(iter(forecasts.values()))[0]
        for action in sorted(actions, key=lambda action: (self.device(action[0]), action[0], KINDS.index(action[1]))):
            shape = {"stage": action[0], "layers": len(self.plan.model_parts.layers_of(action[0]))}
            yield self._row(self.label(action), {by: values[action] for by, (values, _) in forecasts.items()}, shape)
        for device in range(self.plan.shape.p):
            updates = {by: values[device] for by, (_, values) in forecasts.items()}
            yield self._row(f"device {device} optimizer", updates, {})
            for what in on.memory_counters:
                peaks = {forecaster.by: forecaster.peak_memory(device, what) for forecaster in self.forecasters}
                yield self._row(f"device {device} peak {what}", peaks, {}, "bytes")
        yield self._row("step (put together)", {forecaster.by: forecaster.step for forecaster in self.forecasters}, {})

    def _row(
        self, name: str, forecasts: dict[str, ForecastValue], shape: dict[str, Any], quantity: Any = "seconds"
    ) -> MeasurementRow:
        return MeasurementRow(name=name, group=self.group, quantity=quantity, forecasts=forecasts, shape=shape)


class VariantSamples:
    """Samples of a variant by the names of its rows, each with its instrument."""

    def __init__(self, variant: Variant, on: Device, warmup: int, repeat: int, progress: Progress) -> None:
        self.variant, self.on, self.progress = variant, on, progress
        self.warmup, self.repeat = warmup, repeat
        self.samples: dict[str, tuple[list[float], str]] = {}
        self.notes: list[str] = []

    def add_samples(self, row: MeasurementRow) -> MeasurementRow:
        """Returns the row with its samples, if it was measured."""
        samples, instrument = self.samples.get(row.name, ([], ""))
        return row.model_copy(update={"samples": tuple(samples), "instrument": instrument})

    def measure(self) -> None:
        """Runs every device, then assembles the step."""
        passes: list[list[PlayedOrder]] = []
        for device in range(self.variant.plan.shape.p):
            self.progress(f"{self.variant.group}: device {device}")
            try:
                passes.append(self._device(device))
            except torch.OutOfMemoryError:
                self.notes.append(f"{self.variant.group}: device {device} does not fit, so no step is assembled")
                return
            self.on.release_cache()  # the next device starts with empty memory
        price = make_price(self.variant.forecasters[-1])
        steps = [self._step(price, list(some)) for some in zip(*passes, strict=True)]
        self.samples["step (put together)"] = steps, f"{CLOCK}; communication: as forecast"

    def _device(self, device: int) -> list[PlayedOrder]:
        replay = DeviceReplay(self.variant.plan, device, self.on)
        self.on.release_cache()
        for _ in self.on.warm_up(self.warmup):
            replay.play()
        passes = [replay.play() for _ in range(self.repeat)]
        for action in passes[0].seconds:
            seconds = [duration for some in passes for duration in some.seconds[action]]
            self.samples[self.variant.label(action)] = seconds, CLOCK
        self.samples[f"device {device} optimizer"] = [some.optimizer for some in passes], CLOCK
        with self.on.peak() as peak:
            replay.play()
        for what in self.on.memory_counters:
            self.samples[f"device {device} peak {what}"] = [float(getattr(peak, what))], peak.instrument
        return passes

    def _step(self, price: Any, devices: list[PlayedOrder]) -> float:
        """Returns the seconds of a step assembled from a run of each device, each action at its median."""
        seconds = {action: statistics.median(some) for order in devices for action, some in order.seconds.items()}
        return assemble_step(self.variant.plan, price, seconds, [order.optimizer for order in devices])
