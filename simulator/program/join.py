"""Joins the timetables of pipelines that run side by side to a single timetable: replicas that run different numbers of
micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from meshcast.simulator.program.pipeline_stages import Slot
from meshcast.simulator.program.timetable import Timetable
from meshcast.simulator.scheduling.schedule import OverlappedPasses, ScheduleItem


def join_timetables(tables: Sequence[Timetable]) -> Timetable:
    """Returns the timetable of all pipelines: devices, stages, slots and actions are numbered pipeline by pipeline.

    No action of a pipeline needs any of another; they meet in the collectives of the updates.
    """
    first = tables[0]
    devices = [0, *accumulate(table.shape.p for table in tables)]
    stages = [0, *accumulate(len(table.stages.devices) for table in tables)]
    slots = [0, *accumulate(len(table.slots) for table in tables)]
    actions = [0, *accumulate(len(table.slot_array) for table in tables)]
    extra = actions[-1]
    shape = replace(first.shape, p=devices[-1], m=max(table.shape.m for table in tables))
    all_stages = replace(
        first.stages, devices=[], copies=[], predecessors=[], successors=[], coupled={}, chained=False, stripes={}
    )
    starts, joined_slots, columns = [0], list[Slot](), list[tuple[np.ndarray, ...]]()
    further_needs, extra_results = dict[int, tuple[int, ...]](), dict[int, range]()
    for i, table in enumerate(tables):
        d, s, t, a = devices[i], stages[i], slots[i], actions[i]
        count = len(table.slot_array)
        shifted = extra - count

        def result(number: int, a: int = a, count: int = count, shifted: int = shifted) -> int:
            """Returns the number of a result: of an action, or a further one behind all actions."""
            return -1 if number < 0 else number + (a if number < count else shifted)

        starts += [a + end for end in table.starts[1:]]
        joined_slots += [_shift_slot(slot, s, d) for slot in table.slots]
        fields = table.fields + np.array([[s], [0], [0], [0]], np.int32)
        need = np.array([*map(result, table.need)], np.int32)
        columns.append((fields, table.leads, t + table.slot_array, need, a + table.sequence_array))
        all_stages.devices.extend(d + device for device in table.stages.devices)
        all_stages.copies.extend(tuple(d + device for device in held) for held in table.stages.copies)
        all_stages.predecessors.extend(tuple(s + stage for stage in before) for before in table.stages.predecessors)
        all_stages.successors.extend(tuple(s + stage for stage in behind) for behind in table.stages.successors)
        all_stages.coupled.update(
            {s + stage: tuple(s + other for other in with_it) for stage, with_it in table.stages.coupled.items()}
        )
        further_needs.update({a + at: tuple(map(result, needs)) for at, needs in table.further_needs.items()})
        all_stages.stripes.update(
            {
                (s + stage, d + at): stripe._replace(keeper=d + at)
                for (stage, at), stripe in table.stages.stripes.items()
            }
        )
        extra_results.update(
            {a + at: range(shifted + some.start, shifted + some.stop) for at, some in table.extra_results.items()}
        )
        extra += table.results - count
    fields, leads, slot, need, sequence = (np.concatenate(arrays, axis=-1) for arrays in zip(*columns, strict=True))
    return Timetable(
        shape, starts, fields, leads, joined_slots, slot, need, sequence, all_stages, further_needs, extra_results,
        joined=True,
    )  # fmt: skip


def shift_item(item: ScheduleItem, stages: int) -> ScheduleItem:
    """Returns the same passes of stages that are numbered `stages` higher."""
    if isinstance(item, OverlappedPasses):
        return OverlappedPasses(*(action._replace(stage=action.stage + stages) for action in item))
    return item._replace(stage=item.stage + stages)


def _shift_slot(slot: Slot, stages: int, devices: int) -> Slot:
    partner = None if slot.partner is None else _shift_slot(slot.partner, stages, devices)
    keeper = slot.keeper if slot.keeper < 0 else slot.keeper + devices
    return slot._replace(stage=slot.stage + stages, partner=partner, keeper=keeper)
