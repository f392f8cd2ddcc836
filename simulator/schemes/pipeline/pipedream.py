"""PipeDream: 1F1B that never drains; every micro-batch updates the weights, old ones stay for those on their way.

The pipe is filled once, then every device does one forward and one backward pass in turn for ever. Behind each backward
pass it updates its own weights, and micro-batches that are on their way keep the version that they met going forward
(weight stashing): p - i versions on device i, as many as there are micro-batches in flight.

    device 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2 F5 ...
    device 1   .. F0 F1 .. B0 F2 B1 F3 B2 F4 B3 ...
    device 2   .. .. F0 B0 F1 B1 F2 B2 F3 B3 F4 ...

time between two updates max over devices of (t_f + t_B) [s], without hops; p - i micro-batches in flight and p - i
versions of the weights on device i; the optimizer's state stands there once.

References: Harlap et al. 2018, arXiv 1806.03377; Narayanan et al. 2019, doi:10.1145/3341301.3359646, whose sections the
laws name.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.schedule import Action, PipelineSetting, PipelineShape, Schedule, one_forward_one_backward


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
        """The newest when it comes by forward: by then all have been through that came before those in flight."""
        return max(0, microbatch - (shape.p - 1 - device))

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("period", setting.t_total, "section 3.2: one micro-batch an update, the pipe stays full")
        yield ClosedForm(
            "weight_versions", [p - i for i in range(p)], "section 3.3: one for each micro-batch in flight"
        )
        yield ClosedForm("in_flight_b", [min(m, p - i) for i in range(p)], "section 3.2: the start-up phase admits p")
