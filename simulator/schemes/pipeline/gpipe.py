"""GPipe: all forward passes, then all backward passes.

All m micro-batches stay in memory. Slow links cost little: a message has the time of a micro-batch. Backward passes
go in the order of the forward passes, as torch runs them; the paper's figure has the reverse order, of equal time.

    device 0   F0 F1 F2 F3 .. .. .. .. .. .. B0 B1 B2 B3
    device 1   .. F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    device 2   .. .. F0 F1 F2 F3 .. .. B0 B1 B2 B3

bubble (p-1)(t_f + t_B) [s], m micro-batches in flight.

References: Huang et al. 2019, arXiv 1811.06965, section 2.3.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule


class GPipe(Schedule):
    paper = Paper(
        "arXiv:1811.06965", "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2018
    )

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        return forward + [Action(device, "BW", k) for k in shape.microbatches]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape = setting.shape
        yield ClosedForm("bubble", (shape.p - 1) * setting.t_total, "section 2.3")
        yield ClosedForm("in_flight_b", [shape.m] * shape.p, "section 2.3")
        yield ClosedForm("bubble_per_hop", 2 * (shape.p - 1), "one hop a stage, in warm-up and in cool-down")
