"""Compares forecasts: which fields of the jobs differ, and by how much each part of the step and of memory does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from meshcast.hardware.documents.plain_data import SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.job.differences import ChangedField, label_jobs, list_changes
from meshcast.simulator.job.job import Job
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import FIGURES, parts_of_step
from meshcast.simulator.report.report import Report

HEADLINES = ("step_time_s", "interval_low_s", "interval_high_s", "tokens_per_s_per_gpu", "mfu_palm", "mfu_causal")
"""Figures that are compared besides the parts of the step."""

LENGTHS = ("days", "cost")
"""Figures of a whole training, which are compared where every job has them."""

MAX_JOBS = len(ascii_uppercase)
"""Maximum number of jobs: each has a letter."""


@dataclass(frozen=True)
class ForecastComparison:
    """Forecasts, the first as the base of differences.

    Attributes:
        reports: the forecasts.
    """

    reports: tuple[Report, ...]

    @property
    def letters(self) -> str:
        """A letter a job, from A on."""
        return ascii_uppercase[: len(self.reports)]

    @property
    def labels(self) -> list[str]:
        """A label a job, of the fields that tell the jobs apart."""
        return label_jobs([report.job for report in self.reports])

    @property
    def changes(self) -> list[ChangedField]:
        """Fields that differ."""
        return list_changes([report.job for report in self.reports])

    @property
    def figures(self) -> dict[str, list[float]]:
        """Headline figures by their names, a value a job."""
        answers = [report.to_dict() for report in self.reports]
        figures = {name: [FIGURES[name].read(answer) for answer in answers] for name in HEADLINES}
        for name in LENGTHS:
            values = [value for report in self.reports if (value := FIGURES[name].compute(report)) is not None]
            if len(values) == len(self.reports):
                figures[name] = values
        return figures

    @property
    def parts(self) -> dict[str, tuple[float, ...]]:
        """Parts of the step that any forecast has [s], by their keys in `breakdown_s`."""
        parts = {
            key: tuple(figure.compute(report) or 0.0 for report in self.reports)
            for key, figure in parts_of_step().items()
        }
        return {key: seconds for key, seconds in parts.items() if any(seconds)}

    @property
    def memory(self) -> dict[str, tuple[float, ...]]:
        """Memory of the fullest stage of each forecast by category [GiB]."""
        stages = (report.to_dict()["memory"]["stages"] for report in self.reports)
        fullest = [max(every, key=lambda stage: stage["peak_allocated_gib"])["by"] for every in stages]
        kept = [category for category in CATEGORIES if any(by.get(category) for by in fullest)]
        return {category: tuple(by.get(category, 0.0) for by in fullest) for category in kept}

    def sentence(self) -> str:
        """Returns which forecast is the fastest, by how much, and which part makes most of the difference."""
        times = [report.step_time for report in self.reports]
        if len(set(times)) == 1:
            return "Both steps take equally long." if len(times) == 2 else "All steps take equally long."
        if len(times) == 2:
            ratio, base, other = times[1] / times[0], 0, 1
            words = f"The second step takes {abs(ratio - 1):.1%} {'less' if ratio < 1 else 'more'} time than the first"
        else:
            other, base = times.index(min(times)), times.index(max(times))
            names = [f"{letter} ({label})" for letter, label in zip(self.letters, self.labels, strict=True)]
            share = f"{1 - times[other] / times[base]:.1%}"
            words = f"{names[other]} has the shortest step, {share} less than {names[base]}, the longest"
        key, seconds = max(self.parts.items(), key=lambda item: abs(item[1][other] - item[1][base]))
        difference = 1e3 * (seconds[other] - seconds[base])
        return f"{words}; the largest difference is {parts_of_step()[key].label}, {difference:+,.1f} ms."

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON answer; a list has a value a job."""
        answers = [report.to_dict() for report in self.reports]
        return {
            "labels": self.labels,
            "changes": [{"field": change.field, "values": [*change.values]} for change in self.changes],
            **self.figures,
            "fits": [report.fits for report in self.reports],
            "breakdown_s": {key: list(seconds) for key, seconds in self.parts.items()},
            "peak_allocated_gib": [answer["memory"]["peak_allocated_gib"] for answer in answers],
            "peak_device_gib": [answer["memory"]["peak_device_gib"] for answer in answers],
            "memory_gib": {category: list(gib) for category, gib in self.memory.items()},
            "sentence": self.sentence(),
        }


def compare(*jobs: Job | str | Path | SomeFields, base: str | Path | None = None) -> ForecastComparison:
    """Forecasts jobs and compares them; the first is the base of differences.

    jobs: two or more: as `load_job` returns or reads them.
    base: folder of relative paths in mappings.
    Raises PlanError for a single job, or for more than there are letters.
    """
    from meshcast.simulator import load_job, simulate

    check_number(jobs)
    return ForecastComparison(
        tuple(simulate(job if isinstance(job, Job) else load_job(job, base=base)) for job in jobs)
    )


def check_number(jobs: Sequence[object]) -> None:
    """Raises PlanError for a number of jobs that cannot be compared."""
    if len(jobs) < 2:
        raise PlanError("compare", "it takes two jobs", "Name a second job")
    if len(jobs) > MAX_JOBS:
        rule = f"at most {MAX_JOBS} jobs are compared"
        raise PlanError("compare", rule, "Name fewer, or forecast them with meshcast sweep", len(jobs))
