"""Timetables as the arrays that the compiled loops read."""

from __future__ import annotations

from collections.abc import Sequence

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
    successors, predecessors: by stage, the stage that takes its output and that whose output it takes; -1: none.
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
    successors: np.ndarray
    predecessors: np.ndarray


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

    def find_next(others: Sequence[tuple[int, ...]]) -> np.ndarray:
        return np.array([each[0] if each else -1 for each in others])

    return TableArrays(
        np.array(table.starts), table.sequence_array, table.need_array, table.slot_array, stage, backward, first > 0,
        last > 0, np.array(stages.devices), find_next(stages.successors), find_next(stages.predecessors),
    )  # fmt: skip
