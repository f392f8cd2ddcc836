"""Schedules from a building block: the slots of one micro-batch's passes, repeated for every micro-batch.

The method of Qi et al. 2024 (arXiv 2405.15362, section 3). `repeat_block` repeats the block without collisions; all
passes take one slot. The gaps of an order need no squeezing: every pass begins as soon as it can. What is idle at both
ends is filled with other passes, by `reorder_warmup_and_cooldown` in slots, or by `reorder_both_ends`, which also knows
how long passes take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from heapq import heappop, heappush
from typing import Self

from meshcast.simulator.scheduling.greedy import Dependencies, invert_dependencies, pass_dependencies
from meshcast.simulator.scheduling.list_scheduler import PartialSchedule, reorder_at_run_time
from meshcast.simulator.scheduling.schedule import (
    Action,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)

BACKWARD = ("B", "W", "BW")
"""Kinds of backward passes, and those that end the life of a chunk's activations."""
LAST = ("W", "BW")

STEPS = 10**9
"""Steps in which the longest pass is timed: of whole steps, equal times are equal whatever they were added up from."""


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
    """Orders whose idle slots in warm-up and cool-down are filled with later passes, at no higher peak of chunks on any
    device.

    Backwards from the end, W's are moved behind the B's that other devices wait for. Then, forwards from the start, a
    device that would idle takes the next ready pass of its order.
    """
    filling = _Filling(schedule, shape, [_peak_chunks(order) for order in orders])
    return filling.forwards(filling.backwards(orders, "W"))


def reorder_both_ends(
    schedule: Schedule,
    shape: PipelineShape,
    orders: Sequence[Sequence[Action]],
    durations: PassDurations | None = None,
    peak: int | None = None,
) -> list[list[Action]]:
    """Orders whose idle time is filled, at no higher peak of chunks than `peak`; by default that of the fullest device.

    First in slots: forwards from the start a device that would idle takes the next ready pass of its order, then
    backwards from the end W's and B's move behind passes that other devices wait for. Then, of that and of the given
    orders, as long as passes take: backwards, and forwards, where a device waits for a pass of its order rather than to
    delay it. The shortest step is kept of those whose last stage holds one micro-batch, if any does; with a `peak`, of
    the given orders, too.
    """
    peaks = [peak or max(map(_peak_chunks, orders))] * len(orders)
    in_slots = _Filling(schedule, shape, peaks, any(action.kind == "W" for order in orders for action in order))
    found = in_slots.backwards(in_slots.forwards(orders), *BACKWARD)
    if durations is None:
        return found
    timed = in_slots.with_durations(durations)
    again = [timed.forwards(timed.backwards(one, *BACKWARD), patience=1.0) for one in (found, orders)]
    last = shape.stages - 1

    def step_time(candidate: Sequence[Sequence[ScheduleItem]]) -> tuple[bool, float, float]:
        played: PartialSchedule = reorder_at_run_time(schedule, shape, candidate, timed.duration, timed.hop)
        own = (action for action in actions_of(candidate[timed.device[last]]) if action.stage == last)
        return (_peak_chunks(list(own)) > 1, *played.step_time(durations.barrier))

    given = [] if peak is None else [[list(order) for order in orders]]
    return min((*given, found, *again), key=step_time)


def _reverse(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    return [list(reversed(order)) for order in orders]


def _peak_chunks(order: Sequence[Action]) -> int:
    """Peak number of chunks whose activations a device holds, each from its F to its last pass."""
    held = peak = 0
    for action in order:
        held += (action.kind == "F") - (action.kind in LAST)
        peak = max(peak, held)
    return peak


class _Filling:
    """Fills idle time of orders with other passes. Times are in whole steps.

    No pass is moved so that the last stage holds a second micro-batch, whose logits would take memory, too.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape, peaks: Sequence[int], split: bool = True) -> None:
        """peaks: chunks that each device may hold. split: backward passes are B and W."""
        self.peaks, self.last = peaks, shape.stages - 1
        self.device = [schedule.device(shape, stage) for stage in range(shape.stages)]
        self.dependencies = pass_dependencies(schedule, shape, split_backward=split)
        self.dependents = invert_dependencies(self.dependencies)
        self.hop, self.steps = 0, {kind: [1] * shape.stages for kind in ("F", *BACKWARD)}

    def with_durations(self, durations: PassDurations) -> Self:
        """The same, with passes that take as long as given; as it is made, all take one slot."""
        again = zip(durations.input_gradients, durations.recomputation, strict=True)
        seconds = {"F": durations.forward, "B": [sum(both) for both in again], "W": durations.weight_gradients}
        seconds["BW"] = [sum(both) for both in zip(seconds["B"], seconds["W"], strict=True)]
        longest = max(map(max, seconds.values())) or 1.0
        timed = copy(self)
        timed.steps = {kind: [round(t / longest * STEPS) for t in times] for kind, times in seconds.items()}
        timed.hop = round(durations.hop / longest * STEPS)
        return timed

    def duration(self, item: ScheduleItem) -> int:
        """Steps of a pass."""
        assert isinstance(item, Action)
        return self.steps[item.kind][item.stage]

    def forwards(self, orders: Sequence[Sequence[Action]], patience: float = 0.0) -> list[list[Action]]:
        """Fills idle time from the start."""
        return self._fill(orders, self.dependencies, self.dependents, (("F",), LAST), ("F", *BACKWARD), patience)

    def backwards(self, orders: Sequence[Sequence[Action]], *movable: str) -> list[list[Action]]:
        """Fills idle time from the end."""
        kinds = LAST, ("F",)
        return _reverse(self._fill(_reverse(orders), self.dependents, self.dependencies, kinds, movable, 0.0))

    def _fill(
        self,
        orders: Sequence[Sequence[Action]],
        dependencies: Dependencies,
        dependents: Dependencies,
        memory: tuple[Sequence[str], Sequence[str]],
        movable: Sequence[str],
        patience: float,
    ) -> list[list[Action]]:
        """Orders in which each free device takes the next pass of its order or, if that is not ready, the first movable
        one that is.

        memory: kinds of passes that allocate and free a chunk.
        movable: kinds of passes that may go before others.
        patience: a pass does not go before one that is ready within this share of its duration.
        """
        allocating, freeing = memory
        remaining, held, held_last = [list(order) for order in orders], [0] * len(orders), 0
        lanes = [len({(action.stage, action.kind) for action in order}) for order in orders]
        missing = {action: len(others) for action, others in dependencies.items()}
        arrived = dict.fromkeys(missing, 0)
        ready = {action: 0 for action, count in missing.items() if not count}
        free_at = [0] * len(orders)
        filled: list[list[Action]] = [[] for _ in orders]

        def change(action: Action) -> int:
            return (action.kind in allocating) - (action.kind in freeing)

        def pick(device: int, now: int) -> Action | None:
            peak = after = held[device]
            peak_last = after_last = held_last
            seen: set[tuple[int, str]] = set()
            soon = None
            for action in remaining[device]:
                # The next pass of the order is always within the peak. Passes of one kind on one stage never swap.
                lane = action.stage, action.kind
                more = change(action)
                more_last = more * (action.stage == self.last)
                movable_here = action.kind in movable and lane not in seen and peak + more <= self.peaks[device]
                if not seen or (movable_here and peak_last + more_last <= 1):
                    at = ready.get(action)
                    if at is not None and at <= now:
                        late = soon is not None and soon - now < patience * self.duration(action)
                        return None if late else action
                    soon = at if soon is None or (at is not None and at < soon) else soon
                seen.add(lane)
                if len(seen) == lanes[device]:
                    break
                after, after_last = after + more, after_last + more_last
                peak, peak_last = max(peak, after), max(peak_last, after_last)
            return None

        questions = [(0, device) for device in range(len(orders))]
        while questions:
            now, asked = questions[0][0], set()
            while questions and questions[0][0] == now:
                asked.add(heappop(questions)[1])
            free = [device for device in asked if remaining[device] and free_at[device] <= now]
            for device, action in [(device, action) for device in free if (action := pick(device, now))]:
                remaining[device].remove(action)
                filled[device].append(action)
                held[device] += change(action)
                held_last += change(action) * (action.stage == self.last)
                end = free_at[device] = now + self.duration(action)
                heappush(questions, (end, device))
                for other in dependents[action]:
                    owner = self.device[other.stage]
                    arrived[other] = max(arrived[other], end + self.hop * (owner != device))
                    missing[other] -= 1
                    if not missing[other]:
                        ready[other] = arrived[other]
                        heappush(questions, (ready[other], owner))
        return filled
