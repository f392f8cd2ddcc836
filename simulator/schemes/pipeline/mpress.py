"""MPress: 1F1B whose first devices swap activations to all devices with room, over several links at once (D2D swap).

In 1F1B device i holds activations of p - i micro-batches, so that the first devices are full while the last have room.
What a device holds above the limit K goes to lightly loaded devices during a later forward pass, and comes back during
the backward pass of the micro-batch before. Micro-batches of a device go in turn to several keepers, those with most
room first, so that transfers use the links to several GPUs; in BPipe every device has one keeper.

    p = 4, K = 3 (E: swapped out, L: swapped in; on devices 2 and 3 K: kept, G: given back)
    device 0   F0 F1 E1 F2 E2 F3 L1 B0 E3 F4 L2 B1 E4 F5 L3 B2 ..

A device i with p - i > K has p - i - K + 1 micro-batches away, one of them in transfer; device j has room for K-p+j.
All find room if K is at least ceil((p+2)/2), the default. Where a transfer takes less time than a pass the bubble is
1F1B's, (p-1)(t_f + t_B) [s] (t_f, t_B: forward and whole backward pass of a device).

MPress chooses for every tensor between this, recomputation and host memory. Here the activations of a micro-batch are
swapped as a whole; `memory/recompute-full` and `memory/offload` do the other two for some `layers` of a stage, and
`memory/adapipe` for as many as memory asks for. Not modelled: the choice by live intervals of tensors, a tensor striped
over several links, and the search of a GPU for every stage among directly linked GPUs.

References: Zhou et al. 2023 (HPCA), doi 10.1109/HPCA56546.2023.10071077 (from its abstract); the passes during which
activations move: Kim et al. 2023, https://proceedings.mlr.press/v202/kim23l.html.
"""

from collections.abc import Iterable

from pydantic import Field

from hardware.errors import PlanError
from simulator.ir.scheme import ClosedForm, Paper
from simulator.scheduling.activation_transfer import bounded_1f1b_transfers, insert_transfers
from simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineSetting,
    PipelineShape,
    Schedule,
    ScheduleItem,
    one_forward_one_backward,
)


class MPress(Schedule):
    paper = Paper(
        "doi:10.1109/HPCA56546.2023.10071077",
        "MPress: Democratizing Billion-Scale Model Training on Multi-GPU Servers via Memory-Saving Inter-Operator "
        "Parallelism",
        2023,
    )
    needs_durations = True

    class Options(Schedule.Options):
        memory_limit: int | None = Field(default=None, ge=1, strict=True)
        """Micro-batches whose activations a device may hold (K); null: the fewest, ceil((p+2)/2)."""

    def check(self, shape: PipelineShape) -> None:
        super().check(shape)
        limit, least = self.options.memory_limit, min(_least(shape.p), shape.m)
        if limit is not None and limit < least:
            rule = f"{self.use} has no device with room below {least} micro-batches a device"
            raise PlanError("memory_limit", rule, "Raise it, and recompute layers or offload them", limit)

    def orders(self, shape: PipelineShape, durations: PassDurations | None = None) -> list[list[ScheduleItem]]:
        passes = []
        for i in range(shape.p):
            forward, backward = ([Action(i, kind, k) for k in shape.microbatches] for kind in ("F", "BW"))
            passes.append(one_forward_one_backward(forward, backward, shape.p - 1 - i))
        limit = self.options.memory_limit or _least(shape.p)
        room = {j: limit - shape.p + j for j in range(shape.p) if shape.p - j < limit}
        transfers = []
        for i in range(shape.p):
            keepers = []
            for _ in range(shape.p - i - limit + 1 if shape.p - i > limit else 0):
                keepers.append(max(room, key=lambda j: (room[j] > 0, j not in keepers, room[j], j)))
                room[keepers[-1]] -= 1
            transfers += bounded_1f1b_transfers(shape, i, limit, keepers)
        return insert_transfers(self, shape, passes, transfers, durations)

    def closed_forms(self, setting: PipelineSetting) -> Iterable[ClosedForm]:
        p, m = setting.shape.p, setting.shape.m
        yield ClosedForm("bubble", (p - 1) * setting.t_total, "as 1F1B's")
        yield ClosedForm("most_in_flight_b", min(m, p, _least(p)), "all activations, and those in transfer, find room")


def _least(p: int) -> int:
    """The fewest micro-batches a device at which the last devices have room for what the first ones swap."""
    return p // 2 + 1 + p % 2
