"""A job that a person changes by controls: what each control offers, what the rules refuse, and the forecast."""

from __future__ import annotations

from meshcast.experiments.advice.neighbours import STATES, name_field
from meshcast.experiments.explain.changeable_job import Change, ChangeableJob
from meshcast.experiments.explorer.controls import (
    NODE,
    NODES,
    REPLICAS,
    SEQUENCE,
    Control,
    list_companions,
    list_controls,
)
from meshcast.experiments.search.space.fields import AUTO, CLUSTER, FIELDS
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.experiments.sizing.kinds import SizedNode, read_cluster
from meshcast.hardware import load_cluster
from meshcast.hardware import nodes as list_nodes
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report


class ExploredJob:
    """A job with changes.

    job: with the changes that the rules allow.
    refusal: why the rules refuse the last change; empty: they do not.
    """

    def __init__(self, job: Job) -> None:
        self._shared = SharedWork(related=True)
        self.refusal = ""
        self._open(job)

    def _open(self, job: Job) -> None:
        """Begins with a job, in short form where that says all of it. Raises PlanError for plans whose stages or
        replicas differ."""
        if not ChangeableJob(job).is_uniform:
            rule = "controls change plans whose stages and replicas are alike"
            raise PlanError("plan", rule, "Compare such plans with meshcast compare, or search --heterogeneous")
        short = read_short_form(job)
        if ChangeableJob(job).is_long and short.job is not None and not short.others:
            job = load_job(short.job, base=job.folder)
        self.job, self._base, self._changes = job, ChangeableJob(job), Change()
        self._kind, self._nodes, self.fixed_cluster = self._read_cluster(job)
        self._leave_replicas()

    def _read_cluster(self, job: Job) -> tuple[SizedNode | None, int, str]:
        """Returns the kind of node and their number, or why they cannot be changed."""
        try:
            name, single, written = read_cluster(job.as_written[CLUSTER], job.folder, CLUSTER)
        except MeshcastError as error:
            return None, 0, str(error)
        return SizedNode(name, single, written, None), job.cluster.gpus // single.gpus, ""

    def _leave_replicas(self) -> None:
        """Leaves the number of replicas to the GPUs where the plan states the same: they then follow changes."""
        if self.get(REPLICAS) is not None and not self._refuse(left := {REPLICAS: None}):
            changed = self._base.change(left)
            if changed.plan.mesh == self.job.plan.mesh:
                self.job, self._changes = changed, left

    # ------------------------------------------------------------------------------------------- controls

    def list_controls(self) -> list[Control]:
        """Lists the controls, each with its value now among its values."""
        nodes = (self._kind.name, *(n for n in list_nodes() if n != self._kind.name)) if self._kind else ()
        return [
            control if self.get(control.field) in control.values
            else Control(control.field, (self.get(control.field), *control.values))
            for control in list_controls(self.job, nodes)
        ]  # fmt: skip

    def get(self, field: str) -> object:
        """Returns the value of a control now."""
        if field in (NODE, NODES):
            return self._nodes if field == NODES else self._kind and self._kind.name
        if field == SEQUENCE:
            return self.job.batch.sequence
        if field == REPLICAS:
            return ChangeableJob(self.job).plan.get(field.partition(".")[2])
        value = read_short_form(self.job).values.get(FIELDS[field])
        if field == name_field(STATES):
            return next((word for word, name in STATES.chooses.items() if name == value), value)
        return value

    def find_refusal(self, control: Control, value: object) -> str:
        """Returns why a control cannot have a value with the others as they are, in the words of the rule; empty: it
        can, with what it takes along."""
        try:
            self._try(control.field, value)
        except MeshcastError as error:
            return str(error)
        return ""

    def change(self, field: str, value: object) -> None:
        """Sets a control, with what the change takes along; or says in `refusal` why the rules refuse it."""
        try:
            self._changes, self.job, self._kind, self._nodes = self._try(field, value)
            self.refusal = ""
        except MeshcastError as error:
            self.refusal = str(error)

    def take_job(self, data: SomeFields) -> None:
        """Takes another plan of the job, such as the best one. Raises MeshcastError for a wrong one."""
        self._open(load_job(data, base=self.job.folder))
        self.refusal = ""

    def _try(self, field: str, value: object) -> tuple[Change, Job, SizedNode | None, int]:
        """Returns the changes with a further one, the job with them, and its cluster. Raises MeshcastError with the
        refusal of the change alone, if nothing that it may take along makes it possible."""
        changes, kind, count = dict(self._changes), self._kind, self._nodes
        if field in (NODE, NODES):
            assert kind is not None
            if field == NODE:
                single = load_cluster(f"{value}:1", CLUSTER)
                kind = SizedNode(str(value), single, None, None)
            else:
                count = int(str(value))
            changes[CLUSTER] = kind.describe(count)
        else:
            changes[field] = value
        first: MeshcastError | None = None
        for companions in list_companions(field):
            try:
                job = self._base.change(changes | companions)
                resolve_plan(job)
                return changes | companions, job, kind, count
            except MeshcastError as error:
                first = first or error
        assert first is not None
        raise first

    def _refuse(self, changes: Change) -> bool:
        try:
            self._base.change(changes)
        except MeshcastError:
            return True
        return False

    # ------------------------------------------------------------------------------------------- answers

    def forecast(self) -> Report:
        """Forecasts the job. Raises MeshcastError for one that has no forecast."""
        report = simulate(self.job, shared_work=self._shared)
        self._shared.forget_excess()
        return report

    def write_open(self) -> Fields:
        """Returns the job with an open plan, for a search."""
        batch = {key: value for key, value in self.job.as_written.get("batch", {}).items() if key != "microbatches"}
        sizes = {**batch, "global": self.job.batch.total, "micro": AUTO}
        left_out = ("noise", "published", "id")
        written = {key: value for key, value in self.job.as_written.items() if key not in left_out}
        return {**written, "batch": sizes, "plan": AUTO}
