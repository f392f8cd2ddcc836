"""Finds the actions of an order that are missing, repeated, or on a wrong device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from simulator.scheduling.schedule import ACTIVATION_TRANSFERS, BATCH_LOSS, GRADIENT_SUMS, Action, ActionKind


def find_wrong_actions(
    groups: Sequence[list[Action]], order: Sequence[Action], counts: Counter[Action]
) -> list[Action]:
    """Lists the actions that are missing, repeated, or on a wrong device. groups: four for every micro-batch and slice:
    [F], [BW], [B, W], [R]."""
    found = []
    for forward, both, parts, again in zip(*[iter(groups)] * 4, strict=True):
        split = any(counts[action] for action in parts)
        wanted = [*forward, *(parts if split else both)]
        found += [action for action in wanted if counts[action] != 1]
        found += [action for action in (*(both if split else ()), *again) if counts[action] > (action.kind == "R")]
    own = {action for group in groups for action in group}
    ahead = {action._replace(kind=ActionKind.AHEAD) for action in own if action.kind == "F"}
    if any(counts[action] for action in ahead):
        found += [action for action in sorted(ahead) if counts[action] != 1]
        own |= ahead
    for action in order:
        move = action.kind in ACTIVATION_TRANSFERS and counts[action] == 1 and action._replace(kind="F") in counts
        move |= action.kind in (*GRADIENT_SUMS, *BATCH_LOSS)
        found += [] if move or action in own else [action]
    return found
