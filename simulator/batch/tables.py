"""Timetables as the arrays that the compiled loops read."""

from __future__ import annotations

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import ActionKind


@dataclass(eq=False)
class TableArrays:
    """A timetable of plain forward and backward passes.

    starts, sequence, need, slot: as in `Timetable`.
    stages, backward, first, last: by slot, its stage, and whether it is a backward pass, the first and the last of its
        kind on the stage in a step.
    devices: by stage.
    hops: all messages to other devices: whether backward, and the stages from which and to which.
    """

    starts: np.ndarray
    sequence: np.ndarray
    need: np.ndarray
    slot: np.ndarray
    stages: np.ndarray
    backward: np.ndarray
    first: np.ndarray
    last: np.ndarray
    devices: np.ndarray
    hops: list[tuple[int, int, int]]


def flatten_timetable(table: Timetable) -> TableArrays | None:
    """Returns the arrays of a timetable; None if it has other actions, or stages with several neighbours."""
    kinds, stages = {slot.kind for slot in table.slots}, table.stages
    neighbours = *stages.successors, *stages.predecessors
    if not kinds <= {ActionKind.FORWARD, ActionKind.BACKWARD} or any(len(others) > 1 for others in neighbours):
        return None
    if table.leads.any() or table.further_needs or table.extra_results or table.joined or table.update_interval:
        return None
    if stages.backwards_per_forward > 1 or any(slot.variant for slot in table.slots):
        return None
    slots = [(slot.stage, slot.kind == ActionKind.BACKWARD, slot.first, slot.last) for slot in table.slots]
    stage, backward, first, last = np.array(slots, np.int64).T
    ways = enumerate((stages.successors, stages.predecessors))
    links = [(way, sender, other) for way, others in ways for sender, each in enumerate(others) for other in each]
    hops = [hop for hop in links if stages.elsewhere(*hop[1:])]
    return TableArrays(
        np.array(table.starts), table.sequence_array, table.need_array, table.slot_array, stage, backward, first > 0,
        last > 0, np.array(stages.devices), hops,
    )  # fmt: skip
