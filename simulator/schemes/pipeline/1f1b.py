"""1F1B (PipeDream-Flush, DAPPLE): after the warm-up a forward and a backward pass in turn, with a flush at the end.

Device i runs p-1-i forward passes (warm-up), then a forward and a backward pass in turn (steady state), then the
backward passes that are left (cool-down). The bubble is GPipe's, but device i holds at most p - i micro-batches.
Without a pipeline (p = 1) it is gradient accumulation.

    device 0   F0 F1 F2 .. .. B0 F3 .. B1 .. .. B2 .. .. B3
    device 1   .. F0 F1 .. B0 F2 B1 F3 .. B2 .. .. B3
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

Of p devices and m micro-batches: bubble (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a
micro-batch on a device), min(m, p - i) micro-batches in flight on device i, another with `overlap_passes`.

With `deferred_output_gradients` the last stage holds the gradient of the logits of every deferred micro-batch [tokens x
vocabulary / t elements, t tensor ranks] until its last backward pass, and computes their weight gradients then.

References: Narayanan et al. 2021 (PipeDream-Flush), arXiv 2006.09503; Fan et al. 2021 (DAPPLE), arXiv 2007.01045;
overlapped passes: NVIDIA/Megatron-LM, megatron/core/pipeline_parallel/combined_1f1b.py.
"""

from collections.abc import Iterable, Sequence

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    ActionArray,
    PipelineSetting,
    PipelineShape,
    ScheduleItem,
    alternate_passes,
    overlapped_1f1b,
    passes_in_groups,
)
from meshcast.simulator.schemes.pipeline.shared.weight_gradients import PutsOffWeightGradients


class OneFOneB(PutsOffWeightGradients):
    paper = Paper("arXiv:2006.09503", "Memory-Efficient Pipeline-Parallel DNN Training", 2020)

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        self.check_weight_gradients(shape)

    def order(self, shape: PipelineShape, device: int) -> Sequence[ScheduleItem]:
        forward, backward = (passes_in_groups(kind, [device], shape.m, shape.m) for kind in ("F", "BW"))
        if self.options.overlap_passes:
            return overlapped_1f1b(ActionArray(forward), ActionArray(backward), shape.p - 1 - device)
        return self.defer_output(alternate_passes(forward, backward, shape.p - 1 - device), shape)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        if self.options.overlap_passes:
            yield ClosedForm("in_flight_b", [min(m, p - i + 1) for i in range(p)], "replay of the order")
            return
        if self.defers_output:
            return
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "arXiv 2104.04473, section 2.2")
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "arXiv 2104.04473, section 2.2")
        if m % p == 0 and p > 1:
            # Every group of p micro-batches waits for a round trip between neighbours: slow hops are not hidden.
            yield ClosedForm(
                "bubble_per_hop", 2 * (p - 1) * m // p + 2 * p - 4, "replay of the order with a constant latency a hop"
            )
