"""List scheduling with durations: a policy chooses, pass by pass, what a device runs next.

`PartialSchedule` is the state a policy decides on: the passes chosen so far, each begun as soon as its device is free
and its inputs have arrived. `MemoryBoundedSchedule` also counts the activations that devices hold.
`reorder_at_run_time` plays finished orders on devices that may deviate from them by `Schedule.next_item`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Self

from meshcast.simulator.scheduling.schedule import (
    Action,
    OverlappedPasses,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
    split_1f1b,
)

ItemDuration = Callable[[ScheduleItem], float]
"""Duration of a schedule item."""

INPUT_KINDS = {"F": ("F",), "BW": ("BW", "B"), "B": ("B", "BW")}
"""By kind of a pass with inputs from other stages: the kinds of passes that produce them."""


class PartialSchedule:
    """The items chosen so far, and when they run.

    orders: items of every device.
    free_at: end of the last item of every device.
    begin: of every action that has run.
    end: of every action that has run.
    device: of every stage.
    predecessors: of every stage.
    successors: of every stage.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape, item_duration: ItemDuration, hop: float = 0.0) -> None:
        """Starts an empty schedule.

        item_duration: asked once for every item.
        hop: duration of a message between two devices.
        """
        self.shape, self.item_duration, self.hop = shape, item_duration, hop
        self.device = [schedule.device(shape, stage) for stage in range(shape.stages)]
        self.predecessors = [schedule.predecessors(shape, stage) for stage in range(shape.stages)]
        self.successors: list[list[int]] = [[] for _ in self.predecessors]
        for stage, others in enumerate(self.predecessors):
            for other in others:
                self.successors[other].append(stage)
        self.orders: list[list[ScheduleItem]] = [[] for _ in range(shape.p)]
        self.free_at = [0.0] * shape.p
        self.begin: dict[Action, float] = {}
        self.end: dict[Action, float] = {}

    @property
    def spans(self) -> list[float]:
        """Per device, from the begin of its first item to the end of its last."""
        begins = [self.begin[actions_of(order[:1])[0]] for order in self.orders]
        return [end - begin for end, begin in zip(self.free_at, begins, strict=True)]

    def neighbours(self, item: ScheduleItem) -> set[int]:
        """Returns the devices of the stages before and after those of an item."""
        stages = [action.stage for action in actions_of([item])]
        return {
            self.device[other] for stage in stages for other in (*self.predecessors[stage], *self.successors[stage])
        }

    def step_time(self, barrier: bool) -> tuple[float, float]:
        """Returns what a step takes: the makespan if the devices meet at its end (`barrier`), otherwise the longest
        span of a device; and behind it the other. To nine digits: orders that differ by rounding alone are equally
        short."""
        makespan, span = (float(f"{max(ends):.9g}") for ends in (self.free_at, self.spans))
        return (makespan, span) if barrier else (span, makespan)

    def arrival(self, item: ScheduleItem) -> float:
        """Returns when the inputs of an item from other stages have arrived on its device; inf while that is not
        known."""
        if isinstance(item, OverlappedPasses):
            return max(map(self.arrival, item))
        stage, kind, microbatch, part = item
        if kind not in INPUT_KINDS:
            return 0.0
        latest, device = 0.0, self.device[stage]
        for other in (self.predecessors if kind == "F" else self.successors)[stage]:
            ends = (self.end.get(Action(other, source, microbatch, part), inf) for source in INPUT_KINDS[kind])
            latest = max(latest, min(ends) + self.hop * (self.device[other] != device))
        return latest

    def append(self, item: ScheduleItem) -> float:
        """Runs an item whose arrival is known on its device; returns its end."""
        actions = actions_of([item])
        device = self.device[actions[0].stage]
        begin = max(self.free_at[device], self.arrival(item))
        end = self.free_at[device] = begin + self.item_duration(item)
        self.orders[device].append(item)
        for action in actions:
            self.begin[action], self.end[action] = begin, end
        return end


class MemoryBoundedSchedule(PartialSchedule):
    """F, B and W of the stages of each device, on a stage each kind in the order of the micro-batches, in bounded
    memory.

    pass_durations: by kind, of every stage.
    count: by kind, the passes that every stage has run.
    pending: by device, the stages whose W's have not run although their B has, in the order of the B's.
    idle: by device, what `fill_gap` left idle.
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: PipelineShape,
        durations: PassDurations,
        limit: float,
        kept_for_weights: Sequence[float],
    ) -> None:
        """Starts an empty schedule.

        limit: chunks whose activations a device may hold.
        kept_for_weights: by stage, the share of a chunk's activations that stays from B to W.
        """
        backward = [sum(both) for both in zip(durations.input_gradients, durations.recomputation, strict=True)]
        self.pass_durations = {"F": durations.forward, "B": backward, "W": durations.weight_gradients}
        super().__init__(schedule, shape, self._duration, durations.hop)
        self.limit, self.kept_for_weights = limit * (1 + 1e-9), kept_for_weights
        self.count = {kind: [0] * shape.stages for kind in self.pass_durations}
        self.stages: list[list[int]] = [[] for _ in range(shape.p)]
        for stage, device in enumerate(self.device):
            self.stages[device].append(stage)
        self.pending: list[list[int]] = [[] for _ in range(shape.p)]
        self.idle = [0.0] * shape.p

    def _duration(self, item: ScheduleItem) -> float:
        assert isinstance(item, Action)
        return self.pass_durations[item.kind][item.stage]

    def next_pass(self, kind: str, stage: int) -> Action:
        """Returns the next pass of a kind on a stage."""
        return Action(stage, kind, self.count[kind][stage])

    def is_ready(self, kind: str, stage: int) -> bool:
        """Returns whether all that the next pass of a kind on a stage needs has been placed."""
        most = self.count["F"][stage] if kind == "B" else self.shape.m
        return self.count[kind][stage] < most and self.arrival(self.next_pass(kind, stage)) < inf

    def append_next(self, kind: str, stage: int) -> None:
        """Runs the next pass of a kind on a stage."""
        self.append(self.next_pass(kind, stage))
        self.count[kind][stage] += 1
        if kind == "B":
            self.pending[self.device[stage]].append(stage)
        elif kind == "W":
            self.pending[self.device[stage]].remove(stage)

    def append_weight_pass(self, device: int) -> None:
        """Runs the earliest pending W of a device."""
        self.append_next("W", self.pending[device][0])

    def fill_gap(self, kind: str, stage: int, patience: float) -> None:
        """Runs the next pass of a kind on a stage, and before it W's while its inputs are on their way.

        patience: what is then left of the gap stays idle, unless it is longer: a W runs that ends behind it.
        """
        device, arrival = self.device[stage], self.arrival(self.next_pass(kind, stage))
        pending, weights = self.pending[device], self.pass_durations["W"]
        while pending and self.free_at[device] + weights[pending[0]] <= arrival:
            self.append_weight_pass(device)
        if pending and arrival - self.free_at[device] > patience:
            self.append_weight_pass(device)
        self.idle[device] += max(0.0, arrival - self.free_at[device])
        self.append_next(kind, stage)

    def follow_split_1f1b(self, rounds: int) -> Self:
        """Runs all passes of a stage a device in the orders of `split_1f1b`."""
        remaining = [split_1f1b(self.shape, device, rounds)[::-1] for device in range(self.shape.p)]
        while any(remaining):
            for device, order in enumerate(remaining):
                while order and self.arrival(order[-1]) < inf:
                    self.append_next(order.pop().kind, device)
        return self

    def excess(self, device: int, more: float) -> float:
        """Chunks above the limit if a device takes the activations of `more` chunks."""
        held, count = 0.0, self.count
        for stage in self.stages[device]:
            held += count["F"][stage] - count["B"][stage]
            held += self.kept_for_weights[stage] * (count["B"][stage] - count["W"][stage])
        return held + more - self.limit

    def free_memory(self, device: int, more: float) -> None:
        """Runs pending W's until the activations of `more` chunks fit, or none is left."""
        while self.pending[device] and self.excess(device, more) > 0:
            self.append_weight_pass(device)


def reorder_at_run_time(
    schedule: Schedule,
    shape: PipelineShape,
    orders: Sequence[Sequence[ScheduleItem]],
    item_duration: ItemDuration,
    hop: float = 0.0,
) -> PartialSchedule:
    """Plays orders without deadlocks on devices that decide at run time what they run next.

    A free device asks `Schedule.next_item`, and asks again when the inputs of the answer have arrived.
    """
    played = PartialSchedule(schedule, shape, item_duration, hop)
    remaining = [list(order) for order in orders]
    questions = [(0.0, device) for device in range(shape.p)]
    waiting: set[int] = set()

    def is_ready(item: ScheduleItem) -> bool:
        return played.arrival(item) <= now

    def fraction_done(action: Action) -> float:
        begin, end = played.begin.get(action, inf), played.end.get(action, inf)
        return 1.0 if end <= now else max(0.0, (now - begin) / (end - begin)) if begin < inf else 0.0

    while questions:
        now, device = heappop(questions)
        if not remaining[device]:
            continue
        item = schedule.next_item(shape, remaining[device], is_ready, fraction_done)
        arrival = played.arrival(item)
        if arrival == inf:
            waiting.add(device)
        elif arrival > now:
            heappush(questions, (arrival, device))
        else:
            remaining[device].remove(item)
            heappush(questions, (played.append(item), device))
            woken = waiting & played.neighbours(item)
            waiting -= woken
            for other in woken:
                heappush(questions, (now, other))
    return played
