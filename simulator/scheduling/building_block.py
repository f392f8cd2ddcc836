"""Schedules from a building block: the slots of a micro-batch's passes, repeated for every micro-batch.

The method of Qi et al. 2024 (arXiv 2405.15362, section 3). `repeat_block` repeats the block without collisions; all
passes take a single slot. The gaps of an order need no squeezing: every pass begins as soon as it can. What is idle at
both ends is filled with other passes, by `reorder_warmup_and_cooldown` in slots, or by `reorder_both_ends`, which also
knows how long passes take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from heapq import heappop, heappush
from typing import NamedTuple, Self

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
    """Returns the orders of all devices when every micro-batch follows that before after a period, the slots that its
    passes take on a device.

    block: for each stage the slots in which F and B of the first micro-batch begin. A W takes the first free slot after
    its B, in the order of the B's.

    Raises ValueError if two passes fall on the same slot.
    """
    period = 3 * shape.v
    slots: list[dict[int, Action]] = [{} for _ in range(shape.p)]
    for stage, begins in enumerate(block):
        device_slots = slots[schedule.device(shape, stage)]
        for kind, begin in zip("FB", begins, strict=True):
            for k in shape.microbatches:
                slot = begin + period * k
                if slot in device_slots:
                    raise ValueError(f"{device_slots[slot]} and {Action(stage, kind, k)} fall on one slot")
                device_slots[slot] = Action(stage, kind, k)
    return [_insert_weight_passes(device_slots) for device_slots in slots]


def _insert_weight_passes(slots: Mapping[int, Action]) -> list[Action]:
    """Returns the order of a device: F and B in their slots, and in each free slot the W of the earliest B that has
    none."""
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
    backwards from the end W's and B's move behind passes that other devices wait for. Then, of that and of `orders`,
    as long as passes take: backwards, and forwards, where a device waits for a pass of its order rather than to
    delay it. The shortest step is kept of those whose last stage holds a single micro-batch, if any does; with a
    `peak`, of `orders`, too.
    """
    peaks = [peak or max(map(_peak_chunks, orders))] * len(orders)
    in_slots = _Filling(schedule, shape, peaks, any(action.kind == "W" for order in orders for action in order))
    filled = in_slots.backwards(in_slots.forwards(orders), *BACKWARD)
    if durations is None:
        return filled
    timed = in_slots.with_durations(durations)
    again = [timed.forwards(timed.backwards(start, *BACKWARD), patience=1.0) for start in (filled, orders)]
    last = shape.stages - 1

    def step_time(candidate: Sequence[Sequence[ScheduleItem]]) -> tuple[bool, float, float]:
        played: PartialSchedule = reorder_at_run_time(schedule, shape, candidate, timed.duration, timed.hop)
        last_stage = (action for action in actions_of(candidate[timed.device[last]]) if action.stage == last)
        return (_peak_chunks(list(last_stage)) > 1, *played.step_time(durations.barrier))

    unfilled = [] if peak is None else [[list(order) for order in orders]]
    return min((*unfilled, filled, *again), key=step_time)


def _reverse(orders: Sequence[Sequence[Action]]) -> list[list[Action]]:
    return [list(reversed(order)) for order in orders]


def _peak_chunks(order: Sequence[Action]) -> int:
    """Returns the peak number of chunks whose activations a device holds, each from its F to its last pass."""
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
        """Prepares the filling.

        peaks: chunks that each device may hold.
        split: backward passes are B and W.
        """
        self.peaks, self.last = peaks, shape.stages - 1
        self.device = [schedule.device(shape, stage) for stage in range(shape.stages)]
        self.dependencies = pass_dependencies(schedule, shape, split_backward=split)
        self.dependents = invert_dependencies(self.dependencies)
        self.hop, self.steps = 0, {kind: [1] * shape.stages for kind in ("F", *BACKWARD)}

    def with_durations(self, durations: PassDurations) -> Self:
        """Returns the same, with passes that take `durations`; before, all take a single slot."""
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
        """Fills idle time from the start.

        patience: a pass does not go before another that is ready within this share of its duration.
        """
        movable = frozenset(("F", *BACKWARD))
        direction = _Direction(self.dependencies, self.dependents, frozenset("F"), frozenset(LAST), movable, patience)
        return _Fill(self, direction, orders).run()

    def backwards(self, orders: Sequence[Sequence[Action]], *movable: str) -> list[list[Action]]:
        """Fills idle time from the end. movable: kinds of passes that may go before others."""
        kinds = frozenset(LAST), frozenset("F"), frozenset(movable)
        return _reverse(_Fill(self, _Direction(self.dependents, self.dependencies, *kinds), _reverse(orders)).run())


class _Direction(NamedTuple):
    """The way in which idle time is filled: from the start, or from the end.

    dependencies: the passes that each pass follows.
    dependents: the passes that follow each pass.
    allocating: kinds of passes that allocate a chunk.
    freeing: kinds of passes that free a chunk.
    movable: kinds of passes that may go before others.
    patience: see `_Filling.forwards`.
    """

    dependencies: Dependencies
    dependents: Dependencies
    allocating: frozenset[str]
    freeing: frozenset[str]
    movable: frozenset[str]
    patience: float = 0.0

    def added_chunks(self, action: Action) -> int:
        return (action.kind in self.allocating) - (action.kind in self.freeing)


class _Fill:
    """One run in which each free device takes the next pass of its order or, if that is not ready, the first movable
    pass that is.

    remaining, filled: by device, the passes of its order that have not begun, and those that have.
    lanes: by device, the number of stages and kinds of its passes.
    held: by device, its chunks.
    held_last: chunks of the last stage.
    missing: by pass, how many of those that it follows have not ended.
    arrived: by pass, when the last result arrived of those that have.
    ready: by pass of which none is missing, when it may begin.
    questions: times at which devices may become able to begin a pass.
    """

    def __init__(self, filling: _Filling, direction: _Direction, orders: Sequence[Sequence[Action]]) -> None:
        self.filling, self.direction = filling, direction
        self.remaining: list[list[Action]] = [list(order) for order in orders]
        self.filled: list[list[Action]] = [[] for _ in orders]
        self.lanes = [len({(action.stage, action.kind) for action in order}) for order in orders]
        self.held, self.held_last, self.free_at = [0] * len(orders), 0, [0] * len(orders)
        self.missing = {action: len(others) for action, others in direction.dependencies.items()}
        self.arrived = dict.fromkeys(self.missing, 0)
        self.ready = {action: 0 for action, count in self.missing.items() if not count}
        self.questions = [(0, device) for device in range(len(orders))]

    def run(self) -> list[list[Action]]:
        questions = self.questions
        while questions:
            now, asked = questions[0][0], set()
            while questions and questions[0][0] == now:
                asked.add(heappop(questions)[1])
            free = [device for device in asked if self.remaining[device] and self.free_at[device] <= now]
            picked = [(device, self.pick(device, now)) for device in free]
            for device, action in picked:
                if action is not None:
                    self.begin(device, action, now)
        return self.filled

    def pick(self, device: int, now: int) -> Action | None:
        """Returns the pass that a free device begins, if any."""
        direction, last, limit = self.direction, self.filling.last, self.filling.peaks[device]
        peak = held = self.held[device]
        peak_last = held_last = self.held_last
        seen: set[tuple[int, str]] = set()
        soon = None
        for action in self.remaining[device]:
            # The next pass of the order is always within the peak. Passes of a kind on a stage never swap.
            lane = action.stage, action.kind
            added = direction.added_chunks(action)
            added_last = added if action.stage == last else 0
            movable = action.kind in direction.movable and lane not in seen and peak + added <= limit
            if not seen or (movable and peak_last + added_last <= 1):
                at = self.ready.get(action)
                if at is not None and at <= now:
                    late = soon is not None and soon - now < direction.patience * self.filling.duration(action)
                    return None if late else action
                soon = at if soon is None or (at is not None and at < soon) else soon
            seen.add(lane)
            if len(seen) == self.lanes[device]:
                break
            held, held_last = held + added, held_last + added_last
            peak, peak_last = max(peak, held), max(peak_last, held_last)
        return None

    def begin(self, device: int, action: Action, now: int) -> None:
        """Begins a pass, and hands its result to those that follow it."""
        self.remaining[device].remove(action)
        self.filled[device].append(action)
        added = self.direction.added_chunks(action)
        self.held[device] += added
        self.held_last += added if action.stage == self.filling.last else 0
        end = self.free_at[device] = now + self.filling.duration(action)
        heappush(self.questions, (end, device))
        for other in self.direction.dependents[action]:
            owner = self.filling.device[other.stage]
            self.arrived[other] = max(self.arrived[other], end + self.filling.hop * (owner != device))
            self.missing[other] -= 1
            if not self.missing[other]:
                self.ready[other] = self.arrived[other]
                heappush(self.questions, (self.ready[other], owner))
