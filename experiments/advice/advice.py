"""What to change in a job: changed plans, what each is worth, and the edited launch file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from meshcast.experiments.advice.neighbours import PlanChange
from meshcast.experiments.advice.trials import TriedPlan
from meshcast.experiments.explain.edited_launch import EditedLaunch, diff_edits, list_edits
from meshcast.experiments.explain.fitting_changes import FittingChange
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import GIB
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.program.categories import COMPUTING, EXPOSED
from meshcast.simulator.report.report import Report
from meshcast.validation.published.measured_range.distance import Distance, distance_from_measured

LEAST_GAIN = 0.005
"""Share of the step that a change must save to be shown: what is less cannot be told apart, nor measured easily."""

TERMS: Mapping[str, tuple[str, ...]] = {
    "compute": COMPUTING,
    "exposed": EXPOSED,
    "bubble": ("bubble",),
    "other": ("host", "idle"),
}
"""Parts of the step by where a change is worth something."""


@dataclass(frozen=True)
class AdvisedPlan:
    """A job with one or more changes, its forecast, and what they are to the program.

    trial: the job with the changes.
    report: its forecast.
    settings: the settings of the launch file that say so, in the program's own words; of each single change where it is
        one of several.
    now: the forecast of the job as it is.
    distance: of the plan from what somebody has measured.
    """

    trial: TriedPlan
    report: Report
    settings: tuple[str, ...]
    now: Report
    distance: Distance

    @property
    def changes(self) -> tuple[PlanChange, ...]:
        return self.trial.changes

    @property
    def gain(self) -> float:
        """Share of the time for the same tokens that is saved; below 0: it takes longer."""
        return 1 - self.trial.seconds / self.now.step_time

    @property
    def effort(self) -> int:
        """Settings to edit, or fields of the job."""
        return len(self.settings) or sum(len(change.fields) for change in self.changes)

    @cached_property
    def terms(self) -> dict[str, float]:
        """Change of each part of the step [s], for the same tokens; below 0: it is shorter."""
        before, after = self.now.parts, self.report.parts
        return {
            name: sum(after[key] for key in keys) / self.trial.batch - sum(before[key] for key in keys)
            for name, keys in TERMS.items()
        }

    @property
    def measured_runs(self) -> int:
        """Published runs of a plan like this; 0: nobody has published any."""
        return self.distance.nearest.runs if self.distance.measured and self.distance.nearest else 0

    def to_dict(self) -> Fields:
        """Returns the plan in the JSON answer."""
        return {
            "step_time_s": self.trial.seconds,
            "peak_allocated_gib": self.report.peak_allocated / GIB,
            "fits_probability": self.trial.probability,
            "gain": self.gain,
            "terms": self.terms,
            "numerics": self.trial.numerics,
            "measured_runs": self.measured_runs,
            "measured": str(self.distance),
        }


@dataclass(frozen=True)
class Patch:
    """A launch file that was edited for the best changes, and is forecast as announced.

    file: as it is. form: name of its format.
    edited: its texts, and the settings that were changed.
    words: a sentence on its forecast.
    """

    file: LaunchFile
    form: str
    edited: EditedLaunch
    words: str

    @property
    def diff(self) -> list[str]:
        """The lines of a unified diff of all files that are edited."""
        return diff_edits(list_edits(self.file, self.edited.files))


@dataclass(frozen=True)
class Advice:
    """What to change in a job.

    now: its forecast as it is.
    changes: single changes that save time and fit, by the time that they save for each setting to edit.
    together: the best two, and the best three, together; without those that change the numerics of the training.
    best: the fewest changes that come within `LEAST_GAIN` of the fastest; None: none saves as much.
    fitting: where the plan is tight or does not fit, the cheapest changes that make it fit.
    patch: the edited launch file of the best changes; None of a job file, and where it is not edited so.
    unpatched: why there is no patch; empty if there is one.
    program: the training program; empty of a job file.
    trials: number of plans that were forecast, that a rule excludes, and that the program cannot be told.
    """

    now: Report
    changes: tuple[AdvisedPlan, ...]
    together: tuple[AdvisedPlan, ...]
    best: AdvisedPlan | None
    fitting: tuple[tuple[FittingChange, tuple[str, ...]], ...]
    patch: Patch | None
    unpatched: str
    program: str
    trials: tuple[int, int, int]

    def to_dict(self, patched: str | None = None) -> Fields:
        """Returns the JSON answer. patched: the file that was written."""
        answer = self.now.to_dict()
        keys = ("step_time_s", "interval_90_s", "breakdown_s", "limits", "status", "assumed")
        fit = {
            "peak_allocated_gib": self.now.peak_allocated / GIB,
            "fits_probability": self.now.fit.probability,
        }
        tried, refused, untold = self.trials
        return {
            "base": {key: answer[key] for key in keys} | fit | {"measured": str(measure(self.now))},
            "changes": [describe_single(plan) for plan in self.changes],
            "together": [describe_together(plan) for plan in self.together],
            "best": describe_together(self.best) if self.best else None,
            "fitting": [{**change.to_dict(), "flag": "; ".join(flags)} for change, flags in self.fitting],
            "patched": patched,
            "diff": self.patch.diff if self.patch else None,
            "read_back": self.patch.words if self.patch else self.unpatched or None,
            "tried": {"forecast": tried, "against_a_rule": refused, "not_told": untold},
        }


def describe_single(plan: AdvisedPlan) -> Fields:
    """Returns a single change in the JSON answer."""
    (change,) = plan.changes
    return {**describe_change(change), "flag": "; ".join(plan.settings) or None, **plan.to_dict()}


def describe_together(plan: AdvisedPlan) -> Fields:
    """Returns several changes in the JSON answer."""
    changes = [describe_change(change) for change in plan.changes]
    return {"changes": changes, "flag": "; ".join(plan.settings) or None, **plan.to_dict()}


def describe_change(change: PlanChange) -> Fields:
    """Returns a change in the JSON answer."""
    before = list(change.before) if isinstance(change.before, tuple) else change.before
    return {"key": change.key, "from": before, "to": change.after, "fields": change.fields}


def measure(report: Report) -> Distance:
    """Returns how far a plan is from what somebody has measured."""
    return distance_from_measured(report.play.plan)
