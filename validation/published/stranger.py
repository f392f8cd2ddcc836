"""A published run as a stranger would ask for it: what a job states, and nothing that only its source shows.

Hidden of a run are

- the flags that jobs leave to their program (`FLAGS`), also where the source prints them;
- settings of the plan that the source does not print, but its scripts hold or its program has by convention (`filled`);
- the words by which launchers, recipes and clusters are looked up: the name of the source, of the model and of the
  machine, the settings of a recipe.

A job then gets what its program does by itself. What a stranger states stays: the model, the machine and its network,
the program with its release, formats of products and of main weights, batch, degrees, chunks, schedule, adapters, the
kernels that replace the program's, and of sharding, recomputation and compilation what the source prints.
"""

from __future__ import annotations

from typing import Any

from meshcast.validation.published.recipes import correct_misprints
from meshcast.validation.published.releases import month_of
from meshcast.validation.published.rows import PublishedHardware, PublishedPlan, PublishedRun, Spec, SpecModel
from meshcast.validation.published.stacks import FLAGS, UNPRINTED, framework

STRANGER = "stranger"
"""Source of a run that is told by a stranger."""

READ_ELSEWHERE = ("script", "convention")
"""Reasons of `Spec.filled` why a field is not of the text of the source."""


def hidden_fields(spec: Spec) -> tuple[str, ...]:
    """Returns the fields of a spec that a stranger's job leaves open, though the run is told to have them."""
    reasons = dict(entry.partition(":")[::2] for entry in spec.filled)
    unprinted = (field for field in UNPRINTED if reasons.get(field) in READ_ELSEWHERE)
    return tuple(field for field in (*FLAGS, *unprinted) if _look_up(spec, field) is not None)


def as_stranger(run: PublishedRun) -> PublishedRun:
    """Returns a run as a stranger would tell it."""
    run = correct_misprints(run)
    spec = run.spec
    changes: dict[str, Any] = {"stack_version": month_of(run, framework(spec.stack)) or spec.stack_version}
    for field in hidden_fields(spec):
        part, _, key = field.rpartition(".")
        if part:
            changes[part] = changes.get(part, getattr(spec, part)).model_copy(update={key: None})
        else:
            changes[key] = None
    kernels = f"framework_config {run.kernel_plugin}" if run.kernel_plugin not in ("", "none") else None
    return run.model_copy(
        update={
            "id": STRANGER, "model": None, "cited": kernels, "spec": spec.model_copy(update=changes),
            "plan": PublishedPlan(), "hardware": PublishedHardware(),
        }
    )  # fmt: skip


def _look_up(spec: SpecModel, field: str) -> Any:
    """Returns the value of a field, of a part of a spec with a dot."""
    part, _, key = field.rpartition(".")
    return getattr(getattr(spec, part) if part else spec, key)
