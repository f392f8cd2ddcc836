"""Compares two forecasts: which fields of the jobs differ, and by how much each part of the step and of memory does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.job import Job
from meshcast.simulator.program.memory_profile import CATEGORIES
from meshcast.simulator.report.figures import FIGURES, parts_of_step
from meshcast.simulator.report.report import Report

HEADLINES = ("step_time_s", "tokens_per_s_per_gpu", "mfu_palm", "mfu_causal")
"""Figures that are compared besides the parts of the step."""

UNCOMPARED = ("published", "origin")
"""Fields of a job that change no forecast."""


@dataclass(frozen=True)
class ChangedField:
    """A field that two jobs state differently; None: the job has no such field."""

    field: str
    first: Any
    second: Any


@dataclass(frozen=True)
class ForecastComparison:
    """Two forecasts, the first as the base of differences."""

    first: Report
    second: Report

    @property
    def changes(self) -> list[ChangedField]:
        """Fields that differ, in the order of the first job, then those that only the second has."""
        before, after = (dict(_fields(report.job.to_dict())) for report in (self.first, self.second))
        fields = [field for field in {**before, **after} if field.partition(".")[0] not in UNCOMPARED]
        changes = [ChangedField(field, before.get(field), after.get(field)) for field in fields]
        return [change for change in changes if change.first != change.second]

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Parts of the step that either forecast has [s], by their keys in `breakdown_s`."""
        parts = {
            key: (figure.compute(self.first) or 0.0, figure.compute(self.second) or 0.0)
            for key, figure in parts_of_step().items()
        }
        return {key: pair for key, pair in parts.items() if any(pair)}

    @property
    def memory(self) -> dict[str, tuple[float, float]]:
        """Memory of the fullest stage of each forecast by category [GiB]."""
        stages = (report.to_dict()["memory"]["stages"] for report in (self.first, self.second))
        before, after = (max(every, key=lambda stage: stage["peak_allocated_gib"])["by"] for every in stages)
        kept = [category for category in CATEGORIES if before.get(category) or after.get(category)]
        return {category: (before.get(category, 0.0), after.get(category, 0.0)) for category in kept}

    def sentence(self) -> str:
        """Returns which forecast is faster, by how much, and which part makes most of the difference."""
        times = self.first.step_time, self.second.step_time
        if times[0] == times[1]:
            return "Both steps take equally long."
        ratio = times[1] / times[0]
        faster = f"The second step takes {abs(ratio - 1):.1%} {'less' if ratio < 1 else 'more'} time than the first"
        key, (before, after) = max(self.parts.items(), key=lambda item: abs(item[1][1] - item[1][0]))
        return f"{faster}; the largest difference is {parts_of_step()[key].label}, {1e3 * (after - before):+,.1f} ms."

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON answer."""
        answers = [report.to_dict() for report in (self.first, self.second)]
        figures = {name: [FIGURES[name].read(answer) for answer in answers] for name in HEADLINES}
        return {
            "changes": [{"field": change.field, "values": [change.first, change.second]} for change in self.changes],
            **figures,
            "fits": [report.fits for report in (self.first, self.second)],
            "breakdown_s": {key: list(pair) for key, pair in self.parts.items()},
            "peak_allocated_gib": [answer["memory"]["peak_allocated_gib"] for answer in answers],
            "memory_gib": {category: list(pair) for category, pair in self.memory.items()},
            "sentence": self.sentence(),
        }


def compare(first: Job, second: Job) -> ForecastComparison:
    from meshcast.simulator import simulate

    return ForecastComparison(simulate(first), simulate(second))


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings by their paths; the schemes of a plan by their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _fields(inner, f"{path}.{key}" if path else str(key))
    elif path == "plan.schemes":
        for entry in value:
            use = entry["use"]
            yield f"{path}.{use}", "used"
            yield from _fields({key: inner for key, inner in entry.items() if key != "use"}, f"{path}.{use}")
    else:
        yield path, value
