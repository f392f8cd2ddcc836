"""Breadth-First: every chunk runs all micro-batches before the next chunk does, so its weights are used at a stretch.

Chunks go round-robin as in interleaved 1F1B, and the bubble is as small. All micro-batches stay in memory. In return,
with fully sharded data parallelism the weights of a chunk are all-gathered once a pass and its gradients are
reduce-scattered while other chunks run, and a message between stages has several micro-batches of time.

    p = 2, v = 2, m = 3 (upper case: chunk 0, lower case: chunk 1)
    device 0   F0 F1 F2 f0 f1 f2 .. .. b0 b1 b2 B0 B1 B2
    device 1   .. F0 F1 F2 f0 f1 f2 b0 b1 b2 B0 B1 B2

bubble (p-1)(t_f + t_B)/v [s] for m >= p, m v chunks in flight. torch's LoopedBFS runs the backward passes
of a chunk from the last micro-batch to the first (`backward_from: last`), which idles and holds as much.

References: Lamy-Poirier 2022, arXiv 2211.05953, section 3; ScheduleLoopedBFS of torch.distributed.pipelining.
"""

from collections.abc import Iterable
from typing import Literal

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule


class BreadthFirst(Schedule):
    paper = Paper("arXiv:2211.05953", "Breadth-First Pipeline Parallelism", 2022)

    class Options(Schedule.Options):
        backward_from: Literal["first", "last"] = "first"
        """The micro-batch with which the backward passes of a chunk begin: as in the paper, or as in torch's
        LoopedBFS."""

    def check(self, shape: PipelineShape) -> None:
        """Accepts any number of chunks; with a single chunk it is GPipe."""

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        stages = range(device, shape.stages, shape.p)
        forward = [Action(stage, "F", k) for stage in stages for k in shape.microbatches]
        backward = shape.microbatches[:: -1 if self.options.backward_from == "last" else 1]
        return forward + [Action(stage, "BW", k) for stage in reversed(stages) for k in backward]

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m, v = setting.shape.p, setting.shape.m, setting.shape.v
        if m >= p:
            yield ClosedForm("bubble", (p - 1) * setting.t_total / v, "section 3.2; replay of the order")
        yield ClosedForm("in_flight_b", [m * v] * p, "section 3.2")
