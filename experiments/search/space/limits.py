"""Limits of a search: constraints on the fields of a point, memory that stays free, what the program of the job runs,
combinations that were measured.

A constraint excludes points before the search, and so does a rule of the program, or a field outside of every measured
combination; whether a whole combination was measured is asked once its bound is the smallest. All of them count as
excluded.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from meshcast.experiments.search.space.fields import FIELDS
from meshcast.experiments.search.space.point_rules import PointRule
from meshcast.experiments.search.space.program_points import (
    ProgramPoints,
    find_program,
    keep_own_values,
    name_own_schemes,
)
from meshcast.experiments.search.space.scheme_keys import DATA_OPTIONS
from meshcast.experiments.search.space.space import (
    LayerGroup,
    Pipeline,
    Space,
    StepChoice,
    values_of_point,
)
from meshcast.experiments.sweeps.expressions import Expression
from meshcast.experiments.sweeps.grid import DERIVED, MISSING, Names
from meshcast.hardware.errors import MeshcastError, PlanError, nearest
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered, remembered_by
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.peak_errors import RISK
from meshcast.validation.published.measured_range.distance import distance_from_measured, known_combinations
from meshcast.validation.published.measured_range.plan_fields import NAMED, NUMBERS, task_of_job

DEGREE = "plan.dp"
"""Name of the data-parallel degree in constraints, which follows from the others."""


@dataclass(frozen=True)
class Limits:
    """What a search leaves out.

    where: constraints; a point that violates any is excluded.
    memory_margin: share of the memory of a GPU that must stay free.
    memory_risk: most probability of lacking memory that a plan may have.
    near_measured: whether only combinations are kept that somebody has run.
    program: whether only points are kept that the program which the job names runs.
    """

    where: tuple[Expression, ...] = ()
    memory_margin: float = 0.0
    memory_risk: float = RISK
    near_measured: bool = False
    program: bool = False


class LimitedSpace(Space):
    """The points of a search within its limits. Raises PlanError for a constraint with unknown names."""

    def __init__(
        self, job: Mapping[str, Any], base: Path, limits: Limits, names_cluster: bool = False, run_open: bool = False
    ) -> None:
        self._rules = find_program(job) if limits.program else None
        super().__init__(name_own_schemes(job, self._rules) if self._rules else job, base, names_cluster, run_open)
        self.memory_margin, self.memory_risk, self.constraints = limits.memory_margin, limits.memory_risk, limits.where
        self._constraints = [PointConstraint(self, constraint) for constraint in limits.where]
        self._program = ProgramPoints(self, self._rules) if self._rules else None
        self._measured = MeasuredPoints(self) if limits.near_measured else None

    def _automatic(self, name: str, before: Mapping[str, Sequence[Any]]) -> tuple[Any, ...]:
        values = super()._automatic(name, before)
        return keep_own_values(name, values, self._rules) if self._rules else values

    def choices(self, group: LayerGroup, pipeline: Pipeline) -> tuple[StepChoice, ...]:
        steps = self._choices_of_program(group, pipeline, self._choices_by_constraints(group, pipeline))
        return steps if self._measured is None or self._measured.may_admit(group, pipeline) else ()

    def _choices_by_constraints(self, group: LayerGroup, pipeline: Pipeline) -> tuple[StepChoice, ...]:
        steps = super().choices(group, pipeline)
        for constraint in self._constraints:
            steps = constraint.select(group, pipeline, steps)
        return steps

    def _choices_of_program(
        self, group: LayerGroup, pipeline: Pipeline, steps: tuple[StepChoice, ...]
    ) -> tuple[StepChoice, ...]:
        return steps if self._program is None else self._program.select(group, pipeline, steps)

    def _what_counts(self, pipeline: Pipeline) -> Hashable:
        schedule = pipeline.schedule if self._measured is not None else None
        by_program = self._program.key_of(pipeline) if self._program is not None else None
        return (
            pipeline.place,
            schedule,
            by_program,
            tuple([constraint.key_of(1, pipeline) for constraint in self._constraints]),
        )

    def size(self, group: LayerGroup) -> int:
        return self._count(group)[0] if self.limits_points else super().size(group)

    def count_excluded(self, group: LayerGroup) -> dict[str, int]:
        return self._count(group)[1] if self.limits_points else super().count_excluded(group)

    @property
    def limits_points(self) -> bool:
        return bool(self._constraints) or self._program is not None or self._measured is not None

    @remembered
    def _count(self, group: LayerGroup) -> tuple[int, dict[str, int]]:
        points = self._counted_points(group)
        kept = points.hold(self._constraints, group)
        run = kept & points.hold(self._program.rules if self._program is not None else (), group)
        measured = run & points.admitted_by(self._measured, group)
        masks = {"where": ~kept, "program": kept & ~run, "near_measured": run & ~measured}
        return points.count(measured), {name: points.count(mask) for name, mask in masks.items()}

    @remembered_by(
        lambda space, group: (
            *(group.tp, group.cp, group.micro, group.recompute == "full"),
            group.ep * group.expert_tensor_ranks,
        )
    )
    def _counted_points(self, group: LayerGroup) -> CountedPoints:
        points, counts = list[tuple[Pipeline, StepChoice]](), list[int]()
        for pipeline, count in self.count_pipelines(group):
            steps = self.steps(group, *pipeline.place)
            points += [(pipeline, step) for step in steps]
            counts += [count] * len(steps)
        return CountedPoints(points, np.array(counts, int))

    def admits(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        return self._measured is None or self._measured.admits(group, pipeline, step)

    def explain_program(self) -> str:
        if self._program is None:
            return ""
        points = (
            (group, pipeline, step)
            for group in self.groups()
            for pipeline in self.pipelines(group)
            for step in self.steps(group, *pipeline.place)
        )
        return next((words for point in points if (words := self._program.explain(*point))), "")

    def explain_exclusion(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> str:
        """Returns which limit excludes a point, in words; empty if none does."""
        for limit in self._constraints:
            if step not in limit.select(group, pipeline, self.steps(group, *pipeline.place)):
                return f"it violates {limit.constraint.text}"
        if self._program is not None and (words := self._program.explain(group, pipeline, step)):
            return words
        known = self._measured
        if known is None or (known.may_admit(group, pipeline) and known.admits(group, pipeline, step)):
            return ""
        return "nobody has published a run of its schedule, degrees and micro-batch on as many GPUs"


@dataclass(frozen=True, eq=False)
class CountedPoints:
    """Points of groups with the same pipelines and choices.

    points: of pipelines of which each stands for those that no limit tells apart, with all its choices.
    counts: of such pipelines [points].
    """

    points: list[tuple[Pipeline, StepChoice]]
    counts: np.ndarray

    def hold(self, rules: Sequence[PointRule], group: LayerGroup) -> np.ndarray:
        """Returns at which points of a group all of some rules hold."""
        return np.logical_and.reduce([self._holds(rule, group) for rule in rules], axis=0, initial=True) & self.all

    @remembered_by(lambda points, rule, group: (id(rule), rule.key_of(0, group)))
    def _holds(self, rule: PointRule, group: LayerGroup) -> np.ndarray:
        return np.array([rule.holds(group, *point) for point in self.points], bool)

    @cached_property
    def all(self) -> np.ndarray:
        return np.ones(len(self.points), bool)

    def admitted_by(self, measured: MeasuredPoints | None, group: LayerGroup) -> np.ndarray:
        """Returns which points of a group may have been measured."""
        if measured is None:
            return self.all
        return np.array([measured.may_admit(group, pipeline) for pipeline, _ in self.points], bool)

    def count(self, mask: np.ndarray) -> int:
        """Returns the number of points of all pipelines that are in a mask."""
        return int(self.counts[mask].sum())


class PointConstraint(PointRule):
    """A constraint on the fields of a point."""

    def __init__(self, space: Space, constraint: Expression) -> None:
        self.space, self.constraint = space, constraint
        self._names = Names(space.job, space.base)
        batch = space.loaded.batch
        self._defaults: dict[str, object] = {"batch.sequence": batch.sequence, "batch.global": batch.total}
        """Values of keys that neither a job states nor a point has."""
        if "plan.zero" not in space.open:
            self._defaults |= {"plan.zero": 1, "plan.fsdp": False}
        needed = {name for field in constraint.names for name in self._parts_of(field)}
        super().__init__(needed)

    def _parts_of(self, field: str) -> tuple[str, ...]:
        """Returns the parts of a point that determine the value of a name. Raises PlanError for an unknown name."""
        if field == DEGREE:
            return ("tp", "cp", "pp")
        if field == "plan.etp":
            return ("tp", "ep", "etp")
        if field == "plan.shard":
            return ("tp", "cp", "pp", "shard")
        if field in ("plan.schedule", "plan.chunks"):  # a plan without a pipeline has 1F1B with a single chunk
            return ("pp", FIELDS[field])
        if field in ("plan.zero", "plan.fsdp"):
            if "plan.zero" not in self.space.fields:
                rule = "the data schemes of this search are those of plan.dp_scheme"
                raise PlanError(self.constraint.where, rule, "Name plan.dp_scheme", self.constraint.text)
            return ("data",)
        if field in FIELDS:
            return ("options",) if FIELDS[field] in DATA_OPTIONS else (FIELDS[field],)
        try:
            if field in self._defaults or self._names.find(field, {}) is not MISSING:
                return ()
        except MeshcastError as error:
            raise error.at(self.constraint.where) from None
        known = sorted({*FIELDS, "plan.fsdp", DEGREE, *self._defaults, *DERIVED})
        rule = f"{field} is no name that a constraint of a search knows"
        raise PlanError(self.constraint.where, rule, nearest(field, known), self.constraint.text)

    def evaluate(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        return bool(self.constraint(lambda name: self._look_up(name, group, pipeline, step)))

    def _look_up(self, name: str, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> object:
        if name == DEGREE:
            return self.space.data_ranks(group, pipeline.place)[0]
        if name == "plan.etp":
            return group.expert_tensor_ranks
        if name == "plan.shard":
            return step.shard or self.space.data_ranks(group, pipeline.place)[0]
        value = self._names.find(name, self.space.changes(group, pipeline, step))
        if value is not MISSING:
            return value
        if name in self._defaults:
            return self._defaults[name]
        if pipeline.pp == 1 and name in ("plan.schedule", "plan.chunks"):
            return "1f1b" if name == "plan.schedule" else 1
        return values_of_point(group, pipeline, step)[FIELDS[name]]


class MeasuredPoints:
    """Which points have a combination that somebody has run. Raises PlanError if nobody has run such a job."""

    def __init__(self, space: Space) -> None:
        self.space, self.shared = space, SharedWork()
        task = task_of_job(space.loaded)
        if not (combinations := known_combinations(task)):
            rule = f"nobody has published a run of {task.kind} models on GPUs of {task.architecture}"
            raise PlanError("--near-measured", rule, "Leave it out")
        gpus = NUMBERS.index("gpus")
        here = [
            combination
            for combination in combinations
            if combination.ranges[gpus][0] <= space.loaded.cluster.gpus <= combination.ranges[gpus][1]
        ]
        if not here:
            low, high = (
                end([combination.ranges[gpus][i] for combination in combinations]) for i, end in enumerate((min, max))
            )
            count = f"{space.loaded.cluster.gpus:,} GPUs"
            rule = f"no measured combination was run on {count}: those of all together had {low:,} to {high:,}"
            raise PlanError("--near-measured", rule, "Leave it out")
        # Schedule, and ranges of the numbers that follow from degrees and micro-batch alone.
        numbers = [NUMBERS.index(name) for name in ("tp", "cp", "microbatch_tokens")]
        self._ranges = [
            (combination.names[NAMED.index("schedule")], [combination.ranges[i] for i in numbers])
            for combination in here
        ]

    def may_admit(self, group: LayerGroup, pipeline: Pipeline) -> bool:
        """Returns whether the schedule and the degrees alone leave a measured combination."""
        schedule = f"pipeline/{pipeline.schedule}" if pipeline.pp > 1 else ""
        return self._has_run(group.tp, group.cp, group.micro, schedule)

    @remembered
    def _has_run(self, tp: int, cp: int, micro: int, schedule: str) -> bool:
        numbers = tp, cp, max(1, micro * (self.space.loaded.batch.sequence or 1) // cp)
        return any(
            name == schedule and all(low <= n <= high for n, (low, high) in zip(numbers, ranges, strict=True))
            for name, ranges in self._ranges
        )

    def admits(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        """Returns whether somebody has run the combination of a point; points that break a rule count as run."""
        return self._is_measured(group._replace(recompute="none", offload=()), pipeline, step)

    @remembered_by(lambda points, group, pipeline, step: (group, pipeline, step.data, step.shard, step.options))
    def _is_measured(self, group: LayerGroup, pipeline: Pipeline, step: StepChoice) -> bool:
        try:
            plan = resolve_plan(load_job(self.space.job_of(group, pipeline, step), base=self.space.base), self.shared)
        except MeshcastError:
            return True
        return distance_from_measured(plan).measured
