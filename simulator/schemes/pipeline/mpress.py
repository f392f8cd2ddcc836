"""MPress: 1F1B that chooses for every saved tensor of a stage: kept, swapped to other devices or the host, recomputed.

In 1F1B device i holds activations of p - i micro-batches, so that the first devices are full while the last have room.
For every stage that exceeds the memory of its device it is chosen what becomes of every tensor that its layers save:

1. D2D swap: it rests on several devices with room, a stripe on each, sent over the links to them at once during a later
   forward pass and back during the backward pass before its own. Tensors that take longest to recompute come first, as
   long as the keepers have room and the transfer takes no longer than a pass.
2. Host: it is copied over PCIe while layers compute, as long as the copies take no longer than a pass.
3. Recompute: those with fewest seconds a byte are freed and made again. What is swapped stays in more micro-batches
   than what is recomputed, so tensors are swapped only as far as the stage then still fits.

    p = 4 (E: swapped tensors leave, L: they come back; on devices 2 and 3 K: a stripe is kept, G: given back)
    device 0   F0 F1 E1 F2 E2 F3 L1 B0 E3 F4 L2 B1 E4 F5 L3 B2 ..

Of swapped tensors a device holds 3 micro-batches: min(m, p - i) - 3 fewer. Their keepers hold, of stripes of S bytes,
at most (min(m, p - i) - 2) S. Of A bytes in L layers recomputation frees (min(m, p - i) - 1/L) A, the host less by A/L.

With a `memory_limit` of K micro-batches all tensors of a micro-batch are swapped instead, in turn to several devices:
device i with p - i > K has p - i - K + 1 micro-batches away, device j has room for K - p + j. All find room if K is at
least ceil((p+2)/2), which it is where memory is not known (a schedule without a job). The bubble is 1F1B's,
(p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a device), where a transfer is shorter than a pass.

Simplified: a choice is of the tensors that one op makes in all layers of a stage; transfers hide behind one pass, not
the whole interval between the passes of a tensor; a choice is corrected by forecasts of memory, not of time. Not
modelled: several stages that share the links of a keeper; the search of a GPU for every stage among directly linked
GPUs.

References: Zhou et al. 2023 (HPCA), doi 10.1109/HPCA56546.2023.10071077 (from its abstract); the passes during which
activations move: Kim et al. 2023, https://proceedings.mlr.press/v202/kim23l.html.
"""

from collections.abc import Iterable

from pydantic import Field

from meshcast.hardware.errors import PlanError
from meshcast.simulator.ir.scheme import ClosedForm, Paper
from meshcast.simulator.scheduling.activation_transfer import insert_transfers, spread_transfers, striped_transfers
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    ScheduleItem,
    one_forward_one_backward,
)
from meshcast.simulator.schemes.pipeline.shared.tensor_choices import TensorSchedule


class MPress(TensorSchedule):
    paper = Paper(
        "doi:10.1109/HPCA56546.2023.10071077",
        "MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers via Memory-Saving Inter-Operator "
        "Parallelism",
        2023,
    )
    needs_durations = True

    class Options(TensorSchedule.Options):
        memory_limit: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches whose activations a device may hold (K), of which whole ones are swapped; null: tensors are."""

    @property
    def chooses_tensors(self) -> bool:
        return self.options.memory_limit is None

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        limit, least = self.options.memory_limit, min(_least(shape.p), shape.m)
        if limit is not None and limit < least:
            rule = f"{self.use} has no device with room below {least} micro-batches a device"
            raise PlanError("memory_limit", rule, "Raise it, or leave it out to choose for every tensor", limit)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        passes = []
        for i in range(shape.p):
            forward, backward = ([Action(i, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
            passes.append(one_forward_one_backward(forward, backward, shape.p - 1 - i))
        if self.options.tensors:
            chosen = enumerate(self.options.tensors)
            transfers = [move for i, one in chosen for move in striped_transfers(shape, i, one.stripes)]
        else:
            transfers = spread_transfers(shape, self.options.memory_limit or _least(shape.p))
        return insert_transfers(self, shape, passes, transfers, durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm("most_in_flight_b", min(m, p, _least(p)), "all activations, and those in transfer, find room")


def _least(p: int) -> int:
    """The fewest micro-batches a device at which the last devices have room for what the first ones swap."""
    return p // 2 + 1 + p % 2
