"""Runs of planners that claims compare: what is planned, and the numbers that are read off the planner's plan.

The planners lie above this room, so a function that runs a planner is handed in (`PlanFinder`). Numbers of a plan are
those of `OF_PLAN`, ``plan.KEY`` for a number of the plan in its planner's terms, or any number of the forecast of the
plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, model_validator
from meshcast.simulator.report.report import Report
from meshcast.validation.claims.relation import Quantity

OF_PLAN = ("value", "one_device_s", "stages", "stage_gpus", "stage_nodes", "stage_tp", "stage_dp", "visited", "proven")
"""Numbers of a plan besides those of its forecast; the first is the default.

value: the planner's objective, in its unit. one_device_s: the same work on one device [s]. stage_gpus, stage_nodes:
devices and layers (nodes of a graph) of every stage. visited: candidates that were priced. proven: 1 if no plan of the
planner's space is better.
"""


class PlannerRun(BaseModel):
    """A planner and its problem: the public profile of a paper, or a job at the prices of the forecast.

    planner: its name (docs/planners.md).
    profile, levels, gpus, memory, settings: of a profile; levels as (width, bytes/s), the innermost first.
    job, microbatches: a job, whose plan does not count.
    traits: attributes of the planner that differ from its defaults, such as ``recompute: [full]``.
    stages: a stated plan in place of the planner's, as (layers, tp, dp) of every stage, at the same prices.
    steps, seconds: of random searches, and of solvers [s].
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    planner: str = Field(min_length=1)
    profile: str = ""
    levels: list[tuple[int, float]] = []
    gpus: int = Field(default=0, ge=0)
    memory: float = Field(default=0.0, ge=0)
    settings: dict[str, Any] = {}
    job: dict[str, Any] = {}
    microbatches: int = Field(default=0, ge=0)
    traits: dict[str, Any] = {}
    stages: list[tuple[int, int, int]] = []
    steps: int = Field(default=10_000, ge=1)
    seconds: float = Field(default=20.0, gt=0)

    @model_validator(mode="after")
    def _check_problem(self) -> PlannerRun:
        if bool(self.profile) == bool(self.job):
            raise ValueError("a planner solves a profile or a job. Write one of profile, job")
        if self.stages and not self.job:
            raise ValueError("stages are those of a job. Write job in place of profile, or leave stages out")
        return self


@dataclass(frozen=True)
class PlannerPlan:
    """What a planner returns, or a stated plan at its prices.

    numbers: those of `OF_PLAN` that there are.
    plan: in the planner's terms.
    forecast: the forecast of the plan, which raises PlanError for a plan that is no job.
    """

    numbers: Mapping[str, Quantity]
    plan: Mapping[str, Any]
    forecast: Callable[[], Report]


PlanFinder = Callable[[PlannerRun], PlannerPlan]
"""Runs a planner. Raises MeshcastError where it finds no plan."""


def read_plan(planned: PlannerPlan, name: str) -> Quantity | None:
    """Returns the number of a plan; None for a name that is read off its forecast. Raises PlanError for a number that
    it lacks."""
    name = name or OF_PLAN[0]
    if name in OF_PLAN:
        if name not in planned.numbers:
            raise PlanError(
                "measure", "the plan does not have this number", f"It has {', '.join(planned.numbers)}", name
            )
        return planned.numbers[name]
    if not name.startswith("plan."):
        return None
    value: Any = planned.plan
    for word in name.split(".")[1:]:
        if not isinstance(value, Mapping) or word not in value:
            raise PlanError("measure", f"the plan has no {word!r}", f"The plan is {dict(planned.plan)}", name)
        value = value[word]
    if not isinstance(value, int | float):
        raise PlanError("measure", "it is no number of the plan", "Name a number", name)
    return float(value)
