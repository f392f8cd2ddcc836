"""The answer of ``meshcast explain``: how much slower a run is than its forecast, and its causes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from itertools import pairwise

from meshcast.experiments.diagnosis.detector import Cause, detectors
from meshcast.experiments.diagnosis.evidence import RunEvidence
from meshcast.experiments.diagnosis.steps import StepTimes
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.records import dataclass
from meshcast.simulator.report.formatting import format_seconds

APART = {"skipped steps", "long warm-up"}
"""Causes whose seconds are neither those of pauses nor of steady steps."""


@dataclass(frozen=True)
class Explanation:
    """Why a run is slower than its forecast.

    Attributes:
        files: the files that were read, each with what it is.
        evidence: what is known of the run.
        causes: that take the most seconds first; those whose seconds are not known last.
        questions: where log and job disagree on what a step is: the forecast may be of another run.
        patterns: pauses that the evidence does not explain.
        notes: on what was read.
    """

    files: tuple[tuple[str, str], ...]
    evidence: RunEvidence
    causes: tuple[Cause, ...]
    questions: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def expected(self) -> float | None:
        """Forecast of the step [s]; None without a job, or if it is that of another run."""
        report = self.evidence.report
        return report.step_time if report is not None and not self.questions else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """90 % interval of the forecast [s]."""
        return self.evidence.report.interval_90 if self.evidence.report is not None and self.expected else None

    @property
    def measured(self) -> float | None:
        """Mean of a measured step with its pauses [s]; None: no file has times of steps."""
        steps = self.evidence.steps
        return (steps.mean if steps is not None else self.evidence.step) or None

    @property
    def pauses(self) -> float:
        """Seconds of a mean step that single longer steps, and time between steps, add."""
        return self.evidence.steps.paused if self.evidence.steps is not None else 0.0

    @property
    def steady_excess(self) -> float | None:
        """Seconds by which a step without pauses is longer than forecast; below 0: it is shorter; None: not known."""
        return self.evidence.step - self.expected if self.expected is not None and self.measured is not None else None

    @property
    def unexplained(self) -> float | None:
        """Seconds of every step beyond the forecast that no cause takes; None: not known."""
        if self.steady_excess is None:
            return None
        return max(0.0, self.steady_excess - self.sum_causes(pauses=False))

    @property
    def unexplained_pauses(self) -> float:
        """Seconds of pauses for each step that no cause takes."""
        return max(0.0, self.pauses - self.sum_causes(pauses=True))

    def sum_causes(self, pauses: bool) -> float:
        """Returns the seconds of a step that all causes take, of single steps or of every one."""
        return sum(cause.seconds or 0.0 for cause in self.causes if cause.pauses == pauses and cause.name not in APART)

    def to_dict(self) -> Fields:
        """Returns the JSON answer; times in seconds."""
        return {
            "files": [{"file": file, "kind": kind} for file, kind in self.files],
            "expected_s": self.expected,
            "interval_90_s": list(self.interval) if self.interval else None,
            "measured": self._describe_measured(),
            "slower_s": {"every step": self.steady_excess, "pauses": self.pauses},
            "causes": [cause.to_dict() for cause in self.causes],
            "unexplained_s": {"every step": self.unexplained, "pauses": self.unexplained_pauses},
            "patterns": list(self.patterns),
            "questions": list(self.questions),
            "notes": list(self.notes),
        }

    def _describe_measured(self) -> Fields | None:
        steps = self.evidence.steps
        if steps is None:
            return {"mean_s": self.measured} if self.measured else None
        drift = steps.drift
        return {
            "mean_s": steps.mean,
            "median_s": steps.typical,
            "p5_s": steps.percentile(5),
            "p95_s": steps.percentile(95),
            "steps": steps.steps,
            "lines": len(steps.intervals),
            "left_out": len(steps.warm),
            "drift": {"from_s": drift[0], "to_s": drift[1], "at_step": drift[2]} if drift else None,
        }


def describe_surplus(explanation: Explanation) -> Iterable[str]:
    """Yields a note if the causes of every step take more than a step is longer than forecast."""
    if explanation.steady_excess is not None:
        surplus = explanation.sum_causes(pauses=False) - max(explanation.steady_excess, 0.0)
        if surplus > explanation.evidence.least:
            yield (
                f"causes of every step take {format_seconds(surplus)} more than it is longer than forecast: they "
                "overlap, or the forecast is too long"
            )


def find_causes(evidence: RunEvidence) -> tuple[Cause, ...]:
    """Returns the causes that all detectors find, ranked."""
    causes = [cause for detector in detectors().values() for cause in detector.find(evidence)]
    return tuple(sorted(causes, key=lambda cause: (cause.seconds is None, -(cause.seconds or 0.0), cause.name)))


def find_patterns(steps: StepTimes, causes: Iterable[Cause]) -> tuple[str, ...]:
    """Returns what pauses have in common that no cause takes."""
    taken = sum(cause.seconds or 0.0 for cause in causes if cause.pauses and cause.name not in APART)
    rest = steps.paused - taken
    if not steps.pauses or rest < 0.01 * steps.typical:
        return ()
    numbers = [interval.line.number for interval in steps.pauses]
    apart = [later - earlier for earlier, later in pairwise(numbers)]
    words = f"{len(numbers)} of {len(steps.intervals)} lines are of longer steps, {format_seconds(rest)} for each step"
    if len(apart) >= 3 and max(apart) - min(apart) <= 0.1 * min(apart):
        return (f"{words}, one each {round(sum(apart) / len(apart))} steps: no setting that is known has this period",)
    return (f"{words}, at no period; the longest is step {max(steps.pauses, key=lambda i: i.excess).line.number}",)
