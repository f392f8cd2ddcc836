"""PipeDream-2BW: 1F1B without a flush; m micro-batches make an update, so two versions of the weights are enough.

A device accumulates the gradients of the m micro-batches of a batch and updates its weights after the last of them. By
then micro-batches of the next batch are in flight with older weights. So every batch t uses the weights of the update
before the last, W(t+1) = W(t) - lr g(W(t-1)) with g the gradient, and a device holds these and the newest.

    m = 3
    device 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 ...     updates after B2, B5, ...
    device 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 ...
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 ...

Time between two updates: m times the maximum of t_f + t_B over the devices [s], messages neglected (t_f, t_B: forward
and whole backward pass of a micro-batch on a device). Device i holds p - i micro-batches in flight, of p devices, and
two versions of the weights. Needs m >= p: with fewer micro-batches more than two versions would be in use.

References: Narayanan et al. 2021, arXiv 2006.09503, section 3.1.
"""

from collections.abc import Iterable

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class PipeDream2BW(Schedule):
    paper = Paper("arXiv:2006.09503", "Memory-Efficient Pipeline-Parallel DNN Training", 2020)
    flush = False

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        if shape.m < shape.p:
            rule = f"{self.use} needs at least as many micro-batches an update as the pipeline has devices, {shape.p}"
            remedy = f"{shape.p} would work: change batch.global or plan.dp, or use pipeline/pipedream"
            raise PlanError("micro-batches per replica", rule, remedy, shape.m)

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        return one_forward_one_backward(forward, backward, shape.p - 1 - device)

    def weight_version(self, shape: PipelineShape, device: int, microbatch: int) -> int:
        """Returns one version for a whole batch: the newest that all devices have when its first micro-batch enters."""
        return max(0, microbatch // shape.m - 1)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("period", m * setting.t_total, "section 3.1: no flush between batches")
        yield ClosedForm("weight_versions", [2] * p, "section 3.1: the weights of the batch before, and the newest")
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "section 3.1, figure 2")
