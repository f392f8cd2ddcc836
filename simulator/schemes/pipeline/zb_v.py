"""Zero Bubble (ZB-V): a V of stages with split backward passes; no bubble at 1F1B's memory for equal F, B and W.

A backward pass is split: B computes gradients of inputs, for which the previous stage waits, W gradients of weights,
which fill what would idle. Stages go down the devices and up again, so the last stage is on the first device: there the
first micro-batch returns soonest, and every device can hold 2 p chunks, the memory of 1F1B's first device.

    p = 2, m = 4 (upper case: down, lower case: up)
    device 0   F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3
    device 1   .. F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

Bubble of the longest span (p-1)(t_b - t_w) [s] for t_w <= t_f <= t_b and m >= 2 p (t_f, t_b, t_w: F, B and W of a
micro-batch through both chunks of a device). Devices begin and end in turn, so it is the bubble of a step
without a barrier (`post_validation`); with a barrier, the default, a step takes the makespan, whose bubble is
(p-1) max(t_b/2, t_b - t_w). 2 p chunks are held until W. A micro-batch crosses 2 (p-1) borders of devices each way,
twice 1F1B's; the chunks at the tip of the V lie on the same device.

The order is that drawn by hand for equal passes, whatever passes last; the authors' repository builds orders for
measured durations, as pipeline/v-zb does.

References: Qi et al. 2024, arXiv 2401.10241, section 6; ScheduleZBVZeroBubble of torch.distributed.pipelining.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, PostValidation, VShape


class ZBV(VShape):
    paper = Paper("arXiv:2401.10241", "Zero Bubble Pipeline Parallelism", 2024)

    class Options(VShape.Options, PostValidation):
        pass

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        p = shape.p
        # For fewer micro-batches: the order of 2p - 1 without the passes of those that do not exist.
        n = max(shape.m, 2 * p - 1)
        stages = {"down": device, "up": 2 * p - 1 - device}
        remaining = {(direction, kind): iter(range(n)) for direction in stages for kind in "FBW"}
        order: list[Action] = []

        def append(direction: str, kinds: str) -> None:
            for kind in kinds:
                order.append(Action(stages[direction], kind, next(remaining[direction, kind])))

        for _ in range(2 * (p - device) - 1):
            append("down", "F")
        for _ in range(device):
            append("up", "F")
            append("down", "F")
        for _ in range(p - device):
            append("up", "FBW")
        for k in range(p, n):
            append("down", "FBW" if k + p - device - 1 < n else "BW")
            append("up", "FBW")
        for _ in range(device):
            append("down", "B")
            append("up", "B")
        for _ in range(p - device):
            append("down", "BW")
        for direction in ("up", "down"):
            order += [Action(stages[direction], "W", k) for k in remaining[direction, "W"]]
        return [action for action in order if action.microbatch < shape.m]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, t_f, t_b, t_w = setting.shape.p, setting.shape.m, setting.t_f, setting.t_b, setting.t_w
        if m >= 2 * p:
            yield ClosedForm("in_flight_w", [2 * p] * p, "section 6; replay of the order")
        if m >= 2 * p and t_w <= t_f <= t_b:
            yield ClosedForm("bubble_span", (p - 1) * (t_b - t_w), "section 6; replay of the order")
            yield ClosedForm("bubble", (p - 1) * max(t_b / 2, t_b - t_w), "replay of the order")
