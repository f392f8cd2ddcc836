"""Differences of jobs: the fields that they state differently, and labels that tell the jobs apart by few of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from meshcast.hardware.records import dataclass
from meshcast.simulator.job.job import Job

UNCOMPARED = ("published", "origin")
"""Fields of a job that change no forecast."""

SCHEMES = "plan.schemes"

TELLING = ("cluster", "model", "framework", "plan.mesh", SCHEMES, "plan", "batch", "precision")
"""Fields by which jobs are labelled, with those below them: what a user chooses first stands first."""

REMAINDER = "plan.mesh.dp"
"""Field that follows from others: of labels of the same length it stands in the last."""

MAX_TRIED, MAX_PHRASES = 20, 4
"""Fields among which those of labels are chosen, and maximum number of these; with more, labels have all fields."""

MAX_LETTERS = 28
"""Maximum length of a value in a label; longer values are cut."""


@dataclass(frozen=True)
class ChangedField:
    """A field that jobs state differently.

    values: one a job; None: the job has no such field.
    """

    field: str
    values: tuple[object, ...]


def list_changes(jobs: Sequence[Job]) -> list[ChangedField]:
    """Returns the fields that differ, in the order of the first job, then those that only later jobs have."""
    stated = [dict(_list_fields(job.to_dict())) for job in jobs]
    names = dict.fromkeys(name for fields in stated for name in fields if name.partition(".")[0] not in UNCOMPARED)
    changes = [ChangedField(name, tuple(fields.get(name) for fields in stated)) for name in names]
    return [change for change in changes if any(value != change.values[0] for value in change.values)]


def label_jobs(jobs: Sequence[Job]) -> list[str]:
    """Returns a label a job: the values of as few fields as tell all jobs apart, such as ``tp 4, zero-1``.

    Jobs that differ in nothing are numbered.
    """
    changes = sorted(_join_schemes(list_changes(jobs)), key=lambda change: _rank(change.field))
    chosen = _choose_fields(changes, len(jobs))
    keys = [change.field.rpartition(".")[2] for change in changes]
    labels = [", ".join(_phrase(change, job, keys) for change in chosen) for job in range(len(jobs))]
    labels = [label or "the same job" for label in labels]
    return [
        f"{label} ({labels[: job + 1].count(label)})" if labels.count(label) > 1 else label
        for job, label in enumerate(labels)
    ]


def _choose_fields(changes: Sequence[ChangedField], jobs: int) -> Sequence[ChangedField]:
    """Returns the fewest fields that tell as many jobs apart as all do; of as few the first."""
    wanted = _count_distinct(changes, jobs)
    for size in range(MAX_PHRASES + 1):
        for chosen in combinations(changes[:MAX_TRIED], size):
            if _count_distinct(chosen, jobs) == wanted:
                return chosen
    return changes


def _count_distinct(changes: Sequence[ChangedField], jobs: int) -> int:
    return len({tuple(repr(change.values[job]) for change in changes) for job in range(jobs)})


def _rank(field: str) -> tuple[bool, int]:
    places = (place for place, prefix in enumerate(TELLING) if field == prefix or field.startswith(f"{prefix}."))
    return field == REMAINDER, next(places, len(TELLING))


def _join_schemes(changes: Sequence[ChangedField]) -> list[ChangedField]:
    """Makes the schemes of a kind a single field, such as ``plan.schemes.data``, whose values are their names."""
    joined: dict[str, ChangedField] = {}
    for change in changes:
        kind, slash, name = change.field.removeprefix(f"{SCHEMES}.").partition("/")
        if not (change.field.startswith(f"{SCHEMES}.") and slash):
            joined[change.field] = change
        elif "." not in name:
            field = f"{SCHEMES}.{kind}"
            before = joined[field].values if field in joined else (None,) * len(change.values)
            used = [name if value else None for value in change.values]
            both = zip(before, used, strict=True)
            joined[field] = ChangedField(
                field, tuple("+".join(str(name) for name in pair if name) or None for pair in both)
            )
        elif not name.endswith(".over"):
            joined[change.field] = change
    return list(joined.values())


def _phrase(change: ChangedField, job: int, keys: Sequence[str]) -> str:
    """Returns the words for a field of a job. keys: last keys of all fields that differ."""
    value, key = change.values[job], change.field.rpartition(".")[2]
    words = write_value(value)
    if len(words) > MAX_LETTERS:
        words = f"{words[: MAX_LETTERS - 3]}..."
    if change.field in ("cluster", "model", "framework.name", "framework.release") and value is not None:
        return words
    if change.field.rpartition(".")[0] == SCHEMES:
        return words if value is not None else f"no {key} scheme"
    name = key if keys.count(key) == 1 else change.field
    return f"no {name}" if value is None else f"{name} {words}"


def write_value(value: object) -> str:
    """Returns the value of a field as it is shown."""
    if isinstance(value, float):
        return f"{value:g}"
    return "-" if value in (None, "") else value if isinstance(value, str) else json.dumps(value)


def _list_fields(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yields the leaves of nested mappings by their paths; the schemes of a plan by their names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _list_fields(inner, f"{path}.{key}" if path else str(key))
    elif path == SCHEMES and isinstance(value, list):
        for entry in value:
            use = entry["use"]
            yield f"{path}.{use}", "used"
            yield from _list_fields({key: inner for key, inner in entry.items() if key != "use"}, f"{path}.{use}")
    else:
        yield path, value
