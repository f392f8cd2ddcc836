"""What an import and an export of a launch file give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import Any

from meshcast.hardware.errors import PlanError, escape_controls, to_line
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.launch.table import SomeKeys, Stated
from meshcast.simulator.formats.launch.verdicts import ApproximatedSetting, Findings, Question


class OpenQuestions(PlanError):
    """What of a launch file decides the plan or the memory, and was not understood: it has no forecast.

    Args:
        where: the file.
        questions: what is open, each with its line and what answers it.
    """

    def __init__(self, where: str, questions: tuple[Question, ...]) -> None:
        lines = "".join(f"\n  {to_line(str(question))}" for question in questions)
        rule = f"it leaves open what decides the answer:{lines}\nEach line ends with what answers it"
        super().__init__(where, rule, "--assume-defaults forecasts without an answer")
        self.questions = questions

    @staticmethod
    def _escape(text: str) -> str:
        return escape_controls(text)

    def to_dict(self) -> dict[str, Any]:
        """Returns the error object in answers of ``--json``."""
        return super().to_dict() | {"questions": [asdict(question) for question in self.questions]}


@dataclass(frozen=True)
class ImportedJob:
    """A launch file as a job.

    job: the keys of a job file.
    comments: what is behind its dotted keys.
    assumed: keys that the file does not state, with the reason.
    assumed_values: what is assumed of them.
    findings: the settings of the file: taken, without influence, approximated, open.
    where: the file.
    form: name of its format.
    places: file, line and name of the setting behind each key.
    microbatches: of a replica, where the file leaves out the global batch, which then follows from them.
    checkpoints: ``run.checkpoints`` as the file states them. They are no keys of `job`, for a sweep of a job with such
        keys simulates whole runs; ``meshcast run`` alone reads them.
    bounding: approximated settings whose error a second forecast bounds, each with the job of that forecast.
    settings: of the file and of those beside it, by their normalised names.
    """

    job: dict[str, Any]
    comments: Mapping[str, str]
    assumed: Mapping[str, str]
    assumed_values: SomeKeys
    findings: Findings
    where: str
    form: str
    places: Mapping[str, str] = field(default_factory=dict)
    microbatches: int | None = None
    checkpoints: SomeKeys = field(default_factory=dict)
    bounding: tuple[tuple[ApproximatedSetting, dict[str, Any]], ...] = ()
    settings: Mapping[str, Stated] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer of ``import --json``."""
        return {
            "job": self.job,
            "assumed": [{"key": key, "why": why} for key, why in self.assumed.items()],
            "taken": [asdict(entry) for entry in self.findings.taken],
            "without_influence": [asdict(entry) for entry in self.findings.ignored],
            "approximated": [asdict(entry) for entry in self.findings.approximated],
            "questions": [asdict(question) for question in self.findings.questions],
        }


@dataclass(frozen=True)
class Exported:
    """A job as a launch file.

    suffix: of its name.
    unsaid: keys that the file cannot say, each with what the job says and what the program would run.
    """

    text: str
    suffix: str
    unsaid: Mapping[str, tuple[Any, Any]]
