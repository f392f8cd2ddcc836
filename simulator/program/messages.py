"""Messages and collectives between pipeline devices, from stage to stage and among the holders of a stage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from meshcast.hardware.remembered import remembered
from meshcast.simulator.ir.ops import Collective, StageOps, Transfer
from meshcast.simulator.lowering.scatter_gather import has_backward


class StageEnd(NamedTuple):
    """One end of a message: a virtual stage, its pipeline device, and its ops."""

    stage: int
    device: int
    ops: StageOps


class StageMessages:
    """Messages of a pipeline whose devices have the same mesh: from every rank to the rank at the same place."""

    def __init__(self, axis: str) -> None:
        self.axis = axis

    def traits(self, stages: Sequence[Sequence[StageOps]]) -> Hashable:
        """Returns what the messages between stages depend on; None: on more than their ops. stages: their ops in all
        variants."""
        return self.axis, tuple(tuple(map(self._traits_of, variants)) for variants in stages)

    @remembered
    def _traits_of(self, stage_ops: StageOps) -> Hashable:
        loss = stage_ops.batch_loss.nbytes if stage_ops.batch_loss is not None else 0
        return stage_ops.message_nbytes, has_backward(stage_ops), loss

    def results(self, sender: StageEnd, receiver: StageEnd, forward: bool) -> Transfer:
        """Returns what carries the output of a stage to the next, or the gradient of its input back."""
        return self.plain(self._nbytes(sender.ops, receiver.ops, forward), sender.device, receiver.device)

    @remembered
    def _nbytes(self, sender: StageOps, receiver: StageOps, forward: bool) -> int:
        # What comes back to one of several that were joined is its share; to frozen layers nothing does.
        stated = sender if forward else receiver if has_backward(receiver) else None
        return stated.message_nbytes if stated else 0

    def outputs(self, sender: StageEnd, receiver: StageEnd) -> Transfer:
        """Returns what carries the outputs of a batch from a stage to another whose loss reads them, or the gradients
        of those that came from there."""
        assert sender.ops.batch_loss is not None
        return self.plain(sender.ops.batch_loss.nbytes, sender.device, receiver.device)

    def plain(self, nbytes: int, source: int, target: int) -> Transfer:
        """Returns a message from every rank of a device to the rank at the same place of another."""
        return Transfer(nbytes, self.axis, source, target)

    def among(self, operation: str, nbytes: int, members: Sequence[int]) -> Collective:
        """Returns a collective among the ranks at the same place of several devices."""
        return Collective(operation, nbytes, (self.axis,), tuple(members))

    def all_reduce(self, nbytes: int, members: Sequence[int]) -> Collective:
        """Returns an all-reduce among the ranks at the same place of several devices."""
        return self.among("all_reduce", nbytes, members)
