"""Interleaved 1F1B (Megatron-LM): each device holds v chunks of the model, so the bubble is v times smaller.

Of p devices, chunk c of device i is stage c p + i. The m micro-batches run in groups of p: a device runs chunk 0 for
all of a group, then chunk 1, and so on; backward the same with the chunks in reverse order. Passes in warm-up and
cool-down are those of one chunk. There are v times as many messages, and the first device holds up to
p (1 + (p-1)/(p v)) micro-batches.

    p = 2, v = 2, m = 4 (upper case: chunk 0, lower case: chunk 1)
    device 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 B2 B3

Bubble (p-1)(t_f + t_B)/v [s] (t_f, t_B: forward and whole backward pass of a micro-batch through all chunks of a
device); min(m v, 2 (p-1-i) + (v-1) p + 1) chunks in flight on device i. Needs v >= 2 and m a multiple of p.

References: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.
"""

from collections.abc import Iterable

from hardware.errors import PlanError
from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    nearest_multiple,
    one_forward_one_backward,
)


class Interleaved1F1B(Schedule):
    paper = Paper(
        "arXiv:2104.04473", "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021
    )

    def check(self, shape: PipelineShape) -> None:
        if shape.v < 2:
            raise PlanError(
                "plan.chunks",
                f"{self.use} needs at least 2 chunks a device",
                "Set chunks: 2, or use pipeline/1f1b",
                shape.v,
            )
        if shape.m % shape.p:
            near = nearest_multiple(shape.m, shape.p)
            rule = f"{self.use} needs micro-batches in multiples of pp = {shape.p}"
            raise PlanError("micro-batches per replica", rule, f"{near} would work: change batch.global or dp", shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        p, v = shape.p, shape.v
        stages = [chunk * p + device for chunk in range(v)]
        groups = range(0, shape.m, p)
        forward = [Action(stage, "F", g + i) for g in groups for stage in stages for i in range(p)]
        backward = [Action(stage, "BW", g + i) for g in groups for stage in reversed(stages) for i in range(p)]
        return one_forward_one_backward(forward, backward, 2 * (p - 1 - device) + (v - 1) * p)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        yield ClosedForm("bubble", (p - 1) * setting.t_total / v, "section 2.2.2")
        yield ClosedForm(
            "in_flight_b", [min(m * v, 2 * (p - 1 - i) + (v - 1) * p + 1) for i in range(p)], "replay of the order"
        )
