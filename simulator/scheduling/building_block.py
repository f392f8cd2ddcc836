"""Orders that come about in unit slots: every pass takes one slot, however long it lasts in the end.

Some papers state not an order but how it is made: by a rule which pass a free device takes (`greedy`), or as a building
block, the slots of one micro-batch's passes, that is repeated for every micro-batch (`repeated`, `reordered`: Qi et al.
2024, arXiv 2405.15362, section 3). What comes out is an order like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from simulator.scheduling.schedule import Action, PipelineShape, Schedule

Needs = Mapping[Action, Sequence[Action]]
"""What must have been done before an action can begin."""


def needs(schedule: Schedule, shape: PipelineShape, *, apart: bool) -> Needs:
    """What every pass needs; apart: whether the gradients of weights are passes of their own."""
    found: dict[Action, list[Action]] = {}
    kind = "B" if apart else "BW"
    for stage in range(shape.stages):
        before = schedule.before(shape, stage)
        for k in schedule.microbatches(shape, stage):
            forward, backward = Action(stage, "F", k), Action(stage, kind, k)
            found[forward] = [Action(other, "F", k) for other in before]
            found.setdefault(backward, []).append(forward)
            for other in before:
                found.setdefault(Action(other, kind, k), []).append(backward)
            if apart:
                found[Action(stage, "W", k)] = [backward]
    return found


def turned(needs: Needs) -> Needs:
    """Who needs an action."""
    found: dict[Action, list[Action]] = {action: [] for action in needs}
    for action, others in needs.items():
        for other in others:
            found[other].append(action)
    return found


def greedy(schedule: Schedule, shape: PipelineShape, needs: Needs, rank: Callable[[Action], Any]) -> list[list[Action]]:
    """In every slot each device takes, of the actions that are ready, the one of the lowest rank."""
    after = turned(needs)
    left = {action: len(others) for action, others in needs.items()}
    ready: list[list[tuple[Any, Action]]] = [[] for _ in range(shape.p)]
    orders: list[list[Action]] = [[] for _ in range(shape.p)]
    free = [action for action, count in left.items() if not count]
    while free or any(ready):
        for action in free:
            heappush(ready[schedule.device(shape, action.stage)], (rank(action), action))
        free = []
        for heap, order in zip(ready, orders, strict=True):
            if heap:
                order.append(heappop(heap)[1])
                for other in after[order[-1]]:
                    left[other] -= 1
                    free += [other] * (not left[other])
    return orders


def repeated(schedule: Schedule, shape: PipelineShape, block: Sequence[tuple[int, int]]) -> list[list[Action]]:
    """Every micro-batch passes as the one before did, one period later: as many slots as it has passes on a device.

    block: for each stage the slots in which the first micro-batch's F and B begin. A W takes the first slot that is
    free, those of earlier B first.

    Raises ValueError where two passes fall on one slot.
    """
    period = 3 * shape.v
    slots: list[dict[int, Action]] = [{} for _ in range(shape.p)]
    for stage, begins in enumerate(block):
        own = slots[schedule.device(shape, stage)]
        for kind, begin in zip("FB", begins, strict=True):
            for k in shape.microbatches:
                slot = begin + period * k
                if slot in own:
                    raise ValueError(f"{own[slot]} and {Action(stage, kind, k)} fall on one slot")
                own[slot] = Action(stage, kind, k)
    return [_filled(own) for own in slots]


def _filled(slots: Mapping[int, Action]) -> list[Action]:
    """The passes of a device in their slots, and in the free ones the W's of what has gone before."""
    order: list[Action] = []
    owed: list[Action] = []
    for slot in range(min(slots), max(slots) + 1):
        if (action := slots.get(slot)) is not None:
            order.append(action)
            owed += [action._replace(kind="W")] * (action.kind == "B")
        elif owed:
            order.append(owed.pop(0))
    return order + owed


def reordered(schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """Fills with other passes what idles while the pipe fills and runs dry; no device holds more chunks than it did.

    First, looking back from the end, W's are put off where a device would idle later on: so B's before them come
    sooner. Then, looking on from the start, a device that would idle takes the next pass in its order that is ready.
    """
    first = needs(schedule, shape, apart=True)
    most = [_held(order) for order in orders]
    late = _turned_round(_drawn(_turned_round(orders), turned(first), most, "WF", "W"))
    return _drawn(late, first, most, "FW", "FBW")


def _turned_round(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    return [list(reversed(order)) for order in orders]


def _held(order: Sequence[Action]) -> int:
    """The most chunks that a device holds, each from its F to its W."""
    held = top = 0
    for action in order:
        held += (action.kind == "F") - (action.kind == "W")
        top = max(top, held)
    return top


def _drawn(
    orders: Sequence[Sequence[Action]], needs: Needs, most: Sequence[int], ends: str, kinds: str
) -> list[list[Action]]:
    """In every slot each device takes the next pass of its order, or, if that is not ready, the first that is.

    most: chunks that each device may hold, from passes of the first kind in `ends` to those of the second. kinds: what
    may be drawn before others.
    """
    left, held = [list(order) for order in orders], [0] * len(orders)
    lanes = [len({(action.stage, action.kind) for action in order}) for order in orders]
    done: set[Action] = set()
    drawn: list[list[Action]] = [[] for _ in orders]

    def change(action: Action) -> int:
        return (action.kind == ends[0]) - (action.kind == ends[1])

    def pick(device: int) -> Action | None:
        top = after = held[device]
        seen: set[tuple[int, str]] = set()
        for action in left[device]:
            # The next of the order is always within the bounds. Passes of one kind on one stage never swap.
            lane = action.stage, action.kind
            may = not seen or (action.kind in kinds and lane not in seen and top + change(action) <= most[device])
            if may and done.issuperset(needs[action]):
                return action
            seen.add(lane)
            if len(seen) == lanes[device]:
                break
            after += change(action)
            top = max(top, after)
        return None

    while any(left):
        taken = [(device, action) for device in range(len(left)) if (action := pick(device))]
        for device, action in taken:
            left[device].remove(action)
            drawn[device].append(action)
            held[device] += change(action)
        done.update(action for _, action in taken)
    return drawn
