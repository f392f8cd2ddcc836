"""The problem that a planner solves: this program's prices of a job, or the public profile of a paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from meshcast.experiments.planning.graph import LayerGraph
from meshcast.experiments.planning.stages import StageTable
from meshcast.experiments.planning.table import FactorTable
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass

Dims = tuple[tuple[str, str], ...]
"""For every axis the dim that it shards; empty: none."""

Changes = Mapping[str, Any]
"""What a planner changes of a job: its ``plan``, ``batch`` and, where it says so, ``cluster`` and ``framework``."""

Settings = Mapping[str, Any]
"""What a profile says besides its graph, by name."""

Allowed = Callable[[str, Dims], bool]
"""Whether an operator may have a layout."""


def settings_of(problem: Problem) -> Settings:
    """Returns the settings of a profile; none of a job."""
    settings: Settings = getattr(problem, "settings", {})
    return settings


def allow_all(name: str, layout: Dims) -> bool:
    """Restricts nothing."""
    return True


@dataclass(frozen=True)
class SearchBudget:
    """What a planner may spend.

    seconds: CPU time; see `experiments.planning.clock` [s].
    steps: proposals, rollouts or restarts of random searches.
    seed: of random numbers.
    """

    seconds: float = 20.0
    steps: int = 10_000
    seed: int = 0


class Problem(Protocol):
    """Prices of operators, stages and layers.

    name: of the problem, for reports.
    mode: ``paper`` (the profile of a paper) or ``ours`` (the prices of the forecast).
    gpus: number of devices.
    memory: of a device [bytes].
    microbatches: of a step.
    """

    name: str
    mode: str
    gpus: int
    memory: float
    microbatches: int

    def operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> FactorTable:
        """Returns the table of the model's operators on a mesh of `axes`, outermost first.

        allowed: layouts that the planner may use; others are not priced.
        Raises PlanError where the problem has no operators, or these axes do not fit its devices.
        """
        ...

    def stages(self, recompute: bool = True) -> StageTable:
        """Returns the table of stages of the model's layers, with full recompute, too, or raises PlanError."""
        ...

    def graph(self) -> LayerGraph:
        """Returns the graph of the model's layers with the figures that are known of them, or raises PlanError."""
        ...


class UnknownPart:
    """A problem whose parts are all unknown: a problem overrides those that it knows."""

    name, mode = "", "paper"
    gpus, memory, microbatches = 1, math.inf, 1

    def operators(self, axes: Mapping[str, int], allowed: Allowed = allow_all) -> FactorTable:
        raise self._no("operator tables", "a job, for its prices")

    def stages(self, recompute: bool = True) -> StageTable:
        raise self._no("stage tables", "a job, for its prices")

    def graph(self) -> LayerGraph:
        raise self._no("a graph of layers", "a profile of experiments/planning/profiles that has `nodes`")

    def _no(self, part: str, instead: str) -> PlanError:
        return PlanError(f"problem {self.name}", f"it has no {part}, which this planner needs", f"Give it {instead}")
