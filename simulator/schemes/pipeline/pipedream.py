"""PipeDream: 1F1B without a flush; every micro-batch updates the weights, and those in flight keep older versions.

The pipeline fills once, then every device alternates forward and backward passes without end. After each backward pass
a device updates its weights. The backward pass of a micro-batch uses the weight version of its forward pass (weight
stashing): device i holds p - i versions, each for a micro-batch in flight.

    device 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 ...
    device 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 ...
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 ...

Time between two updates: the maximum of t_f + t_B over the devices [s], messages neglected (t_f, t_B: forward and whole
backward pass of a device). Device i holds p - i micro-batches in flight, p - i versions of the weights and a copy of
the optimizer states.

References: Harlap et al. 2018, arXiv 1806.03377; Narayanan et al. 2019, doi:10.1145/3341301.3359646, to whose sections
the closed forms refer.
"""

from collections.abc import Iterable

from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.schedule import (
    Action,
    PipelineSetting,
    PipelineShape,
    Schedule,
    one_forward_one_backward,
)


class PipeDream(Schedule):
    paper = Paper("arXiv:1806.03377", "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018)
    flush = False

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        forward = [Action(device, "F", k) for k in shape.microbatches]
        backward = [Action(device, "BW", k) for k in shape.microbatches]
        return one_forward_one_backward(forward, backward, shape.p - 1 - device)

    def microbatches_per_update(self, shape: PipelineShape) -> int:
        return 1

    def weight_version(self, shape: PipelineShape, device: int, microbatch: int) -> int:
        """Returns the newest version at its forward pass: updated by all earlier micro-batches but those in flight."""
        return max(0, microbatch - (shape.p - 1 - device))

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("period", setting.t_total, "section 3.2: one micro-batch an update, the pipeline stays full")
        yield ClosedForm(
            "weight_versions", [p - i for i in range(p)], "section 3.3: one for each micro-batch in flight"
        )
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "section 3.2: the start-up phase admits p")
