"""Zero Bubble (ZB-H2): split backward passes and a longer warm-up; no device idles in between, for twice the memory.

A backward pass is split: B computes gradients of inputs, for which the previous stage waits, W gradients of weights,
for which no stage waits. Device i begins with 2 (p - i) - 1 forward passes and delays 2 i W's. Devices begin and end
in turn: the next step can follow without a bubble if the optimizer does not synchronise the devices.

    p = 3, m = 5
    device 0   F0 F1 F2 F3 F4 B0 W0 B1 W1 B2 W2 B3 W3 B4 W4
    device 1   .. F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 W2 W3 W4
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 W2 W3 W4

bubble of the longest span (p-1)(t_f + t_b - 2 t_w) [s] for t_w <= t_f, t_b and m >= 2 p - 1; from the first begin to
the last end (p-1) max(t_f, t_f + t_b - 2 t_w). 2 (p - i) - 1 micro-batches are held until B, 2 p - 1 until W.

References: Qi et al. 2024, arXiv 2401.10241, section 2.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, ZeroBubble, split_1f1b


class ZBH2(ZeroBubble):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        return split_1f1b(shape, device, 2)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, t_f, t_b, t_w = setting.shape.p, setting.shape.m, setting.t_f, setting.t_b, setting.t_w
        yield ClosedForm("in_flight_b", [min(m, 2 * (p - i) - 1) for i in range(p)], "section 2.3, table 2")
        yield ClosedForm("in_flight_w", [min(m, 2 * p - 1)] * p, "section 2.3, table 2")
        if m >= 2 * p - 1 and t_w <= min(t_f, t_b):
            yield ClosedForm("bubble_span", (p - 1) * (t_f + t_b - 2 * t_w), "section 2.3, table 2")
            yield ClosedForm("bubble", (p - 1) * max(t_f, t_f + t_b - 2 * t_w), "replay of the order")
