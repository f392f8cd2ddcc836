"""Updates and resting memory of the devices of a plan: plans whose devices hold the same have them in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered_by
from meshcast.simulator.batch.blocks import stream_numbers
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.forecast.program import host_launch_seconds
from meshcast.simulator.forecast.resident_memory import (
    count_outside_steps,
    offloaded_of_devices,
    resident_of_devices,
)
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params, lower_updates
from meshcast.simulator.ir.ops import COMPUTE, StageOps
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.build import build_updates
from meshcast.simulator.program.categories import EXPOSED, HOST, axis_of
from meshcast.simulator.program.flatten import FlatProgram, flatten_updates
from meshcast.simulator.program.task import Task
from meshcast.simulator.report.forecast import OutsideSteps
from meshcast.simulator.report.joules import task_joules

LEVELS = (COMPUTE, *EXPOSED, HOST)
"""Axes in the order in which a breakdown counts them."""


class UpdateArrays(NamedTuple):
    """The ops of updates, as `play_updates` reads them."""

    seconds: np.ndarray
    latency: np.ndarray
    issue: np.ndarray
    first: np.ndarray
    after: np.ndarray
    device: np.ndarray
    stream: np.ndarray


@dataclass(eq=False)
class RestingDevices:
    """What the devices of a plan do and hold beside their passes.

    updates: the ops of their updates.
    levels: by stream of these, the place of its axis in `LEVELS`.
    tasks: the updates themselves.
    memory: by device, what it holds all the time, at the peak of its update and while it loads [bytes].
    resident, offloaded: see `Forecast`.
    outside: see `Forecast.outside_steps`.
    """

    updates: UpdateArrays
    levels: np.ndarray
    tasks: Sequence[Task]
    memory: np.ndarray
    resident: Sequence[dict[str, float]]
    offloaded: Sequence[dict[str, float]]
    outside: Sequence[OutsideSteps]

    @property
    def offloads(self) -> bool:
        """Whether anything of it is off the GPU."""
        return any(any(by.values()) for by in self.offloaded)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` of the update of every device."""
        return np.array([task.sums for task in self.tasks])

    @remembered_by(lambda states, model: model.gpu.name)
    def joules(self, model: PowerModel) -> np.ndarray:
        """Returns the energy of the update of every device beyond the idle power [devices, 2] [J]."""
        return np.array([task_joules(task, model) for task in self.tasks])


def make_states(plan: Plan, stages: Sequence[StageOps], costs: Costs, shared: SharedWork) -> RestingDevices:
    """Returns what the devices of a plan do and hold beside their passes."""
    every_params = device_params(plan, stages)
    updates = lower_updates(plan, stages, every_params, shared.units, shared.stages)
    tails, meetings = build_updates(updates, [costs.estimate] * plan.shape.p, shared.blocks)
    flat = flatten_updates(tails, meetings, host_launch_seconds(plan))
    resting = resident_of_devices(plan, every_params, None, shared.states)
    loads = [0.0] * len(resting)
    outside = count_outside_steps(plan, every_params, shared.states, shared.outside)
    if plan.job.framework.memory.loads != "shards":
        loads = [device.loading for device in outside]
    rows = zip(resting, tails, loads, strict=True)
    memory = np.array([(sum(states.values()), update.memory.peak, load) for states, update, load in rows])
    offloaded = offloaded_of_devices(plan, every_params)
    arrays = _flatten_updates(flat)
    levels = np.zeros(int(arrays.stream.max(initial=-1)) + 1, np.int64)
    levels[arrays.stream] = [LEVELS.index(axis_of(op)) for op in flat.ops]
    return RestingDevices(arrays, levels, tails, memory, resting, offloaded, outside)


def _flatten_updates(flat: FlatProgram) -> UpdateArrays:
    """Returns the arrays of updates."""
    first = np.cumsum([0, *map(len, flat.after)])
    after = np.array([other for others in flat.after for other in others], np.int64)
    seconds, latency, issue = (np.array(column, float) for column in (flat.seconds, flat.latency, flat.issue))
    streams = stream_numbers(flat.ops, flat.device)
    return UpdateArrays(seconds, latency, issue, first, after, np.array(flat.device, np.int64), streams)
