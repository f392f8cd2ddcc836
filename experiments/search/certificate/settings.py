"""Settings of jobs beside their plans: the task, which compared jobs have in common, framework and precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from meshcast.experiments.search.space.fields import FIELDS
from meshcast.simulator.job.job import Job

TASK = {
    "model": "the model",
    "cluster": "the cluster",
    "batch": "the batch",
    "train": "the set of parameters that are trained",
}
"""Parts of a job that are its task, in words."""

NOT_OF_TASK = ("name", "title", "source", "assumed", "micro", "microbatches")
"""Fields of these parts that are names, or of the plan."""

JOB_KEYS = {"total": "global", "used": "gpus"}
"""Keys in a job file, where fields have other names."""

NO_TRAITS = ("title", "source", "weights", "quantised", "gradients", "main_weights", "moments")
"""Fields of a framework that are descriptions, or that the precision of the job states."""


def find_other_task(searched: Job, compared: Job) -> tuple[str, str, Any, Any] | None:
    """Returns the first part of the task that differs: the part in words, the field, its value in `compared` and in
    `searched`; None if both jobs have the same task."""
    for part, words in TASK.items():
        wanted, other = getattr(searched, part), getattr(compared, part)
        if part == "cluster":
            names = [f"{cluster.gpus:,} x {cluster.gpu.name}" for cluster in (other, wanted)]
            if names[0] != names[1]:
                return words, part, names[0], names[1]
        for key in type(wanted).model_fields:
            value, theirs = getattr(other, key), getattr(wanted, key)
            if key not in NOT_OF_TASK and value != theirs:
                return words, f"{part}.{JOB_KEYS.get(key, key)}", _to_scalar(value), _to_scalar(theirs)
    return None


def differing_settings(searched: Job, compared: Job) -> dict[str, tuple[Any, Any]]:
    """Returns fields of framework and precision that differ, in `searched` and in `compared`. Of another framework it
    is its name alone; fields that a search varies are of the plan."""
    framework, other = searched.framework, compared.framework
    if framework.name != other.name:
        pairs: dict[str, tuple[Any, Any]] = {"framework.name": (framework.name, other.name)}
    else:
        stated = [
            dict(_leaves(profile.model_dump(exclude=set(NO_TRAITS)), "framework.set")) for profile in (framework, other)
        ]
        pairs = {field: (stated[0].get(field), stated[1].get(field)) for field in {**stated[0], **stated[1]}}
    precisions = [job.precision.model_dump() for job in (searched, compared)]
    pairs |= {f"precision.{key}": (value, precisions[1][key]) for key, value in precisions[0].items()}
    return {field: pair for field, pair in pairs.items() if field not in FIELDS and pair[0] != pair[1]}


def _leaves(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def _to_scalar(value: Any) -> Any:
    return value if isinstance(value, int | float | str) else "none" if value is None else "another one"
