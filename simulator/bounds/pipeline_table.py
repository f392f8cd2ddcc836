"""Lower bounds of the step time and memory of many pipelines at once, from the units of a model.

What a device runs and holds is counted in units once a pipeline. With the durations and the memory of a unit, matrix
products give the bounds of all pipelines. Passes last at least the sum of their units: (max,+) matrices in series have
at least the sum of each entry on the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.bounds.schedule_bound import FORWARD, Mode, PassSeconds, StagePlaces, StageTimes, has_bound
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule


@dataclass(frozen=True, eq=False)
class DeviceUnits:
    """What the devices of a pipeline run and hold, for several variants of its parts, in numbers of units.

    work: that pass through a device in a step for each micro-batch.
    passed: through which a micro-batch comes before it reaches the device.
    held: of the device.
    least, most: of its stage with the fewest and with the most [devices, variants, kinds].
    places: numbers of the devices: only those that no other device exceeds in everything.
    """

    work: np.ndarray
    passed: np.ndarray
    held: np.ndarray
    least: np.ndarray
    most: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, place: StagePlaces, counts: np.ndarray, m: int) -> DeviceUnits:
        """Counts the units of a placement of stages. counts: units of the parts of the model [parts, variants, kinds].
        m: micro-batches of a step."""
        parts, flat = place.part, counts.reshape(len(counts), -1)
        stages = flat[parts]
        work, passed = place.sum(place.turns[:, None] / m * stages), place.least(place.passed @ flat)
        held, least, most = place.sum(stages), place.least(stages), place.most(stages)
        kinds = counts.shape[2]
        places = _largest(np.hstack([column[:, :kinds] for column in (work, passed, held, least, -most)]))
        shape = len(places), *counts.shape[1:]
        work, passed, held, least, most = (
            column[places].reshape(shape) for column in (work, passed, held, least, most)
        )
        return cls(work, passed, held, least, most, places)


class PipelineUnits(NamedTuple):
    """A pipeline of a model and its variants.

    devices: what its devices run and hold.
    in_flight: least activations in flight on every device [devices].
    """

    schedule: Schedule
    shape: PipelineShape
    devices: DeviceUnits
    in_flight: np.ndarray


class Collectives(NamedTuple):
    """Data-parallel collectives of a step, by the group of ranks that takes part.

    elements: parameters of a unit whose gradients a group sums [groups, kinds].
    matrices: those of large parameters of layers alone, which every scheme that gathers weights in every micro-batch
        gathers there [groups, kinds].
    reductions, gathers: seconds that those of a parameter take at least [pipelines, choices, groups] [s].
    each_reduction, each_gather: how often they happen in a micro-batch; 0: once a step [pipelines, choices].
    """

    elements: np.ndarray
    matrices: np.ndarray
    reductions: np.ndarray
    gathers: np.ndarray
    each_reduction: np.ndarray
    each_gather: np.ndarray


class PipelineTable:
    """Pipelines as numbers of units of their devices; variants of a pipeline are pipelines themselves."""

    def __init__(self, pipelines: Sequence[PipelineUnits]) -> None:
        columns: dict[str, list[np.ndarray]] = {name: [] for name in ("work", "passed", "held", "least", "most")}
        held, rows_of_mode, widths, at = list[np.ndarray](), dict[Mode, list[np.ndarray]](), list[int](), 0
        for schedule, shape, devices, in_flight in pipelines:
            number, variants, kinds = devices.work.shape
            for name, parts in columns.items():
                parts.append(
                    getattr(devices, name).swapaxes(0, 1).reshape(-1, kinds) * (shape.m if name == "work" else 1)
                )
            mode, known = Mode.of(schedule), has_bound(schedule, shape)
            # Where passes are paired, a forward pass takes the memory that a backward pass gives back.
            count = (in_flight[devices.places] - mode.pairs) * known
            held.append(np.tile(_divide_held(count, shape, schedule.directions), variants))
            rows = at + np.arange(number * variants)
            if known:
                rows_of_mode.setdefault(mode, []).append(rows)
            widths += [number] * variants
            at += len(rows)
        self.size = len(widths)
        self._devices = {name: np.concatenate(parts) for name, parts in columns.items() if parts}
        self._held = np.concatenate(held, axis=1) if held else np.zeros((2, 0))
        """Micro-batches of every stage of a device whose activations it holds, and those of any stage beside
        them [2, devices]."""
        self._modes = {mode: np.concatenate(rows) for mode, rows in rows_of_mode.items()}
        self._starts = np.asarray(np.cumsum([0, *widths])[: self.size])
        self._pipelines = np.repeat(np.arange(self.size), widths)

    def step_seconds(self, units: StageTimes, collectives: Collectives) -> np.ndarray:
        """Returns lower bounds of the time of all passes and data-parallel collectives [pipelines, choices] [s].

        units: durations, each kind of unit as a part. Messages take no time; passes of a schedule without bounds take
        none.
        """
        if not self.size:
            return np.zeros(collectives.gathers.shape[:2])
        passes, opened = np.zeros((2, self._held.shape[1]))
        for mode, rows in self._modes.items():
            passes[rows], opened[rows] = self._passes(mode, rows, units)
        held, least = self._devices["held"] @ collectives.elements.T, self._devices["least"] @ collectives.elements.T
        reductions, gathers = (rates[self._pipelines] for rates in (collectives.reductions, collectives.gathers))
        # The reductions of some stage follow the begin of the last backward pass.
        last = opened[:, None] + np.einsum("dg,dcg->dc", least, reductions)
        each, again = (counts[self._pipelines] for counts in (collectives.each_reduction, collectives.each_gather))
        once = np.einsum("dg,dcg->dc", held, reductions + gathers) * (each + again == 0)
        work = self._devices["work"]
        reduced = each * np.einsum("dg,dcg->dc", work @ collectives.elements.T, reductions)
        gathered = again * np.einsum("dg,dcg->dc", work @ collectives.matrices.T, gathers)
        every = np.maximum(once, reduced + gathered)
        return np.asarray(np.maximum.reduceat(np.maximum(np.maximum(last, every), passes[:, None]), self._starts))

    def pass_seconds(self, units: StageTimes) -> np.ndarray:
        """Returns lower bounds of the time of all passes, as `step_seconds` has them without collectives [pipelines]
        [s]."""
        if not self.size:
            return np.zeros(0)
        passes = np.zeros(self._held.shape[1])
        for mode, rows in self._modes.items():
            passes[rows], _ = self._passes(mode, rows, units)
        return np.asarray(np.maximum.reduceat(passes, self._starts))

    def _passes(self, mode: Mode, rows: np.ndarray, units: StageTimes) -> tuple[np.ndarray, np.ndarray]:
        """Returns when devices are done with all passes, and begin the last backward pass, at the earliest [devices]
        [s]: `bound_devices` of sums of units."""
        if not mode.pairs:
            return self._passes_of(mode, rows, units, units.stream)
        both = (self._passes_of(mode, rows, units, seconds) for seconds in _alone_and_paired(units))
        passes, opened = (np.maximum(*bounds) for bounds in zip(*both, strict=True))
        return passes, opened

    def _passes_of(
        self, mode: Mode, rows: np.ndarray, units: StageTimes, seconds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes `_passes`, in turn. seconds: of a pass on each stream [kinds, passes, streams]."""
        passes = PassSeconds.of(mode, seconds, units.path)
        work, passed, most = (self._devices[name][rows] for name in ("work", "passed", "most"))
        sums = work @ (passes.forward + passes.backward)
        opened = sums - most @ passes.longest
        if not mode.barrier:
            return sums.max(axis=1), np.maximum(opened.max(axis=1), 0.0)
        early = _largest_part(units.stream[:, FORWARD], units.from_input[:, FORWARD])
        ends = _largest_part(units.stream[:, passes.last], units.to_result[:, passes.last])
        begins = np.maximum((passed @ units.path[:, FORWARD])[:, None] - early, 0.0)
        returned = (begins + work @ (passes.forward + passes.inputs) - ends).max(axis=1) + passed @ passes.gradient
        return np.maximum((begins + sums).max(axis=1), returned), np.maximum((begins + opened).max(axis=1), 0.0)

    def memory(
        self, grown: np.ndarray, elements: np.ndarray, each: np.ndarray, whole: np.ndarray | None = None
    ) -> np.ndarray:
        """Returns the least memory of the fullest device [pipelines, choices] [bytes].

        grown: what the forward pass of a unit leaves for its backward pass [kinds] [bytes].
        elements: parameters of a unit [kinds].
        each: bytes of states of a parameter [pipelines, choices].
        whole: bytes of the weights of a unit that a stage holds from its first forward to its last forward or backward
            pass, beside the states [pipelines, choices, kinds]; None: none.
        """
        if not self.size:
            return np.zeros(each.shape)
        held, least, most = (self._devices[name] for name in ("held", "least", "most"))
        every, others = self._held
        activations = every * (held @ grown) + others * (least @ np.maximum(grown, 0.0) + most @ np.minimum(grown, 0.0))
        states = (held @ elements)[:, None] * each[self._pipelines]
        beside = np.maximum(activations, 0.0)[:, None]
        if whole is not None:
            beside = self._add_whole(beside, whole[self._pipelines])
        return np.asarray(np.maximum.reduceat(beside + states, self._starts))

    def _add_whole(self, activations: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Returns the least of activations and whole weights together [devices, choices] [bytes].

        With several stages activations may be most before or after the weights of any of them are there; of passes that
        run as pairs both directions have begun. activations: [devices, 1]. whole: of a unit [devices, choices, kinds].
        """
        held, least = self._devices["held"], self._devices["least"]
        stage, device = (np.einsum("dk,dck->dc", rows, whole) for rows in (least, held))
        pairs, known = self._has_mode(lambda mode: mode.pairs), self._has_mode(lambda _: True)
        alone = (held == least).all(axis=1)[:, None]
        together = activations + np.where(pairs, device, np.where(alone, stage, 0.0))
        return np.where(known, np.maximum(together, stage), activations)

    def _has_mode(self, holds: Callable[[Mode], bool]) -> np.ndarray:
        """Returns whether the schedule of a device has bounds, and something holds of its mode [devices, 1]."""
        rows = np.zeros((self._held.shape[1], 1), bool)
        for mode, numbers in self._modes.items():
            rows[numbers] = holds(mode)
        return rows


def sum_passes(mode: Mode, units: StageTimes, counts: np.ndarray) -> float:
    """Returns the least seconds of all passes of a micro-batch, in turn on one device. counts: units of every kind."""

    def longest(seconds: np.ndarray) -> float:
        passes = PassSeconds.of(mode, seconds, units.path)
        return float((counts @ (passes.forward + passes.backward)).max())

    return longest(units.stream) if not mode.pairs else max(map(longest, _alone_and_paired(units)))


def _alone_and_paired(units: StageTimes) -> tuple[np.ndarray, np.ndarray]:
    """Returns durations of passes that run as pairs: the ops of both follow each other on each stream, and a pair takes
    no less than its backward pass alone."""
    alone = units.stream.copy()
    alone[:, FORWARD] = 0.0
    return units.busy, alone


def _divide_held(count: np.ndarray, shape: PipelineShape, directions: int) -> list[np.ndarray]:
    """Returns the micro-batches of which devices hold the activations of every stage, and those of any stage beside
    them [2, devices]. count: activations in flight [devices]."""
    # A stage holds no more than all micro-batches: of each of them the rest is held at least.
    chunks = shape.stages // shape.p
    every = np.maximum(count - shape.m * (chunks - 1), 0.0) * (directions == 1)
    return [every, count - chunks * every]


def _largest_part(stream: np.ndarray, waiting: np.ndarray) -> np.ndarray:
    """Returns the most of a pass that runs on each stream before its input, or after its result, of any stage [streams]
    [s].

    stream: of a pass of every kind of unit.
    waiting: from its input on, or up to its result [kinds, streams].

    The embedding is on a device that waits for no other. A unit without ops on a stream puts off neither.
    """
    apart = np.where(stream[1:] > 0.0, stream[1:] - waiting[1:], 0.0)
    return np.asarray(np.maximum(apart.max(axis=0), 0.0))


def _largest(rows: np.ndarray) -> np.ndarray:
    """Returns the places of rows that no other row exceeds in all columns or, of equal rows, of the first."""
    rows, places = np.unique(rows, axis=0, return_index=True)
    above = (rows[:, None] <= rows[None]).all(axis=2)
    return np.asarray(places[above.sum(axis=1) == 1])
