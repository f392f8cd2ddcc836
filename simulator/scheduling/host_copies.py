"""Activations that rest in host memory between a forward and its backward pass, by the order of a schedule: copies put
into orders.

Copies of a device take equal slots in turn, one to the host and one back. A forward pass takes the first slot to the
host that begins behind it, a backward pass the last slot back that ends a backward pass before it; before the first
slot back, copies to the host follow one another (`add_send_recv` and `adjust_warmup` of sail-sg/zero-bubble @3fd87fd,
megatron/core/pipeline_parallel/zerobubble/scheduler/offloading.py). Activations stay on the GPU where their backward
pass comes within three slots of each kind, and, evenly, where there is no time for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from math import ceil
from typing import NamedTuple

from meshcast.simulator.scheduling.activation_transfer import TimedItem, equal_durations, time_orders
from meshcast.simulator.scheduling.schedule import (
    Action,
    ActionKind,
    PassDurations,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)

LEAST_SLOTS = 6
"""Slots between two passes from which on activations are copied (`add_send_recv`)."""

ROUNDING = 1e-9
"""Of slots: times that differ by less are equal."""


class CopiesToHost(Schedule):
    """Base of the schedules that may let activations rest in host memory."""

    @abstractmethod
    def copied_stages(self, shape: PipelineShape) -> Collection[int]:
        """Returns the stages whose activations rest in host memory as far as there is time for it."""


class HostRest(NamedTuple):
    """The copies of a forward pass's activations. Times are of the schedule.

    forward: the pass.
    out: begin of the copy to the host.
    back: begin of the copy to the GPU.
    """

    forward: Action
    out: float
    back: float


def insert_host_copies(
    schedule: CopiesToHost,
    shape: PipelineShape,
    orders: Sequence[Sequence[ScheduleItem]],
    durations: PassDurations | None = None,
) -> list[list[ScheduleItem]]:
    """Returns orders with the copies of their stages. durations: of passes and copies; without them all last equally
    long."""
    stages = set(schedule.copied_stages(shape))
    lasting = durations or equal_durations(shape)
    timed: list[list[TimedItem]] = [[] for _ in orders]
    for item in time_orders(schedule, shape, orders, lasting):
        timed[item.device].append(item)
    copied = lasting.copied or (max(lasting.forward),) * shape.stages
    extended = []
    for items in timed:
        of_device = [copied[a.stage] for item in items for a in actions_of([item.item]) if a.stage in stages]
        slot = max(of_device, default=0.0)
        extended.append(_insert(items, _place_copies(items, stages, slot), slot))
    return extended


def _place_copies(items: Sequence[TimedItem], stages: set[int], slot: float) -> list[HostRest]:
    """Returns the copies of a device, of as many forward passes as there is time for, evenly. slot: of a copy."""
    passes = [(item, action) for item in items for action in actions_of([item.item]) if action.stage in stages]
    backwards = {action[::2]: item for item, action in passes if action.kind in ("B", "BW")}
    spans = [
        TimeAway(action, item.end, 2 * backward.begin - backward.end)
        for item, action in passes
        if action.kind == "F" and (backward := backwards.get(action[::2])) is not None
    ]
    spans = [span for span in spans if span.latest - span.earliest > LEAST_SLOTS * slot * (1 - ROUNDING)]
    slots = Slots(items[0].end, items[-1].end, slot) if items else None
    fewest, most = 0, len(spans)
    placed = list[HostRest]()
    while slots is not None and fewest < most:
        # The largest share that fits, by bisection.
        count = (fewest + most + 1) // 2
        chosen = [span for i, span in enumerate(spans) if (i + 1) * count // len(spans) > i * count // len(spans)]
        if (found := slots.place(chosen)) is None:
            most = count - 1
        else:
            fewest, placed = count, found
    return placed


class TimeAway(NamedTuple):
    """A forward pass, and the time between its end and a backward pass before its backward pass."""

    forward: Action
    earliest: float
    latest: float


class Slots(NamedTuple):
    """The slots of a device: turns from `begin` on, each with a copy to the host and then one back."""

    begin: float
    end: float
    slot: float

    def place(self, spans: Sequence[TimeAway]) -> list[HostRest] | None:
        """Returns the copies of some forward passes; None if they have not enough time."""
        turn, out, back = 2 * self.slot, dict[Action, float](), dict[Action, float]()
        at = self.begin
        for span in sorted(spans, key=lambda span: span.earliest):
            out[span.forward] = at = self._turn_from(max(at, span.earliest))
            at += turn
        at = self._turn_from(self.end)
        for span in sorted(spans, key=lambda span: -span.latest):
            if at > span.latest:
                at = at - turn * ceil((at - span.latest) / turn - ROUNDING) if turn else span.latest
            back[span.forward], at = at - self.slot, at - turn
        if any(back[each] < out[each] + self.slot * (1 - ROUNDING) for each in out):
            return None
        self._fill_warmup(spans, out, min(back.values(), default=0.0))
        return [HostRest(forward, begin, back[forward]) for forward, begin in out.items()]

    def _fill_warmup(self, spans: Sequence[TimeAway], out: dict[Action, float], first: float) -> None:
        """Moves copies to the host ahead, one behind the other, as long as nothing comes back. first: the first copy
        back."""
        at = self.begin
        for span in sorted(spans, key=lambda span: span.earliest):
            at = max(at, span.earliest)
            if at + self.slot > first or out[span.forward] >= first:
                return
            out[span.forward], at = at, at + self.slot

    def _turn_from(self, time: float) -> float:
        """Returns the first begin of a turn that is not before `time`."""
        turn = 2 * self.slot
        return self.begin + turn * max(0, ceil((time - self.begin) / turn - ROUNDING)) if turn else time


def _insert(items: Sequence[TimedItem], stays: Sequence[HostRest], slot: float) -> list[ScheduleItem]:
    """Returns the order of a device with its copies. A copy to the host begins with the pass in which its slot does;
    memory is free before the first pass behind the copy, and a copy back begins with the first pass behind its slot's
    begin."""
    begins = [(rest.out, 0, rest.forward._replace(kind=ActionKind.HOST_OUT)) for rest in stays]
    ends = [(rest.back, 2, rest.forward._replace(kind=ActionKind.HOST_IN)) for rest in stays]
    ends += [(min(rest.out + slot, rest.back), 1, rest.forward._replace(kind=ActionKind.HOST_FREED)) for rest in stays]
    begins.sort(key=lambda event: event[:2])
    ends.sort(key=lambda event: event[:2])
    order: list[ScheduleItem] = []
    for item in items:
        events = []
        while ends and ends[0][0] <= item.begin + ROUNDING * slot:
            events.append(ends.pop(0))
        while begins and begins[0][0] < item.end - ROUNDING * slot:
            events.append(begins.pop(0))
        order += [action for *_, action in sorted(events, key=lambda event: event[:2])]
        order.append(item.item)
    return [*order, *(action for *_, action in sorted([*begins, *ends], key=lambda event: event[:2]))]
