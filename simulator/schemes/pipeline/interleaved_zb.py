"""Interleaved zero bubble (torch): interleaved 1F1B with split backward passes; weight gradients fill the bubble.

Chunks and groups of N micro-batches are those of interleaved 1F1B. A backward pass is split: B computes gradients of
inputs, for which the previous stage waits, W gradients of weights, for which no stage waits. Of p devices, device i
runs p - 1 - i forward passes fewer before its first B than interleaved 1F1B does, and each W after i further B's. One
chunk a device would be ZB-H1.

    p = 2, v = 2, m = 4 (upper case: chunk 0, lower case: chunk 1)
    device 0   F0 F1 f0 f1 b0 w0 F2 b1 w1 F3 B0 W0 f2 B1 W1 f3 b2 w2 b3 w3 B2 W2 B3 W3
    device 1   F0 F1 f0 b0 f1 b1 w0 F2 B0 w1 F3 B1 W0 f2 b2 W1 f3 b3 w2 B2 w3 B3 W2 W3

Bubble (p-1)(t_f + t_b - t_w)/v [s] for t_w <= t_f, t_b and N >= p (t_f, t_b, t_w: F, B and W of a micro-batch through
all chunks of a device). Device i holds (v-1) N + p - i chunks for B and (v-1) N + p, at most m v, for W. Needs v >= 2;
the last group needs p micro-batches, too. torch's groups have m / max(1, m // p) micro-batches.

References: ScheduleInterleavedZeroBubble of torch.distributed.pipelining, which names it the ZB1P of Qi et al. 2024,
arXiv 2401.10241, section 2.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    ActionArray,
    PipelineSetting,
    PipelineShape,
    PostValidation,
    split_backwards,
)
from meshcast.simulator.scheduling.sequence_slicing import interleaved_passes
from meshcast.simulator.schemes.pipeline.shared.interleaved import Interleaved


class InterleavedZB(Interleaved):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)
    backward_kinds = ("B", "W")

    class Options(Interleaved.Options, PostValidation):
        pass

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        group = self.options.group or shape.p
        forward, backward = (ActionArray(fields) for fields in interleaved_passes(shape, device, group)[:2])
        warmup = min(len(forward), shape.p - 1 - device + (shape.v - 1) * group)
        return split_backwards([*forward], [*backward], warmup, device)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        t_f, t_b, t_w, group = setting.t_f, setting.t_b, setting.t_w, self.options.group or setting.shape.p
        if p <= group and t_w <= min(t_f, t_b):
            yield ClosedForm("bubble", (p - 1) * (t_f + t_b - t_w) / v, "replay of the order")
        if m % group == 0:
            ahead = (v - 1) * group
            yield ClosedForm("in_flight_b", [min(m * v, ahead + p - i) for i in range(p)], "replay of the order")
            yield ClosedForm("in_flight_w", [min(m * v, ahead + p)] * p, "replay of the order")
