"""The stages of a pipeline as its actions see them: their devices, and where their results go."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.scheduling.schedule import BATCH_LOSS, ActionKind, Stripe

GRADIENT_PASSES = (ActionKind.BACKWARD, ActionKind.INPUT_GRADIENTS)
"""Passes that compute the gradients of a stage's inputs."""


class Slot(NamedTuple):
    """What all actions of a task have in common.

    first: the first action of its kind on the stage since the last update.
    last: the last before the next update. BW and W count as a single kind, as both complete gradients; so do N and F.
    variant: which of the ops of its stage it runs: the slice of the sequences, the part of the samples, or the class of
        micro-batches of different lengths.
    partner: of an action that leads an overlapped pair, the slot of the backward pass.
    follows: whether it is the second action of an overlapped pair.
    keeper: of an activation transfer, the device that keeps the activations; otherwise -1.
    """

    stage: int
    kind: str
    first: bool
    last: bool
    variant: int = 0
    partner: Slot | None = None
    follows: bool = False
    keeper: int = -1


@dataclass(frozen=True)
class PipelineStages:
    """The stages of a pipeline, and what its schedule says of their passes.

    devices: by stage, the device that runs it.
    copies: by stage, the devices that hold the same part of the model.
    predecessors, successors: by stage, the stages whose output it receives, and those that receive its output.
    coupled: by stage, the other stages whose outputs enter the loss of a batch with those of the stage.
    chained: every update needs the norm of the gradients of the devices before (post-validation).
    backwards_per_forward: backward passes to a forward pass, each of a part of its samples.
    separates_multiprocessors: of the schedule.
    stripes: of the schedule.
    """

    devices: list[int]
    copies: list[tuple[int, ...]]
    predecessors: list[tuple[int, ...]]
    successors: list[tuple[int, ...]]
    coupled: dict[int, tuple[int, ...]] = field(default_factory=dict)
    chained: bool = False
    backwards_per_forward: int = 1
    separates_multiprocessors: bool = False
    stripes: dict[tuple[int, int], Stripe] = field(default_factory=dict)

    def owner(self, slot: Slot) -> int:
        """Returns the device that runs a slot's actions."""
        return slot.keeper if slot.kind in (ActionKind.KEEP, ActionKind.GIVE_BACK) else self.devices[slot.stage]

    def takes_from(self, slot: Slot) -> tuple[int, ...]:
        """Returns the stages whose results a slot needs; an update needs that of the device before (`chained`)."""
        if slot.kind in BATCH_LOSS[1:]:
            return self.coupled.get(slot.stage, ())
        if slot.kind == ActionKind.UPDATE:
            return self._chain(slot, -1)
        return _by_kind(slot, self.predecessors, self.successors)

    def gives_to(self, slot: Slot) -> tuple[int, ...]:
        """Returns the stages that need the result of a slot."""
        if slot.kind in BATCH_LOSS[:-1]:
            return self.coupled.get(slot.stage, ())
        if slot.kind == ActionKind.UPDATE:
            return self._chain(slot, 1)
        return _by_kind(slot, self.successors, self.predecessors)

    def _chain(self, slot: Slot, step: int) -> tuple[int, ...]:
        """Returns the first stage of the device before or after that of an update."""
        return (slot.stage + step,) if self.chained and 0 <= slot.stage + step <= max(self.devices) else ()

    def elsewhere(self, stage: int, other: int) -> bool:
        """Returns whether two stages are on different devices."""
        return self.devices[stage] != self.devices[other]


def _by_kind(slot: Slot, forward: list[tuple[int, ...]], backward: list[tuple[int, ...]]) -> tuple[int, ...]:
    if slot.kind in (ActionKind.FORWARD, ActionKind.AHEAD):
        return forward[slot.stage]
    return backward[slot.stage] if slot.kind in GRADIENT_PASSES else ()
