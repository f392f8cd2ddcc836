"""Lower bounds of the step time of a pipeline schedule, and of the activations that its devices hold.

No order of the passes lets a device begin before a micro-batch has come through the stages before it, end before the
last gradient has gone back through them, or run its passes in less time than they take in turn.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remember
from meshcast.simulator.ir.capabilities import RequiresRoles
from meshcast.simulator.scheduling.schedule import PipelineSetting, PipelineShape, Schedule, actions_of

PASSES = ("F", "BW", "B", "W")
"""Kinds of passes whose durations a bound needs."""

FORWARD, WHOLE, INPUTS, WEIGHTS = range(4)


@dataclass(frozen=True)
class StageTimes:
    """Least durations of the passes (`PASSES`) of the parts of a model [s].

    stream: time by which a pass puts off each stream (and last the host) if nothing else delays it [parts, passes,
        streams].
    busy: time of the ops of a pass on each stream [parts, passes, streams].
    path: from the input of a pass to its result [parts, passes].
    from_input: from the input of a pass to the end of its ops on each stream, as `stream` has them; -inf where none of
        them waits for the input, as on the host, which launches ahead.
    to_result: from the begin of the ops of a pass on each stream to its result; -inf where it needs none of them.
        Both are 0 or more on the compute stream, the first, where the pass has kernels: a pass without, such as the
        gradient of the input of an embedding, puts off nothing that follows, and its result follows nothing but its
        input.
    hop: a message between two stages.
    """

    stream: np.ndarray
    busy: np.ndarray
    path: np.ndarray
    from_input: np.ndarray
    to_result: np.ndarray
    hop: float


class StagePlaces:
    """Where the stages of a schedule are, by virtual stage.

    part: part of the model.
    device: pipeline device.
    turns: micro-batches that pass through.
    """

    def __init__(self, schedule: Schedule, shape: PipelineShape) -> None:
        stages = range(shape.stages)
        self.part = np.array([schedule.model_part(shape, stage) for stage in stages])
        self.device = np.array([schedule.device(shape, stage) for stage in stages])
        each = shape.stages // schedule.directions
        turns = [len(schedule.microbatches(shape, first)) for first in range(0, shape.stages, each)]
        self.turns = np.repeat(turns, each)
        previous = [schedule.predecessors(shape, stage)[:1] for stage in stages]
        self.passed = np.zeros((shape.stages, int(self.part.max()) + 1))
        """Whether a micro-batch passes through a part before it comes to a stage [stages, parts]."""
        self.hops = np.zeros(shape.stages)
        """Messages between devices before a stage."""
        self.sends = np.zeros(shape.stages)
        """Outputs that a stage sends to other devices for a micro-batch."""
        for stage in np.argsort(self.part, kind="stable").tolist():
            for before in previous[stage]:
                self.passed[stage] = self.passed[before]
                self.passed[stage, self.part[before]] = 1
                elsewhere = self.device[before] != self.device[stage]
                self.hops[stage] = self.hops[before] + elsewhere
                self.sends[before] += elsewhere
        self._order = np.argsort(self.device, kind="stable")
        self._starts = np.searchsorted(self.device[self._order], np.arange(shape.p))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Adds up values over the stages of every device. values: by virtual stage; so for the others."""
        return np.add.reduceat(values[self._order], self._starts)

    def work(self, values: np.ndarray) -> np.ndarray:
        """Adds up values over the stages of every device, micro-batch by micro-batch. values: by part [parts,
        streams]."""
        return self.sum(self.turns[:, None] * values[self.part])

    def least(self, values: np.ndarray) -> np.ndarray:
        """Returns the least value of the stages of every device."""
        return np.minimum.reduceat(values[self._order], self._starts)

    def most(self, values: np.ndarray) -> np.ndarray:
        """Returns the largest value of the stages of every device."""
        return np.maximum.reduceat(values[self._order], self._starts)


class Mode(NamedTuple):
    """How the durations of a unit enter the bound of a schedule.

    split: backward passes compute gradients of inputs and of weights apart.
    mixed: some do.
    pairs: two passes may run together.
    barrier: all devices wait for each other before the update.
    """

    split: bool
    mixed: bool
    pairs: bool
    barrier: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Mode:
        """Returns the mode of a schedule."""
        split, mixed = schedule.backward_kinds == ("B", "W"), len(schedule.backward_kinds) > 2
        return cls(split, mixed, schedule.pairs_passes, schedule.barrier)


class PassSeconds(NamedTuple):
    """Least durations of the passes that a schedule runs for a micro-batch [s].

    Backward passes are whole or in halves or, in a schedule that has both, whichever is shorter.
    forward, backward: of a part on each stream.
    inputs: up to the gradients of its inputs.
    longest: the longest backward pass of a part [parts, streams].
    gradient: from the input of a backward pass to its result [parts].
    last: the kind of pass that gives the last gradient back.
    """

    forward: np.ndarray
    backward: np.ndarray
    inputs: np.ndarray
    longest: np.ndarray
    gradient: np.ndarray
    last: int

    @classmethod
    def of(cls, mode: Mode, seconds: np.ndarray, path: np.ndarray) -> PassSeconds:
        """Sums durations of passes [parts, passes, streams], and from their input to their result [parts, passes]."""
        forward, whole, halves = seconds[:, FORWARD], seconds[:, WHOLE], seconds[:, INPUTS] + seconds[:, WEIGHTS]
        backward, inputs, gradient = whole, whole, path[:, WHOLE]
        if mode.split or mode.mixed:
            backward, inputs, gradient = halves, seconds[:, INPUTS], path[:, INPUTS]
        if mode.mixed:
            backward, inputs = np.minimum(halves, whole), np.minimum(inputs, whole)
            gradient = np.minimum(gradient, path[:, WHOLE])
        last = INPUTS if mode.split or mode.mixed else WHOLE
        return cls(forward, backward, inputs, np.maximum(backward, whole), gradient, last)


class DeviceBound(NamedTuple):
    """Lower bounds of when a pipeline device is done with its passes [devices] [s].

    computed: its kernels have ended.
    returned: its last gradient has gone back through the stages before it.
    opened: its last backward pass has begun.
    """

    computed: np.ndarray
    returned: np.ndarray
    opened: np.ndarray


def bound_devices(
    schedule: Schedule, shape: PipelineShape, place: StagePlaces, times: StageTimes, blocking: bool = False
) -> DeviceBound:
    """Returns lower bounds of when every device is done. A schedule for which `has_bound` is false has none.

    blocking: a device waits for each message that it sends.
    """
    if not schedule.pairs_passes:
        return _bound_passes(schedule, shape, place, times, times.stream, blocking)
    # The ops of both passes of a pair follow each other on each stream.
    kernels = _bound_passes(schedule, shape, place, times, times.busy, False)
    if shape.forward_only or not schedule.barrier:
        return kernels
    # One of them is a backward pass, whose ops keep their order: the pair takes no less than that pass alone.
    bounds = kernels, _bound_backward_passes(place, times)
    return DeviceBound(*(np.maximum(*ends) for ends in zip(*bounds, strict=True)))


def _bound_passes(
    schedule: Schedule,
    shape: PipelineShape,
    place: StagePlaces,
    times: StageTimes,
    seconds: np.ndarray,
    blocking: bool,
) -> DeviceBound:
    """Returns the bound of all passes of a device, in turn. seconds: of a pass on each stream [parts, passes,
    streams]."""
    passes, part = PassSeconds.of(Mode.of(schedule), seconds, times.path), place.part
    if shape.forward_only:
        passes = passes._replace(backward=0.0 * passes.backward, inputs=0.0 * passes.inputs)
    waits = _wait_for_messages(place, times, seconds.shape[2]) if blocking else 0.0
    sums = place.work(passes.forward + passes.backward) + waits
    if not schedule.barrier:
        computed = sums.max(axis=1)
        return DeviceBound(computed, computed, computed)
    head = place.least(place.passed @ times.path[:, FORWARD] + place.hops * times.hop)
    tail = place.least(place.passed @ passes.gradient + place.hops * times.hop)
    # On each stream the first pass may begin before its input, and the last gives its result before it ends: the
    # host runs ahead of the input as far as it waits for nothing.
    early = place.most(np.maximum(times.stream[part, FORWARD] - times.from_input[part, FORWARD], 0.0))
    ends = place.most(np.maximum(times.stream[part, passes.last] - times.to_result[part, passes.last], 0.0))
    begins = np.maximum(head[:, None] - early, 0.0)
    if shape.forward_only:
        tail[:], ends[:] = 0.0, 0.0
    computed = (begins + sums).max(axis=1)
    opened = (begins + (sums - place.most(passes.longest[part]))).max(axis=1)
    returned = (begins + place.work(passes.forward + passes.inputs) + waits - ends).max(axis=1) + tail
    return DeviceBound(computed, returned, opened)


def _wait_for_messages(place: StagePlaces, times: StageTimes, streams: int) -> np.ndarray:
    """Returns how long devices wait for the messages that they send [devices, streams] [s]: nothing is computed
    meanwhile; collectives of a pass may go on."""
    # A gradient is sent while gradients of weights are computed; an output when nothing is left of its pass.
    left = np.maximum(times.stream[place.part, FORWARD, 0] - times.to_result[place.part, FORWARD, 0], 0.0)
    every = place.sum(place.turns * place.sends * np.maximum(times.hop - left, 0.0))
    waits = np.zeros((len(every), streams))
    waits[:, 0] = np.maximum(every - times.hop, 0.0)
    return waits


def _bound_backward_passes(place: StagePlaces, times: StageTimes) -> DeviceBound:
    """Returns the bound of the backward passes of a device, which may compute gradients of weights with those of inputs
    or apart: no two of them run together, and the first begins once a gradient has come to the device."""
    part, path = place.part, times.path
    passes = PassSeconds.of(Mode(split=False, mixed=True, pairs=True, barrier=True), times.stream, path)
    after = 1.0 - place.passed
    after[np.arange(len(part)), part] = 0.0
    hops = 2 * place.hops.max() - place.hops
    head = place.least(path[:, FORWARD].sum() + after @ passes.gradient + hops * times.hop)
    tail = place.least(place.passed @ passes.gradient + place.hops * times.hop)
    seconds, entered, left = (of[part][:, [INPUTS, WHOLE]] for of in (times.stream, times.from_input, times.to_result))
    early, ends = (place.most(np.maximum(seconds - waits, 0.0).max(axis=1)) for waits in (entered, left))
    begins, sums = np.maximum(head[:, None] - early, 0.0), place.work(passes.backward)
    computed = (begins + sums).max(axis=1)
    opened = (begins + (sums - place.most(passes.longest[part]))).max(axis=1)
    return DeviceBound(computed, (begins + place.work(passes.inputs) - ends).max(axis=1) + tail, opened)


def shortest_step(
    schedule: Schedule, bound: DeviceBound, update: np.ndarray, reductions: np.ndarray, beside: float = 0.0
) -> float:
    """Returns a lower bound of the step time [s].

    update: time of the optimizer update on the compute stream of every device [devices] [s].
    reductions: time of the gradient reductions of the stage of every device that has least [devices] [s].
    beside: time of all ops of a stream beside the compute stream, such as data-parallel collectives or copies [s].
    """
    if not schedule.barrier:
        return max(float((bound.computed + update).max()), beside)
    # The reductions of some stage follow the begin of the last backward pass. All devices wait for the norm of the
    # gradients before they update their weights.
    ends = bound.computed, bound.returned, bound.opened + reductions
    done = max(beside, *(float(end.max()) for end in ends))
    return done + float(update.max())


def has_bound(schedule: Schedule, shape: PipelineShape) -> bool:
    """Says whether `shortest_step` knows the passes of a schedule: whole sequences and samples of a single
    micro-batch."""
    whole = len(schedule.slices) == 1 and shape.slices == 1 and not shape.classes and not shape.batch_loss
    of_one = schedule.microbatches_per_forward == schedule.backwards_per_forward == 1
    return whole and of_one and not isinstance(schedule, RequiresRoles)


def least_in_flight(schedule: Schedule, shape: PipelineShape, known: dict[int, np.ndarray] | None = None) -> np.ndarray:
    """Counts the passes whose activations a device holds at its peak, at least [devices]: the closed form of the paper;
    without it, as a replay of its orders counts them, if they do not depend on durations.

    known: replays by the number of micro-batches, of shapes that differ in it alone.
    """
    held = np.ones(shape.p)
    if shape.forward_only or schedule.needs_durations or not has_bound(schedule, shape):
        return held
    setting = PipelineSetting(shape, 1.0, 1.0, 1.0)
    for form in schedule.closed_forms(setting):
        if form.quantity == "in_flight_b":
            return np.maximum(held, np.asarray(form.value, float))
    # Longer batches hold as much: the steady state repeats.
    few = replace(shape, m=min(shape.m, 2 * shape.stages))
    try:
        schedule.check(few)
    except PlanError:
        few = shape
    return remember({} if known is None else known, few.m, partial(_count_held, schedule, few))


def _count_held(schedule: Schedule, shape: PipelineShape) -> np.ndarray:
    """Counts the passes whose activations devices hold at their peak, in the orders of a schedule [devices]."""
    steps = ([_HELD.get(action.kind, 0) for action in actions_of(order)] for order in schedule.orders(shape))
    return np.array([max(1.0, np.cumsum(of_device).max(initial=0)) for of_device in steps])


_HELD = {"F": 1, "B": -1, "BW": -1}
"""What a pass adds to the activations that are kept for gradients of inputs."""
