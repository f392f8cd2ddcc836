"""Schedules from a building block: the slots of one micro-batch's passes, repeated for every micro-batch.

The method of Qi et al. 2024 (arXiv 2405.15362, section 3). `repeat_block` repeats the block without collisions. Its
gaps need no squeezing here: an order holds no idle slots, every pass begins as soon as it can.
`reorder_warmup_and_cooldown` then fills the idle time at both ends. All passes take one slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from simulator.scheduling.greedy import Dependencies, invert_dependencies, pass_dependencies
from simulator.scheduling.schedule import Action, PipelineShape, Schedule


def repeat_block(schedule: Schedule, shape: PipelineShape, block: Sequence[tuple[int, int]]) -> list[list[Action]]:
    """The orders of all devices when every micro-batch follows the one before after one period, the slots that its
    passes take on a device.

    block: for each stage the slots in which F and B of the first micro-batch begin. A W takes the first free slot after
    its B, in the order of the B's.

    Raises ValueError if two passes fall on one slot.
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
    return [_insert_weight_passes(own) for own in slots]


def _insert_weight_passes(slots: Mapping[int, Action]) -> list[Action]:
    """The order of a device: F and B in their slots, and in each free slot the W of the earliest B that has none."""
    order: list[Action] = []
    pending: list[Action] = []
    for slot in range(min(slots), max(slots) + 1):
        if (action := slots.get(slot)) is not None:
            order.append(action)
            pending += [action._replace(kind="W")] * (action.kind == "B")
        elif pending:
            order.append(pending.pop(0))
    return order + pending


def reorder_warmup_and_cooldown(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[Action]]
) -> list[list[Action]]:
    """Orders whose idle slots in warm-up and cool-down are filled with later passes, at no higher peak of chunks.

    Backwards from the end, W's are moved behind the B's that other devices wait for. Then, forwards from the start, a
    device that would idle takes the next ready pass of its order.
    """
    dependencies = pass_dependencies(schedule, shape, split_backward=True)
    peaks = [_peak_chunks(order) for order in orders]
    late = _reverse(_fill_idle_slots(_reverse(orders), invert_dependencies(dependencies), peaks, "W", "F", "W"))
    return _fill_idle_slots(late, dependencies, peaks, "F", "W", "FBW")


def _reverse(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    return [list(reversed(order)) for order in orders]


def _peak_chunks(order: Sequence[Action]) -> int:
    """Peak number of chunks whose activations a device holds, each from its F to its W."""
    held = peak = 0
    for action in order:
        held += (action.kind == "F") - (action.kind == "W")
        peak = max(peak, held)
    return peak


def _fill_idle_slots(
    orders: Sequence[Sequence[Action]],
    dependencies: Dependencies,
    peaks: Sequence[int],
    allocating: str,
    freeing: str,
    movable: str,
) -> list[list[Action]]:
    """Orders in which, slot by slot, each device takes the next pass of its order or, if that is not ready, the first
    movable one that is.

    peaks: chunks that each device may hold, from a pass of kind `allocating` to one of kind `freeing`.
    movable: kinds of passes that may go before others.
    """
    remaining, held = [list(order) for order in orders], [0] * len(orders)
    lanes = [len({(action.stage, action.kind) for action in order}) for order in orders]
    done: set[Action] = set()
    filled: list[list[Action]] = [[] for _ in orders]

    def change(action: Action) -> int:
        return (action.kind == allocating) - (action.kind == freeing)

    def pick(device: int) -> Action | None:
        peak = after = held[device]
        seen: set[tuple[int, str]] = set()
        for action in remaining[device]:
            # The next pass of the order is always within the peak. Passes of one kind on one stage never swap.
            lane = action.stage, action.kind
            fits = not seen or (action.kind in movable and lane not in seen and peak + change(action) <= peaks[device])
            if fits and done.issuperset(dependencies[action]):
                return action
            seen.add(lane)
            if len(seen) == lanes[device]:
                break
            after += change(action)
            peak = max(peak, after)
        return None

    while any(remaining):
        taken = [(device, action) for device in range(len(remaining)) if (action := pick(device))]
        for device, action in taken:
            remaining[device].remove(action)
            filled[device].append(action)
            held[device] += change(action)
        done.update(action for _, action in taken)
    return filled
