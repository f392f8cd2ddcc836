"""GEMS: two replicas of a model in opposite directions on the same devices; the next forward pass follows a backward.

Memory is the limit: every device holds the activations of a micro-batch. A micro-batch runs back and forth alone, but
the next enters at the other end, where the last stage of the first is: its forward passes run behind the wave of
backward passes that leaves the devices free. Odd micro-batches go down the devices, even up; their gradients are
summed.

    p = 4, m = 2 (upper case: down, lower case: up; a backward pass takes two slots)
    device 0   F0 .. .. .. .. .. .. .. .. .. B0 B0 f1 b1 b1
    device 1   .. F0 .. .. .. .. .. .. B0 B0 .. f1 .. .. .. b1 b1
    device 2   .. .. F0 .. .. .. B0 B0 .. f1 .. ..
    device 3   .. .. .. F0 B0 B0 f1 .. ..

Bubble (p-1)(t_f + t_B + (m-1) max(t_f, t_B)) [s] (t_f, t_B: forward and whole backward pass of a micro-batch on a
device): (p-1)/(p+1/2) of a long step for t_B = 2 t_f. One micro-batch in flight. Two copies of the weights.

Not modelled: GEMS-MASTER, more than two replicas; GEMS-Hybrid is this with data parallelism.

References: Jain et al. 2020 (SC20), https://doi.org/10.1109/SC41405.2020.00049; at most two active micro-batches: Li
and Hoefler 2021, arXiv 2107.06925, section 2.
"""

from collections.abc import Iterable

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, Bidirectional, PipelineSetting, PipelineShape


class Gems(Bidirectional):
    paper = Paper(
        "https://doi.org/10.1109/SC41405.2020.00049",
        "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training",
        2020,
    )

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m % 2:
            rule = f"half of the micro-batches of {self.use} go down the devices and half up"
            remedy = f"{shape.m + 1} would work: change batch.global or plan.dp"
            raise PlanError("micro-batches per replica", rule, remedy, shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        stages = (device, 2 * shape.p - 1 - device)
        in_turn = zip(*(self.microbatches(shape, stage) for stage in stages), strict=True)
        turns = [(stage, k) for pair in in_turn for stage, k in zip(stages, pair, strict=True)]
        return [Action(stage, kind, k) for stage, k in turns for kind in ("F", "BW")]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, backward = setting.shape.p, setting.shape.m, setting.t_b + setting.t_w
        bubble = (p - 1) * (setting.t_total + (m - 1) * max(setting.t_f, backward))
        yield ClosedForm("bubble", bubble, "arXiv 2107.06925, table 2, for a long step; replay of the order")
        yield ClosedForm("in_flight_b", [1] * p, "arXiv 2107.06925, table 2")
