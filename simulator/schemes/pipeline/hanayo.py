"""Hanayo: stages placed down the devices and up again in waves; Chimera's small bubble with a single copy of the
weights.

Each wave gives a device two chunks, for the way down and the way up; at a turning point both are on the same
device and no message is sent. Orders come from greedy list scheduling in unit slots: a free device takes the ready
backward pass of the earliest micro-batch, else the ready forward pass of the deepest stage.

    one wave, p = 2, m = 4 (upper case: down, lower case: up)
    device 0   F0 F1 F2 f0 b0 f1 b1 B0 F3 B1 .. f2 b2 f3 b3 B2 .. B3
    device 1   .. F0 f0 F1 f1 b0 B0 b1 B1 F2 f2 F3 f3 b2 B2 b3 B3

For w waves: bubble (p-1) t_B/w [s] for m = p and t_B >= t_f, (p-1)(t_f + t_B)/(2 w) for m a multiple of p and t_f =
t_B; 2 w p chunks in flight for m >= 2 p. t_f, t_B: forward and whole backward pass of a micro-batch through all chunks
of a device.

References: Liu et al. 2023, arXiv 2308.15762, section 3.
"""

from collections.abc import Iterable

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper, SchemeOptions
from meshcast.simulator.scheduling.greedy import pass_dependencies, schedule_greedily
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    v_shape_device,
)


class Hanayo(Schedule):
    paper = Paper(
        "arXiv:2308.15762", "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model", 2023
    )

    class Options(SchemeOptions):
        chunks: int = Field(default=2, ge=1, strict=True)
        """Virtual stages per device, two per wave; an alternative to `waves`."""
        waves: int | None = Field(default=None, ge=1, strict=True)
        """Number of times that the stages run down the devices and up again."""

    def chunks_per_device(self) -> int:
        waves: int | None = self.options.waves
        return 2 * waves if waves else int(self.options.chunks)

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        chunks = self.options.chunks if "chunks" in self.options.model_fields_set else shape.v
        if shape.v % 2 or chunks != shape.v:
            rule = f"{self.use} runs two chunks per device and wave"
            raise PlanError("plan.chunks", rule, "Set waves, and leave chunks out", chunks)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[Action]]:
        def priority(action: Action) -> tuple[bool, int, int]:
            is_forward = action.kind == "F"
            return is_forward, -action.stage if is_forward else 0, action.microbatch

        return schedule_greedily(self, shape, pass_dependencies(self, shape, split_backward=False), priority)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v, t_f = setting.shape.p, setting.shape.m, setting.shape.v, setting.t_f
        backward = setting.t_b + setting.t_w
        if m == p and backward >= t_f:
            yield ClosedForm("bubble", 2 * (p - 1) * backward / v, "replay of the order")
        if m % p == 0 and backward == t_f:
            yield ClosedForm("bubble", (p - 1) * (t_f + backward) / v, "replay of the order")
        if m == p:
            yield ClosedForm("in_flight_b", [v * p - (p - 1) + i for i in range(p)], "replay of the order")
        if m >= 2 * p:
            yield ClosedForm("in_flight_b", [v * p] * p, "replay of the order")
