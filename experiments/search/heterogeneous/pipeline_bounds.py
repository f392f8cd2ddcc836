"""Lower bounds of the time and the memory of many pipelines whose stages have different degrees.

As for stages that are alike (`simulator.bounds.schedule_bound`): a device cannot start before a micro-batch has come
through the stages before it, runs its passes in sequence, and cannot end before the last gradient has gone back
through them. Of every run of equal stages those with the embedding, the output layer, or most layers are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshcast.experiments.search.heterogeneous.stage_runs import Runs
from meshcast.experiments.search.heterogeneous.stage_units import RunOption, StageUnits, UnitSums, stack_sums
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remembered
from meshcast.hardware.units import GIB
from meshcast.simulator.bounds.schedule_bound import least_in_flight
from meshcast.simulator.job.framework import Framework
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule, make_schedule


class DeviceLines(NamedTuple):
    """Lower bounds of when devices are done, for any number m of micro-batches: fixed + m x each.

    fixed: warm-up and cool-down.
    each: of a micro-batch [lines, pipelines] [s].
    """

    fixed: np.ndarray
    each: np.ndarray

    def seconds(self, m: float | np.ndarray) -> np.ndarray:
        """Returns when the last device is done with m micro-batches, at the earliest [pipelines] [s]."""
        return np.asarray((self.fixed + m * self.each).max(axis=0))

    @property
    def slowest(self) -> tuple[np.ndarray, np.ndarray]:
        """The line of the device that takes longest for a micro-batch [pipelines] each."""
        at = self.each.argmax(axis=0)[None]
        return tuple(np.take_along_axis(column, at, axis=0)[0] for column in self)  # type: ignore[return-value]


class PipelineMemory(NamedTuple):
    """Least memory that nvidia-smi shows on devices, for a number of micro-batches.

    nbytes: on the fullest device [bytes].
    fits: whether no device needs more than its GPU may give [pipelines].
    """

    nbytes: np.ndarray
    fits: np.ndarray


OF_STREAMS = ("forward", "whole", "halves", "inputs")
OF_UNITS = ("path", "gradient", "gradient_of_inputs", "grown", "weights", "optimizer", "gradients")
OF_OPTION = ("early", "late", "late_inputs", "tied_weights", "tied_optimizer")
"""Fields of `UnitSums`: of every stream and unit, of every unit, of all units together."""


class OptionTable:
    """The units of several degrees beside each other.

    options: the degrees.
    micro: sequences of a micro-batch.
    valid: whether they break no rule, as far as they alone decide [options].
    """

    def __init__(self, units: StageUnits, options: Sequence[RunOption], micro: int) -> None:
        self.options, self.fields = options, units.fields
        units_of = [units.find(option, micro // option.dp) for option in options]
        self.valid = np.array([unit_sums is not None for unit_sums in units_of], bool)
        known = next((unit_sums for unit_sums in units_of if unit_sums is not None), None)
        self.empty = known is None
        if known is None:
            return
        sums: list[UnitSums] = [unit_sums or known for unit_sums in units_of]
        self.streams = {name: stack_sums([getattr(unit_sums, name) for unit_sums in sums]) for name in OF_STREAMS}
        self.sums = {name: np.array([getattr(unit_sums, name) for unit_sums in sums]) for name in OF_UNITS}
        self.single = {name: np.array([getattr(unit_sums, name) for unit_sums in sums]) for name in OF_OPTION}
        self.dp = np.array([option.dp for option in options])
        # Shards of experts lie on as many ranks as do not share an expert.
        moe = self.fields.loaded.model.moe is not None
        self.shards = np.array([option.dp * (option.tp if moe else 1) for option in options], float)
        kinds = [kind.memory for kind in self.fields.kinds]
        memory = [*kinds, min(kinds)]
        self.memory = np.array([memory[option.kind] for option in options]) * self.fields.usable


class _Device(NamedTuple):
    """A device of every pipeline: its degrees, its place, its units from `begin` to `end` [pipelines].

    passed: the units before it: degrees, first and end of them, run by run.
    """

    option: np.ndarray
    place: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    passed: list[tuple[np.ndarray, np.ndarray, np.ndarray]]

    def sum(self, sums: np.ndarray) -> np.ndarray:
        """Returns what its units have together. sums: over the units before a place [..., options, units + 1]."""
        return np.asarray(sums[..., self.option, self.end] - sums[..., self.option, self.begin])

    def sum_passed(self, sums: np.ndarray) -> np.ndarray:
        """Returns what the units before it have together."""
        return np.asarray(sum(sums[option, end] - sums[option, begin] for option, begin, end in self.passed))


def find_devices(runs: Runs, layers: int) -> list[_Device]:
    """Returns the devices that are bounded: of every run the first and the last, of a run alone also the second."""
    devices, passed = list[_Device](), list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    ends = runs.layers.cumsum(axis=1)
    for run in range(runs.option.shape[1]):
        first_layer = ends[:, run] - runs.layers[:, run]
        entered = np.zeros_like(first_layer) if run == 0 else first_layer + 1
        for at, width in _layers_of_devices(runs, run).items():
            option, place, begin = runs.option[:, run], *_place_device(runs, run, at, width, first_layer)
            if at == 1:
                width = np.where(runs.stages[:, run] > 1, width, runs.layers[:, run] // runs.stages[:, run])
            opens, closes = place == 0, place == runs.stages.sum(axis=1) - 1
            of_run = option, entered, np.where(opens, entered, begin + 1)
            end = np.where(closes, layers + 2, begin + width + 1)
            devices.append(_Device(option, place, np.where(opens, 0, begin + 1), end, [*passed, of_run]))
        passed.append((runs.option[:, run], entered, ends[:, run] + 1))
    return devices


def _layers_of_devices(runs: Runs, run: int) -> dict[int, np.ndarray]:
    """Returns the layers of the devices of a run that are bounded, by their places in it; see `layers_of_run`."""
    each, rest = np.divmod(runs.layers[:, run], runs.stages[:, run])
    more = (rest > 0).astype(int)
    if runs.option.shape[1] == 1:
        return {0: each, 1: each + more, -1: each + (rest == runs.stages[:, run] - 1) * more}
    return {0: each, -1: each + more} if run == 0 else {0: each + more, -1: each}


def _place_device(
    runs: Runs, run: int, at: int, width: np.ndarray, first_layer: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of a device in its pipeline, and its first layer. at: its place in the run."""
    stages, layers = runs.stages[:, run], runs.layers[:, run]
    where = np.minimum(at, stages - 1) if at >= 0 else stages - 1
    place = runs.stages[:, :run].sum(axis=1) + where
    if at == 1:
        return place, first_layer + np.where(where > 0, layers // stages, 0)
    return place, first_layer if at == 0 else first_layer + layers - width


def bound_lines(table: OptionTable, runs: Runs, schedule: Schedule, sum_rate: float = 0.0) -> DeviceLines:
    """Returns when the devices of pipelines are done with their passes, and with sums among replicas, at the earliest.

    sum_rate: of sums of gradients among replicas, which follow the passes of a device [s/byte].
    """
    split, sums = schedule.backward_kinds == ("B", "W"), table.sums
    work = table.streams["forward"] + table.streams["halves" if split else "whole"]
    to_inputs = table.streams["forward"] + table.streams["inputs"]
    gradient, late = sums["gradient_of_inputs" if split else "gradient"], "late_inputs" if split else "late"
    fixed, each = [], []
    devices = find_devices(runs, table.fields.loaded.model.layers)
    summed_first = sum_rate * devices[0].sum(sums["gradients"])
    for device in devices:
        summed = sum_rate * device.sum(sums["gradients"])
        head = np.maximum(device.sum_passed(sums["path"]) - table.single["early"][device.option], 0.0)
        back = device.sum_passed(gradient) - table.single[late][device.option]
        seconds = device.sum(work)
        # The last gradient comes back to the first device, which then sums its gradients.
        fixed.append(head + (summed if split else np.maximum(back + summed_first, summed)))
        each.append(seconds[0])
        if split:
            fixed.append(head + back + summed_first)
            each.append(device.sum(to_inputs)[0])
        if len(seconds) > 1:
            # The host launches the first kernels, and other streams may run, before the input is there.
            fixed.append(np.zeros_like(head))
            each.append(seconds[1:].max(axis=0))
    return DeviceLines(np.array(fixed), np.array(each))


def bound_memory(table: OptionTable, runs: Runs, in_flight: np.ndarray, zero: int) -> PipelineMemory:
    """Returns the least memory of pipelines.

    in_flight: least activations in flight by number of stages and device [stages + 1, devices].
    zero: ZeRO stage.
    """
    fields, sums, single = table.fields, table.sums, table.single
    context = fields.loaded.framework.memory.context_gib * GIB
    total = runs.stages.sum(axis=1)
    most, fits = np.zeros(len(total)), np.ones(len(total), bool)
    alone = (total == 1).astype(float)
    for device in find_devices(runs, fields.loaded.model.layers):
        option, grown = device.option, device.sum(sums["grown"])
        weights = device.sum(sums["weights"]) - alone * single["tied_weights"][option]
        optimizer = device.sum(sums["optimizer"]) - alone * single["tied_optimizer"][option]
        states = weights + optimizer / (table.shards[option] if zero else 1.0)
        nbytes = states + in_flight[total, device.place] * np.maximum(grown, 0.0) + context
        most, fits = np.maximum(most, nbytes), fits & (nbytes <= table.memory[option])
    return PipelineMemory(most, fits)


class ScheduleTable:
    """A schedule in pipelines of up to so many stages."""

    def __init__(self, name: str, most: int, framework: Framework) -> None:
        self.name, self.most, self.framework = name, most, framework
        self.schedule = make_schedule(name, 2, 1, framework)

    @remembered
    def at(self, m: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns whether m micro-batches work [stages + 1], and least activations in flight [stages + 1, devices]."""
        takes, held = np.zeros(self.most + 1, bool), np.ones((self.most + 1, self.most))
        for stages in range(1, self.most + 1):
            schedule = make_schedule(self.name, stages, 1, self.framework)
            shape = PipelineShape(stages, m)
            try:
                schedule.check(shape)
            except MeshcastError:
                continue
            takes[stages], held[stages, :stages] = True, least_in_flight(schedule, shape)
        return takes, held
