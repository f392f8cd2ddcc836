"""BPipe: 1F1B whose first devices lend activations to the last ones, so that all hold like many.

In 1F1B device x holds p - x micro-batches and its partner p-1-x only x + 1. Here each device of the first half evicts
every micro-batch to its partner, a few forward passes after its own, and loads it back while the one before is in its
backward pass. No device holds more than K = ceil((p+2)/2): one more than the mean, for what is on its way lies on both.

    p = 4, K = 3 (E: goes to device 3, L: comes back; K and G: the same on device 3, so much ahead of its passes)
    device 0   F0 F1 E1 F2 E2 F3 L1 B0 E3 F4 L2 B1 E4 F5 L3 B2 E5 F6 L4 B3 ..
    device 3   K1 K2 F0 B0 F1 B1 F2 G1 B2 K3 F3 G2 B3 K4 F4 G3 B4 K5 F5 G4 ..

Where links are fast enough to move a micro-batch's activations during a pass, the bubble is 1F1B's,
(p-1)(t_f + t_B) [s]. What it gains is room: for a larger micro-batch, or for less recomputation.

References: Kim et al. 2023 (ICML), https://proceedings.mlr.press/v202/kim23l.html; re-evaluated in arXiv 2401.02088.
"""

from collections.abc import Iterable

from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.activation_transfer import ActivationTransfer, insert_transfers
from simulator.scheduling.schedule import (
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

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        passes = []
        for x in range(shape.p):
            forward, backward = ([Action(x, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
            passes.append(one_forward_one_backward(forward, backward, shape.p - 1 - x))
        transfers = [transfer for x in range(shape.p // 2) for transfer in _transfers(shape, x)]
        return insert_transfers(self, shape, passes, transfers, durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm(
            "most_in_flight_b", min(m, p, _bound(p)), "section 3.2: balanced between a device and its partner"
        )


def _bound(p: int) -> int:
    """Micro-batches that a device holds at the most: ceil((p + 2) / 2)."""
    return p // 2 + 1 + p % 2


def _transfers(shape: PipelineShape, x: int) -> Iterable[ActivationTransfer]:
    """The moves of a device of the first half, none where 1F1B stays within the bound.

    While F(n) runs, n-K+2 leaves: the device then holds K-3 that were made since, F(n), the one whose backward pass is
    next and the one that leaves. While B(k) runs, k+1 comes.
    """
    most = _bound(shape.p)
    if min(shape.m, shape.p - x) > most:
        for k in range(1, shape.m - most + 2):
            out, back = Action(x, "F", k + most - 2), Action(x, "BW", k - 1)
            yield ActivationTransfer(Action(x, "F", k), shape.p - 1 - x, out, back)
