"""Timetables as the arrays that the compiled loops read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.batch.loops.arrays import Order
from meshcast.simulator.batch.loops.order import sort_actions
from meshcast.simulator.program.timetable import read_fields
from meshcast.simulator.scheduling.schedule import (
    ACTION_KINDS,
    Action,
    ActionArray,
    ActionKind,
    Orders,
    PipelineShape,
    Schedule,
)

Neighbours = tuple[Sequence[tuple[int, ...]], Sequence[tuple[int, ...]]]
"""By stage, other stages."""

FORWARD, BACKWARD = ACTION_KINDS.index(ActionKind.FORWARD), ACTION_KINDS.index(ActionKind.BACKWARD)


@dataclass(eq=False)
class TableArrays:
    """A timetable of plain forward and backward passes.

    order: of all passes.
    stages, backward, first, last: by slot, its stage, and whether it is a backward pass, the first and the last of its
        kind on the stage in a step.
    devices: by stage.
    turns: number of actions of every slot.
    ports, targets: by slot, see `PORT` and `TARGET`.
    route: all messages to other devices: whether backward, and the stages from which and to which; and the devices.
    layouts: layers of plans on its stages, by what they depend on.
    """

    order: Order
    stages: np.ndarray
    backward: np.ndarray
    first: np.ndarray
    last: np.ndarray
    devices: np.ndarray
    turns: np.ndarray
    ports: np.ndarray
    targets: np.ndarray
    route: tuple[tuple[tuple[int, int, int], ...], tuple[int, ...]]
    layouts: dict[Hashable, Layout] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays, and of a layout."""
        return self.order.rows.nbytes + self.order.slot.nbytes + 9 * self.stages.nbytes


def make_table(schedule: Schedule, shape: PipelineShape) -> TableArrays | None:
    """Returns the timetable of a schedule as arrays, equal to those of `simulator.program.timetable.timetable`; None if
    it has other actions, stages with several neighbours, or orders that are refused there.

    Raises PlanError for a shape that the schedule does not support.
    """
    if shape.slices > 1 or shape.forward_only or shape.classes or shape.batch_loss:
        return None
    schedule.check(shape)
    orders, stages = schedule.orders(shape), range(shape.stages)
    devices = [schedule.device(shape, stage) for stage in stages]
    before = [tuple(schedule.predecessors(shape, stage)) for stage in stages]
    behind: list[tuple[int, ...]] = [()] * shape.stages
    for stage, others in enumerate(before):
        for other in others:
            behind[other] = *behind[other], stage
    if any(schedule.sums_early(shape, stage) for stage in stages) or max(map(len, (*before, *behind))) > 1:
        return None
    columns = _read_passes(orders)
    if columns is None or not _is_complete(shape, devices, columns):
        return None
    need = _find_needs(shape, (before, behind), *columns[1:])
    sequence = sort_actions(columns[0], need)
    if len(sequence) < len(need):
        return None
    slots, slot = _find_slots(*columns[1:3])
    return _flatten(devices, (behind, before), Order(columns[0], slot, sequence), need, slots)


def _read_passes(orders: Orders) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Returns where the actions of each device begin, and of all actions the stage, whether it is a backward pass, and
    the micro-batch; None if any is something else."""
    if not all(isinstance(order, ActionArray) or {*map(type, order)} <= {Action} for order in orders):
        return None
    every = [order.fields if isinstance(order, ActionArray) else read_fields(order) for order in orders]
    stage, kind, microbatch, piece = np.concatenate(every, axis=1)
    backward = kind == BACKWARD
    if piece.any() or not (backward | (kind == FORWARD)).all():
        return None
    starts = np.cumsum([0, *(fields.shape[1] for fields in every)])
    return starts, stage, backward.astype(np.int64), microbatch


def _is_complete(
    shape: PipelineShape, devices: list[int], columns: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> bool:
    """Says whether every pass occurs once, on its device, and backward passes behind forward passes.

    columns: see `_read_passes`.
    """
    starts, stage, backward, microbatch = columns
    if len(stage) != 2 * shape.stages * shape.m or stage.min() < 0 or stage.max() >= shape.stages:
        return False
    if microbatch.min() < 0 or microbatch.max() >= shape.m:
        return False
    numbers = np.full((shape.stages, 2, shape.m), -1)
    numbers[stage, backward, microbatch] = np.arange(len(stage))
    owner, (forward, behind) = np.repeat(np.arange(shape.p), np.diff(starts)), numbers.swapaxes(0, 1)
    return bool((numbers >= 0).all() and (forward < behind).all() and (np.array(devices)[stage] == owner).all())


def _find_needs(
    shape: PipelineShape, neighbours: Neighbours, stage: np.ndarray, backward: np.ndarray, microbatch: np.ndarray
) -> np.ndarray:
    """Returns by action the one whose result it needs: on another stage; -1: none.

    neighbours: by stage, those from which forward and backward passes receive.
    """
    numbers = np.empty((shape.stages, 2, shape.m), np.int64)
    numbers[stage, backward, microbatch] = np.arange(len(stage))
    first = np.array([[others[0] if others else -1 for others in way] for way in neighbours])[backward, stage]
    return np.where(first >= 0, numbers[first, backward, microbatch], -1)


def _find_slots(stage: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the slots: stage, and whether it is a backward pass, the first and the last of its kind on its stage
    [slots, 4]; and the slot of every action."""
    turn, numbers = 2 * stage + backward, np.arange(len(stage))
    first, last = np.empty((2, turn.max() + 1), np.int64)
    # Where an index occurs several times, the last assignment stays.
    first[turn[::-1]], last[turn] = numbers[::-1], numbers
    code = 4 * turn + 2 * (first[turn] == numbers) + (last[turn] == numbers)
    present = np.zeros(4 * len(first), bool)
    present[code] = True
    codes = np.flatnonzero(present)
    slots = np.column_stack([codes // 8, codes // 4 % 2, codes // 2 % 2, codes % 2])
    return slots, (np.cumsum(present) - 1)[code]


def _flatten(
    devices: list[int], neighbours: Neighbours, order: Order, need: np.ndarray, slots: np.ndarray
) -> TableArrays:
    """Returns a timetable.

    neighbours: by stage, those to which forward and backward passes send.
    order: with the numbers of actions as rows.
    need: by action, see `NEED`.
    slots: see `_find_slots`.
    """
    stage, backward, first, last = slots.T
    hops = _find_hops(devices, neighbours)
    of_stages = np.full((2, 2, len(devices)), -1)
    for hop in hops:
        of_stages[:, hop[0], hop[1]] = hop[0], devices[hop[2]]
    ports, targets = of_stages[:, backward, stage]
    owners = np.repeat(np.arange(len(order.starts) - 1), np.diff(order.starts))
    rows = np.column_stack(
        [np.arange(len(need)), need, order.slot, owners, ports[order.slot], targets[order.slot]]
    ).astype(np.int32)[order.rows]
    whole, at = Order(order.starts, order.slot.astype(np.int32), rows), np.array(devices)
    ends, turns = (first > 0, last > 0), np.bincount(order.slot)
    return TableArrays(whole, stage, backward, *ends, at, turns, ports, targets, (hops, tuple(devices)))


def _find_hops(devices: list[int], neighbours: Neighbours) -> tuple[tuple[int, int, int], ...]:
    """Returns all messages to other devices, as `TableArrays.route` has them. neighbours: see `_flatten`."""
    links = enumerate(neighbours)
    hops = [(way, stage, other) for way, others in links for stage, each in enumerate(others) for other in each]
    return tuple(hop for hop in hops if devices[hop[1]] != devices[hop[2]])


class StageKind(NamedTuple):
    """What stages of a plan differ in beside their number of layers.

    first, last: whether it has the embedding, and the output layer.
    layers: whether it has any.
    embeds: whether its device has the table of the embedding, and it reads it.
    gathers: whether it all-gathers its input, and the gradient of its output, from shares that ranks of another device
        sent.
    """

    first: bool
    last: bool
    layers: bool
    embeds: bool
    gathers: tuple[bool, bool]


@dataclass(eq=False)
class Layout:
    """The layers of a plan on the stages of a timetable.

    stages: the distinct stages: kind and number of layers.
    of_stage: by stage, its place in `stages`.
    held: by device, whether it has the embedding, the output layer and a table that this reads, and its layers.
    rows: by slot, a number for its distinct stage and whether it is backward.
    at_end: by slot, whether it is the first forward or the last backward pass.
    """

    stages: list[tuple[StageKind, int]]
    of_stage: np.ndarray
    held: tuple[tuple[bool, bool, bool, int], ...]
    rows: np.ndarray
    at_end: np.ndarray


def lay_out(table: TableArrays, layers: tuple[int, ...], shares: bool) -> Layout:
    """Lays layers out on the stages of a timetable. shares: whether tensor-parallel ranks send shares of messages."""
    devices, last = table.devices.tolist(), len(layers) - 1
    places: dict[tuple[StageKind, int], int] = {}
    of_stage = []
    held = [(False, False, False, 0) for _ in range(len(table.order.starts) - 1)]
    for stage, (device, count) in enumerate(zip(devices, layers, strict=True)):
        apart = [shares and 0 <= other <= last and devices[other] != device for other in (stage - 1, stage + 1)]
        embeds = stage == last and device == devices[0]
        kind = StageKind(stage == 0, stage == last, count > 0, embeds, (apart[0], apart[1]))
        of_stage.append(places.setdefault((kind, count), len(places)))
        before = held[device]
        held[device] = before[0] or kind.first, before[1] or kind.last, before[2] or embeds, before[3] + count
    places_of = np.array(of_stage)
    at_end = np.where(table.backward > 0, table.last, table.first).astype(np.int64)
    return Layout(list(places), places_of, tuple(held), 2 * places_of[table.stages] + table.backward, at_end)
