"""How far a plan is from the combinations that somebody has run on its GPUs, and how much that widens its interval.

A plan is held against the nearest measured combination of its task (`combinations`): architecture of the GPUs, family
of training programs, class of model. The fields outside of it widen the interval by `SIGMAS`, independent of each
other. Without any run of the task, all measured combinations of the architecture and class are candidates, and the
program counts as a field outside, which the regime of the forecast has widened already (`simulator.costs.regimes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshcast.hardware.records import dataclass
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.metrics import Metrics, interval_90
from meshcast.validation.published.measured_range.combinations import (
    Combination,
    find_nearest,
    measured_combinations,
    read_combinations,
)
from meshcast.validation.published.measured_range.plan_fields import (
    NAMED,
    NUMBERS,
    TITLES,
    PlanFields,
    TrainingTask,
    fields_of_plan,
    task_of_job,
)

SIGMAS = {"schedule": 0.070}
"""Standard deviation of log(step time) that a field outside of what was run adds; of all other fields nothing.

source: 747 published runs of 14 sources, each held against the combinations of all other sources (`sigmas`,
    docs/search.md). Of the 162 runs with the schedule outside, 91 % lie in their 90 % interval, 98 % with this sigma.
    Of the 215 with the number of GPUs outside, 84 % do; 0.055 would be likelier by 3.7, but by 0.4 without some source.
checked: 2026-11-26
"""


@dataclass(frozen=True)
class Distance:
    """Distance of a plan from what somebody has run.

    task: of the plan.
    fields: its fields; of a plan with heterogeneous stages those of the stage that is farthest.
    nearest: the combination with the fewest fields outside; None if nobody has published a run on the architecture with
        this class of model.
    outside: fields of the plan that it does not have; all where `nearest` is None.
    """

    task: TrainingTask
    fields: PlanFields
    nearest: Combination | None
    outside: tuple[str, ...]

    @property
    def measured(self) -> bool:
        """Whether somebody has run a plan like this, with whatever program."""
        return self.nearest is not None and not set(self.outside) - {"program"}

    @property
    def sigma(self) -> float:
        """Standard deviation of log(step time) that the fields outside add."""
        return math.hypot(*(SIGMAS.get(field, 0.0) for field in self.outside))

    def __str__(self) -> str:
        if self.nearest is None:
            return f"nobody has published a run of {self.task.kind} models on GPUs of {self.task.architecture}"
        if not self.outside:
            return f"measured: {self.nearest.runs} runs of {', '.join(self.nearest.sources)}"
        return f"outside of what was run: {'; '.join(self._describe(field) for field in self.outside)}"

    def _describe(self, field: str) -> str:
        assert self.nearest is not None
        if field == "program":
            return f"{TITLES[field]} {self.task.program} (measured: {self.nearest.task.program})"
        value = getattr(self.fields, field)
        if field in NAMED:
            run = self.nearest.names[NAMED.index(field)]
            return f"{TITLES[field]} {value or 'none'} (measured: {run or 'none'})"
        low, high = self.nearest.ranges[NUMBERS.index(field)]
        return f"{value:,} {TITLES[field]} (measured: {low:,}{f' to {high:,}' if high > low else ''})"


def distance_from_measured(plan: Plan) -> Distance:
    """Returns how far a plan is from the nearest combination that somebody has run on its architecture."""
    task = task_of_job(plan.job)
    known = known_combinations(task)
    distances = [measure_distance(task, fields, known) for fields in fields_of_plan(plan)]
    return max(distances, key=lambda distance: (distance.nearest is None, len(distance.outside)))


def known_combinations(task: TrainingTask, table: Sequence[Combination] | None = None) -> tuple[Combination, ...]:
    """Returns the measured combinations that a plan is held against: of its task, or without any of all programs.

    table: of all combinations; that which ships if None.
    """
    key = (task.architecture, task.kind)
    of_task = measured_combinations(task) if table is None else tuple(entry for entry in table if entry.task == task)
    every = read_combinations() if table is None else table
    return of_task or tuple(entry for entry in every if (entry.task.architecture, entry.task.kind) == key)


def measure_distance(task: TrainingTask, fields: PlanFields, known: Sequence[Combination]) -> Distance:
    """Measures how far a plan is from the nearest of some combinations, which are all of its task, or none is."""
    if not known:
        return Distance(task, fields, None, ("program", *NAMED, *NUMBERS))
    nearest, outside = find_nearest(fields, known)
    program = () if nearest.task == task else ("program",)
    return Distance(task, fields, nearest, (*program, *outside))


def widened_interval(metrics: Metrics, distance: Distance) -> tuple[float, float]:
    """Returns the 90 % interval of a step [s], wider by the fields outside of what was run."""
    return interval_90(metrics.step_time, metrics.residual.bias, math.hypot(metrics.sigma, distance.sigma))
