"""A job with changes of single fields, whatever the form of its plan, as far as its program runs them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property

from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.keys import compose_plan, compose_short_plan, flatten_plan
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.job.program_rules import broken_rules
from meshcast.simulator.loading.load import load_job, set_field

Change = Fields
"""Fields of a job as ``--set`` has them, with their new values; null: as if it were not stated."""

PLAN = "plan."

LONG = ("mesh", "schemes")
"""Keys of a plan in long form."""

UNLIKE = ("stages", "replicas")
"""Keys of plans whose stages or replicas have degrees of their own."""


@dataclass(frozen=True)
class ChangeableJob:
    """A job whose fields are changed by keys of a plan in short form; options of schemes that only a long form states
    stay, where a change leaves the scheme.

    job: as it is.
    """

    job: Job

    @property
    def stated(self) -> SomeFields:
        """The plan as the job states it."""
        plan = self.job.as_written.get("plan", {})
        return plan if isinstance(plan, Mapping) else {}

    @property
    def is_uniform(self) -> bool:
        """Whether all stages, and all replicas, have the same degrees: others have no plan in short form."""
        return not (self.job.plan.has_stages or self.job.plan.replicas or {*UNLIKE} & self.stated.keys())

    @cached_property
    def plan(self) -> Fields:
        """The plan in short form."""
        if not self.is_long:
            return dict(self.stated)
        return compose_short_plan(self._keys, self.job.cluster.gpus)

    @property
    def is_long(self) -> bool:
        """Whether the job states its plan in long form."""
        return bool({*LONG} & self.stated.keys())

    @cached_property
    def _keys(self) -> Fields:
        """The keys of a plan in long form; data parallelism takes the GPUs that are left."""
        keys = flatten_plan(self.job.plan)
        del keys["plan.dp"]
        return keys

    @cached_property
    def _broken(self) -> frozenset[str]:
        return frozenset(rule.key for rule in broken_rules(self.job))

    def write(self, change: SomeFields) -> Fields:
        """Returns the job with a change as plain data."""
        data = copy.deepcopy(self.job.as_written)
        if self.is_long:
            plan = {field.removeprefix(PLAN): value for field, value in change.items() if field.startswith(PLAN)}
            data["plan"] = self._write_plan(plan)
        for field, value in sorted(change.items(), key=lambda item: item[0].count(".")):  # sections before their keys
            if not (self.is_long and field.startswith(PLAN)):
                set_field(data, field, copy.deepcopy(value), field)
        return data

    def _write_plan(self, plan: SomeFields) -> Fields:
        """Returns a plan in long form, or in short form where that says all, with changed keys of a short one."""
        left_out = tuple(f"{PLAN}{PLAN_KEYS[key].flat}" for key, value in plan.items() if value is None)
        keys = {key: value for key, value in self._keys.items() if key not in left_out}
        stated = {key: value for key, value in plan.items() if value is not None}
        job = self.job
        return compose_plan(keys, job.model, job.cluster.gpus, job.cluster.gpus_per_node, changes=stated)

    def change(self, change: SomeFields) -> Job:
        """Returns the job with a change.

        Raises MeshcastError where the rest of the job rules it out, PlanError where its program does not run it.
        """
        changed = load_job(self.write(change), base=self.job.folder)
        for rule in broken_rules(changed):
            if rule.key not in self._broken:
                raise PlanError(rule.key, str(rule), "Change something else")
        return changed
