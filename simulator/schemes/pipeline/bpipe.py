"""BPipe: 1F1B whose first devices keep activations on the last ones, so that memory is balanced between devices.

In 1F1B device x holds activations of p - x micro-batches and its partner p-1-x of only x + 1. Each device of the first
half evicts those of a micro-batch to its partner during a later forward pass, and loads them back during the backward
pass of the micro-batch before. No device holds more than K = ceil((p+2)/2) micro-batches: more than the mean (p+1)/2,
since activations in transfer take memory on both devices.

    p = 4, K = 3 (E: evicted to device 3, L: loaded back; on device 3 K: kept, G: given back)
    device 0   F0 F1 E1 F2 E2 F3 L1 B0 E3 F4 L2 B1 E4 F5 L3 B2 E5 F6 L4 B3 ..
    device 3   K1 K2 F0 B0 F1 B1 F2 G1 B2 K3 F3 G2 B3 K4 F4 G3 B4 K5 F5 G4 ..

Partners are neighbours along the pipeline's axis, so that activations move inside a node (pair-adjacent assignment):
devices 0, p-1, 1, p-2, .. have places 0, 1, 2, 3, ..; in return more messages between stages leave the node.

If a link transfers a micro-batch's activations in less time than a pass takes, the bubble is 1F1B's, (p-1)(t_f + t_B)
[s] (t_f, t_B: forward and whole backward pass of a device). The memory saved allows a larger micro-batch or less
recomputation.

References: Kim et al. 2023 (ICML), https://proceedings.mlr.press/v202/kim23l.html; re-evaluated in arXiv 2401.02088.
"""

from collections.abc import Iterable

from meshcast.hardware.schemas import Field
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.activation_transfer import bounded_1f1b_transfers, insert_transfers
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    ScheduleItem,
    one_forward_one_backward,
)


class BPipe(Schedule):
    paper = Paper(
        "https://proceedings.mlr.press/v202/kim23l.html",
        "BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models",
        2023,
    )
    needs_durations = True

    class Options(Schedule.Options):
        pair_adjacent: bool = Field(default=True, strict=True)
        """Whether partners are neighbours along the pipeline's axis; otherwise devices are in the order of stages."""

    def place(self, shape: PipelineShape, device: int) -> int:
        first = min(device, shape.p - 1 - device)
        return 2 * first + (device > first) if self.options.pair_adjacent else device

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        passes = []
        for x in range(shape.p):
            forward, backward = ([Action(x, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
            passes.append(one_forward_one_backward(forward, backward, shape.p - 1 - x))
        most, transfers = _peak_microbatches(shape.p), []
        for x in range(shape.p // 2):
            transfers += bounded_1f1b_transfers(shape, x, most, [shape.p - 1 - x])
        return insert_transfers(self, shape, passes, transfers, durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm(
            "most_in_flight_b",
            min(m, p, _peak_microbatches(p)),
            "section 3.2: balanced between a device and its partner",
        )


def _peak_microbatches(p: int) -> int:
    """Returns K, the maximum number of micro-batches that a device holds: ceil((p + 2) / 2)."""
    return p // 2 + 1 + p % 2
