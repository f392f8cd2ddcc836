"""The forecast of a step that was played by loops, with what reports ask for in rows of many plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from meshcast.simulator.batch.states import RestingDevices
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.costs.regimes import Regime
from meshcast.simulator.engine.peak_memory import Peak, find_peak
from meshcast.simulator.engine.play import PlayedStep
from meshcast.simulator.engine.reserved_memory import StateTensors
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.breakdown import Breakdown, account
from meshcast.simulator.report.forecast import Forecast, OutsideSteps


class LoopFigures(NamedTuple):
    """What the loops found of a step.

    span: from its begin to its end [s].
    peaks: see `find_peaks`.
    sums: `SUMS` of every device.
    device: the device that the lengths are of.
    lengths: by the axes of `LEVELS` that occur on it, of the union of their intervals with those before them [s].
    count_joules: counts the energy of every device beyond the idle power of a GPU.
    """

    span: float
    peaks: np.ndarray
    sums: np.ndarray
    device: int
    lengths: dict[str, float]
    count_joules: Callable[[PowerModel], np.ndarray]


class LoopForecast(Forecast):
    """A step that was played by loops. What they do not find is asked of its single forecast, which is made then."""

    def __init__(
        self,
        plan: Plan,
        figures: LoopFigures,
        states: RestingDevices,
        regime: Regime,
        forecast_singly: Callable[[], Forecast],
    ) -> None:
        stated = {"plan": plan, "resting": states.resident, "offloaded_states": states.offloaded, "regime": regime}
        self.__dict__.update(stated, figures=figures, states=states, forecast_singly=forecast_singly)

    figures: LoopFigures
    states: RestingDevices
    forecast_singly: Callable[[], Forecast]
    window = None

    @cached_property
    def singly(self) -> Forecast:
        """The single forecast."""
        return self.forecast_singly()

    @property
    def step(self) -> PlayedStep:
        return self.singly.step

    @property
    def assumed(self) -> Sequence[str]:
        return self.singly.assumed

    @property
    def outside_steps(self) -> Sequence[OutsideSteps]:
        return self.states.outside

    def list_tensors(self, device: int) -> StateTensors:
        return self.singly.list_tensors(device)

    @property
    def played_seconds(self) -> float:
        return self.figures.span

    @property
    def sums(self) -> np.ndarray:
        return self.figures.sums

    @property
    def offloaded(self) -> list[dict[str, float]]:
        return [*self.offloaded_states]

    @cached_property
    def peaks(self) -> list[Peak]:
        rows = zip(self.figures.peaks[:, :, :-1], self.resting, self.states.tasks, strict=True)
        return [find_peak(held, left, static, update) for (held, left), static, update in rows]

    def breakdown(self, device: int) -> Breakdown:
        figures = self.figures
        if device != figures.device:
            return self.singly.breakdown(device)
        return account(figures.span, figures.sums[device], figures.lengths, len(figures.sums) > 1)

    def joules(self, models: Sequence[PowerModel]) -> np.ndarray:
        return self.figures.count_joules(models[0])
