"""Lower bounds of the step time and memory of many pipelines at once, from the units of a model.

What a device runs and holds is counted in units once a pipeline. With the durations and the memory of a unit, matrix
products give the bounds of all pipelines. Passes last at least the sum of their units: (max,+) matrices in series have
at least the sum of each entry on the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulator.bounds.schedule_bound import FORWARD, INPUTS, WEIGHTS, WHOLE, StagePlaces, StageTimes, has_bound
from simulator.scheduling.schedule import PipelineShape, Schedule


class PipelineUnits(NamedTuple):
    """A pipeline of a model.

    place: where its virtual stages are. in_flight: least activations in flight on every device.
    counts: units of every kind in the parts of the model [parts, kinds].
    """

    schedule: Schedule
    shape: PipelineShape
    place: StagePlaces
    in_flight: np.ndarray
    counts: np.ndarray


class Mode(NamedTuple):
    """How the durations of a unit enter the bound of a schedule.

    split: backward passes compute gradients of inputs and of weights apart. mixed: some do.
    pairs: two passes may run together. barrier: all devices wait for each other before the update.
    """

    split: bool
    mixed: bool
    pairs: bool
    barrier: bool

    @classmethod
    def of(cls, schedule: Schedule) -> Mode:
        """The mode of a schedule."""
        split, mixed = schedule.backward_kinds == ("B", "W"), len(schedule.backward_kinds) > 2
        return cls(split, mixed, schedule.pairs_passes, schedule.barrier)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Devices of the pipelines of one mode.

    work, passed: units that a device runs in a step, and units before its first stage [devices, kinds].
    pipelines: numbers of the pipelines. starts: the first device of each.
    """

    work: np.ndarray
    passed: np.ndarray
    pipelines: np.ndarray
    starts: np.ndarray


class PipelineTable:
    """Pipelines as numbers of units of their devices.

    Of the devices of a pipeline only those stay that no other one exceeds in everything.
    """

    def __init__(self, pipelines: Sequence[PipelineUnits]) -> None:
        self.size = len(pipelines)
        by_mode: dict[Mode, list[tuple[int, np.ndarray]]] = {}
        memory = []
        for number, one in enumerate(pipelines):
            place, counts = one.place, one.counts[one.place.part]
            mode, kinds = Mode.of(one.schedule), counts.shape[1]
            if has_bound(one.schedule, one.shape):
                work = place.sum(place.turns[:, None] * counts)
                passed = place.least(place.passed @ one.counts)
                rows = np.hstack([work, passed])
                by_mode.setdefault(mode, []).append((number, rows[_largest(rows)]))
            # Where passes are paired, a forward pass takes the memory that a backward pass gives back.
            held = (one.in_flight - mode.pairs) * has_bound(one.schedule, one.shape)
            least, most = (held[:, None] * values for values in (place.least(counts), place.most(counts)))
            rows = np.hstack([place.sum(counts), least, -most])
            memory.append(rows[_largest(rows)])
        self._modes = {}
        for mode, found in by_mode.items():
            numbers, rows = zip(*found, strict=True)
            stacked = np.vstack(rows)
            starts = np.cumsum([0, *(len(one) for one in rows[:-1])])
            self._modes[mode] = _Rows(stacked[:, :kinds], stacked[:, kinds:], np.array(numbers), starts)
        self._memory = np.split(np.vstack(memory), 3, axis=1) if memory else []
        self._starts = np.cumsum([0, *(len(one) for one in memory[:-1])])
        self._pipelines = np.repeat(np.arange(self.size), [len(one) for one in memory])

    def step_seconds(self, units: StageTimes) -> np.ndarray:
        """Lower bounds of the time of all passes [pipelines] [s]. units: durations, each kind of unit as a part.

        Messages take no time; pipelines for which nothing is known have 0.
        """
        found = np.zeros(self.size)
        for mode, rows in self._modes.items():
            found[rows.pipelines] = np.maximum.reduceat(_devices_seconds(mode, rows, units), rows.starts)
        return found

    def memory(self, grown: np.ndarray, elements: np.ndarray, each: np.ndarray) -> np.ndarray:
        """Least memory of the fullest device [pipelines, choices] [bytes].

        grown: what the forward pass of a unit leaves for its backward pass [kinds] [bytes].
        elements: parameters of a unit [kinds]. each: bytes of states of a parameter [pipelines, choices].
        """
        if not self._memory:
            return np.zeros(each.shape)
        own, least, most = self._memory
        activations = least @ np.maximum(grown, 0.0) - most @ np.minimum(grown, 0.0)
        states = (own @ elements)[:, None] * each[self._pipelines]
        return np.asarray(np.maximum.reduceat(np.maximum(activations, 0.0)[:, None] + states, self._starts))


def _devices_seconds(mode: Mode, rows: _Rows, units: StageTimes) -> np.ndarray:
    """When devices are done with all passes, at the earliest [devices] [s]: `bound_devices` of sums of units."""
    seconds = units.busy if mode.pairs else units.stream
    forward, whole, halves = seconds[:, FORWARD], seconds[:, WHOLE], seconds[:, INPUTS] + seconds[:, WEIGHTS]
    backward, inputs, gradient = whole, whole, units.path[:, WHOLE]
    if mode.split or mode.mixed:
        backward, inputs, gradient = halves, seconds[:, INPUTS], units.path[:, INPUTS]
    if mode.mixed:
        backward, inputs = np.minimum(halves, whole), np.minimum(inputs, whole)
        gradient = np.minimum(gradient, units.path[:, WHOLE])
    work = (rows.work @ (forward + backward)).max(axis=1)
    if not mode.barrier:
        return np.asarray(work)
    kind = INPUTS if mode.split or mode.mixed else WHOLE
    early = max(float((units.stream[:, FORWARD, 0] - units.from_input[:, FORWARD]).max()), 0.0)
    ends = max(float((units.stream[:, kind, 0] - units.to_result[:, kind]).max()), 0.0)
    head = np.maximum(rows.passed @ units.path[:, FORWARD] - early, 0.0)
    returned = (rows.work @ (forward + inputs)).max(axis=1) - ends + rows.passed @ gradient
    return np.asarray(head + np.maximum(work, returned))


def _largest(rows: np.ndarray) -> np.ndarray:
    """The places of rows that no other row exceeds in all columns or, of equal rows, of the first."""
    rows, places = np.unique(rows, axis=0, return_index=True)
    if len(rows) == 1:
        return np.asarray(places)
    above = (rows[:, None] <= rows[None]).all(axis=2)
    return np.asarray(places[above.sum(axis=1) == 1])
