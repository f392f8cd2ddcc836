"""Schedules without a pipeline flush: how long a run must be until devices repeat themselves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from simulator.scheduling.schedule import Action, OverlappedPasses, PipelineShape, Schedule, ScheduleItem, actions_of

LEAD = 4
"""Micro-batches in front of the part that is measured, for each stage: by then the pipe is full and has settled."""


CYCLE = 8
"""Pipes full of micro-batches after which the way in which devices wait should have come round."""


def long_enough(shape: PipelineShape, every: int) -> PipelineShape:
    """A run with an update behind every so many micro-batches in which devices have come to repeat themselves."""
    updates = math.ceil(LEAD * shape.stages / every) + 2 * most_updates(shape, every) - 1 + drained(shape, every)
    return replace(shape, m=updates * every)


def most_updates(shape: PipelineShape, every: int) -> int:
    """Within how many updates the way in which devices wait should come round: as many as there are stages, but fewer
    where each takes many micro-batches, for then little is left of how one began."""
    return min(shape.stages, math.ceil(CYCLE * shape.stages / every))


def drained(shape: PipelineShape, every: int) -> int:
    """Updates at the end of a run that lack the forward passes of micro-batches behind them."""
    return math.ceil(shape.stages / every)


def with_updates(order: Sequence[ScheduleItem], every: int) -> list[ScheduleItem]:
    """The order of a device with an update behind every so many micro-batches, as soon as their gradients are complete.

    An update goes by the first stage of its device, and by the last of its micro-batches.
    """
    left = Counter(action.microbatch // every for action in actions_of(order) if action.kind in ("BW", "W"))
    stage = min((action.stage for action in actions_of(order)), default=0)
    found: list[ScheduleItem] = []
    for turn in order:
        found.append(turn)
        for action in turn if isinstance(turn, OverlappedPasses) else (turn,):
            if action.kind in ("BW", "W"):
                update = action.microbatch // every
                left[update] -= 1
                if not left[update]:
                    found.append(Action(stage, "O", (update + 1) * every - 1))
    return found


def weight_versions(schedule: Schedule, shape: PipelineShape, device: int, order: Sequence[ScheduleItem]) -> int:
    """The most versions of its weights that a device holds at once: the newest, and all that a micro-batch will still
    meet. shape: of one batch. order: of a run of many, with its updates."""
    actions = actions_of(order)
    meets = [schedule.version(shape, device, action.microbatch) for action in actions]
    last = {version: at for at, version in enumerate(meets) if actions[at].kind != "O"}
    held, made, most = {0}, 0, 1
    for at, action in enumerate(actions):
        if action.kind == "O":
            made += 1
            # What is not met any more is given up before the next version is made.
            held = {version for version in held if last.get(version, -1) > at} | {made}
            most = max(most, len(held))
    return most
