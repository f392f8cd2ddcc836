"""Tries the changes of a job: `meshcast.advise`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from meshcast.experiments.advice.advice import LEAST_GAIN, Advice, AdvisedPlan, Patch, measure
from meshcast.experiments.advice.launch_words import LaunchWords
from meshcast.experiments.advice.neighbours import MICRO, PlanChange, PlanNeighbours
from meshcast.experiments.advice.together import LEAST_EFFECT, Together
from meshcast.experiments.advice.trials import SAME, Trials, TriedPlan
from meshcast.experiments.explain.changeable_job import ChangeableJob
from meshcast.experiments.explain.edited_launch import compare_edited
from meshcast.experiments.explain.fitting_changes import FittingChange, fitting_changes
from meshcast.experiments.explain.sensitivity import Watch
from meshcast.experiments.search.space.fields import FIELDS
from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import MeshcastError, PlanError, nearest
from meshcast.simulator.costs.calibration.calibration import Calibration
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.launch.launch_file import read_launch_file
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job, read_job
from meshcast.simulator.plan.size import measure_size
from meshcast.simulator.report.peak_errors import FITS_AT_ALL
from meshcast.simulator.report.report import Report

SHOWN = 8
"""Single changes that are shown, each of another field."""

ATTEMPTS = 4
"""Most combinations that a launch file is edited for, until one is read back as it was announced."""

COMBINATIONS, LEAST_COMBINATIONS = 24, 6
"""Most pairs, and most triples, that are forecast; of jobs whose forecasts take longer than `USUAL_SECONDS`, least."""

MOST_REFUSED = 3
"""Larger micro-batches that are tried with other changes though the batch has not enough for all replicas."""

USUAL_OPS = 200
"""Ops of the distinct passes of a step that take as long as all else of a forecast."""

USUAL_SECONDS = 0.02
"""What the passes of a step take where as many combinations are tried as there may be [s]."""

DEAR = 8.0
"""Cost of a forecast from which on, of a number, the next smaller and larger values alone are tried."""


class Adviser:
    """Tries the changes of a job.

    words: of its launch file; None: it is a job file. keep: see `advise`.
    """

    def __init__(
        self, base: ChangeableJob, words: LaunchWords | None, shared: SharedWork, keep: Sequence[str] = ()
    ) -> None:
        self._base, self._words, self._shared, self._keep = base, words, shared, keep
        self._trials = Trials(base, shared)
        self._now = self._report(self._trials.now)
        self._known: dict[tuple[tuple[str, str], ...], bool] = {}
        self._untold = 0

    def _report(self, trial: TriedPlan) -> Report:
        return simulate(trial.job, shared_work=self._shared)

    def advise(self, watch: Watch) -> Advice:
        """Tries all changes. watch: passes them on."""
        neighbours = PlanNeighbours(self._base, self._words is not None and self._words.is_written)
        near = self._cost > DEAR
        every = neighbours.list_changes(near)
        self._check_kept({field for change in every for field in change.fields})
        listed = [change for change in every if not self._is_kept(change)]
        trials = [trial for change in watch(listed) if (trial := self._trials.forecast(change)) is not None]
        useful = [trial for trial in sorted(trials, key=lambda trial: trial.seconds) if self._is_useful(trial)]
        sayable = [said for trial in useful if (said := self._tell(trial)) is not None]
        sayable.sort(key=_take_seconds)
        fitting = self._find_fitting()
        tried = {trial.changes[0] for trial in trials}
        larger = [change for change in listed if change.key == MICRO and change.grows]
        refused = [change for change in larger if change not in tried]  # fewer replicas may have such micro-batches
        pairs, triples = Together(self._trials, sayable, refused[:MOST_REFUSED]).find(watch, self._count_combinations())
        singles = [trial for trial in sayable if self._trials.fits(trial)]
        same = [trial for trial in singles if not trial.numerics]
        best, patch, unpatched = self._choose([*singles, *pairs, *triples])
        together, limit = list[AdvisedPlan](), same[0].seconds if same else math.inf
        for combined in (pairs, triples):
            least = limit - LEAST_EFFECT * self._now.step_time  # each change has an effect
            faster = [trial for trial in combined if self._gains(trial) and trial.seconds < least]
            first = next((trial for trial in faster[:ATTEMPTS] if self._is_said(trial)), None)
            if first is not None:
                together.append(self._make_plan(first))
                limit = first.seconds
        return ShownAdvice(
            self._now,
            tuple(self._rank(singles)),
            tuple(together),
            best,
            fitting,
            patch,
            unpatched,
            self._words.format.program if self._words is not None else "",
            (self._trials.tried, self._trials.refused, self._untold),
        )

    @cached_property
    def _cost(self) -> float:
        """What a forecast takes, over one of equal layers in a stage: layers that differ are lowered one by one."""
        program = self._now.play.program
        tasks = {id(task): task for task in (*program.tasks, *program.updates)}.values()
        return 1 + sum(len(part.prices.block.ops) for task in tasks for part in task.parts) / USUAL_OPS

    def _count_combinations(self) -> int:
        """Returns the most pairs, and the most triples, that are tried: fewer where a forecast takes long."""
        seconds = measure_size(self._now.play.plan).seconds / USUAL_SECONDS
        return max(LEAST_COMBINATIONS, int(COMBINATIONS / max(1.0, self._cost / 2, seconds)))

    def _check_kept(self, fields: set[str]) -> None:
        """Raises PlanError for a field to keep that no job has, or that no change sets. fields: that changes set."""
        sections = {field.rpartition(".")[0] for field in fields} | {field.partition(".")[0] for field in fields}
        known = sorted({*fields, *sections, *FIELDS} - {""})
        for kept in self._keep:
            if kept not in known:
                raise PlanError("--keep", "advise changes no such field", nearest(kept, known), kept)

    def _is_kept(self, change: PlanChange) -> bool:
        """Returns whether a change sets a field that is to stay as it is."""
        return any(field == kept or field.startswith(f"{kept}.") for field in change.fields for kept in self._keep)

    def _is_useful(self, trial: TriedPlan) -> bool:
        """Returns whether a change saves time or memory."""
        now = self._trials.now
        saved = min(trial.seconds / now.seconds, trial.forecast.held / now.forecast.held)
        return saved < 1 - LEAST_EFFECT

    def _gains(self, trial: TriedPlan) -> bool:
        return trial.seconds < (1 - LEAST_GAIN) * self._now.step_time or not self._fits_now

    @property
    def _fits_now(self) -> bool:
        return self._now.fit.probability >= FITS_AT_ALL

    def _tell(self, trial: TriedPlan) -> TriedPlan | None:
        """Returns a single change as the program can be told it; None if it cannot.

        Of numbers what holds of one holds of all.
        """
        if self._words is None:
            return trial
        (change,) = trial.changes
        form = tuple((field, "number" if type(value) is int else repr(value)) for field, value in change.fields.items())
        said = change if self._known.get(form) else self._words.tell(change, trial.job)
        self._untold += said is None
        self._known[form] = said is change
        if said is None or said is change:
            return trial if said is change else None
        amended = self._trials.forecast(said)
        return amended if amended is not None and self._is_useful(amended) else None

    def _is_said(self, trial: TriedPlan) -> bool:
        """Returns whether the launch file, edited for some changes, is forecast as they are."""
        if self._words is None or not self._words.is_written:
            return True
        try:
            back = forecast_step(self._words.edit(trial.job).job, self._shared)
        except MeshcastError:
            self._untold += 1
            return False
        pairs = (
            (back.step_time, trial.forecast.step_time),
            (back.peak_allocated, trial.forecast.peak_allocated),
        )
        return all(math.isclose(left, right, rel_tol=SAME) for left, right in pairs)

    def _make_plan(self, trial: TriedPlan) -> AdvisedPlan:
        report = self._report(trial)
        return AdvisedPlan(trial, report, self._list_settings(trial), self._now, measure(report))

    def _list_settings(self, trial: TriedPlan) -> tuple[str, ...]:
        """Returns the settings of the launch file that changes are; of a job file none."""
        if self._words is None:
            return ()
        if self._words.is_written:
            return self._words.list_settings(trial.changes[0], trial.job)
        settings = [name for change in trial.changes for name in self._words.list_settings(change, trial.job)]
        return tuple(dict.fromkeys(settings))

    def _rank(self, singles: Sequence[TriedPlan]) -> list[AdvisedPlan]:
        """Returns the fastest change of every field, by the time that it saves for each setting."""
        fastest: dict[str, TriedPlan] = {}
        for trial in singles:
            (change,) = trial.changes
            if len(fastest) < SHOWN and change.key not in fastest and self._gains(trial) and self._is_said(trial):
                fastest[change.key] = trial
        plans = [self._make_plan(trial) for trial in fastest.values()]
        return sorted(plans, key=lambda plan: (plan.trial.numerics, -plan.gain / plan.effort))

    def _find_fitting(self) -> tuple[tuple[FittingChange, tuple[str, ...]], ...]:
        """Returns the cheapest changes that make a plan fit that is tight or does not, with their settings."""
        cheapest = []
        for fitting in fitting_changes(self._now, self._shared, of_any_form=True).fitting:
            change = PlanChange(next(iter(fitting.changes)), fitting.changes, None, None)
            trial = self._trials.forecast(change)
            if trial is not None and self._words is not None and self._words.is_written:
                trial = self._tell(trial)
            if trial is not None and self._trials.fits(trial) and self._is_said(trial):
                saved = self._now.fit.held - trial.forecast.held
                fields = trial.changes[0].fields
                cheapest.append((FittingChange(fields, trial.forecast, saved), self._list_settings(trial)))
        return tuple(cheapest)

    def _choose(self, trials: Sequence[TriedPlan]) -> tuple[AdvisedPlan | None, Patch | None, str]:
        """Returns the fewest changes that come close to the fastest plan, with the edited launch file.

        Of a launch file that is edited in place they are the first ones that are read back as announced.
        """
        kept = sorted((trial for trial in trials if self._gains(trial) and not trial.numerics), key=_take_seconds)
        if not kept:
            return None, None, ""
        limit = kept[0].seconds + LEAST_GAIN * self._now.step_time
        close = [trial for trial in kept if trial.seconds <= limit]
        ordered = sorted(close, key=lambda trial: (len(trial.changes), trial.seconds))
        ordered += [trial for trial in kept if trial.seconds > limit]
        if self._words is None:
            return self._make_plan(ordered[0]), None, ""
        if not self._words.is_written:
            words = f"launch files of {self._words.format.program} are read, not written: edit it by hand"
            return self._make_plan(ordered[0]), None, words
        reason = ""
        for trial in ordered[:ATTEMPTS]:
            try:
                edited = self._words.edit(trial.job)
                agrees, words = compare_edited(trial.job, edited.job, self._words.file.where, self._words.format.name)
            except MeshcastError as error:
                agrees, words = False, str(error)
            if agrees:
                patch = Patch(self._words.file, self._words.format.name, edited, words)
                return self._make_plan(trial), patch, ""
            reason = reason or words
        return self._make_plan(ordered[0]), None, reason


def _take_seconds(trial: TriedPlan) -> float:
    return trial.seconds


class ShownAdvice(Advice):
    """`Advice` that shows itself in notebooks as the page of ``meshcast advise``."""

    def _repr_html_(self) -> str:
        from meshcast.experiments.advice.page import page
        from meshcast.experiments.render.terminal.forecast import to_html

        return to_html(page(self))


def advise(
    job: str | Path | SomeFields,
    changes: str | Iterable[str] | SomeFields = (),
    *,
    keep: Sequence[str] = (),
    base: str | Path | None = None,
    calibration: Calibration | None = None,
    watch: Watch = iter,
) -> Advice:
    """Returns what to change in a job: every change of a single field alone, and the best two and three together.

    job: path of a launch file or of a job file, or the mapping of a job.
    changes: to make first, such as ``cluster=dgx-h100:4``, or a mapping.
    keep: fields that stay as they are, such as ``plan.tp``; ``plan`` for all of the plan.
    base: folder of relative paths in the job; default: the folder of the file, for a mapping the current folder.
    calibration: the coefficients of all costs; by default those that ship with meshcast.
    watch: passes the plans that are tried on, as a progress bar does.

    Only plans are proposed that the program of the job runs, by its own rules, and that its launch file can say.
    Raises PlanError, ModelError or CatalogError for a wrong job, and for one whose plans no search takes.
    """
    loaded = load_job(job, changes, base)
    listed = [changes] if isinstance(changes, str) else [*changes] if not isinstance(changes, Mapping) else []
    file = None if isinstance(job, Mapping) else Path(job)
    return advise_on(loaded, file, listed, keep=keep, calibration=calibration, watch=watch)


def advise_on(
    job: Job,
    file: Path | None = None,
    changes: Sequence[str] = (),
    *,
    keep: Sequence[str] = (),
    calibration: Calibration | None = None,
    watch: Watch = iter,
) -> Advice:
    """Returns what to change in a job that is loaded.

    file: from which it is, a launch file or a job file; None: a mapping. changes: with which it was read.
    keep, calibration, watch: see `advise`.
    """
    launch = read_job(file, changes).launch if file is not None else None
    words = LaunchWords(read_launch_file(file), launch, job) if file is not None and launch is not None else None
    with locate_errors(*job.origin):
        return Adviser(ChangeableJob(job), words, SharedWork(calibration), keep).advise(watch)
