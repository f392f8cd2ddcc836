"""Longest chains of passes and messages through the orders of a pipeline schedule.

Every chain of passes that wait for each other, on a device or for a message, bounds the step from below, whatever the
passes last. Which chain is the longest hardly depends on the durations: the orders are replayed once for a shape, and
the passes of the longest chain are counted. Priced with the durations of any plan of that shape, the counts give a
lower bound of its step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.bounds.schedule_bound import FORWARD, PASSES, StageTimes
from meshcast.simulator.scheduling.schedule import Action, Orders, OverlappedPasses, PipelineShape, Schedule, actions_of

STREAM, RESULT, INPUT, THROUGH, BUSY = range(5)
"""How a chain runs through a pass: along the compute stream, from the stream to the result, from the input to the
stream, from the input to the result; along the compute stream of a pair, which has the kernels of both passes."""

FEW = 3
"""Micro-batches of a replay, in pipeline sizes: warm-up, cool-down and one period between them."""


MOST = 6
"""Most stages of a device at which chains end, and begin."""


@dataclass(frozen=True, eq=False)
class CriticalPaths:
    """Numbers of passes and messages of chains, and the stages whose collectives go on where a chain ends.

    The first chain leads to the end of all passes. Then come `ends` chains to the begin of the last backward pass of a
    stage, from where on its gradients are reduced, and those of later ones; `starts` chains after the end
    of the first forward pass of a stage, before which its weights are gathered, and those of the stages that start
    earlier; and chains to the begin of the first backward pass of a device and of those that no forward pass follows,
    from where on gradients are reduced in every micro-batch.

    passes: passes by part of the model, kind (`PASSES`) and way through the pass [chains, parts, kinds, ways].
    hops: messages [chains].
    beside: how often the collectives of a virtual stage precede or follow a chain [chains, stages].
    """

    passes: np.ndarray
    hops: np.ndarray
    beside: np.ndarray
    ends: int
    starts: int

    def seconds(self, times: StageTimes) -> np.ndarray:
        """Lengths of the chains [chains] [s]. times: least durations of passes."""
        durations = ways(times)
        none = np.isneginf(durations)
        found = np.einsum("cpkw,pkw->c", self.passes, np.where(none, 0.0, durations)) + self.hops * times.hop
        # Other durations may be those of passes without kernels, which no chain runs through.
        return np.where(np.einsum("cpkw,pkw->c", self.passes, none) > 0, 0.0, found)

    def last_reduction(
        self, times: StageTimes, reductions: np.ndarray, gathers: np.ndarray, each: np.ndarray, late: float
    ) -> float:
        """When all passes have ended and all gradients are reduced, at the earliest [s].

        reductions, gathers: of the gradients and weights of a virtual stage, once a step [stages] [s].
        each: reductions of a virtual stage in every micro-batch [stages] [s].
        late: by how much the first forward pass of all is put off by what it waits for [s].
        """
        begin, last = self.seconds(times), 1 + self.ends + self.starts
        begin[: 1 + self.ends] += late
        begin[last:] += late
        begin[1 : 1 + self.ends] += self.beside[1 : 1 + self.ends] @ (reductions + each)
        begin[1 + self.ends : last] += self.beside[1 + self.ends : last] @ gathers
        begin[last:] += self.beside[last:] @ each
        return float(begin.max())


Replays = dict[tuple[int, ...], tuple[CriticalPaths | None, ...]]
"""Chains by the numbers of micro-batches of the batches that were replayed together."""


def ways(times: StageTimes) -> np.ndarray:
    """Durations of passes by part, kind and way through the pass [parts, kinds, ways] [s]."""
    own, result, entered, busy = (one[:, :, 0] for one in (times.stream, times.to_result, times.from_input, times.busy))
    along = own, result, entered, times.path, busy
    return np.stack(along, axis=-1)


def critical_paths(
    schedule: Schedule,
    shape: PipelineShape,
    times: StageTimes,
    devices: Collection[int] = (),
    known: Replays | None = None,
) -> CriticalPaths | None:
    """The longest chains of a schedule; None for one whose orders depend on durations.

    times: durations by which chains are chosen. devices: those at whose stages chains begin and end; of schedules that
    pair passes, or have two directions, chains begin and end with the step alone.
    known: replays of shapes that differ in the number of micro-batches alone.

    A long batch repeats what a short one has between warm-up and cool-down: passes are counted at two short batches,
    and what the longer one has more is repeated.
    """
    if schedule.needs_durations or shape.forward_only:
        return None
    if schedule.pairs_passes or schedule.directions > 1:
        devices = ()
    period, known = shape.p, {} if known is None else known
    few = FEW * period + shape.m % period
    needed = (shape.m,) if shape.m <= few + period else (few, few + period)
    # Two batches are replayed with the same durations: only then is one chain the other one with repeats.
    if needed not in known:
        known[needed] = tuple(_replay(schedule, replace(shape, m=m), times, devices) for m in needed)
    if len(needed) == 1:
        return known[needed][0]
    short, long = known[needed]
    if short is None or long is None:
        return None
    passes, hops, repeats = long.passes - short.passes, long.hops - short.hops, (shape.m - few) // period - 1
    grows = (passes.min(axis=(1, 2, 3)) >= 0) & (hops >= 0)  # else the chains differ, and nothing repeats
    return replace(
        long,
        passes=long.passes + repeats * np.where(grows[:, None, None, None], passes, 0),
        hops=long.hops + repeats * np.where(grows, hops, 0),
        beside=long.beside + repeats * (long.beside - short.beside),
    )


def _replay(
    schedule: Schedule, shape: PipelineShape, times: StageTimes, devices: Collection[int]
) -> CriticalPaths | None:
    try:
        schedule.check(shape)
        orders = schedule.orders(shape)
    except MeshcastError:
        return None
    if any(action.kind not in PASSES or action.slice for order in orders for action in actions_of(order)):
        return None
    replay = _Replay(schedule, shape, ways(times), times.hop, orders)
    return replay.paths(devices) if replay.ended else None


class _Replay:
    """Passes played in the orders of their devices, each with the one that it waited for.

    Every pass has two moments: the end of its kernels and its result. `came` holds what each of them followed: a number
    of a pass, and whether it came with a message.
    """

    def __init__(
        self,
        schedule: Schedule,
        shape: PipelineShape,
        durations: np.ndarray,
        hop: float,
        orders: Orders,
    ) -> None:
        self.schedule, self.shape, self.orders = schedule, shape, orders
        stages = range(shape.stages)
        self.part = [schedule.model_part(shape, stage) for stage in stages]
        self.parts = int(max(self.part)) + 1
        device = [schedule.device(shape, stage) for stage in stages]
        before = [tuple(schedule.predecessors(shape, stage)) for stage in stages]
        after: list[list[int]] = [[] for _ in stages]
        for stage, others in enumerate(before):
            for one in others:
                after[one].append(stage)
        delays = {
            (one, other): hop if device[one] != device[other] else 0.0
            for other, others in enumerate(before)
            for one in others
        }
        delays |= {(other, one): delay for (one, other), delay in delays.items()}
        seconds = durations.tolist()
        kinds = {kind: number for number, kind in enumerate(PASSES)}
        done: dict[tuple[int, int, bool], tuple[float, int]] = {}  # results, with the numbers of their passes
        self.ends: list[float] = []
        self.came: list[tuple[tuple[int, bool, bool], tuple[int, bool, bool]]] = []
        """For the end of the kernels and for the result of a pass: the pass before, whether it was waited for by a
        message, and whether that came from another device."""
        self.partner: list[int] = []
        """The forward pass whose kernels, with its own, take longer than a backward pass that runs beside it; -1 for
        none."""
        self.action: list[Action] = []
        self.before: list[int] = []
        """The pass before on the device, -1 for none."""
        self.begun: list[tuple[int, bool, bool]] = []
        """What every pass began after, as in `came`."""
        self.readers: list[list[tuple[int, bool]]] = []
        """Of every pass those that wait for its result, and whether they are on other devices."""
        at, clock, last = [0] * shape.p, [0.0] * shape.p, [-1] * shape.p
        waiting, number = list(range(shape.p)), count()
        while waiting:
            moved = False
            for one in waiting:
                order = orders[one]
                while at[one] < len(order):
                    item = order[at[one]]
                    pair = item if isinstance(item, OverlappedPasses) else (item,)
                    needs = [
                        () if action.kind == "W" else (before if action.kind == "F" else after)[action.stage]
                        for action in pair
                    ]
                    found = [
                        [done.get((other, action.microbatch, action.kind == "F")) for other in own]
                        for action, own in zip(pair, needs, strict=True)
                    ]
                    if any(None in results for results in found):
                        break
                    begin, previous, busy = clock[one], last[one], 0.0
                    for action, own_needs, results in zip(pair, needs, found, strict=True):
                        kind, this = kinds[action.kind], next(number)
                        came, source, far = -1.0, -1, False
                        for other, result in zip(own_needs, results, strict=True):
                            assert result is not None
                            self.readers[result[1]].append((this, device[other] != device[action.stage]))
                            moment = result[0] + delays[other, action.stage]
                            if moment > came:
                                came, source, far = moment, result[1], device[other] != device[action.stage]
                        durations = seconds[self.part[action.stage]][kind]
                        busy += durations[BUSY]
                        # A pair takes no less than the kernels of both passes, and no less than either pass alone.
                        together = busy > durations[STREAM] and action is not pair[0]
                        own, given = begin + (busy if together else durations[STREAM]), begin + durations[RESULT]
                        steps = [(previous, False, False), (previous, False, False)]
                        if source >= 0 and came + durations[INPUT] > own:
                            own, steps[0] = came + durations[INPUT], (source, True, far)
                        if source >= 0 and came + durations[THROUGH] > given:
                            given, steps[1] = came + durations[THROUGH], (source, True, far)
                        self.came.append((steps[0], steps[1]))
                        self.action.append(action)
                        self.partner.append(this - 1 if together else -1)
                        self.before.append(previous)
                        waited = source >= 0 and came > begin
                        self.begun.append((source, True, far) if waited else (previous, False, False))
                        self.readers.append([])
                        self.ends.append(own)
                        if kind != 3:
                            done[action.stage, action.microbatch, action.kind == "F"] = given, this
                        if own >= clock[one]:
                            clock[one], last[one] = own, this
                    at[one] += 1
                    moved = True
            waiting = [one for one in waiting if at[one] < len(orders[one])]
            if not moved and waiting:
                break
        self.ended = not waiting
        """Whether all passes ran: those of pairs are played once the inputs of both are there."""
        self.device, self.seconds, self.hop = device, seconds, hop

    def paths(self, devices: Collection[int]) -> CriticalPaths:
        ends, starts, drains = [], [], []
        """Each the end of a chain, and how often the collectives of every stage precede or follow it."""
        for device in sorted(devices):
            own = [number for number, action in enumerate(self.action) if self.device[action.stage] == device]
            forward = [number for number in own if self.action[number].kind == "F"]
            sums = [number for number in own if self.action[number].kind in ("BW", "W")]
            first = {self.action[number].stage: number for number in reversed(forward)}
            last = {self.action[number].stage: number for number in sums}
            starts += [
                ((one, False, False), self._stages_of(before)) for one, before in _choose(sorted(first.values()), True)
            ]
            ends += [(self.begun[one], self._stages_of(after)) for one, after in _choose(sorted(last.values()), False)]
            for begin in (sums[0], next(one for one in sums if one > forward[-1])):
                drains.append((self.begun[begin], self._stages_of([one for one in sums if one >= begin])))
        backward = [((int(np.argmax(self.ends)), False, False), np.zeros(self.shape.stages)), *ends]
        chains = [*backward, *starts, *drains]
        passes, hops = np.zeros((len(chains), self.parts, len(PASSES), 5)), np.zeros(len(chains))
        follows = self._follow() if starts else []
        for chain, (end, _) in enumerate(chains):
            on = len(backward) <= chain < len(backward) + len(starts)
            hops[chain] = self._count_on(end[0], follows, passes[chain]) if on else self._count(end, passes[chain])
        return CriticalPaths(passes, hops, np.array([beside for _, beside in chains]), len(ends), len(starts))

    def _stages_of(self, numbers: Sequence[int]) -> np.ndarray:
        """How many of some passes every stage has."""
        return np.bincount([self.action[number].stage for number in numbers], minlength=self.shape.stages)

    def _count(self, end: tuple[int, bool, bool], passes: np.ndarray) -> int:
        """Counts the passes of the chain to the end of the kernels of a pass, or to its result, and on to another
        device; returns the number of its messages."""
        number, to_result, far = end
        hops = int(far)
        while number >= 0:
            action = self.action[number]
            source, message, far = self.came[number][to_result]
            way = (THROUGH if to_result else INPUT) if message else (RESULT if to_result else STREAM)
            if way == STREAM and (partner := self.partner[number]) >= 0:
                way = BUSY
                passes[self.part[self.action[partner].stage], FORWARD, BUSY] += 1
            passes[self.part[action.stage], PASSES.index(action.kind), way] += 1
            hops += far
            number, to_result = source, message
        return hops

    def _follow(self) -> list[tuple[tuple[int, int, bool], tuple[int, int, bool], bool]]:
        """What the longest chain to the end of the step goes on with after the end of the kernels of a pass, and after
        its result: the next pass (-1: none), the way through it, and whether a message to another device comes before;
        and whether the chain after the result is the longer one.
        """
        after = [-1] * len(self.action)
        for number, before in enumerate(self.before):
            if before >= 0:
                after[before] = number
        left = [(0.0, 0.0)] * len(self.action)
        found = [((-1, 0, False), (-1, 0, False), False)] * len(self.action)
        for number in range(len(self.action) - 1, -1, -1):
            own, given = (0.0, (-1, 0, False)), (0.0, (-1, 0, False))
            if (one := after[number]) >= 0:
                own = max(self._ways_on(one, STREAM, RESULT, False, left), own)
            for one, far in self.readers[number]:
                given = max(self._ways_on(one, INPUT, THROUGH, far, left), given)
            left[number], found[number] = (own[0], given[0]), (own[1], given[1], given[0] > own[0])
        return found

    def _ways_on(
        self, number: int, to_end: int, to_result: int, far: bool, left: list[tuple[float, float]]
    ) -> tuple[float, tuple[int, int, bool]]:
        """The longer of two ways through a pass, with what follows: to the end of its kernels, or to its result."""
        action = self.action[number]
        durations, delay = self.seconds[self.part[action.stage]][PASSES.index(action.kind)], self.hop if far else 0.0
        ways = [
            (delay + durations[way] + rest, (number, way, far))
            for way, rest in zip((to_end, to_result), left[number], strict=True)
        ]
        return max(ways)

    def _count_on(self, number: int, follows: Sequence[Any], passes: np.ndarray) -> int:
        """Counts the passes of the longer chain after a pass; returns the number of its messages."""
        hops, to_result = 0, follows[number][2]
        while (step := follows[number][to_result])[0] >= 0:
            number, way, far = step
            action = self.action[number]
            passes[self.part[action.stage], PASSES.index(action.kind), way] += 1
            hops, to_result = hops + far, way in (RESULT, THROUGH)
        return hops


def _choose(numbers: list[int], before: bool) -> list[tuple[int, list[int]]]:
    """At most `MOST` of the passes, each with those up to it, or from it on."""
    chosen = sorted({*np.linspace(0, len(numbers) - 1, min(MOST, len(numbers))).round().astype(int).tolist()})
    return [(numbers[i], numbers[: i + 1] if before else numbers[i:]) for i in chosen]
