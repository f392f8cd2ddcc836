"""ZB-V: stages go down the devices and up again, so nothing idles at 1F1B's memory where F, B and W last as long.

A backward pass is two: B makes the gradients of inputs, for which the stage before waits, and W those of weights, which
fills what would idle. The last stage is on the first device: there the first micro-batch comes back soonest, and every
device can hold 2 p chunks, the memory of 1F1B's first device.

    p = 2, m = 4 (upper case: down, lower case: up)
    device 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3
    device 1   .. F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

bubble of the longest span (p-1)(t_b - t_w) [s] where t_w <= t_f <= t_b and m >= 2 p; 2 p chunks in flight to their W.

References: Qi et al. 2024, arXiv 2401.10241, section 6.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, VShape


class ZBV(VShape):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        p = shape.p
        # Below 2p - 1 micro-batches the order is that of so many, of which the first are there.
        n = max(shape.m, 2 * p - 1)
        lane = {"down": device, "up": 2 * p - 1 - device}
        left = {(way, kind): iter(range(n)) for way in lane for kind in "FBW"}
        order: list[Action] = []

        def run(way: str, kinds: str) -> None:
            order.extend(Action(lane[way], kind, k) for kind in kinds for k in [next(left[way, kind])])

        for _ in range(2 * (p - device) - 1):
            run("down", "F")
        for _ in range(device):
            run("up", "F")
            run("down", "F")
        for _ in range(p - device):
            run("up", "FBW")
        for k in range(p, n):
            run("down", "FBW" if k + p - device - 1 < n else "BW")
            run("up", "FBW")
        for _ in range(device):
            run("down", "B")
            run("up", "B")
        for _ in range(p - device):
            run("down", "BW")
        for way in ("up", "down"):
            order += [Action(lane[way], "W", k) for k in left[way, "W"]]
        return [action for action in order if action.microbatch < shape.m]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, t_f, t_b, t_w = setting.shape.p, setting.shape.m, setting.t_f, setting.t_b, setting.t_w
        if m >= 2 * p:
            yield ClosedForm("in_flight_w", [2 * p] * p, "section 6; replay of the order")
        if m >= 2 * p and t_w <= t_f <= t_b:
            yield ClosedForm("bubble_span", (p - 1) * (t_b - t_w), "section 6; replay of the order")
