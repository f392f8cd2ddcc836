"""One step as the engine played it, with the program it was played from and the memory of every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.costs.regimes import Regime
from meshcast.simulator.engine.occupancy import Occupied
from meshcast.simulator.engine.peak_memory import Peak, offloaded_activations, over_time, peaks
from meshcast.simulator.engine.play import PlayedStep
from meshcast.simulator.engine.reserved_memory import StateTensors
from meshcast.simulator.engine.steady_state import Window, window
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.program import Program
from meshcast.simulator.report.breakdown import Breakdown, breakdown
from meshcast.simulator.report.device_ops import device_ops
from meshcast.simulator.report.joules import sum_joules
from meshcast.simulator.scheduling.schedule import ScheduleItem

Assume = Callable[[], Sequence[str]]
"""Returns the assumptions of a forecast, a sentence each."""


@dataclass(frozen=True)
class OutsideSteps:
    """Memory of a rank outside of its steps, and what the phases of steps differ by [bytes].

    loading: weights at most, while the model is built and divided among ranks.
    moments: of the optimizer's states what its first update makes.
    gathered: weights that a forward pass gathers, whole.
    saved: weights that are whole at most while a checkpoint is saved.
    """

    loading: float
    moments: float
    gathered: float
    saved: float


def _list_none(device: int) -> StateTensors:
    return StateTensors()


@dataclass(frozen=True)
class Forecast:
    """A step of a plan as the engine played it."""

    plan: Plan
    step: PlayedStep
    resting: Sequence[dict[str, float]]
    """Memory that is held through the whole step on every device, by category [bytes]."""
    offloaded_states: Sequence[dict[str, float]]
    """Bytes of states off the GPU on a rank of every device, in host memory (``cpu``) and on disks (``nvme``)."""
    assume: Assume = tuple
    """Looks up the assumptions of the forecast, see `assumed`."""
    regime: Regime = "program"
    """How well the framework and the GPUs are known."""
    count_outside: Callable[[], Sequence[OutsideSteps]] = tuple
    """Counts the memory of every device outside of its steps, see `outside_steps`."""
    list_tensors: Callable[[int], StateTensors] = _list_none
    """Lists the tensors of the states on a rank of a device."""
    evaluation: Forecast | None = None
    """The forward passes of an evaluation between steps, where the job states their size."""
    reference: Forecast | None = None
    """The forward passes of a reference in every step, if any; its weights are in `resting`."""
    rebuild: Callable[[Sequence[Sequence[ScheduleItem]]], Program] | None = None
    """Builds the program of the same step for other orders; only of schedules that decide at run time."""

    @cached_property
    def assumed(self) -> Sequence[str]:
        """Assumptions of the forecast, a sentence each."""
        return self.assume()

    @cached_property
    def outside_steps(self) -> Sequence[OutsideSteps]:
        """The memory of every device outside of its steps."""
        return self.count_outside()

    def __getstate__(self) -> dict[str, Any]:
        """Returns for pickle and copies what was looked up instead of all prices and stages that it is looked up
        in."""
        looked_up = {"assumed": self.assumed, "outside_steps": self.outside_steps}
        return self.__dict__ | looked_up | {"assume": tuple, "count_outside": tuple}

    @cached_property
    def peaks(self) -> list[Peak]:
        """Peak of allocated memory on every device."""
        return peaks(self.program, self.resting)

    @cached_property
    def offloaded(self) -> list[dict[str, float]]:
        """Peak of the bytes off the GPU on a rank of every device, in host memory and on disks: states, activations."""
        activations = offloaded_activations(self.program)
        return [
            {place: nbytes + more.get(place, 0.0) for place, nbytes in states.items()}
            for states, more in zip(self.offloaded_states, activations, strict=True)
        ]

    def memory(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the allocated memory through the step: moments [s] and bytes by category [moments, categories]."""
        return over_time(self.program, *device_ops(self.step, device), device, self.resting[device])

    @property
    def program(self) -> Program:
        return self.step.program

    @cached_property
    def window(self) -> Window | None:
        """The part of a run that repeats, of a schedule without a flush; None with a flush."""
        table = self.program.timetable
        return window(table, self.step.done, self.plan.shape.m) if table.update_interval else None

    @property
    def played_seconds(self) -> float:
        """Duration of what was played [s]: from an empty to an empty pipeline, or without a flush from batch to
        batch."""
        return self.window.seconds if self.window else self.step.span

    @property
    def seconds(self) -> float:
        """Duration of a step [s], the passes of a reference included."""
        return self.played_seconds + (self.reference.played_seconds if self.reference is not None else 0.0)

    @property
    def parts(self) -> tuple[Forecast, ...]:
        """What is played in turn in a step: the training, and the passes of a reference."""
        return (self,) if self.reference is None else (self, self.reference)

    @cached_property
    def sums(self) -> np.ndarray:
        """`SUMS` over the ops of a step, on every device."""
        return self.step.sums_in(self.window) / (self.window.steps if self.window else 1.0)

    def occupancy(self, device: int) -> Occupied:
        """Returns the busy intervals of a device in a step, by axis; without a flush the mean over the window's
        steps."""
        occupied, cut = self.step.occupancy(device), self.window
        return {axis: cut.occupancy(device, spans) for axis, spans in occupied.items()} if cut else occupied

    def breakdown(self, device: int) -> Breakdown:
        """Returns the account of `played_seconds` on a device."""
        return breakdown(self.program, self.played_seconds, self.occupancy(device), device, self.sums)

    def joules(self, models: Sequence[PowerModel]) -> np.ndarray:
        """Returns the energy of the kernels and of the communication of every pipeline device in a step, beyond the
        idle power [devices, 2] [J]. models: of the power of their GPUs."""
        if self.window is None:
            return sum_joules(self.program, np.array(self.program.timetable.turns), models)
        return sum_joules(self.program, self.window.turns(self.program), models) / self.window.steps
