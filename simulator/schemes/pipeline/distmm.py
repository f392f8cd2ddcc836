"""DistMM: pipelines of the branches of a contrastive model side by side, and a single loss for all samples of a batch.

A contrastive loss (CLIP) couples all samples, so no backward pass may begin before all outputs of a batch are computed.
All micro-batches run forward first, and of them the outputs alone are kept (batch-sync). The loss and its gradient are
computed once. Then every micro-batch runs forward again and backward, in the order of 1F1B. Each branch has
its stages with their degrees (`plan.stages`), and they run at the same time.

    two branches of two stages, m = 2; N: forward pass of which the output alone is kept; L: loss of the batch
    device 0   N0 N1 F0 F1 .. .. B0 .. B1        device 1   .. N0 N1 L F0 B0 F1 B1
    device 2   N0 N1 F0 F1 .. .. B0 .. B1        device 3   .. N0 N1 L F0 B0 F1 B1

The p stages are those of the branches, branch by branch. Where `branches` is a number, each has d = p / branches of
them; a list gives the stages of each. One stage holds all branches where `branches` is 1. With `recompute: false` no
forward pass is repeated, and all activations stay until the loss.

Step m t_f + t_loss + (m + d - 1)(t_f + t_B) [s] with d stages of the slowest branch (t_f, t_B: forward and whole
backward pass of a micro-batch on a device). Stages run forward again while those behind them still make outputs;
if all waited for the loss, the first phase would take (m + d - 1) t_f. min(m, d - i) micro-batches in flight on
stage i of a branch, and m outputs.

Where the loss couples no samples (a language model) it is 1F1B. Not modelled: a choice of the degrees, which are
stated; losses of three and more branches.

References: Huang et al. 2024, NSDI, https://www.usenix.org/conference/nsdi24/presentation/huang. Repeated forward
passes without a pipeline: Gao et al. 2021 (gradient cache), arXiv 2101.06983.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import Annotated

from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    ActionKind,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class DistMM(Schedule):
    paper = Paper(
        "https://www.usenix.org/conference/nsdi24/presentation/huang",
        "DISTMM: Accelerating Distributed Multimodal Model Training",
        2024,
    )
    couples_samples = True

    class Options(Schedule.Options):
        branches: Annotated[int, Field(ge=1, strict=True)] | tuple[Annotated[int, Field(ge=1, strict=True)], ...] = 1
        """Branches of stages, all with equally many; a list gives the stages of each. 1: a single stage holds all."""
        recompute: bool = True
        """Keep the outputs of the first forward passes alone, and run each again before its backward pass."""

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        branches = self.options.branches
        if isinstance(branches, tuple) and sum(branches) != shape.p:
            rule = f"the branches of {self.use} have {' + '.join(map(str, branches))} stages"
            raise PlanError("the pipeline's axis", rule, f"pp = {sum(branches)} would work", shape.p)
        if isinstance(branches, int) and shape.p % branches:
            rule = f"{self.use} has {branches} branches of one number of stages"
            remedy = f"pp = {max(1, round(shape.p / branches)) * branches} would work, or a list"
            raise PlanError("the pipeline's axis", rule, remedy, shape.p)

    def branch_ends(self, shape: PipelineShape) -> list[int]:
        """Returns the stage behind the last of every branch."""
        branches = self.options.branches
        return list(accumulate(branches if isinstance(branches, tuple) else [shape.p // branches] * branches))

    def predecessors(self, shape: PipelineShape, stage: int) -> tuple[int, ...]:
        return () if stage == 0 or stage in self.branch_ends(shape) else (stage - 1,)

    def path_length(self, shape: PipelineShape, stage: int) -> int:
        """Counts the stages from `stage` to the last of its branch, both included."""
        return next(end - stage for end in self.branch_ends(shape) if stage < end)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        if shape.batch_loss and not self.options.recompute:
            return forward + backward
        ahead = [Action(device, ActionKind.AHEAD, k) for k in shape.microbatches] if shape.batch_loss else []
        return ahead + one_forward_one_backward(forward, backward, self.path_length(shape, device) - 1)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        shape = setting.shape
        depths = [self.path_length(shape, x) for x in range(shape.p)]
        yield ClosedForm("bubble", (max(depths) - 1) * setting.t_total, "as 1F1B; the first phase adds m t_f alone")
        yield ClosedForm("in_flight_b", [min(shape.m, depth) for depth in depths], "1F1B")
