"""Trials of changes: the job with them, as far as its program runs it, its step, and how likely it fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from meshcast.experiments.advice.neighbours import PlanChange
from meshcast.experiments.explain.changeable_job import Change, ChangeableJob
from meshcast.hardware.errors import MeshcastError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.job.job import Job
from meshcast.simulator.report.peak_errors import FITS, FITS_AT_ALL, peak_error_of

SAME = 1e-6
"""Largest relative difference of figures that are the same."""


@dataclass(frozen=True)
class TriedPlan:
    """A job with changes.

    changes: that it has; none of the job as it is.
    job: with them.
    forecast: its step and memory.
    batch: its sequences over those of the job as it is.
    """

    changes: tuple[PlanChange, ...]
    job: Job
    forecast: StepAndMemory
    batch: float = 1.0

    @property
    def seconds(self) -> float:
        """Time of a step, or of as many tokens as a step of the job as it is has [s]."""
        return self.forecast.step_time / self.batch

    @cached_property
    def probability(self) -> float:
        """Probability that it fits in memory."""
        return peak_error_of(self.job.framework).probability(self.forecast.room)

    @property
    def numerics(self) -> bool:
        """Whether the training computes something else with any of its changes."""
        return any(change.numerics for change in self.changes)


def merge_fields(changes: Sequence[PlanChange]) -> Change | None:
    """Returns the fields of several changes; None if they contradict each other.

    What a change leaves to its default another one may state.
    """
    merged: Change = {}
    for change in changes:
        for field, value in change.fields.items():
            other = merged.get(field)
            if other is not None and value is not None and other != value:
                return None
            merged[field] = other if value is None else value
    return merged


class Trials:
    """Tries changes of a job; the job as it is is the first trial.

    tried, refused: numbers of changes that were forecast, and that a rule excludes.
    """

    def __init__(self, base: ChangeableJob, shared: SharedWork) -> None:
        """Raises MeshcastError for a job that breaks a rule."""
        self.base, self.shared = base, shared
        self.now = TriedPlan((), base.job, forecast_step(base.job, shared))
        self.tried = self.refused = 0
        self._known: dict[frozenset[tuple[str, str]], TriedPlan | None] = {}

    @property
    def least(self) -> float:
        """Least probability to fit that a changed plan must have: that of a plan that fits, or of the job as it is."""
        now = self.now.probability
        return min(FITS, now) if now >= FITS_AT_ALL else FITS

    def fits(self, trial: TriedPlan) -> bool:
        """Returns whether a plan is as sure to fit as is asked for."""
        return trial.probability >= self.least * (1 - SAME)

    def has_effect(self, trial: TriedPlan) -> bool:
        """Returns whether a plan differs from the job as it is in step or memory."""
        pairs = (trial.seconds, self.now.seconds), (trial.forecast.held, self.now.forecast.held)
        return any(abs(new / old - 1) > SAME for new, old in pairs)

    def forecast(self, *changes: PlanChange) -> TriedPlan | None:
        """Returns the job with changes; None where a rule excludes them, or they contradict each other."""
        fields = merge_fields(changes)
        if fields is None:
            return None
        key = frozenset((field, repr(value)) for field, value in fields.items())
        if key not in self._known:
            self._known[key] = self._forecast(changes, fields)
        return self._known[key]

    def _forecast(self, changes: tuple[PlanChange, ...], fields: Change) -> TriedPlan | None:
        total = self.base.job.batch.total
        assert total is not None
        try:
            job = self.base.change({"batch.global": total, **self._drop_replicas(), **fields})
            forecast = forecast_step(job, self.shared)
        except MeshcastError:
            self.refused += 1
            return None
        self.tried += 1
        return TriedPlan(changes, job, forecast, (job.batch.total or total) / total)

    def _drop_replicas(self) -> Change:
        """Returns what leaves the replicas, and the micro-batches of each, to the other degrees."""
        plan, batch = self.base.plan, self.base.job.as_written.get("batch", {})
        dropped: Change = {"plan.dp": None} if plan.get("dp") is not None else {}
        if batch.get("microbatches") is not None:
            dropped |= {"batch.microbatches": None, "batch.micro": self.base.job.batch.micro}
        return dropped
