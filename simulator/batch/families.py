"""Plans of a grid, derived from plans that are resolved: jobs that differ in pipeline devices, chunks and micro-batch
alone are loaded once for each number of devices.

What such jobs may break are rules about numbers: whole micro-batches, chunks that the schedule takes, layers for every
stage, the size of a forecast. All other rules do not ask for them, and hold as they do for the job that was resolved.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Mapping
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

DEGREES = "tp", "cp"
"""Keys of a plan that decide how many ranks are left for replicas and pipeline devices."""

WITHIN_STAGES = frozenset((*DEGREES, *(name for name, key in PLAN_KEYS.items() if key.chooses)))
"""Keys of a plan that decide nothing about its pipeline but how many devices are left for it."""

BATCH_KEYS = {"global", "micro", "sequence"}

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
        self._relatives: dict[Hashable, _Relatives] = {}
        self._count = 0

    def plan(self, job: SomeFields) -> ResolvedPlan | Refused:
        """Returns the resolved plan of a job."""
        split = _split(job)
        if split is None:
            plan = self._try(job)
            return plan if isinstance(plan, Refused) else ResolvedPlan(plan, is_plain(plan))
        common, stage, numbers = split
        if self._count > MAX_FAMILIES:
            self._relatives.clear()
            self._count = 0
        relatives = remember(self._relatives, common, _Relatives)
        resolve = partial(self._resolve, job, relatives)
        degrees = tuple(_freeze(job["plan"].get(key, 1)) for key in DEGREES)
        places = relatives.places.get(degrees)
        if places is not None and relatives.breaks_batch(places, numbers):
            return Refused(job, resolve=resolve)
        if stage not in relatives.families:
            self._count += 1
        family = remember(relatives.families, stage, lambda: _JobFamily(relatives))
        base = family.plans.get(numbers.devices)
        key = _freeze(job["plan"].get(SCHEDULE)), numbers.devices, numbers.pieces if numbers.devices > 1 else 1
        if base is None or key not in relatives.schedules:
            plan = self._try(job, relatives)
            if isinstance(plan, Refused):
                return plan
            plain = is_plain(plan)
            if plain and _is_derivable(plan):
                family.plans.setdefault(plan.shape.p, plan)
                relatives.places[degrees], relatives.total = (
                    plan.ranks.replicas * plan.shape.p,
                    plan.job.batch.total or 0,
                )
                relatives.schedules.setdefault(key, plan.schedule)
            return ResolvedPlan(plan, plain)
        derived = family.derive(base, relatives.schedules[key], numbers, job)
        return Refused(job, resolve=resolve) if derived is None else ResolvedPlan(derived, plain=True)

    def _try(self, job: SomeFields, relatives: _Relatives | None = None) -> Plan | Refused:
        try:
            return self._resolve(job, relatives)
        except MeshcastError as error:
            return Refused(job, error)

    def _resolve(self, job: SomeFields, relatives: _Relatives | None) -> Plan:
        """Resolves a job. relatives: those whose model it has; None: not known."""
        known = relatives.model if relatives else None
        loaded = load_job(job if known is None else {**job, "model": known}, base=self._base)
        if known is not None:
            loaded.as_written["model"] = job["model"]
        elif relatives and not (isinstance(job["model"], str) and is_preset(job["model"])):  # which are loaded already
            relatives.model = loaded.model
        return resolve_plan(loaded, self.shared)


class _Relatives:
    """Jobs that differ in their plans and micro-batches alone.

    families: by what decides about stages.
    model: of all, once it is loaded and no preset.
    places: ranks for replicas and pipeline devices, by `DEGREES`.
    total: samples of a batch.
    schedules: by their name, pipeline devices and pieces.
    layers: of every stage, by the number of stages; None: there are not enough.
    shapes: whether a shape of a pipeline keeps the rules, with its schedule.
    """

    def __init__(self) -> None:
        self.families: dict[Hashable, _JobFamily] = {}
        self.model: Model | None = None
        self.places: dict[Hashable, int] = {}
        self.total = 0
        self.schedules: dict[Hashable, Schedule] = {}
        self.layers: dict[int, tuple[int, ...] | None] = {}
        self.shapes: dict[tuple[PipelineShape, Schedule], bool] = {}

    def breaks_batch(self, places: int, numbers: Numbers) -> bool:
        """Says whether the batch of a plan is certainly no whole number of micro-batches."""
        return places % numbers.devices == 0 and self.total % (numbers.micro * (places // numbers.devices)) > 0


class _JobFamily:
    """Relatives that differ in their `Numbers` alone. plans: a resolved plan for each number of devices."""

    def __init__(self, relatives: _Relatives) -> None:
        self.plans: dict[int, Plan] = {}
        self._relatives = relatives
        self._jobs: dict[tuple[int, int], Job | None] = {}
        self._schemes: dict[tuple[int, Schedule], tuple[Scheme, ...]] = {}

    def derive(self, base: Plan, schedule: Schedule, numbers: Numbers, stated: SomeFields) -> Plan | None:
        """Returns the plan of other numbers; None if it breaks a rule.

        base: a plan of as many devices.
        schedule: that of as many devices and chunks, of any plan.
        stated: the job.
        """
        relatives, p = self._relatives, base.shape.p
        microbatches, left = divmod(relatives.total, numbers.micro * base.ranks.replicas)
        if left:
            return None
        shape = PipelineShape(p, microbatches, schedule.chunks_per_device())
        layers = remember(relatives.layers, shape.stages, partial(_spread_layers, base, shape.stages))
        job = remember(self._jobs, (p, numbers.micro), partial(_change_micro, base, numbers.micro))
        if layers is None or job is None:
            return None
        schemes = remember(self._schemes, (p, schedule), partial(_change_schedule, base, schedule))
        written = {**job.as_written, "plan": stated["plan"], "batch": stated["batch"]}
        job = job.model_copy(update={"as_written": written, "id": stated.get("id")})
        plan = replace(base, job=job, schemes=schemes, shape=shape, layers=layers)
        return plan if remember(relatives.shapes, (shape, schedule), partial(_takes_shape, plan)) else None


def _split(job: SomeFields) -> tuple[Hashable, Hashable, Numbers] | None:
    """Splits a job into what is no part of its plan, what decides about its stages, and its numbers; None if it states
    more than plans are derived for."""
    plan, batch = job.get("plan"), job.get("batch")
    if not isinstance(plan, Mapping) or not isinstance(batch, Mapping) or not plan.keys() <= KNOWN_KEYS:
        return None
    devices, pieces = (plan.get(key, 1) for key in PIPELINE_NUMBERS)
    numbers = Numbers(devices, pieces, batch.get("micro", 1))
    if batch.keys() != BATCH_KEYS or any(type(number) is not int for number in numbers):
        return None
    if min(numbers) < 1 or "framework" in job or (SCHEDULE in plan and PIPELINE_NUMBERS[1] not in plan):
        return None
    try:
        rest = frozenset([(key, _freeze(job[key])) for key in job if key not in ("plan", "batch", "id")])
        common = rest, _freeze(batch["global"]), _freeze(batch["sequence"])
        return common, frozenset([(key, _freeze(plan[key])) for key in plan if key not in PIPELINE_NUMBERS]), numbers
    except TypeError:
        return None


def _freeze(value: object) -> Hashable:
    """Returns a key for plain data. Raises TypeError for what is none."""
    return (type(value), value) if isinstance(value, str | int | float) else json.dumps(value, sort_keys=True)


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
