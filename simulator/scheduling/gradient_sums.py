"""Gradients of stages that several devices hold, summed while other passes run: their actions put into orders.

A device states at COMPLETE that its last backward pass of a stage has run. SUM, the all-reduce, waits for all devices
that hold the stage. Both take nothing from the compute stream.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from meshcast.simulator.scheduling.activation_transfer import TimedItem, equal_durations, time_orders
from meshcast.simulator.scheduling.schedule import Action, ActionKind, PipelineShape, Schedule, ScheduleItem, actions_of


def insert_gradient_sums(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[ScheduleItem]]
) -> Sequence[Sequence[ScheduleItem]]:
    """Orders with the sums of gradients of the stages that `Schedule.sums_early` names.

    COMPLETE follows the last backward pass of a stage. SUM precedes the first item that begins once all copies have
    run theirs, if all passes last equally long: every action then follows in time those that it needs, so no device
    waits for a sum that another has yet to reach.
    """
    early = [stage for stage in range(shape.stages) if schedule.sums_early(shape, stage)]
    if not early or shape.forward_only:
        return orders
    timed = time_orders(schedule, shape, orders, equal_durations(shape))
    last: dict[int, tuple[TimedItem, Action]] = {}
    # By device: moment, rank among the items of a moment, item.
    entries: dict[int, list[tuple[float, int, ScheduleItem]]] = defaultdict(list)
    for timed_item in timed:
        entries[timed_item.device].append((timed_item.begin, 2, timed_item.item))
        last.update(
            {
                action.stage: (timed_item, action)
                for action in actions_of([timed_item.item])
                if action.kind in ("BW", "W")
            }
        )
    ends: dict[int, float] = defaultdict(float)
    for stage in early:
        part = schedule.model_part(shape, stage)
        ends[part] = max(ends[part], last[stage][0].end)
    for stage in early:
        timed_item, action = last[stage]
        entries[timed_item.device].append((timed_item.end, 0, action._replace(kind=ActionKind.COMPLETE)))
        entries[timed_item.device].append(
            (ends[schedule.model_part(shape, stage)], 1, action._replace(kind=ActionKind.SUM))
        )
    return [[item for *_, item in sorted(entries[device], key=lambda entry: entry[:2])] for device in range(shape.p)]
