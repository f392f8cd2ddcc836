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
class DeviceUnits:
    """What the devices of a pipeline run and hold, for several variants of its parts, in numbers of units.

    work: that pass through a device in a step for each micro-batch. passed: through which a micro-batch comes before
    it reaches the device. own: of the device. least, most: of its stage with the fewest and with the most [devices,
    variants, kinds].
    places: numbers of the devices: only those that no other one exceeds in everything.
    """

    work: np.ndarray
    passed: np.ndarray
    own: np.ndarray
    least: np.ndarray
    most: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, place: StagePlaces, counts: np.ndarray, m: int) -> DeviceUnits:
        """Of a placement of stages. counts: units of the parts of the model [parts, variants, kinds]. m: micro-batches
        of a step."""
        parts, flat = place.part, counts.reshape(len(counts), -1)
        stages = flat[parts]
        work, passed = place.sum(place.turns[:, None] / m * stages), place.least(place.passed @ flat)
        own, least, most = place.sum(stages), place.least(stages), place.most(stages)
        kinds = counts.shape[2]
        places = _largest(np.hstack([one[:, :kinds] for one in (work, passed, own, least, -most)]))
        shape = len(places), *counts.shape[1:]
        work, passed, own, least, most = (one[places].reshape(shape) for one in (work, passed, own, least, most))
        return cls(work, passed, own, least, most, places)


class PipelineUnits(NamedTuple):
    """A pipeline of a model and its variants.

    devices: what its devices run and hold. in_flight: least activations in flight on every device [devices].
    """

    schedule: Schedule
    shape: PipelineShape
    devices: DeviceUnits
    in_flight: np.ndarray


@dataclass(frozen=True, eq=False)
class _Devices:
    """Devices of the pipelines of one mode.

    work, passed: units that a device runs in a step, and units before its first stage [devices, kinds].
    pipelines: numbers of the pipelines. starts: the first device of each.
    """

    work: np.ndarray
    passed: np.ndarray
    pipelines: np.ndarray
    starts: np.ndarray


class PipelineTable:
    """Pipelines as numbers of units of their devices; variants of a pipeline are pipelines of their own."""

    def __init__(self, pipelines: Sequence[PipelineUnits]) -> None:
        by_mode: dict[Mode, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        columns: list[list[np.ndarray]] = [[], [], []]
        self.size, widths = 0, []
        for schedule, shape, devices, in_flight in pipelines:
            number, variants, kinds = devices.work.shape
            mode, known = Mode.of(schedule), has_bound(schedule, shape)
            numbers = self.size + np.arange(variants)
            if known:
                work, passed = (one.swapaxes(0, 1).reshape(-1, kinds) for one in (devices.work, devices.passed))
                by_mode.setdefault(mode, []).append((shape.m * work, passed, numbers))
            # Where passes are paired, a forward pass takes the memory that a backward pass gives back.
            held = (in_flight[devices.places] - mode.pairs) * known
            least, most = (held[:, None, None] * one for one in (devices.least, devices.most))
            for column, one in zip(columns, (devices.own, least, most), strict=True):
                column.append(one.swapaxes(0, 1).reshape(-1, kinds))
            widths += [number] * variants
            self.size += variants
        self._modes = {}
        for mode, found in by_mode.items():
            work, passed, numbers = (np.concatenate(one) for one in zip(*found, strict=True))
            starts = _starts([len(own) // len(which) for own, _, which in found for _ in which])
            self._modes[mode] = _Devices(work, passed, numbers, starts)
        self._memory = [np.concatenate(one) for one in columns] if pipelines else []
        self._starts, self._pipelines = _starts(widths), np.repeat(np.arange(self.size), widths)

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
        activations = least @ np.maximum(grown, 0.0) + most @ np.minimum(grown, 0.0)
        states = (own @ elements)[:, None] * each[self._pipelines]
        return np.asarray(np.maximum.reduceat(np.maximum(activations, 0.0)[:, None] + states, self._starts))


def _devices_seconds(mode: Mode, rows: _Devices, units: StageTimes) -> np.ndarray:
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


def _starts(widths: Sequence[int]) -> np.ndarray:
    """The places of the first of several items of these widths each."""
    return np.asarray(np.cumsum([0, *widths])[: len(widths)])


def _largest(rows: np.ndarray) -> np.ndarray:
    """The places of rows that no other row exceeds in all columns or, of equal rows, of the first."""
    rows, places = np.unique(rows, axis=0, return_index=True)
    if len(rows) == 1:
        return np.asarray(places)
    above = (rows[:, None] <= rows[None]).all(axis=2)
    return np.asarray(places[above.sum(axis=1) == 1])
