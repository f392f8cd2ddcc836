"""Chimera: two pipelines in opposite directions through the same devices; each fills bubbles of the other.

Every device holds one stage of each direction, so there are two copies of the weights, whose gradients are all-reduced
before the update. Half of the micro-batches go down, from device 0 to the last, half go up. Orders are read off a grid
of unit slots in which the two directions never collide; groups of p micro-batches follow one another.

    p = 4, m = 4 (upper case: down, lower case: up)
    device 0   F0 .. F1 f0 b0 f1 b1 B0 .. B1
    device 1   .. F0 f0 F1 f1 b0 B0 b1 B1
    device 2   .. f0 F0 f1 F1 B0 b0 B1 b1
    device 3   f0 .. f1 F0 B0 F1 B1 b0 .. b1

bubble (p-2) t_B + (m/p - 1)(p-2)(t_B - t_f) [s] for t_B = t_b + t_w >= t_f; from p/2 + 1 (first and last device) to p
(middle) micro-batches in flight. Needs an even p and m a multiple of p.

References: Li and Hoefler 2021, arXiv 2107.06925, section 3.
"""

from collections.abc import Iterable

from hardware.errors import PlanError
from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import Action, Bidirectional, PipelineSetting, PipelineShape, nearest_multiple


class Chimera(Bidirectional):
    paper = Paper(
        "arXiv:2107.06925",
        "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines",
        2021,
    )

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m % shape.p:
            near = nearest_multiple(shape.m, shape.p)
            rule = f"{self.use} needs micro-batches in multiples of pp = {shape.p}"
            raise PlanError("micro-batches per replica", rule, f"{near} would work: change batch.global or dp", shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        p, half = shape.p, shape.p // 2
        slots = {}
        # The stage of each direction on this device, and its position in that direction.
        for stage, position in ((device, device), (2 * p - 1 - device, p - 1 - device)):
            for index, k in enumerate(self.microbatches(shape, stage)):
                group, number = divmod(index, half)
                begin = 2 * p * group + 2 * number
                slots[begin + position] = Action(stage, "F", k)
                slots[begin + 2 * p - 1 - position] = Action(stage, "BW", k)
        return [slots[slot] for slot in sorted(slots)]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, groups = setting.shape.p, setting.shape.m // setting.shape.p
        backward = setting.t_b + setting.t_w
        if backward >= setting.t_f:
            bubble = (p - 2) * (backward + (groups - 1) * (backward - setting.t_f))
            yield ClosedForm("bubble", bubble, "section 3; between groups, replay of the order")
        yield ClosedForm(
            "in_flight_b", [p // 2 + 1 + min(i, p - 1 - i) for i in range(p)], "section 3, table 2; replay of the order"
        )
