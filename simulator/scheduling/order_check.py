"""Finds the actions of an order that are missing, repeated, or on a wrong device; shows orders in messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from meshcast.hardware.errors import ScheduleError
from meshcast.simulator.scheduling.schedule import (
    ACTIVATION_TRANSFERS,
    BATCH_LOSS,
    GRADIENT_SUMS,
    HOST_COPIES,
    SHARD_COLLECTIVES,
    Action,
    ActionKind,
    Orders,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)

PUT_IN = (*GRADIENT_SUMS, *BATCH_LOSS, *SHARD_COLLECTIVES, *HOST_COPIES)
"""Kinds of actions that are no passes of a stage."""

MAX_SHOWN = 8
"""Devices that a message shows, and actions on either side of the marked action."""


def find_wrong_actions(
    groups: Sequence[list[Action]], order: Sequence[Action], counts: Counter[Action]
) -> list[Action]:
    """Lists the actions that are missing, repeated, or on a wrong device. groups: four for every micro-batch and slice:
    [F], [BW], [B, W], [R]."""
    wrong = []
    for forward, both, parts, again in zip(*[iter(groups)] * 4, strict=True):
        split = any(counts[action] for action in parts)
        wanted = [*forward, *(parts if split else both)]
        wrong += [action for action in wanted if counts[action] != 1]
        wrong += [action for action in (*(both if split else ()), *again) if counts[action] > (action.kind == "R")]
    expected = {action for group in groups for action in group}
    ahead = {action._replace(kind=ActionKind.AHEAD) for action in expected if action.kind == "F"}
    if any(counts[action] for action in ahead):
        wrong += [action for action in sorted(ahead) if counts[action] != 1]
        expected |= ahead
    for action in order:
        move = action.kind in ACTIVATION_TRANSFERS and counts[action] == 1
        move &= action._replace(kind="F", slice=0) in counts
        wrong += [] if move or action.kind in PUT_IN or action in expected else [action]
    return wrong


def incomplete_error(
    schedule: Schedule, shape: PipelineShape, orders: Orders, devices: Sequence[int], pieces: int
) -> ScheduleError:
    """Makes the error for orders in which an action is missing, repeated or on a wrong device.

    devices: of every stage; pieces: slices of every micro-batch, or parts of it that have separate backward passes.
    """
    parts = schedule.backwards_per_forward
    counts = Counter(action for order in orders for action in actions_of(order))
    for device, order in enumerate(orders):
        passes = [
            [
                [Action(stage, kind, microbatch, 0 if kind == "F" and parts > 1 else part) for kind in kinds]
                for microbatch in schedule.microbatches(shape, stage)
                for part in range(pieces)
                for kinds in (("F",), ("BW",), ("B", "W"), ("R",))
            ]
            for stage in range(shape.stages)
            if devices[stage] == device
        ]
        wrong = find_wrong_actions([group for groups in passes for group in groups], actions_of(order), counts)
        if wrong:
            break
    times = counts[wrong[0]]
    remedy = f"{'Add it' if not times else 'Keep one of them'} on device {device}"
    at = [step for step, item in enumerate(order) if wrong[0] in actions_of([item])]
    return ScheduleError(
        f"{schedule.use} on device {device}",
        f"an order lists each action of its stages exactly once; {wrong[0]} is listed {times} times",
        f"{remedy}:\n{format_orders(orders, {device: at[-1] if at else len(order)})}",
    )


def format_orders(orders: Sequence[Iterable[ScheduleItem]], failed_step: dict[int, int]) -> str:
    """Returns orders as text, a line a device: those around the failed steps, if there are many.

    failed_step: by device, the step to mark as ``>...<``.
    """
    shown = sorted(range(len(orders)), key=lambda device: device not in failed_step)[:MAX_SHOWN]
    rows = []
    for device in sorted(shown):
        failed = failed_step.get(device)
        cells = [f">{item}<" if failed == step else str(item) for step, item in enumerate(orders[device])]
        begin = max((failed or 0) - MAX_SHOWN, 0)
        end = (failed or 0) + MAX_SHOWN + 1
        dots = ["..."] if begin else [], ["..."] if end < len(cells) else []
        rows.append(f"  device {device}: {' '.join([*dots[0], *cells[begin:end], *dots[1]])}")
    if len(orders) > MAX_SHOWN:
        rows.append(f"  and {len(orders) - MAX_SHOWN:,} more devices")
    return "\n".join(rows)
