"""Activations that rest on another device: moves put into finished orders.

A schedule states its passes, and which of them make room: before the pass `out` what a micro-batch has saved leaves its
device, and before the pass `back` it is called again. `moved` finds where the other device stands then, by how long
passes last, and puts its half of each move there, in front of the pass that it is busy with: neither device waits for
the other to come, and the other one may make room a pass before it is needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from simulator.scheduling.schedule import Action, Durations, PipelineShape, Schedule, ScheduleItem, actions_of


@dataclass(frozen=True)
class Move:
    """What a forward pass has saved goes to the device `to` as the pass `out` begins, and comes back from when `back`
    does. All three passes are of one device."""

    forward: Action
    to: int
    out: Action
    back: Action


def moved(
    schedule: Schedule,
    shape: PipelineShape,
    orders: Sequence[Sequence[ScheduleItem]],
    moves: Sequence[Move],
    lasting: Durations | None = None,
) -> list[list[ScheduleItem]]:
    """Orders with their moves. lasting: how long passes last; if not given, all alike."""
    played = _played(schedule, shape, orders, lasting or _alike(shape))
    place = {action: at for at, (turn, *_) in enumerate(played) for action in actions_of([turn])}
    # Ends of passes may fall on one moment; a later place never has an earlier end.
    ends = list(accumulate((end for *_, end in played), max))
    put: list[tuple[int, float, tuple[tuple[int, Action], ...]]] = []
    for move in moves:
        for behind, kinds in ((move.out, ("K", "E")), (move.back, ("L", "G"))):
            at = place[behind]
            _, own, begin, _ = played[at]
            # The other device says first that it keeps, and the own one that it calls.
            devices = (move.to, own) if kinds[0] == "K" else (own, move.to)
            halves = [(d, move.forward._replace(kind=kind)) for d, kind in zip(devices, kinds, strict=True)]
            put.append((min(bisect_right(ends, begin), at), begin, tuple(halves)))
    put.sort(key=lambda one: one[:2])
    found: list[list[ScheduleItem]] = [[] for _ in orders]
    for at, (turn, device, *_) in enumerate([*played, (None, 0, 0.0, 0.0)]):
        while put and put[0][0] == at:
            for one, half in put.pop(0)[2]:
                found[one].append(half)
        if turn is not None:
            found[device].append(turn)
    return found


def _alike(shape: PipelineShape) -> Durations:
    one = (1.0,) * shape.stages
    return Durations(one, one, one, one)


def _played(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[ScheduleItem]], lasting: Durations
) -> list[tuple[ScheduleItem, int, float, float]]:
    """Every turn with its device, begin and end, by their ends; each comes after all that it needs.

    An order that stands still ends where it does: who checks it will tell.
    """
    after: list[list[int]] = [[] for _ in range(shape.stages)]
    for stage in range(shape.stages):
        for other in schedule.before(shape, stage):
            after[other].append(stage)
    at, free, done = [0] * len(orders), [0.0] * len(orders), dict[tuple[int, bool, int, int], float]()
    found: list[tuple[ScheduleItem, int, float, float]] = []

    def come(action: Action, device: int) -> float | None:
        """When what an action needs from others has come; None: not yet known."""
        forward = action.kind == "F"
        others = {"F": schedule.before(shape, action.stage), "BW": after[action.stage], "B": after[action.stage]}
        latest = 0.0
        for other in others.get(action.kind, ()):
            end = done.get((other, forward, action.microbatch, action.slice))
            if end is None:
                return None
            latest = max(latest, end + lasting.hop * (schedule.device(shape, other) != device))
        return latest

    moving = True
    while moving:
        moving = False
        for device, order in enumerate(orders):
            while at[device] < len(order):
                turn = order[at[device]]
                waits = [come(action, device) for action in actions_of([turn])]
                if (known := [one for one in waits if one is not None]) != waits:
                    break
                begin = max(free[device], *known)
                free[device] = begin + sum(_lasts(action, lasting) for action in actions_of([turn]))
                for action in actions_of([turn]):
                    if action.kind in ("F", "BW", "B"):
                        done[action.stage, action.kind == "F", action.microbatch, action.slice] = free[device]
                found.append((turn, device, begin, free[device]))
                at[device] += 1
                moving = True
    found.sort(key=lambda one: one[3])
    return found + [(turn, d, free[d], free[d]) for d, order in enumerate(orders) for turn in order[at[d] :]]


def _lasts(action: Action, lasting: Durations) -> float:
    stage = action.stage
    inputs, weights = lasting.backward[stage], lasting.weights[stage]
    known = {"F": lasting.forward[stage], "BW": inputs + weights, "B": inputs, "W": weights, "R": lasting.again[stage]}
    return known.get(action.kind, 0.0)
