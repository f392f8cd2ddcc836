"""Longest chains of passes and messages through the orders of a pipeline schedule.

Every chain of passes that wait for each other, on a device or for a message, bounds the step from below, whatever the
passes last. Which chain is the longest hardly depends on the durations: the orders are replayed once for a shape, and
the passes of the longest chain are counted. Priced with the durations of any plan of that shape, the counts give a
lower bound of its step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.bounds.schedule_bound import FORWARD, PASSES, WEIGHTS, WHOLE, StageTimes
from meshcast.simulator.scheduling.schedule import Action, Orders, OverlappedPasses, PipelineShape, Schedule, actions_of

STREAM, RESULT, INPUT, THROUGH, BUSY = range(5)
"""How a chain runs through a pass: along the compute stream, from the stream to the result, from the input to the
stream, from the input to the result; along the compute stream of a pair, which has the kernels of both passes."""

WAYS = 5
WAYS_THROUGH = np.array([[STREAM, RESULT], [INPUT, THROUGH]])
"""Ways by whether a chain comes from the input of a pass, and whether it goes on with its result."""

KINDS = {kind: number for number, kind in enumerate(PASSES)}

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
        lengths = np.einsum("cpkw,pkw->c", self.passes, np.where(none, 0.0, durations)) + self.hops * times.hop
        # Other durations may be those of passes without kernels, which no chain runs through.
        return np.where(np.einsum("cpkw,pkw->c", self.passes, none) > 0, 0.0, lengths)

    def last_reduction(
        self, lengths: np.ndarray, reductions: np.ndarray, gathers: np.ndarray, each: np.ndarray, late: float
    ) -> float:
        """Returns when all passes have ended and all gradients are reduced, at the earliest [s].

        lengths: of the chains [chains] [s].
        reductions, gathers: of the gradients and weights of a virtual stage, once a step [stages] [s].
        each: reductions of a virtual stage in every micro-batch [stages] [s].
        late: by how much the first forward pass of all is put off by what it waits for [s].
        """
        begin, last = lengths.copy(), 1 + self.ends + self.starts
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
    stream, result, entered, busy = (
        column[:, :, 0] for column in (times.stream, times.to_result, times.from_input, times.busy)
    )
    along = stream, result, entered, times.path, busy
    return np.stack(along, axis=-1)


def critical_paths(
    schedule: Schedule,
    shape: PipelineShape,
    times: StageTimes,
    devices: Collection[int] = (),
    known: Replays | None = None,
) -> CriticalPaths | None:
    """Returns the longest chains of a schedule; None for one whose orders depend on durations.

    times: durations by which chains are chosen.
    devices: those at whose stages chains begin and end; of schedules that pair passes, or have two directions, chains
        begin and end with the step alone.
    known: replays of shapes that differ in the number of micro-batches alone.

    A long batch repeats what a short batch has between warm-up and cool-down: passes are counted at two short batches,
    and what the longer batch has more is repeated.
    """
    if schedule.needs_durations or shape.forward_only:
        return None
    if schedule.pairs_passes or schedule.directions > 1:
        devices = ()
    period, known = shape.p, {} if known is None else known
    few = FEW * period + shape.m % period
    needed = (shape.m,) if shape.m <= few + period else (few, few + period)
    # Two batches are replayed with the same durations: only then is one chain the other with repeats.
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
    passes = _arrange(schedule, shape, orders)
    return _Replay(passes, ways(times), times.hop).paths(devices) if passes is not None else None


PassRow = tuple[int, int, tuple[int, ...], bool]
"""Of a pass its stage, its kind, its inputs, and whether it is the second of two that run together."""


@dataclass(frozen=True, eq=False)
class PassSequence:
    """The passes of all devices in an order in which each comes after those whose results it waits for.

    shape: of the pipeline.
    stage, kind: of every pass; the kind is a place in `PASSES`.
    inputs: links of the passes that it waits for (`_link`).
    seconds: whether it is the second of two passes that run together.
    part, device: by stage.
    """

    shape: PipelineShape
    stage: tuple[int, ...]
    kind: tuple[int, ...]
    inputs: tuple[tuple[int, ...], ...]
    seconds: tuple[bool, ...]
    part: Sequence[int]
    device: Sequence[int]

    @classmethod
    def of(
        cls, shape: PipelineShape, rows: Sequence[PassRow], part: Sequence[int], device: Sequence[int]
    ) -> PassSequence:
        """Returns passes by their rows. part, device: by stage."""
        stage, kind, inputs, seconds = zip(*rows, strict=True)
        return cls(shape, stage, kind, inputs, seconds, part, device)


def _link(number: int, by_message: bool, far: bool) -> int:
    """Returns a pass that another one follows as a number; -1 stands for none.

    by_message: whether its result is waited for, and not the end of its kernels. far: whether on another device.
    """
    return 4 * number + 2 * far + by_message


def _arrange(schedule: Schedule, shape: PipelineShape, orders: Orders) -> PassSequence | None:
    """Returns the passes of all devices, which go on in turn as far as the inputs of their passes are there; None where
    none can go on."""
    part, device = (
        [find(shape, stage) for stage in range(shape.stages)] for find in (schedule.model_part, schedule.device)
    )
    rows, senders = list[PassRow](), _find_senders(schedule, shape, device)
    numbers = [-1] * (2 * shape.m * shape.stages)
    """Of passes, by stage, micro-batch, and whether they are forward passes."""
    waiting, at, moved = list(range(len(orders))), [0] * len(orders), True
    items = [[*order] for order in orders]  # an `ActionArray` makes its actions anew at every look-up
    while waiting and moved:
        moved = False
        for here in waiting:
            order = items[here]
            while at[here] < len(order):
                item = order[at[here]]
                actions = item if isinstance(item, OverlappedPasses) else (item,)
                inputs = [_find_inputs(senders[action.kind][action.stage], action, numbers) for action in actions]
                if None in inputs:
                    break
                for action, links in zip(actions, inputs, strict=True):
                    if action.kind != "W":
                        place = 2 * (shape.m * action.stage + action.microbatch) + (action.kind == "F")
                        numbers[place] = len(rows)
                    rows.append((action.stage, KINDS[action.kind], links or (), action is not actions[0]))
                at[here] += 1
                moved = True
        waiting = [here for here in waiting if at[here] < len(items[here])]
    return None if waiting else PassSequence.of(shape, rows, part, device)


Senders = tuple[tuple[int, int], ...]
"""Passes that a pass of the first micro-batch waits for: their places among all passes, and links to a pass 0 there."""


def _find_senders(schedule: Schedule, shape: PipelineShape, device: Sequence[int]) -> dict[str, list[Senders]]:
    """Returns the passes that those of every stage wait for, by the kind of pass. device: of every stage."""
    stages = range(shape.stages)
    before = [tuple(schedule.predecessors(shape, stage)) for stage in stages]
    after = [tuple(other for other in stages if stage in before[other]) for stage in stages]
    forward, backward = (
        [
            tuple(
                (2 * shape.m * sender + is_forward, _link(0, True, device[sender] != device[stage]))
                for sender in senders[stage]
            )
            for stage in stages
        ]
        for senders, is_forward in ((before, 1), (after, 0))
    )
    return {"F": forward, "BW": backward, "B": backward, "W": [()] * shape.stages}


def _find_inputs(senders: Senders, action: Action, numbers: list[int]) -> tuple[int, ...] | None:
    """Returns links to the passes that a pass waits for; None if some are not there yet."""
    links: tuple[int, ...] = ()
    for place, link in senders:
        number = numbers[place + 2 * action.microbatch]
        if number < 0:
            return None
        links = (*links, 4 * number + link)
    return links


class PassChain(NamedTuple):
    """A chain of passes.

    link: to the pass where it ends, or begins.
    beside: how often the collectives of every stage follow.
    """

    link: int
    beside: np.ndarray


class _Replay:
    """Passes that begin as early as they can, each with what it waited for.

    passes: in their order.
    durations: of passes by part, kind and way [s].
    hop: of a message between devices [s].
    """

    def __init__(self, passes: PassSequence, durations: np.ndarray, hop: float) -> None:
        self.passes, self._hops = passes, (0.0, hop)
        seconds, part = durations.tolist(), passes.part
        self._durations = [seconds[part[stage]][kind] for stage, kind in zip(passes.stage, passes.kind, strict=True)]
        self._stage, self._kind = np.array(passes.stage), np.array(passes.kind)
        self._device = np.array(passes.device)[self._stage]
        self._counter = (np.array(part)[self._stage] * len(PASSES) + self._kind) * WAYS
        """The first of the counters of every pass: one for each way through passes of its part and kind."""
        self._counters = (max(part) + 1) * len(PASSES) * WAYS
        self._results: list[float] = []
        """When the results of passes are there [s]."""
        self._begun, self._ended, self._followed = list[int](), list[int](), list[int]()
        """Links to what the begin of every pass, the end of its kernels, and its result followed."""
        self._before: list[int] = []
        """The passes before on the devices; -1: none."""
        self._pairs: dict[int, int] = {}
        """The forward passes whose kernels, with those of a pass, take longer than it, which runs beside them."""
        self._play()

    # -------------------------------------------------------------------------------------------- play

    def _play(self) -> None:
        devices, ends = self.passes.device, list[float]()
        last, latest = [0.0] * self.passes.shape.p, [-1] * self.passes.shape.p
        """When the kernels of every device have ended [s], and the pass that ended last."""
        begin, before = 0.0, -1
        for number, (stage, second) in enumerate(zip(self.passes.stage, self.passes.seconds, strict=True)):
            device, kernels = devices[stage], self._durations[number][STREAM]
            if not second:
                begin, before = last[device], latest[device]
            elif (both := self._durations[number - 1][BUSY] + self._durations[number][BUSY]) > kernels:
                # A pair takes no less than the kernels of both passes, and no less than either pass alone.
                kernels, self._pairs[number] = both, number - 1
            self._before.append(before)
            end = self._play_pass(number, kernels, begin, 4 * before if before >= 0 else -1)
            ends.append(end)
            if end >= last[device]:
                last[device], latest[device] = end, number
        self._last = ends.index(max(ends))

    def _play_pass(self, number: int, kernels: float, begin: float, previous: int) -> float:
        """Plays a pass; returns when its kernels end [s].

        kernels: how long they take [s].
        begin, previous: when the pass before on its device ended [s], and a link to it.
        """
        _, to_result, from_input, through, _ = self._durations[number]
        came, source = -1.0, -1
        for link in self.passes.inputs[number]:
            moment = self._results[link >> 2] + self._hops[link >> 1 & 1]
            if moment > came:
                came, source = moment, link
        end, ended = begin + kernels, previous
        result, followed = begin + to_result, previous
        if source >= 0:
            if came + from_input > end:
                end, ended = came + from_input, source
            if came + through > result:
                result, followed = came + through, source
        self._results.append(result)
        self._ended.append(ended)
        self._followed.append(followed)
        self._begun.append(source if came > begin else previous)
        return end

    # ------------------------------------------------------------------------------------------ chains

    def paths(self, devices: Collection[int]) -> CriticalPaths:
        """Counts the passes and messages of the chains of some devices."""
        onward, longer = self._follow() if devices else (None, [])
        every = [self._chains_of(device, longer) for device in sorted(devices)]
        ends, starts, drains = ([chain for chains in every for chain in chains[kind]] for kind in range(3))
        back, whole = self._walk_back(), PassChain(_link(self._last, False, False), self._beside([]))
        counts = [back.count_passes(chain.link) for chain in (whole, *ends)]
        counts += [onward.count_passes(chain.link) for chain in starts if onward is not None]
        counts += [back.count_passes(chain.link) for chain in drains]
        passes, hops = zip(*counts, strict=True)
        shape, beside = (
            (len(counts), -1, len(PASSES), WAYS),
            [chain.beside for chain in (whole, *ends, *starts, *drains)],
        )
        return CriticalPaths(
            np.array(passes, float).reshape(shape), np.array(hops, float), np.array(beside), len(ends), len(starts)
        )

    def _chains_of(
        self, device: int, longer: Sequence[bool]
    ) -> tuple[list[PassChain], list[PassChain], list[PassChain]]:
        """Returns the chains to the last backward passes of the stages of a device, after their first forward passes,
        and to its backward passes that no forward pass follows.

        longer: whether more follows after the result of a pass than after the end of its kernels.
        """
        here, stage = self._device == device, self.passes.stage
        forward = np.flatnonzero(here & (self._kind == FORWARD)).tolist()
        sums = np.flatnonzero(here & ((self._kind == WHOLE) | (self._kind == WEIGHTS))).tolist()
        first = {stage[number]: number for number in reversed(forward)}
        last = {stage[number]: number for number in sums}
        starts = [
            PassChain(_link(end, longer[end], False), self._beside(upto))
            for end, upto in _choose(sorted(first.values()), True)
        ]
        ends = [PassChain(self._begun[end], self._beside(on)) for end, on in _choose(sorted(last.values()), False)]
        drains = [
            PassChain(self._begun[begin], self._beside([number for number in sums if number >= begin]))
            for begin in (sums[0], next(number for number in sums if number > forward[-1]))
        ]
        return ends, starts, drains

    def _beside(self, numbers: Sequence[int]) -> np.ndarray:
        """Counts some passes by their stages."""
        return np.bincount([self.passes.stage[number] for number in numbers], minlength=self.passes.shape.stages)

    def _walk_back(self) -> _Walk:
        """Returns the chains to the end of the kernels of a pass, or to its result."""
        links = np.array([self._ended, self._followed]).T
        way = WAYS_THROUGH[np.where(links >= 0, links & 1, 0), np.arange(2)]
        counters = np.stack([self._counter[:, None] + way, np.full_like(links, -1)], axis=-1)
        for number, partner in self._pairs.items():  # along the kernels of both
            if way[number, 0] == STREAM:
                counters[number, 0] = self._counter[[number, partner]] + BUSY
        return _Walk.of(links, counters, self._counters)

    def _follow(self) -> tuple[_Walk, list[bool]]:
        """Returns what the longest chain to the end of the step goes on with after the end of the kernels of a pass,
        and after its result; and whether the chain after the result is longer."""
        size = len(self._begun)
        left, readers = ([0.0] * size, [0.0] * size), ([-1] * size, [-1] * size)
        for number in range(size - 1, -1, -1):
            stream, result, from_input, through, _ = self._durations[number]
            end_left, result_left = left[0][number], left[1][number]
            if (before := self._before[number]) >= 0:
                _take_longer(left[0], readers[0], before, 4 * number, (stream + end_left, result + result_left))
            for source in self.passes.inputs[number]:
                hop = self._hops[source >> 1 & 1]
                lengths = hop + from_input + end_left, hop + through + result_left
                _take_longer(left[1], readers[1], source >> 2, 4 * number + (source & 2), lengths)
        links = np.array(readers).T
        counters = self._counter[links >> 2] + WAYS_THROUGH[np.arange(2), links & 1]
        longer = [after_result > after_end for after_end, after_result in zip(*left, strict=True)]
        return _Walk.of(links, np.where(links >= 0, counters, -1)[..., None], self._counters), longer


def _take_longer(left: list[float], readers: list[int], number: int, link: int, lengths: tuple[float, float]) -> None:
    """Notes what follows a pass if it takes longer than what is known; of equal chains the first that is noted.

    left, readers: the longest chain after every pass [s], and a link to what it goes on with.
    link: to the kernels of a reader. lengths: up to the end of its kernels and on, and up to its result and on [s].
    """
    to_result = lengths[1] >= lengths[0]
    longer = lengths[to_result]
    if longer > left[number] or (longer == left[number] and readers[number] < 0):
        left[number], readers[number] = longer, link + to_result


class _Walk(NamedTuple):
    """Chains through the states of passes: state 2 n of pass n is the end of its kernels, 2 n + 1 its result.

    next: state after every state; -1: none.
    far: whether a message comes between.
    counters: of what a chain runs through at a state; -1: nothing [states, most].
    size: number of counters.
    """

    next: list[int]
    far: np.ndarray
    counters: np.ndarray
    size: int

    @classmethod
    def of(cls, links: np.ndarray, counters: np.ndarray, size: int) -> _Walk:
        """Returns the chains by links [passes, 2] and counters [passes, 2, most]."""
        states = np.where(links >= 0, 2 * (links >> 2) + (links & 1), -1).ravel()
        far = np.where(links >= 0, links >> 1 & 1, 0).ravel()
        return cls(states.tolist(), far, counters.reshape(len(states), -1), size)

    def count_passes(self, link: int) -> tuple[np.ndarray, int]:
        """Counts the passes, by their counters, and the messages of a chain. link: to its first pass."""
        visited, state = list[int](), 2 * (link >> 2) + (link & 1) if link >= 0 else -1
        while state >= 0:
            visited.append(state)
            state = self.next[state]
        counters = self.counters[visited].ravel()
        hops = int(self.far[visited].sum()) + (link >> 1 & 1 if link >= 0 else 0)
        return np.bincount(counters[counters >= 0], minlength=self.size), hops


def _choose(numbers: list[int], before: bool) -> list[tuple[int, list[int]]]:
    """Returns at most `MOST` of the passes, each with those up to it, or from it on."""
    chosen = sorted({*np.linspace(0, len(numbers) - 1, min(MOST, len(numbers))).round().astype(int).tolist()})
    return [(numbers[i], numbers[: i + 1] if before else numbers[i:]) for i in chosen]
