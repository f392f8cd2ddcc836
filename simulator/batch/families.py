"""Plans of a grid, derived from plans that are resolved: jobs that differ in pipeline devices, chunks and micro-batch
alone are loaded once for each number of devices.

What such jobs may break are rules about numbers: whole micro-batches, chunks that the schedule takes, layers for every
stage, the size of a forecast. All other rules do not ask for them, and hold as they do for the job that was resolved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.remembered import remember
from meshcast.simulator.batch.plain import is_plain
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PIPELINE_NUMBERS, PLAN_KEYS, SCHEME_KEYS
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.models.load import is_preset
from meshcast.simulator.models.model import Model
from meshcast.simulator.plan.partition import layers_of_stages
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.plan.size import check_size
from meshcast.simulator.scheduling.schedule import PipelineShape, Schedule

SCHEDULE = SCHEME_KEYS["pipeline"]

WITHIN_STAGES = frozenset(("tp", "cp", *(name for name, key in PLAN_KEYS.items() if key.chooses)))
"""Keys of a plan that decide nothing about its pipeline but how many devices are left for it."""

KNOWN_KEYS = WITHIN_STAGES.union(PIPELINE_NUMBERS, (SCHEDULE,))
"""Keys of the plans that are derived."""


MAX_FAMILIES = 200
"""Families that are kept, each with a plan for every number of pipeline devices."""


class Numbers(NamedTuple):
    """What the jobs of a family differ in: pipeline devices, pieces of layers on each, and samples of a micro-batch."""

    devices: int
    pieces: int
    micro: int


class ResolvedPlan(NamedTuple):
    """A resolved plan, and whether it is plain."""

    plan: Plan
    plain: bool


class Refused:
    """A job that breaks a rule. error: the first one; it is looked up when somebody asks."""

    def __init__(
        self, job: SomeFields, error: MeshcastError | None = None, resolve: Callable[[], object] | None = None
    ) -> None:
        """resolve: resolves the job, where the error is not known."""
        self.job, self._error, self._resolve = job, error, resolve

    @property
    def error(self) -> MeshcastError:
        if self._error is None:
            assert self._resolve is not None
            try:
                self._resolve()
            except MeshcastError as error:
                self._error = error
            else:
                raise AssertionError(f"a plan that no rule refuses: {self.job}")
        return self._error


class Families:
    """Plans of jobs by what they have in common."""

    def __init__(self, shared: SharedWork, base: str | Path | None = None) -> None:
        """shared: parts of plans of earlier jobs. base: folder of relative paths in jobs."""
        self.shared, self._base = shared, base
        self._families: dict[str, _JobFamily] = {}
        self._models: dict[str, Model] = {}
        self._schedules: dict[tuple[str, int, int], Schedule] = {}

    def plan(self, job: SomeFields) -> ResolvedPlan | Refused:
        """Returns the resolved plan of a job."""
        split = _split(job)
        if split is None:
            plan = self._try(job)
            return plan if isinstance(plan, Refused) else ResolvedPlan(plan, is_plain(plan))
        common, rest, pipeline, numbers = split
        if len(self._families) > MAX_FAMILIES:
            self._families.clear()
            self._models.clear()
            self._schedules.clear()
        family, resolve = remember(self._families, rest, _JobFamily), partial(self._resolve, job, common)
        base = family.plans.get(numbers.devices)
        if base is None and family.breaks_batch(numbers):
            return Refused(job, resolve=resolve)
        key = pipeline, numbers.devices, numbers.pieces if numbers.devices > 1 else 1
        if base is None or key not in self._schedules:
            plan = self._try(job, common)
            if isinstance(plan, Refused):
                return plan
            plain = is_plain(plan)
            if plain and _is_derivable(plan):
                family.add(plan)
                self._schedules.setdefault(key, plan.schedule)
            return ResolvedPlan(plan, plain)
        derived = family.derive(base, self._schedules[key], numbers, job)
        return Refused(job, resolve=resolve) if derived is None else ResolvedPlan(derived, plain=True)

    def _try(self, job: SomeFields, common: str = "") -> Plan | Refused:
        try:
            return self._resolve(job, common)
        except MeshcastError as error:
            return Refused(job, error)

    def _resolve(self, job: SomeFields, common: str) -> Plan:
        """Resolves a job. common: what it has in common with others, whose model it has; empty: not known."""
        known = self._models.get(common)
        loaded = load_job(job if known is None else {**job, "model": known}, base=self._base)
        if known is not None:
            loaded.as_written["model"] = job["model"]
        elif common and not (isinstance(job["model"], str) and is_preset(job["model"])):  # which are loaded already
            self._models[common] = loaded.model
        return resolve_plan(loaded, self.shared)


class _JobFamily:
    """Jobs that differ in their `Numbers` alone. plans: a resolved plan for each number of devices."""

    def __init__(self) -> None:
        self.plans: dict[int, Plan] = {}
        self._places = self._total = 0
        self._layers: dict[int, tuple[int, ...] | None] = {}
        self._jobs: dict[tuple[int, int], Job | None] = {}
        self._schemes: dict[tuple[int, Schedule], tuple[Scheme, ...]] = {}
        self._shapes: dict[tuple[PipelineShape, Schedule], bool] = {}

    def add(self, plan: Plan) -> None:
        """Adds a resolved plan."""
        self.plans.setdefault(plan.shape.p, plan)
        self._places, self._total = plan.ranks.replicas * plan.shape.p, plan.job.batch.total or 0

    def breaks_batch(self, numbers: Numbers) -> bool:
        """Says whether the batch of a plan is certainly no whole number of micro-batches: other degrees leave the same
        ranks for replicas and pipeline devices."""
        if not self._places or self._places % numbers.devices:
            return False
        return self._total % (numbers.micro * (self._places // numbers.devices)) > 0

    def derive(self, base: Plan, schedule: Schedule, numbers: Numbers, stated: SomeFields) -> Plan | None:
        """Returns the plan of other numbers; None if it breaks a rule.

        base: a plan of as many devices.
        schedule: that of as many devices and chunks, of any plan.
        stated: the job.
        """
        microbatches, left = divmod(self._total, numbers.micro * self._places // numbers.devices)
        if left:
            return None
        shape = PipelineShape(numbers.devices, microbatches, schedule.chunks_per_device())
        layers = remember(self._layers, shape.stages, partial(_spread_layers, base, shape.stages))
        job = remember(self._jobs, (shape.p, numbers.micro), partial(_change_micro, base, numbers.micro))
        if layers is None or job is None:
            return None
        schemes = remember(self._schemes, (shape.p, schedule), partial(_change_schedule, base, schedule))
        written = {**job.as_written, "plan": stated["plan"], "batch": stated["batch"]}
        job = job.model_copy(update={"as_written": written, "id": stated.get("id")})
        plan = replace(base, job=job, schemes=schemes, shape=shape, layers=layers)
        return plan if remember(self._shapes, (shape, schedule), partial(_takes_shape, plan)) else None


def _split(job: SomeFields) -> tuple[str, str, str, Numbers] | None:
    """Splits a job into what is no part of its plan, what its family has in common, what its pipeline depends on, and
    its numbers; None if it states more than plans are derived for."""
    plan, batch = job.get("plan"), job.get("batch")
    if not isinstance(plan, Mapping) or not isinstance(batch, Mapping) or not plan.keys() <= KNOWN_KEYS:
        return None
    devices, pieces = (plan.get(key, 1) for key in PIPELINE_NUMBERS)
    numbers = Numbers(devices, pieces, batch.get("micro", 1))
    if batch.keys() != {"global", "micro", "sequence"} or any(type(number) is not int for number in numbers):
        return None
    if min(numbers) < 1 or "framework" in job or (SCHEDULE in plan and PIPELINE_NUMBERS[1] not in plan):
        return None
    stage = {key: value for key, value in plan.items() if key not in PIPELINE_NUMBERS}
    rest = {key: value for key, value in job.items() if key not in ("plan", "batch", "id")}
    try:
        common = json.dumps((rest, batch["global"], batch["sequence"]), sort_keys=True)
        of_stage = json.dumps(stage, sort_keys=True)
    except TypeError:
        return None
    return common, common + of_stage, f"{common}{plan.get(SCHEDULE)}", numbers


def _is_derivable(plan: Plan) -> bool:
    """Says whether plans with other numbers follow from a plain plan."""
    even = plan.job.plan.partition == "even" and not plan.job.taken and not plan.mesh.places and not plan.vocab_rows
    # Rules of a schedule that ask for more of a job than the shape of its pipeline.
    asks = type(plan.schedule).check_job is not Scheme.check_job
    return even and not asks and plan.schedule.microbatches_per_forward == 1


def _change_micro(base: Plan, micro: int) -> Job | None:
    """Returns the job of a plan with other micro-batches; None if a scheme refuses it."""
    batch = base.job.batch.model_copy(update={"micro": micro})
    job = base.job if micro == base.job.batch.micro else base.job.model_copy(update={"batch": batch})
    return job if all(_keeps(partial(scheme.check_job, job)) for scheme in base.schemes) else None


def _change_schedule(base: Plan, schedule: Schedule) -> tuple[Scheme, ...]:
    """Returns the schemes of a plan with the kind and options of another schedule."""
    stated = base.schedule
    if (schedule.use, schedule.options) == (stated.use, stated.options):
        return base.schemes
    traits = stated.framework, stated.sequence_axes, stated.pipelined
    changed = type(schedule)(stated.axes, schedule.options, base.mesh, *traits)
    return tuple(changed if scheme is stated else scheme for scheme in base.schemes)


def _takes_shape(plan: Plan) -> bool:
    """Says whether a plan keeps the rules about the shape of its pipeline."""
    return _keeps(lambda: check_size(plan)) and _keeps(lambda: plan.schedule.check(plan.shape))


def _spread_layers(plan: Plan, stages: int) -> tuple[int, ...] | None:
    """Returns the layers of every stage; None if there are not enough."""
    layers = list[int]()
    fits = _keeps(lambda: layers.extend(layers_of_stages("even", len(plan.job.model.every_layer), stages)))
    return tuple(layers) if fits else None


def _keeps(check: Callable[[], object]) -> bool:
    """Says whether a check finds no mistake."""
    try:
        check()
    except MeshcastError:
        return False
    return True
