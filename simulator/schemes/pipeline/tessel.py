"""Tessel: a schedule that is searched for a placement of stages: a kernel that repeats, then its warm-up and cool-down.

In the steady state a device repeats the same passes, each of another micro-batch. CP-SAT of OR-Tools finds the
shortest such kernel (repetend) for the durations of the passes and a limit of memory, and of these that which a
micro-batch leaves soonest. The passes before the first and after the last whole kernel are warm-up and cool-down, in
which other passes fill what would idle.

    p = 3, m = 5, t_B = 2 t_f; the kernel is F B
    device 0   F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 F4 B2 B2 .. B3 B3 .. B4 B4
    device 1   .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 F4 B3 B3 .. B4 B4
    device 2   .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4

A step takes the first micro-batch's way through the pipeline and m - 1 periods. On a chain of equal stages with memory
for p micro-batches the search finds 1F1B: bubble (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a
micro-batch on a device).

Not modelled: blocks that occupy several devices. Passes are rounded to 1/60 of the longest, and warm-up and cool-down
are filled pass by pass, not searched.

References: Lin et al. 2023, arXiv 2311.15269.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.activation_transfer import equal_durations
from meshcast.simulator.scheduling.building_block import reorder_both_ends
from meshcast.simulator.scheduling.repeating_kernel import find_kernel, unroll
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    v_shape_device,
)


class Tessel(Schedule):
    paper = Paper(
        "arXiv:2311.15269",
        "Tessel: Boosting Distributed Execution of Large DNN Models via Flexible Schedule Search",
        2023,
    )
    needs_durations = True

    class Options(Schedule.Options):
        placement: Literal["chain", "v"] = "chain"
        """Where stages are: `chain`, one on each device; `v`, down the devices and up again."""
        memory_limit: float | None = Field(default=None, ge=1)
        """Micro-batches whose activations a device may hold; by default p."""
        kernel_microbatches: int = Field(default=2, ge=1, strict=True)
        """Most micro-batches whose passes a kernel runs."""
        split_backward: bool = False
        """Whether gradients of weights are separate passes (W)."""

    def chunks_per_device(self) -> int:
        return 2 if self.options.placement == "v" else int(self.options.chunks)

    def device(self, shape: PipelineShape, stage: int) -> int:
        return v_shape_device(shape, stage)

    def check(self, shape: PipelineShape) -> None:
        if self.options.chunks != 1 or shape.v != self.chunks_per_device():
            rule = f"{self.use} has one chunk a device, or two with placement: v"
            raise PlanError("plan.chunks", rule, "Leave it out, and set placement", self.options.chunks)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[Action]]:
        durations, limit = durations or equal_durations(shape), int(shape.v * (self.options.memory_limit or shape.p))
        most, split = self.options.kernel_microbatches, self.options.split_backward
        kernel = find_kernel(self, shape, durations, limit, most, split)
        orders = unroll(kernel, shape, [self.device(shape, stage) for stage in range(shape.stages)])
        return reorder_both_ends(self, shape, orders, durations, limit)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B, the shortest for whole backward passes")
        yield ClosedForm("most_in_flight_b", min(p, m), "the limit of memory, all of it used for the shortest step")
