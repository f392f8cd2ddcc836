"""GraphPipe: a graph of stages instead of a chain; the branches of a model run at the same time and join in a trunk.

A chain of stages runs the branches of a model (encoders, each with its input) in turn, though they do not
depend on each other. Here every branch has its stages. The first stage of the trunk takes the outputs of all
branches and sends each its gradient. Every stage runs 1F1B as if the pipeline were as deep as the longest path through
the graph: stage x has k_x - 1 warm-up passes, where k_x is 1 on the last stage, else 1 more than the largest of its
successors.

    p = 3, two branches of a stage (devices 0 and 1), a trunk of a stage
    device 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    device 1   F0 F1 .. B0 F2 B1 F3 B2 .. B3
    device 2   .. F0 B0 F1 B1 F2 B2 F3 B3

The p stages are those of the branches, branch by branch, and then the trunk. Where `branches` is a number, each branch
has d = (p - trunk) / branches of them; a list gives the stages of each branch, in the order of the model's branches
that have layers.

bubble (d + trunk - 1)(t_f + t_B) [s] with d stages of the longest branch, against (p - 1)(t_f + t_B) for a chain;
min(m, k_x) micro-batches in flight. With a single branch it is 1F1B.

References: Jeon et al. 2024, arXiv 2406.17145.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class GraphPipe(Schedule):
    paper = Paper(
        "arXiv:2406.17145",
        "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline Parallelism",
        2024,
    )

    class Options(Schedule.Options):
        branches: Annotated[int, Field(ge=1, strict=True)] | tuple[Annotated[int, Field(ge=1, strict=True)], ...] = 2
        """Branches of stages, each for a branch of the model that has layers, all with equally many stages; a list
        gives the stages of each."""
        trunk: int = Field(default=1, ge=1, strict=True)
        """Stages after the join of the branches."""

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        branches, trunk = self.options.branches, self.options.trunk
        left = shape.p - trunk
        if isinstance(branches, tuple):
            if not branches or sum(branches) != left:
                stages = " + ".join(map(str, (*branches, trunk)))
                rule = f"the branches and the trunk of {self.use} have {stages} stages"
                raise PlanError("the pipeline's axis", rule, f"pp = {sum(branches) + trunk} would work", shape.p)
        elif left < branches or left % branches:
            rule = f"{self.use} has {branches} branches of one number of stages, at least 1, and a trunk of {trunk}"
            remedy = f"pp = {max(1, round(left / branches)) * branches + trunk} would work"
            if d := (shape.p - 1) // branches:
                remedy += f", or trunk: {shape.p - d * branches}"
            raise PlanError("the pipeline's axis", rule, remedy, shape.p)

    def branch_ends(self, shape: PipelineShape) -> list[int]:
        """Returns the stage behind the last of every branch."""
        branches = self.options.branches
        joins = shape.p - self.options.trunk
        return list(accumulate(branches if isinstance(branches, tuple) else [joins // branches] * branches))

    def predecessors(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        ends = self.branch_ends(shape)
        if stage == ends[-1]:
            return tuple(end - 1 for end in ends)
        return () if stage == 0 or stage in ends else (stage - 1,)

    def path_length(self, shape: PipelineShape, stage: int) -> int:
        """Returns k_x: the stages on the path from `stage` to the last, both included."""
        end = next((end for end in self.branch_ends(shape) if stage < end), None)
        return shape.p - stage if end is None else end - stage + self.options.trunk

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        return one_forward_one_backward(forward, backward, self.path_length(shape, device) - 1)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape = setting.shape
        depth = max(self.path_length(shape, x) for x in range(shape.p))
        yield ClosedForm("bubble", (depth - 1) * setting.t_total, "1F1B as deep as the longest path")
        yield ClosedForm("in_flight_b", [min(shape.m, self.path_length(shape, x)) for x in range(shape.p)], "k_x")
        if shape.m % depth == 0:
            hops = 2 * (depth - 1) * shape.m // depth + 2 * depth - 4
            yield ClosedForm(
                "bubble_per_hop", hops, "replay of the order with a constant latency a hop: 1F1B of that depth"
            )
