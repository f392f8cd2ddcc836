"""Policies: who does next what, where that depends on how long passes last.

`Play` is what a policy looks at while it decides: the passes that it has chosen so far, each begun as soon as its
device is free and what it needs from others is there; `InTurn` also knows the activations that devices hold.
`at_run_time` plays orders that are there already, by devices that may leave them as their schedule's `next_item` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf

from simulator.scheduling.schedule import (
    Action,
    Durations,
    OverlappedPasses,
    PipelineShape,
    Schedule,
    ScheduleItem,
    actions_of,
)

Lasting = Callable[[ScheduleItem], float]
"""How long a turn lasts."""

GIVES = {"F": ("F",), "BW": ("BW", "B"), "B": ("B", "BW")}
"""The kinds of passes that take something from another stage, and those that make it there."""


class Play:
    """Turns played so far. order, clock: of every device, its turns and when it is free. begin, end: of every action.

    lasts: asked once for every turn. hop: from device to device, behind a pass whose result goes there.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape, lasts: Lasting, hop: float = 0.0) -> None:
        self.lasts, self.hop = lasts, hop
        self.device = [schedule.device(shape, stage) for stage in range(shape.stages)]
        self.before = [schedule.before(shape, stage) for stage in range(shape.stages)]
        self.after: list[list[int]] = [[] for _ in self.before]
        for stage, others in enumerate(self.before):
            for other in others:
                self.after[other].append(stage)
        self.order: list[list[ScheduleItem]] = [[] for _ in range(shape.p)]
        self.clock = [0.0] * shape.p
        self.begin: dict[Action, float] = {}
        self.end: dict[Action, float] = {}

    @property
    def spans(self) -> list[float]:
        """Per device, from its first begin to its last end."""
        begins = [self.begin[actions_of(order[:1])[0]] for order in self.order]
        return [end - begin for end, begin in zip(self.clock, begins, strict=True)]

    def comes(self, turn: ScheduleItem) -> float:
        """When all that a turn needs from other stages is on its device; inf while that cannot be told."""
        if isinstance(turn, OverlappedPasses):
            return max(map(self.comes, turn))
        stage, kind, microbatch, part = turn
        if kind not in GIVES:
            return 0.0
        latest, own = 0.0, self.device[stage]
        for other in (self.before if kind == "F" else self.after)[stage]:
            ends = (self.end.get(Action(other, made, microbatch, part), inf) for made in GIVES[kind])
            latest = max(latest, min(ends) + self.hop * (self.device[other] != own))
        return latest

    def add(self, turn: ScheduleItem) -> float:
        """Plays a turn whose needs are there or known to come; when it ends."""
        actions = turn if isinstance(turn, OverlappedPasses) else (turn,)
        device = self.device[actions[0].stage]
        begin = max(self.clock[device], self.comes(turn))
        end = self.clock[device] = begin + self.lasts(turn)
        self.order[device].append(turn)
        for action in actions:
            self.begin[action], self.end[action] = begin, end
        return end


class InTurn(Play):
    """Passes F, B and W of one stage a device, of each kind in the order of the micro-batches, in bounded memory.

    limit: micro-batches whose activations a device may hold. kept: on each, the part of them that stays from B to W.
    """

    def __init__(
        self, schedule: Schedule, shape: PipelineShape, lasting: Durations, limit: float, kept: Sequence[float]
    ) -> None:
        backward = [once + again for once, again in zip(lasting.backward, lasting.again, strict=True)]
        self.each = {"F": lasting.forward, "B": backward, "W": lasting.weights}
        super().__init__(schedule, shape, self._lasts, lasting.hop)
        self.limit, self.kept = limit * (1 + 1e-9), kept
        self.made = {kind: [0] * shape.p for kind in self.each}

    def _lasts(self, turn: ScheduleItem) -> float:
        assert isinstance(turn, Action)
        return self.each[turn.kind][turn.stage]

    def next(self, kind: str, device: int) -> Action:
        """The next pass of its kind."""
        return Action(device, kind, self.made[kind][device])

    def make(self, kind: str, device: int) -> None:
        self.add(self.next(kind, device))
        self.made[kind][device] += 1

    def owed(self, device: int) -> int:
        """W's that can be made."""
        return self.made["B"][device] - self.made["W"][device]

    def over(self, device: int, more: float) -> float:
        """Micro-batches above the limit, if a device takes up so many more."""
        held = self.made["F"][device] - self.made["B"][device] + self.kept[device] * self.owed(device)
        return held + more - self.limit

    def make_room(self, device: int, more: float) -> None:
        """Makes W's, as many as it takes and as can be made, to take up so many micro-batches more."""
        while self.owed(device) and self.over(device, more) > 0:
            self.make("W", device)


def at_run_time(
    schedule: Schedule, shape: PipelineShape, orders: Sequence[Sequence[ScheduleItem]], lasts: Lasting, hop: float = 0.0
) -> Play:
    """Plays orders in which nothing waits for itself.

    A device that is free asks `next_item`, and again when what it then waits for is there.
    """
    play = Play(schedule, shape, lasts, hop)
    left = [list(order) for order in orders]
    asks = [(0.0, device) for device in range(shape.p)]
    waiting: set[int] = set()

    def there(turn: ScheduleItem) -> bool:
        return play.comes(turn) <= now

    def done(action: Action) -> float:
        begin, end = play.begin.get(action, inf), play.end.get(action, inf)
        return 1.0 if end <= now else max(0.0, (now - begin) / (end - begin)) if begin < inf else 0.0

    while asks:
        now, device = heappop(asks)
        if not left[device]:
            continue
        turn = schedule.next_item(shape, left[device], there, done)
        comes = play.comes(turn)
        if comes == inf:
            waiting.add(device)
        elif comes > now:
            heappush(asks, (comes, device))
        else:
            left[device].remove(turn)
            heappush(asks, (play.add(turn), device))
            stages = [action.stage for action in actions_of([turn])]
            woken = waiting & {play.device[other] for s in stages for other in (*play.before[s], *play.after[s])}
            waiting -= woken
            for other in woken:
                heappush(asks, (now, other))
    return play
