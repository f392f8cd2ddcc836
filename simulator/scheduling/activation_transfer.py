"""Activations that are kept on another device between a forward and its backward pass: transfers put into orders.

A schedule states its passes and, for every transfer, the pass during which activations leave and the pass during which
they come back. `insert_transfers` finds which pass the other device runs at that time and puts its half of the transfer
before that pass: neither device waits for the other, and the other may free memory a pass before it is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from typing import NamedTuple

from meshcast.hardware.records import dataclass
from meshcast.simulator.scheduling.list_scheduler import PartialSchedule
from meshcast.simulator.scheduling.schedule import (
    Action,
    ActionKind,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    Stripe,
    actions_of,
)


@dataclass(frozen=True)
class ActivationTransfer:
    """Activations of a forward pass that another device keeps for a time. All three passes are of the same device.

    forward: the pass whose activations move.
    keeper: the device that keeps them.
    evict_during: they leave when this pass begins.
    load_during: they come back when this pass begins.
    stripe: number of the part of them, where several devices keep a part each (`Schedule.stripes`).
    """

    forward: Action
    keeper: int
    evict_during: Action
    load_during: Action
    stripe: int = 0


FEWEST_HELD = 3
"""Fewest micro-batches that a device of 1F1B can hold: that which is computed, that whose backward pass is next,
and another in transfer."""


@dataclass(frozen=True)
class TensorChoice:
    """What becomes of the saved tensors of a stage, by name; all others are kept.

    swap: they rest on the keepers of `stripes`, a part on each, while the stage holds `FEWEST_HELD` micro-batches.
    host: they are copied to host memory and back.
    recompute: they are freed, and computed again for the backward pass.
    """

    swap: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    stripes: tuple[Stripe, ...] = ()


def striped_transfers(shape: PipelineShape, device: int, stripes: Sequence[Stripe]) -> list[ActivationTransfer]:
    """Returns the transfers by which a device of 1F1B holds `FEWEST_HELD` micro-batches of what moves, each in
    stripes."""
    return [
        replace(transfer, stripe=number)
        for number, stripe in enumerate(stripes)
        for transfer in bounded_1f1b_transfers(shape, device, FEWEST_HELD, [stripe.keeper])
    ]


def bounded_1f1b_transfers(
    shape: PipelineShape, device: int, most: int, keepers: Sequence[int]
) -> list[ActivationTransfer]:
    """Returns the transfers by which a device of 1F1B holds at most `most` micro-batches; none if it holds no more by
    itself.

    Micro-batch n-most+2 is evicted during F(n): the device then holds this one, the most-3 after it, n itself, and
    that whose backward pass is next. Micro-batch k+1 is loaded back during B(k).

    keepers: devices to which micro-batches go in turn.
    """
    if min(shape.m, shape.p - device) <= most:
        return []
    return [
        ActivationTransfer(
            Action(device, "F", k),
            keepers[k % len(keepers)],
            Action(device, "F", k + most - 2),
            Action(device, "BW", k - 1),
        )
        for k in range(1, shape.m - most + 2)
    ]


def spread_transfers(shape: PipelineShape, most: int) -> list[ActivationTransfer]:
    """Returns the transfers by which every device of 1F1B holds at most `most` micro-batches, whole ones of which go in
    turn to several devices: those that have most room and have none of the device yet come first.
    """
    room = {j: most - shape.p + j for j in range(shape.p) if shape.p - j < most}
    transfers = []
    for i in range(shape.p):
        keepers: list[int] = []
        for _ in range(shape.p - i - most + 1 if shape.p - i > most else 0):
            keepers.append(max(room, key=lambda j: (room[j] > 0, j not in keepers, room[j], j)))
            room[keepers[-1]] -= 1
        transfers += bounded_1f1b_transfers(shape, i, most, keepers)
    return transfers


class TimedItem(NamedTuple):
    """A schedule item with its device, and its begin and end in the unit of the durations."""

    item: ScheduleItem
    device: int
    begin: float
    end: float


def insert_transfers(
    schedule: Schedule,
    shape: PipelineShape,
    orders: Sequence[Sequence[ScheduleItem]],
    transfers: Sequence[ActivationTransfer],
    durations: PassDurations | None = None,
) -> list[list[ScheduleItem]]:
    """Returns orders with their transfers. durations: of passes; without them all passes last equally long."""
    timed = time_orders(schedule, shape, orders, durations or equal_durations(shape))
    index = {action: at for at, timed_item in enumerate(timed) for action in actions_of([timed_item.item])}
    # Ends of passes may coincide; the running maximum keeps them sorted.
    ends = list(accumulate((timed_item.end for timed_item in timed), max))
    # Both halves of every transfer: the item that they go before, their moment, their actions by device.
    halves: list[tuple[int, float, list[tuple[int, Action]]]] = []
    for transfer in transfers:
        for during, evicts in ((transfer.evict_during, True), (transfer.load_during, False)):
            at = index[during]
            actions = _half(transfer, timed[at].device, evicts)
            halves.append((min(bisect_right(ends, timed[at].begin), at), timed[at].begin, actions))
    halves.sort(key=lambda half: half[:2])
    inserted: list[list[ScheduleItem]] = [[] for _ in orders]
    for at, timed_item in enumerate(timed):
        while halves and halves[0][0] == at:
            for device, action in halves.pop(0)[2]:
                inserted[device].append(action)
        inserted[timed_item.device].append(timed_item.item)
    return inserted


def _half(transfer: ActivationTransfer, owner: int, evicts: bool) -> list[tuple[int, Action]]:
    """Returns the two actions of a transfer away from its owner, or back, each with its device."""
    action = transfer.forward._replace(slice=transfer.forward.slice + transfer.stripe)
    kinds = (ActionKind.KEEP, ActionKind.EVICT) if evicts else (ActionKind.LOAD, ActionKind.GIVE_BACK)
    devices = (transfer.keeper, owner) if evicts else (owner, transfer.keeper)
    return [(device, action._replace(kind=kind)) for device, kind in zip(devices, kinds, strict=True)]


def equal_durations(shape: PipelineShape) -> PassDurations:
    unit = (1.0,) * shape.stages
    return PassDurations(unit, unit, unit, unit)


def time_orders(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[ScheduleItem]], durations: PassDurations
) -> list[TimedItem]:
    """Returns every item with its device, begin and end, sorted by end; each after all that it depends on.

    Items of an order that deadlocks stand at the end: the check of the orders reports them.
    """
    played = PartialSchedule(schedule, shape, lambda item: sum(map(durations.of, actions_of([item]))), durations.hop)
    position, timed = [0] * len(orders), list[TimedItem]()
    progress = True
    while progress:
        progress = False
        for device, order in enumerate(orders):
            while position[device] < len(order) and played.arrival(item := order[position[device]]) < inf:
                end = played.append(item)
                timed.append(TimedItem(item, device, played.begin[actions_of([item])[0]], end))
                position[device] += 1
                progress = True
    timed.sort(key=lambda timed_item: timed_item.end)
    stuck = [
        TimedItem(item, device, moment, moment)
        for device, (order, moment) in enumerate(zip(orders, played.free_at, strict=True))
        for item in order[position[device] :]
    ]
    return timed + stuck
