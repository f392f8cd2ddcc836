"""DAPPLE: 1F1B with early backward passes, and a deeper warm-up (policy B) that hides slow messages between stages.

Device i runs K forward passes, then a backward and a forward pass in turn. Policy A is 1F1B, K = p - i. Policy B
runs about twice as many first, K = 2 (p - i) - 1, so that each device has a forward pass in stock while a message is on
its way; it holds as many activations. `in_flight` limits K where memory allows fewer micro-batches (D).

    policy B, p = 3, m = 6
    device 0   F0 F1 F2 F3 F4 B0 F5 B1 .. B2 .. B3 .. B4 .. B5
    device 1   .. F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 .. B4 .. B5
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

Of p devices and m micro-batches: bubble (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a
micro-batch on a device) for D >= p and free messages; min(m, D, K) micro-batches in flight on device i. Messages of c
seconds, a small part of a pass, lengthen a step by 2 (p-1) c with policy B, and with policy A by about as much again
for every p micro-batches.

Not modelled here: the planner, which picks the policy by the ratio of messages to computation.

References: Fan et al. 2021, arXiv 2007.01045 (early backward scheduling).
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class Dapple(Schedule):
    paper = Paper("arXiv:2007.01045", "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", 2021)

    class Options(Schedule.Options):
        policy: Literal["A", "B"] = "B"
        """Forward passes of the warm-up: `A`, as in 1F1B; `B`, about twice as many, for slow links between stages."""
        in_flight: int | None = Field(default=None, ge=1, strict=True)
        """Most micro-batches whose activations a device holds (D); by default as many as the policy asks for."""

    def warmup(self, shape: PipelineShape, device: int) -> int:
        """Counts the forward passes before the first backward pass (K)."""
        behind = shape.p - device
        passes = behind if self.options.policy == "A" else 2 * behind - 1
        return min(passes, self.options.in_flight or passes, shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward, backward = ([Action(device, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
        return one_forward_one_backward(forward, backward, self.warmup(shape, device) - 1)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape, p = setting.shape, setting.shape.p
        yield ClosedForm("in_flight_b", [self.warmup(shape, i) for i in range(p)], "early backward scheduling")
        if (self.options.in_flight or p) >= p:
            yield ClosedForm("bubble", (p - 1) * setting.t_total, "as short as 1F1B")
            if self.options.policy == "B":
                yield ClosedForm("bubble_per_hop", 2 * (p - 1), "replay of the order with a constant latency a hop")
