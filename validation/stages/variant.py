"""A job with one choice of recomputation, and the rows that are forecast and measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.validation.measurements.device import Device
from meshcast.validation.measurements.forecasts import Forecaster
from meshcast.validation.measurements.measurement import ForecastValue, MeasurementRow
from meshcast.validation.reference.orders import KINDS
from meshcast.validation.stages.action_forecasts import StageAction, forecast_actions

RECOMPUTE = ("none", "selective", "full")


def recompute_jobs(job: Mapping[str, Any], recompute: Sequence[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """The job with each of the choices in `recompute` (its own if there are none), and the choice's name."""
    long = load_job(job).to_dict()["plan"]
    memory = [one["use"] for one in long["schemes"] if one["use"].startswith("memory/")]
    if not recompute:
        yield job, memory[0].removeprefix("memory/recompute-") if memory else "none"
    for name in recompute:
        if name not in RECOMPUTE:
            raise PlanError("--recompute", "there is no recomputation of this name", nearest(name, RECOMPUTE), name)
        kept = [one for one in long["schemes"] if not one["use"].startswith("memory/")]
        more = [] if name == "none" else [{"use": f"memory/recompute-{name}"}]
        yield {**job, "plan": {**long, "schemes": [*kept, *more]}}, name


def check_replicas(plan: Plan) -> None:
    """Raises PlanError for state that is sharded over replicas, which one device cannot show."""
    for scheme in plan.family("data"):
        if (size := plan.mesh.size(scheme.over)) > 1 and scheme.use != "data/ddp":
            rule = f"one device cannot show {scheme.use}, which shards state over replicas"
            remedy = "Measure it with meshcast measure distributed, or one replica here: dp = 1"
            raise PlanError(f"plan.{scheme.axes[0]}", rule, remedy, size)


@dataclass(frozen=True)
class Variant:
    """A job with one choice of recomputation.

    forecasters: from the catalog, and from a calibration if there is one.
    recompute: one of `RECOMPUTE`.
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
        """Name of an action's row."""
        stage, kind = action
        more = f" stage {stage}" if self.plan.shape.v > 1 else ""
        return f"device {self.device(stage)}{more} {kind}"

    def device(self, stage: int) -> int:
        return self.plan.model_parts.device(stage)

    def rows(self, on: Device) -> Iterator[MeasurementRow]:
        """All rows with their forecasts, before the measurement."""
        forecasts = {one.by: forecast_actions(one) for one in self.forecasters}
        actions = next(iter(forecasts.values()))[0]
        for action in sorted(actions, key=lambda one: (self.device(one[0]), one[0], KINDS.index(one[1]))):
            shape = {"stage": action[0], "layers": len(self.plan.model_parts.layers_of(action[0]))}
            yield self._row(self.label(action), {by: values[action] for by, (values, _) in forecasts.items()}, shape)
        for device in range(self.plan.shape.p):
            updates = {by: values[device] for by, (_, values) in forecasts.items()}
            yield self._row(f"device {device} optimizer", updates, {})
            for what in on.memory_counters:
                found = {one.by: one.peak_memory(device, what) for one in self.forecasters}
                yield self._row(f"device {device} peak {what}", found, {}, "bytes")
        yield self._row("step (put together)", {one.by: one.step for one in self.forecasters}, {})

    def _row(
        self, name: str, found: dict[str, ForecastValue], shape: dict[str, Any], quantity: Any = "seconds"
    ) -> MeasurementRow:
        return MeasurementRow(name=name, group=self.group, quantity=quantity, forecasts=found, shape=shape)
