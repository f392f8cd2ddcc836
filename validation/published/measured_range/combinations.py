"""Combinations of schemes that published runs have measured, each with the ranges of its numbers and its sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from meshcast.hardware.load import read_yaml
from meshcast.hardware.records import dataclass
from meshcast.validation.published.measured_range.plan_fields import NAMED, NUMBERS, PlanFields, TrainingTask

FILE = "combinations.yaml"


@dataclass(frozen=True)
class Combination:
    """Schemes that were run together.

    names: schemes by field of `NAMED`, in their order.
    ranges: least and largest value by field of `NUMBERS`, in their order.
    runs: published runs.
    sources: of these runs.
    """

    task: TrainingTask
    names: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    runs: int
    sources: tuple[str, ...]

    def list_outside(self, fields: PlanFields) -> list[str]:
        """Lists the fields of a plan that this combination does not have, or whose number is outside its range."""
        named = [key for key, name in zip(NAMED, self.names, strict=True) if getattr(fields, key) != name]
        bounds = zip(NUMBERS, self.ranges, strict=True)
        return named + [key for key, (low, high) in bounds if not low <= getattr(fields, key) <= high]


@dataclass(frozen=True)
class MeasuredPlan:
    """The plan of a published run."""

    task: TrainingTask
    fields: PlanFields
    source: str


def condense(plans: Iterable[MeasuredPlan]) -> list[Combination]:
    """Returns the combinations of some plans, in the order of their tasks and names."""
    groups: dict[tuple[TrainingTask, tuple[str, ...]], list[MeasuredPlan]] = {}
    for plan in plans:
        groups.setdefault((plan.task, tuple(getattr(plan.fields, key) for key in NAMED)), []).append(plan)
    combinations = []
    for (task, names), same in groups.items():
        columns = ([getattr(plan.fields, key) for plan in same] for key in NUMBERS)
        ranges = tuple((min(column), max(column)) for column in columns)
        combinations.append(Combination(task, names, ranges, len(same), tuple(sorted({plan.source for plan in same}))))
    return sorted(
        combinations, key=lambda entry: (entry.task.architecture, entry.task.program, entry.task.kind, entry.names)
    )


def find_nearest(fields: PlanFields, known: Sequence[Combination]) -> tuple[Combination, list[str]]:
    """Returns the combination with the fewest fields outside of it, of several that of most runs, and these fields."""
    pairs = ((entry, entry.list_outside(fields)) for entry in known)
    return min(pairs, key=lambda pair: (len(pair[1]), -pair[0].runs))


@cache
def measured_combinations(task: TrainingTask) -> tuple[Combination, ...]:
    """Returns the measured combinations of a task; empty if nobody has published a run of it."""
    return tuple(entry for entry in read_combinations() if entry.task == task)


@cache
def read_combinations() -> tuple[Combination, ...]:
    """Reads all measured combinations: the table that ships with meshcast."""
    table = read_yaml(resources.files("meshcast.validation.published.measured_range") / FILE).data
    return tuple(_read(entry) for entry in table)


def _read(entry: dict[str, Any]) -> Combination:
    names = tuple(str(entry.get(key, "")) for key in NAMED)
    ranges = []
    for key in NUMBERS:
        value = entry.get(key, 1)
        low, high = value if isinstance(value, list) else (value, value)
        ranges.append((int(low), int(high)))
    task = TrainingTask(entry["architecture"], entry["program"], entry["class"])
    return Combination(task, names, tuple(ranges), int(entry["runs"]), tuple(entry["sources"]))


def write_entry(entry: Combination) -> dict[str, Any]:
    """Returns the entry of a combination in the table: without empty names and numbers that are 1."""
    task = {"architecture": entry.task.architecture, "program": entry.task.program, "class": entry.task.kind}
    names = {key: name for key, name in zip(NAMED, entry.names, strict=True) if name}
    pairs = [(key, low, high) for key, (low, high) in zip(NUMBERS, entry.ranges, strict=True) if high > 1]
    numbers = {key: low if low == high else [low, high] for key, low, high in pairs}
    return {**task, **names, **numbers, "runs": entry.runs, "sources": list(entry.sources)}
