"""Longest chains of passes and messages through the orders of a pipeline schedule.

Every chain of passes that wait for each other, on a device or for a message, bounds the step from below, whatever the
passes last. Which chain is the longest hardly depends on the durations: the orders are replayed once for a shape, and
the passes of the longest chain are counted. Priced with the durations of any plan of that shape, the counts give a
lower bound of its step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.bounds.schedule_bound import FORWARD, PASSES, WEIGHTS, WHOLE, StageTimes
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
        lengths = np.einsum("cpkw,pkw->c", self.passes, np.where(none, 0.0, durations)) + self.hops * times.hop
        # Other durations may be those of passes without kernels, which no chain runs through.
        return np.where(np.einsum("cpkw,pkw->c", self.passes, none) > 0, 0.0, lengths)

    def last_reduction(
        self, times: StageTimes, reductions: np.ndarray, gathers: np.ndarray, each: np.ndarray, late: float
    ) -> float:
        """Returns when all passes have ended and all gradients are reduced, at the earliest [s].

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
    replay = _Replay(schedule, shape, ways(times), times.hop)
    for actions in replay.sequence(orders):
        replay.play(actions)
    return replay.paths(devices) if len(replay.passes) == sum(len(actions_of(order)) for order in orders) else None


class Cause(NamedTuple):
    """What a moment of a pass followed.

    after: number of another pass; -1: none.
    by_message: whether its result was waited for, and not the end of its kernels.
    from_other_device: whether that came from another device.
    """

    after: int
    by_message: bool = False
    from_other_device: bool = False


class PlayedPass(NamedTuple):
    """A pass that begins as early as it can.

    stage: virtual stage.
    part: its part of the model.
    kind: place in `PASSES`.
    end: when its kernels have ended [s].
    begun: what its begin followed.
    causes: what the end of its kernels followed, and what its result.
    before: the pass before on the device; -1: none.
    partner: the forward pass whose kernels, with those of this pass, take longer than a backward pass that runs beside
        it; -1: none.
    """

    stage: int
    part: int
    kind: int
    end: float
    begun: Cause
    causes: tuple[Cause, Cause]
    before: int
    partner: int


class PassChain(NamedTuple):
    """A chain of passes.

    end: where it ends, or begins.
    beside: how often the collectives of every stage follow.
    """

    end: Cause
    beside: np.ndarray


class Step(NamedTuple):
    """What a chain goes on with: the next pass (-1: none), the way through it, and whether a message comes before."""

    number: int = -1
    way: int = STREAM
    from_other_device: bool = False


class _Replay:
    """Passes played in the orders of their devices, each with what it waited for.

    durations: of passes by part, kind and way [s].
    hop: of a message between devices [s].
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape, durations: np.ndarray, hop: float) -> None:
        self.shape, self.seconds, self.hop, stages = shape, durations.tolist(), hop, range(shape.stages)
        self.part = [schedule.model_part(shape, stage) for stage in stages]
        self.device = [schedule.device(shape, stage) for stage in stages]
        before = [tuple(schedule.predecessors(shape, stage)) for stage in stages]
        after = [tuple(other for other in stages if stage in before[other]) for stage in stages]
        self.senders: dict[str, list[tuple[int, ...]]] = {"F": before, "BW": after, "B": after, "W": [()] * len(stages)}
        """The stages whose results the passes of every stage wait for, by the kind of pass."""
        self.passes: list[PlayedPass] = []
        self.readers: list[list[tuple[int, bool]]] = []
        """Of every pass those that wait for its result, and whether they are on other devices."""
        self._results: dict[tuple[int, int, bool], tuple[float, int]] = {}
        """When the results of passes are there [s], with the numbers of the passes."""
        self._last = [(0.0, -1)] * shape.p
        """When the kernels of every device have ended [s], and the pass that ended last."""

    # -------------------------------------------------------------------------------------------- play

    def sequence(self, orders: Orders) -> Iterator[tuple[Action, ...]]:
        """Yields the items of all devices in turn, each once the inputs of its passes are there; ends early where
        none can go on."""
        waiting, moved, left = list(range(len(orders))), True, [list(reversed(order)) for order in orders]
        while waiting and moved:
            moved = False
            for device in waiting:
                while left[device]:
                    item = left[device][-1]
                    actions = item if isinstance(item, OverlappedPasses) else (item,)
                    if not self._inputs_are_there(actions):
                        break
                    left[device].pop()
                    moved = True
                    yield actions
            waiting = [device for device in waiting if left[device]]

    def _inputs_are_there(self, actions: Sequence[Action]) -> bool:
        for action in actions:
            microbatch, forward = action.microbatch, action.kind == "F"
            for stage in self.senders[action.kind][action.stage]:
                if (stage, microbatch, forward) not in self._results:
                    return False
        return True

    def play(self, actions: Sequence[Action]) -> None:
        """Plays a pass, or two that run together."""
        device, busy = self.device[actions[0].stage], 0.0
        begin, previous = self._last[device]
        for action in actions:
            part, kind = self.part[action.stage], PASSES.index(action.kind)
            durations = self.seconds[part][kind]
            busy += durations[BUSY]
            # A pair takes no less than the kernels of both passes, and no less than either pass alone.
            together = busy > durations[STREAM] and action is not actions[0]
            kernels, number = busy if together else durations[STREAM], len(self.passes)
            end, begun, causes = self._play_pass(action, begin, Cause(previous), kernels, durations)
            if end >= self._last[device][0]:
                self._last[device] = end, number
            partner = number - 1 if together else -1
            self.passes.append(PlayedPass(action.stage, part, kind, end, begun, causes, previous, partner))

    def _play_pass(
        self, action: Action, begin: float, previous: Cause, kernels: float, durations: Sequence[float]
    ) -> tuple[float, Cause, tuple[Cause, Cause]]:
        """Plays a pass; returns its end, what it began after, and what its end and its result followed.

        begin, previous: when the pass before on its device ended [s].
        kernels: seconds of its kernels.
        """
        came, source = self._find_input(action)
        end, ended = begin + kernels, previous
        result, followed = begin + durations[RESULT], previous
        if source is not None and came + durations[INPUT] > end:
            end, ended = came + durations[INPUT], source
        if source is not None and came + durations[THROUGH] > result:
            result, followed = came + durations[THROUGH], source
        if action.kind != "W":
            self._results[action.stage, action.microbatch, action.kind == "F"] = result, len(self.passes)
        return end, source if source is not None and came > begin else previous, (ended, followed)

    def _find_input(self, action: Action) -> tuple[float, Cause | None]:
        """Returns when the last input of a pass comes [s], and from where; notes that the pass reads all of them."""
        came, source, device = -1.0, None, self.device[action.stage]
        microbatch, forward = action.microbatch, action.kind == "F"
        for stage in self.senders[action.kind][action.stage]:
            result, sender = self._results[stage, microbatch, forward]
            far = self.device[stage] != device
            self.readers[sender].append((len(self.passes), far))
            if (moment := result + (self.hop if far else 0.0)) > came:
                came, source = moment, Cause(sender, True, far)
        self.readers.append([])
        return came, source

    # ------------------------------------------------------------------------------------------ chains

    def paths(self, devices: Collection[int]) -> CriticalPaths:
        """Counts the passes and messages of the chains of some devices."""
        whole = self._chain(Cause(int(np.argmax([played.end for played in self.passes]))), [])
        every = [self._chains_of(device) for device in sorted(devices)]
        ends, starts, drains = ([chain for chains in every for chain in chains[kind]] for kind in range(3))
        chains, follows = [whole, *ends, *starts, *drains], self._follow() if starts else []
        passes, hops = np.zeros((len(chains), max(self.part) + 1, len(PASSES), 5)), np.zeros(len(chains))
        for number, chain in enumerate(chains):
            begins_there = len(ends) < number <= len(ends) + len(starts)
            count = partial(self._count_on, follows) if begins_there else self._count
            hops[number] = count(chain.end, passes[number])
        return CriticalPaths(passes, hops, np.array([chain.beside for chain in chains]), len(ends), len(starts))

    def _chains_of(self, device: int) -> tuple[list[PassChain], list[PassChain], list[PassChain]]:
        """Returns the chains to the last backward passes of the stages of a device, after their first forward passes,
        and to its backward passes that no forward pass follows."""
        numbers = [number for number, played in enumerate(self.passes) if self.device[played.stage] == device]
        forward = [number for number in numbers if self.passes[number].kind == FORWARD]
        sums = [number for number in numbers if self.passes[number].kind in (WHOLE, WEIGHTS)]
        first = {self.passes[number].stage: number for number in reversed(forward)}
        last = {self.passes[number].stage: number for number in sums}
        starts = [self._chain(Cause(end), upto) for end, upto in _choose(sorted(first.values()), True)]
        ends = [self._chain(self.passes[end].begun, on) for end, on in _choose(sorted(last.values()), False)]
        drains = [
            self._chain(self.passes[begin].begun, [number for number in sums if number >= begin])
            for begin in (sums[0], next(number for number in sums if number > forward[-1]))
        ]
        return ends, starts, drains

    def _chain(self, end: Cause, beside: Sequence[int]) -> PassChain:
        """Returns a chain with the collectives of the stages of some passes beside it."""
        stages = [self.passes[number].stage for number in beside]
        return PassChain(end, np.bincount(stages, minlength=self.shape.stages))

    def _count(self, end: Cause, counts: np.ndarray) -> int:
        """Counts the passes of the chain to the end of the kernels of a pass, or to its result, and on to another
        device; returns the number of its messages."""
        number, to_result, far = end
        hops = int(far)
        while number >= 0:
            played = self.passes[number]
            source, message, far = played.causes[to_result]
            way = (THROUGH if to_result else INPUT) if message else (RESULT if to_result else STREAM)
            if way == STREAM and played.partner >= 0:
                way = BUSY
                counts[self.passes[played.partner].part, FORWARD, BUSY] += 1
            counts[played.part, played.kind, way] += 1
            hops += far
            number, to_result = source, message
        return hops

    def _follow(self) -> list[tuple[tuple[Step, Step], bool]]:
        """Returns what the longest chain to the end of the step goes on with after the end of the kernels of a pass,
        and after its result; and whether the chain after the result is longer."""
        after = [-1] * len(self.passes)
        for number, played in enumerate(self.passes):
            if played.before >= 0:
                after[played.before] = number
        left = [(0.0, 0.0)] * len(self.passes)
        follows = [((Step(), Step()), False)] * len(self.passes)
        for number in range(len(self.passes) - 1, -1, -1):
            on_device, by_message = (0.0, Step()), (0.0, Step())
            if (reader := after[number]) >= 0:
                on_device = max(self._ways_on(reader, STREAM, RESULT, False, left), on_device)
            for reader, far in self.readers[number]:
                by_message = max(self._ways_on(reader, INPUT, THROUGH, far, left), by_message)
            left[number] = on_device[0], by_message[0]
            follows[number] = (on_device[1], by_message[1]), by_message[0] > on_device[0]
        return follows

    def _ways_on(
        self, number: int, to_end: int, to_result: int, far: bool, left: list[tuple[float, float]]
    ) -> tuple[float, Step]:
        """Returns the longer of two ways through a pass, with what follows: to the end of its kernels, or to its
        result."""
        played, delay = self.passes[number], self.hop if far else 0.0
        durations = self.seconds[played.part][played.kind]
        end_left, result_left = left[number]
        by_end, by_result = delay + durations[to_end] + end_left, delay + durations[to_result] + result_left
        if by_result >= by_end:
            return by_result, Step(number, to_result, far)
        return by_end, Step(number, to_end, far)

    def _count_on(self, follows: Sequence[tuple[tuple[Step, Step], bool]], begin: Cause, counts: np.ndarray) -> int:
        """Counts the passes of the longer chain after a pass; returns the number of its messages."""
        number = begin.after
        hops, to_result = 0, follows[number][1]
        while (step := follows[number][0][to_result]).number >= 0:
            number, way, far = step
            counts[self.passes[number].part, self.passes[number].kind, way] += 1
            hops, to_result = hops + far, way in (RESULT, THROUGH)
        return hops


def _choose(numbers: list[int], before: bool) -> list[tuple[int, list[int]]]:
    """Returns at most `MOST` of the passes, each with those up to it, or from it on."""
    chosen = sorted({*np.linspace(0, len(numbers) - 1, min(MOST, len(numbers))).round().astype(int).tolist()})
    return [(numbers[i], numbers[: i + 1] if before else numbers[i:]) for i in chosen]
