"""1F1B with flush: one forward, one backward, as soon as the pipe is full.

Device i runs p-1-i forwards, then alternates one forward and one backward, then drains. The bubble is GPipe's; at most
p - i micro-batches are in memory on device i. Without a pipeline (p = 1) it is plain gradient accumulation.

    device 0   F0 F1 F2 .. .. B0 F3 .. B1 .. .. B2 .. .. B3
    device 1   .. F0 F1 .. B0 F2 B1 F3 .. B2 .. .. B3
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3

bubble (p-1)(t_f + t_B) [s], min(m, p - i) micro-batches in flight.

References: Narayanan et al. 2021 (PipeDream-Flush), arXiv 2006.09503; Fan et al. 2021 (DAPPLE), arXiv 2007.01045.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule, one_forward_one_backward


class OneFOneB(Schedule):
    paper = Paper("arXiv:2006.09503", "Memory-Efficient Pipeline-Parallel DNN Training", 2020)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        return one_forward_one_backward(forward, backward, shape.p - 1 - device)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "arXiv 2104.04473, section 2.2")
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "arXiv 2104.04473, section 2.2")
        if m % p == 0 and p > 1:
            # In-order 1F1B pays a round trip in every group of p micro-batches: it does not tolerate slow hops.
            yield ClosedForm(
                "bubble_per_hop", 2 * (p - 1) * m // p + 2 * p - 4, "replay of the order with a constant latency a hop"
            )
