"""What a search optimises, and the incumbents: the best plans so far, which others have to beat.

Every objective is a figure to minimise: the step time, the GPU time of a step (tokens per second and GPU, and cost, are
best where it is least), the energy of a step, the memory of the fullest GPU; or the mean length or price of simulated
runs. A plan is dominated if another is at least as good in all objectives.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from meshcast.experiments.search.frontier.plan_runs import PlanRuns
from meshcast.experiments.search.space.run_choices import RunChoices
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.bounds.least_energy import LeastEnergy, least_energy
from meshcast.simulator.forecast.step import StepAndMemory
from meshcast.simulator.job.job import Job

Figure = TypeVar("Figure", float, np.ndarray)

OBJECTIVES = ("time", "tokens", "cost", "energy", "memory", "days", "run-cost")
"""Step time, tokens per second and GPU, cost, energy, memory of the fullest GPU; length and price of runs."""

OF_RUNS = ("days", "run-cost")
"""Objectives for which runs are simulated."""

NEAR = 0.05
"""Share of the best objective by which a plan that `top` asks for may be worse; worse ones are not searched for."""

GPU_TIME = {"tokens", "cost"}
"""Objectives that are best where the GPU time of a step is least."""


def check_objectives(names: Sequence[str], place: str = "objective") -> tuple[str, ...]:
    """Returns the objectives by their names, two at most. Raises PlanError for others."""
    if not names or len(names) > 2:
        rule = "a search has one objective, or two for their Pareto front"
        raise PlanError(place, rule, "Write for example time, or time,memory", ",".join(map(str, names)))
    for name in names:
        if name not in OBJECTIVES:
            remedy = nearest(str(name), OBJECTIVES) if name else "Write for example time, or time,memory"
            raise PlanError(place, f"an objective is one of {', '.join(OBJECTIVES)}", remedy, name or ",".join(names))
    if len({*names}) < len(names):
        raise PlanError(place, "both objectives are the same", "Write one of them, or two different ones", names[0])
    if len(names) == 2 and {*names} <= GPU_TIME:
        rule = "both rank plans alike: all GPUs have one price, and a step always has the same tokens"
        raise PlanError(place, rule, "Write one of them, or time with one of them", ",".join(names))
    return tuple(names)


def simulates_runs(names: Sequence[str]) -> bool:
    return any(name in OF_RUNS for name in names)


class ClusterUse(NamedTuple):
    """What a step uses of a cluster besides its seconds: GPUs, least energy, and the choices of simulated runs."""

    gpus: int
    energy: LeastEnergy = LeastEnergy()
    runs: RunChoices | None = None

    @classmethod
    def of(cls, job: Job, names: Sequence[str]) -> ClusterUse:
        """Returns the use of a cluster by its job. names: the objectives."""
        return cls(job.cluster.gpus, least_energy(job) if "energy" in names else LeastEnergy())


class Incumbents:
    """The objectives of the best plans so far, and which bounds cannot lead to a better plan.

    names: the objectives.
    top: number of plans to keep of a single objective.
    within: share by which a better plan may be missed.
    """

    def __init__(self, names: tuple[str, ...] = ("time",), top: int = 10, within: float = 0.0) -> None:
        self.names, self.top, self.within = names, top, within
        # Bounds of time are known before those of memory.
        self.order = tuple(sorted(names, key=lambda name: name == "memory"))
        self._values: list[tuple[float, ...]] = []

    @property
    def by_memory(self) -> bool:
        """Whether plans are bounded in the order of their memory."""
        return self.order[0] == "memory"

    def bounds(self, seconds: Figure, nbytes: Figure, use: ClusterUse) -> tuple[Figure, ...]:
        """Returns lower bounds of the objectives from those of time and memory, in the order of the search."""
        figures = self._figures(seconds, nbytes, use.gpus, use.energy.bound(seconds))  # type: ignore[arg-type, type-var]
        if use.runs is not None:
            of_runs = {"days": use.runs.bound_days, "run-cost": use.runs.bound_cost}
            figures |= {name: bound(seconds) for name, bound in of_runs.items() if name in self.order}
        return tuple(figures[name] for name in self.order)  # type: ignore[misc]

    def values(self, forecast: StepAndMemory, use: ClusterUse, runs: PlanRuns | None = None) -> tuple[float, ...]:
        """Returns the objectives of a plan, in the order of the search; those of runs are infinite without `runs`."""
        figures = self._figures(forecast.step_time, forecast.peak_device, use.gpus, forecast.joules)
        cost = runs.cost if runs is not None else None
        figures |= {"days": runs.days if runs else math.inf, "run-cost": math.inf if cost is None else cost}
        return tuple(figures[name] for name in self.order)

    @staticmethod
    def _figures(seconds: Figure, nbytes: Figure, gpus: int, joules: Figure) -> dict[str, Figure]:
        return {"memory": nbytes, "time": seconds, "energy": joules} | dict.fromkeys(GPU_TIME, seconds * gpus)

    def add(self, values: tuple[float, ...]) -> None:
        bisect.insort(self._values, values)
        if len(self.names) == 1:
            del self._values[self.top :]
            return
        least, front = math.inf, []
        for point in self._values:
            if point[1] < least:
                least = point[1]
                front.append(point)
        self._values = front

    def is_kept(self, values: tuple[float, ...]) -> bool:
        """Returns whether a plan that was added is among the best ones, or on the front."""
        return values in self._values

    @property
    def best(self) -> float:
        """The first objective of the best plan; infinite without one."""
        return self._values[0][0] if self._values else math.inf

    @property
    def limit(self) -> float:
        """The bound of a single objective from which on no plan is better by more than the gap, or kept."""
        if not self._values or len(self.names) > 1:
            return math.inf
        kept = self._values[-1][0] if len(self._values) == self.top else math.inf
        return min(kept, self._values[0][0] * (1 + NEAR)) * (1 - self.within)

    def dominates(self, bounds: Sequence[np.ndarray], within: float = 0.0) -> np.ndarray:
        """Returns which bounds of two objectives a plan of the front dominates, were it better by a share `within`."""
        first, second = bounds
        if not self._values:
            return np.zeros(len(first), bool)
        points = np.array(self._values) * (1 - within)
        at = np.searchsorted(points[:, 0], first, side="right")
        return np.asarray(second >= np.array([math.inf, *points[:, 1]])[at])

    def gap(self, bounds: np.ndarray) -> float:
        """Returns the least share by which, at most, the front is worse than any plan with bounds [plans, 2]."""
        if not self._values:
            return 1.0
        if not len(bounds):
            return 0.0
        better = 1.0 - bounds[:, None] / np.array(self._values)[None]
        return float(np.maximum(better.max(axis=2).min(axis=1), 0.0).max())
