"""Timetables as the arrays that the compiled loops read."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.batch.loops.arrays import Order
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import ActionKind


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


def flatten_timetable(table: Timetable) -> TableArrays | None:
    """Returns the arrays of a timetable; None if it has other actions, or stages with several neighbours."""
    if not _is_plain(table):
        return None
    stages = table.stages
    slots = [(slot.stage, slot.kind == ActionKind.BACKWARD, slot.first, slot.last) for slot in table.slots]
    stage, backward, first, last = np.array(slots, np.int64).T
    ways = enumerate((stages.successors, stages.predecessors))
    links = [(way, sender, other) for way, others in ways for sender, each in enumerate(others) for other in each]
    hops = tuple(hop for hop in links if stages.elsewhere(*hop[1:]))
    ports, targets = np.full((2, len(slots)), -1)
    for way, sender, other in hops:
        sent = (stage == sender) & (backward == way)
        ports[sent], targets[sent] = way, stages.devices[other]
    order, route = _flatten_order(table, ports, targets), (hops, tuple(stages.devices))
    devices, turns = np.array(stages.devices), np.array(table.turns)
    return TableArrays(order, stage, backward, first > 0, last > 0, devices, turns, ports, targets, route)


def _is_plain(table: Timetable) -> bool:
    """Says whether a timetable has plain forward and backward passes alone, whose stages have single neighbours."""
    kinds, stages = {slot.kind for slot in table.slots}, table.stages
    neighbours = *stages.successors, *stages.predecessors
    if not kinds <= {ActionKind.FORWARD, ActionKind.BACKWARD} or any(len(others) > 1 for others in neighbours):
        return False
    if table.leads.any() or table.further_needs or table.extra_results or table.joined or table.update_interval:
        return False
    return stages.backwards_per_forward == 1 and not any(slot.variant for slot in table.slots)


def _flatten_order(table: Timetable, ports: np.ndarray, targets: np.ndarray) -> Order:
    """Returns the order of all passes. ports, targets: see `TableArrays`."""
    actions = table.sequence_array
    slots = table.slot_array[actions]
    columns = actions, table.need_array[actions], slots, table.device_array[actions], ports[slots], targets[slots]
    return Order(np.array(table.starts), table.slot_array, np.column_stack(columns).astype(np.int32))


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
