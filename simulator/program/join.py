"""Joins the timetables of pipelines that run side by side to a single timetable: replicas that run different numbers of
micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from meshcast.simulator.program.pipeline_stages import PipelineStages, Slot
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import OverlappedPasses, ScheduleItem


class _Before(NamedTuple):
    """What the pipelines before one have: the numbers of its devices, stages, slots and actions are so much higher.

    extra: by how much the numbers of its further results, behind all actions, are higher.
    """

    devices: int
    stages: int
    slots: int
    actions: int
    extra: int


def join_timetables(tables: Sequence[Timetable]) -> Timetable:
    """Returns the timetable of all pipelines: devices, stages, slots and actions are numbered pipeline by pipeline.

    No action of a pipeline needs any of another; they meet in the collectives of the updates.
    """
    devices, stages = (table.shape.p for table in tables), (len(table.stages.devices) for table in tables)
    slots, actions = (len(table.slots) for table in tables), [len(table.slot_array) for table in tables]
    further = (table.results - count for table, count in zip(tables, actions, strict=True))
    before = zip(*(accumulate(counts, initial=0) for counts in (devices, stages, slots, actions, further)), strict=True)
    total = sum(actions)
    every = [
        _shift_timetable(table, numbers._replace(extra=total - count + numbers.extra))
        for table, count, numbers in zip(tables, actions, map(_Before._make, before), strict=False)
    ]
    shape = replace(every[0].shape, p=sum(table.shape.p for table in every), m=max(table.shape.m for table in every))
    return Timetable(
        shape,
        [0, *(end for table in every for end in table.starts[1:])],
        np.concatenate([table.fields for table in every], axis=1),
        np.concatenate([table.leads for table in every]),
        [slot for table in every for slot in table.slots],
        np.concatenate([table.slot_array for table in every]),
        np.concatenate([table.need_array for table in every]),
        np.concatenate([table.sequence_array for table in every]),
        _join_stages([table.stages for table in every]),
        {at: needs for table in every for at, needs in table.further_needs.items()},
        {at: numbers for table in every for at, numbers in table.extra_results.items()},
        joined=True,
    )


def _shift_timetable(table: Timetable, before: _Before) -> Timetable:
    """Returns the timetable of a pipeline with the numbers that it has behind others."""
    count, needed = len(table.slot_array), table.need_array

    def shift_result(number: int) -> int:
        """Returns the number of a result: of an action, or a further one behind all actions."""
        return number + (before.actions if number < count else before.extra)

    need = np.where(needed < count, before.actions, before.extra)
    return replace(
        table,
        starts=[before.actions + end for end in table.starts],
        fields=table.fields + np.array([[before.stages], [0], [0], [0]], np.int32),
        slots=[_shift_slot(slot, before.stages, before.devices) for slot in table.slots],
        slot_array=before.slots + table.slot_array,
        need_array=np.where(needed < 0, -1, needed + need).astype(np.int32),
        sequence_array=before.actions + table.sequence_array,
        stages=_shift_stages(table.stages, before),
        further_needs={
            before.actions + at: tuple(map(shift_result, needs)) for at, needs in table.further_needs.items()
        },
        extra_results={
            before.actions + at: range(before.extra + numbers.start, before.extra + numbers.stop)
            for at, numbers in table.extra_results.items()
        },
    )


def _shift_stages(stages: PipelineStages, before: _Before) -> PipelineStages:
    """Returns the stages of a pipeline with the numbers that they have behind others."""

    def shift_each(numbers: Sequence[tuple[int, ...]], by: int) -> list[tuple[int, ...]]:
        return [tuple(by + number for number in each) for each in numbers]

    return replace(
        stages,
        devices=[before.devices + device for device in stages.devices],
        copies=shift_each(stages.copies, before.devices),
        predecessors=shift_each(stages.predecessors, before.stages),
        successors=shift_each(stages.successors, before.stages),
        coupled={
            before.stages + stage: tuple(before.stages + other for other in others)
            for stage, others in stages.coupled.items()
        },
        stripes={
            (before.stages + stage, before.devices + at): stripe._replace(keeper=before.devices + at)
            for (stage, at), stripe in stages.stripes.items()
        },
    )


def _join_stages(every: Sequence[PipelineStages]) -> PipelineStages:
    """Returns the stages of several pipelines, one behind another."""
    return replace(
        every[0],
        devices=[device for stages in every for device in stages.devices],
        copies=[copies for stages in every for copies in stages.copies],
        predecessors=[others for stages in every for others in stages.predecessors],
        successors=[others for stages in every for others in stages.successors],
        coupled={stage: others for stages in every for stage, others in stages.coupled.items()},
        stripes={key: stripe for stages in every for key, stripe in stages.stripes.items()},
        chained=False,
    )


def shift_item(item: ScheduleItem, stages: int) -> ScheduleItem:
    """Returns the same passes of stages that are numbered `stages` higher."""
    if isinstance(item, OverlappedPasses):
        return OverlappedPasses(*(action._replace(stage=action.stage + stages) for action in item))
    return item._replace(stage=item.stage + stages)


def _shift_slot(slot: Slot, stages: int, devices: int) -> Slot:
    partner = None if slot.partner is None else _shift_slot(slot.partner, stages, devices)
    keeper = slot.keeper if slot.keeper < 0 else slot.keeper + devices
    return slot._replace(stage=slot.stage + stages, partner=partner, keeper=keeper)
