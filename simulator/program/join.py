"""Joins the timetables of pipelines that run side by side to one: replicas that run different numbers of
micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from meshcast.simulator.program.timetable import Slot, Timetable
from meshcast.simulator.scheduling.schedule import OverlappedPasses, ScheduleItem


def join_timetables(tables: Sequence[Timetable]) -> Timetable:
    """One timetable of all pipelines: devices, stages, slots and actions are numbered pipeline by pipeline.

    No action of one pipeline needs one of another; they meet in the collectives of the updates.
    """
    first = tables[0]
    devices = [0, *accumulate(table.shape.p for table in tables)]
    stages = [0, *accumulate(len(table.stage_device) for table in tables)]
    slots = [0, *accumulate(len(table.slots) for table in tables)]
    actions = [0, *accumulate(len(table.slot) for table in tables)]
    extra = actions[-1]
    shape = replace(first.shape, p=devices[-1], m=max(table.shape.m for table in tables))
    found = Timetable(
        shape, [], [0], [], [], [], [], [], [], [], [],
        backwards_per_forward=first.backwards_per_forward,
        separates_multiprocessors=first.separates_multiprocessors,
        joined=True,
    )  # fmt: skip
    for i, table in enumerate(tables):
        d, s, t, a = devices[i], stages[i], slots[i], actions[i]
        own = len(table.slot)
        shifted = extra - own

        def result(number: int, a: int = a, own: int = own, shifted: int = shifted) -> int:
            """The number of a result: of an action, or a further one behind all actions."""
            return -1 if number < 0 else number + (a if number < own else shifted)

        found.orders.extend([shift_item(item, s) for item in order] for order in table.orders)
        found.starts.extend(a + end for end in table.starts[1:])
        found.slots.extend(_shift_slot(slot, s, d) for slot in table.slots)
        found.slot.extend(t + number for number in table.slot)
        found.need.extend(map(result, table.need))
        found.sequence.extend(a + number for number in table.sequence)
        found.stage_device.extend(d + device for device in table.stage_device)
        found.copies.extend(tuple(d + device for device in held) for held in table.copies)
        found.predecessors.extend(tuple(s + stage for stage in before) for before in table.predecessors)
        found.successors.extend(tuple(s + stage for stage in behind) for behind in table.successors)
        found.coupled.update(
            {s + stage: tuple(s + other for other in with_it) for stage, with_it in table.coupled.items()}
        )
        found.further_needs.update({a + at: tuple(map(result, needs)) for at, needs in table.further_needs.items()})
        found.stripes.update(
            {(s + stage, d + at): one._replace(keeper=d + at) for (stage, at), one in table.stripes.items()}
        )
        found.extra_results.update(
            {a + at: range(shifted + some.start, shifted + some.stop) for at, some in table.extra_results.items()}
        )
        extra += table.results - own
    return found


def shift_item(item: ScheduleItem, stages: int) -> ScheduleItem:
    """The same passes of stages that are numbered `stages` higher."""
    if isinstance(item, OverlappedPasses):
        return OverlappedPasses(*(action._replace(stage=action.stage + stages) for action in item))
    return item._replace(stage=item.stage + stages)


def _shift_slot(slot: Slot, stages: int, devices: int) -> Slot:
    partner = None if slot.partner is None else _shift_slot(slot.partner, stages, devices)
    keeper = slot.keeper if slot.keeper < 0 else slot.keeper + devices
    return slot._replace(stage=slot.stage + stages, partner=partner, keeper=keeper)
