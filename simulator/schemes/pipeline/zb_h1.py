"""Zero Bubble (ZB-H1): 1F1B with split backward passes; weight gradients fill two thirds of the bubble.

A backward pass is split: B computes gradients of inputs, for which the previous stage waits, W gradients of weights,
for which no stage waits. Device i runs each W after i further B's, so every device holds p micro-batches, as 1F1B's
first device does.

    p = 3, m = 4
    device 0   F0 F1 F2 .. .. B0 W0 F3 B1 W1 B2 W2 B3 W3
    device 1   .. F0 F1 .. B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
    device 2   .. .. F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

Of p devices and m micro-batches: bubble (p-1)(t_f + t_b - t_w) [s] for t_w <= t_f, t_b and m >= p (t_f, t_b, t_w: F, B
and W of a micro-batch on a device). Device i holds the activations of min(m, p - i) micro-batches for B and the inputs
and output gradients of linears of min(m, p) for W.

References: Qi et al. 2024, arXiv 2401.10241, section 2.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, ZeroBubble, split_1f1b


class ZBH1(ZeroBubble):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return split_1f1b(shape, device, 1)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, t_f, t_b, t_w = setting.shape.p, setting.shape.m, setting.t_f, setting.t_b, setting.t_w
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "section 2.3, table 2")
        yield ClosedForm("in_flight_w", [min(m, p)] * p, "section 2.3, table 2")
        if m >= p and t_w <= min(t_f, t_b):
            yield ClosedForm("bubble", (p - 1) * (t_f + t_b - t_w), "section 2.3, table 2")
            yield ClosedForm("bubble_span", (p - 1) * (t_f + t_b - t_w), "section 2.3, table 2")
