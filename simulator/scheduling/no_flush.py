"""Schedules without a flush or a barrier: where weights are updated, how many versions are held, how much to play.

Without a flush the pipeline fills once and never drains. Every device updates its weights, so micro-batches in
flight use older versions (weight stashing, arXiv 1806.03377). With a flush but no barrier (post-validation, arXiv
2401.10241) a device repeats the order of a batch as soon as it has updated its weights; all passes of a batch use the
same version. The time of an update is read from a run that is long enough for devices to repeat themselves: warm-up,
then a window of updates in steady state, then the cool-down, which is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from meshcast.simulator.scheduling.greedy import forward_orders
from meshcast.simulator.scheduling.schedule import (
    Action,
    Orders,
    OverlappedPasses,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)

WARMUP_MICROBATCHES = 4
"""Micro-batches a stage before the part of a run that is measured: by then the pipeline is full and in steady state."""

CYCLE_PIPELINES = 8
"""Pipelines full of micro-batches after which the pattern in which devices wait for each other repeats."""


def insert_updates(order: Sequence[ScheduleItem], interval: int) -> list[ScheduleItem]:
    """Returns the order of a device with an update after every `interval` micro-batches, once their gradients are
    complete.

    An update is an action of the device's first stage and of the last of its micro-batches.
    """
    left = Counter(action.microbatch // interval for action in actions_of(order) if action.kind in ("BW", "W"))
    stage = min((action.stage for action in actions_of(order)), default=0)
    updated: list[ScheduleItem] = []
    for item in order:
        updated.append(item)
        for action in actions_of([item]):
            if action.kind in ("BW", "W"):
                update = action.microbatch // interval
                left[update] -= 1
                if not left[update]:
                    updated.append(Action(stage, "O", (update + 1) * interval - 1))
    return updated


def orders_of_run(
    schedule: Schedule, shape: PipelineShape, interval: int, durations: PassDurations | None = None
) -> Orders:
    """Returns the orders of all devices in a run; of a forward-only shape their forward passes.

    shape: of the run.
    interval: micro-batches per update without a barrier; otherwise 0.

    Raises PlanError for a shape that the schedule does not support.
    """
    batch = replace(shape, m=interval) if schedule.flush and interval else shape
    schedule.check(batch)
    orders = schedule.orders(batch, durations)
    if shape.forward_only:
        return forward_orders(schedule, shape, orders)
    times = shape.m // batch.m
    return [_repeat(order, batch.m, times) for order in orders] if times > 1 else orders


def _repeat(order: Sequence[ScheduleItem], microbatches: int, times: int) -> list[ScheduleItem]:
    """Returns the order of a batch, `times` in a row. microbatches: of a batch."""

    def later(action: Action, batch: int) -> Action:
        return action._replace(microbatch=action.microbatch + batch * microbatches)

    return [
        OverlappedPasses(*(later(action, batch) for action in item))
        if isinstance(item, OverlappedPasses)
        else later(item, batch)
        for batch in range(times)
        for item in order
    ]


def peak_weight_versions(schedule: Schedule, shape: PipelineShape, device: int, order: Sequence[ScheduleItem]) -> int:
    """Returns the peak number of weight versions on a device: the newest, and every older version that a pass will
    still use.

    shape: of a batch.
    order: of a run of many batches, with its updates.
    """
    actions = actions_of(order)
    used = [schedule.weight_version(shape, device, action.microbatch) for action in actions]
    last_use = {version: at for at, version in enumerate(used) if actions[at].kind != "O"}
    held, newest, peak = {0}, 0, 1
    for at, action in enumerate(actions):
        if action.kind == "O":
            newest += 1
            # A version that no pass uses any more is freed before the update makes the next.
            held = {version for version in held if last_use.get(version, -1) > at} | {newest}
            peak = max(peak, len(held))
    return peak


def extend_to_steady_state(shape: PipelineShape, interval: int) -> PipelineShape:
    """Returns the shape of a run that shows the steady state. interval: micro-batches between two updates."""
    warmup = math.ceil(WARMUP_MICROBATCHES * shape.stages / interval)
    updates = warmup + 2 * max_cycle_updates(shape, interval) - 1 + cooldown_updates(shape, interval)
    return replace(shape, m=updates * interval)


def max_cycle_updates(shape: PipelineShape, interval: int) -> int:
    """Returns the most updates after which the pattern in which devices wait for each other should repeat.

    One for every stage; fewer where an update has many micro-batches, since each of them forgets how it began.
    """
    return min(shape.stages, math.ceil(CYCLE_PIPELINES * shape.stages / interval))


def cooldown_updates(shape: PipelineShape, interval: int) -> int:
    """Updates at the end of a run whose micro-batches are followed by none: the pipeline drains."""
    return math.ceil(shape.stages / interval)
