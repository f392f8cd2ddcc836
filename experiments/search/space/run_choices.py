"""The choices of a run that a search compares for every plan: checkpoints, spare nodes, what to do without a node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from meshcast.experiments.search.space.fields import AUTO
from meshcast.experiments.sweeps.grid import apply_changes
from meshcast.hardware.documents.plain_data import Fields, SomeFields
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.runs.least_run import LeastRun

Figure = TypeVar("Figure", float, np.ndarray)

DAY = 86_400.0

CHECKPOINTS, RECOVERY = "run.checkpoints", "run.recovery"
KIND, EVERY_S, ELASTIC = f"{CHECKPOINTS}.kind", f"{CHECKPOINTS}.every_s", f"{RECOVERY}.elastic"

AUTOMATIC: dict[str, tuple[Any, ...]] = {
    KIND: ("sharded", "asynchronous", "in-memory", "just-in-time"),
    f"{RECOVERY}.spares": (0, 1, 2, 4, 8),
    ELASTIC: ("none", "fewer-replicas", "templates", "reroute", "redundant"),
}
"""Values that are tried of a field that is ``auto``."""

INTERVALS = (0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0)
"""Intervals between checkpoints that ``auto`` tries, over the best interval by Daly's formula."""

WITHOUT_INTERVAL = ("none", "just-in-time")
"""Kinds of checkpoints without an interval."""


class RunChoice(NamedTuple):
    """Values of the open fields of a run.

    changes: values of the open fields of the run; null where a field makes no difference, or has its default.
    least: lower bounds of its runs.
    """

    changes: Fields
    least: LeastRun

    def apply(self, job: Fields) -> Fields:
        return _apply(job, self.changes)


@dataclass(frozen=True)
class RunChoices:
    """The choices among which a search decides how a training runs: checkpoints, spares and recovery.

    open: fields of the run that vary.
    refused: number of choices that the cluster does not admit.
    """

    open: tuple[str, ...]
    choices: tuple[RunChoice, ...]
    refused: int = 0

    @property
    def seeds(self) -> int:
        """Number of runs that are simulated of each plan and choice."""
        return self.choices[0].least.seeds

    def bound_days(self, step: Figure) -> Figure:
        """Returns the least days of a plan with any choice. step: lower bound of its step [s]; also an array."""
        return _least([choice.least.seconds(step) / DAY for choice in self.choices])

    def bound_cost(self, step: Figure) -> Figure:
        """Returns the least price of a plan with any choice. step: as above."""
        return _least([choice.least.cost(choice.least.seconds(step)) for choice in self.choices])

    def only(self, choice: RunChoice) -> RunChoices:
        """Returns these choices without all but a single choice."""
        return RunChoices(self.open, (choice,))

    def stated_values(self) -> dict[str, list[Any]]:
        """Returns the values of the open fields, as a job states them."""
        return {field: [*dict.fromkeys(choice.changes[field] for choice in self.choices)] for field in self.open}


def make_choices(job: Fields, opened: SomeFields, base: Path, equal_steps: bool, priced: bool) -> RunChoices:
    """Returns all choices of the runs on a cluster.

    job: as plain data, without open fields of the run. opened: these, with their values or ``auto``. base: folder of
    relative paths. equal_steps: see `LeastRun`. priced: whether the cost of runs is asked for.
    Raises PlanError for runs that do not end after a number of steps, for wrong values, and if the cluster admits no
    choice.
    """
    choices, refused = list[RunChoice](), list[PlanError]()
    for changes in list_changes(job, opened, base):
        loaded = load_job(_apply(job, changes), base=base)
        try:
            choices.append(RunChoice(changes, LeastRun(loaded, equal_steps)))
        except PlanError as error:
            if not error.where.startswith(CHECKPOINTS):
                raise
            refused.append(error)
    if not choices:
        raise refused[0]
    if priced:
        choices[0].least.cost(0.0)
    return RunChoices(tuple(opened), tuple(choices), len(refused))


def _least(values: Sequence[Figure]) -> Figure:
    return np.minimum.reduce(values) if isinstance(values[0], np.ndarray) else min(values)  # type: ignore[return-value]


def _apply(job: Fields, changes: SomeFields) -> Fields:
    return apply_changes(job, {field: value for field, value in changes.items() if value is not None})


def list_changes(job: Fields, opened: SomeFields, base: Path) -> list[Fields]:
    """Returns values of the open fields of a run in every distinct combination. Raises PlanError without values."""
    every = {field: _values(field, value) for field, value in opened.items()}
    combinations: list[Fields] = []
    for values in product(*every.values()):
        changes = dict(zip(every, values, strict=True))
        kind = changes.get(KIND) or _read_word(job, "checkpoints", "kind", "asynchronous")
        elastic = changes.get(ELASTIC) or _read_word(job, "recovery", "elastic", "none")
        idle = {
            "every_steps": kind in WITHOUT_INTERVAL,
            "every_s": kind in WITHOUT_INTERVAL,
            "copies": kind != "in-memory",
            "store_every_s": kind not in ("in-memory", "just-in-time"),
            "most_lost_replicas": elastic in ("none", "redundant"),
        }
        changes = {field: None if idle.get(field.split(".")[-1]) else value for field, value in changes.items()}
        combinations += _divide_interval(job, changes, kind, base) if changes.get(EVERY_S) == AUTO else [changes]
    return [changes for i, changes in enumerate(combinations) if changes not in combinations[:i]]


def _values(field: str, stated: Any) -> tuple[Any, ...]:
    if stated == AUTO:
        if field == EVERY_S:
            return (AUTO,)
        if field not in AUTOMATIC:
            raise PlanError(field, "a search has no values of its own for it", "Write a list of values", stated)
        return AUTOMATIC[field]
    if not stated:
        raise PlanError(field, "there are no values", "Give one at least", stated)
    if AUTO in stated:
        raise PlanError(field, "a list has values alone", "Leave auto out, or write auto without a list", stated)
    return tuple(stated)


def _divide_interval(job: Fields, changes: Fields, kind: str, base: Path) -> list[Fields]:
    """Returns a choice with intervals around that by Daly's formula, to three digits; in memory every step is saved."""
    if kind == "in-memory":
        return [{**changes, EVERY_S: None}]
    best = LeastRun(load_job(_apply(job, {**changes, EVERY_S: None}), base=base)).interval
    return [{**changes, EVERY_S: float(f"{best * factor:.3g}")} for factor in INTERVALS]


def _read_word(job: SomeFields, part: str, key: str, default: str) -> str:
    stated = (job.get("run") or {}).get(part)
    if isinstance(stated, str):
        return stated
    return str((stated or {}).get(key) or default)


def refuse_open_run(fields: SomeFields, rule: str) -> None:
    """Raises PlanError for open fields of a run, of which a single value is admitted. rule: why."""
    for field, value in fields.items():
        remedy = "Give it one value, or compare runs: `meshcast search` with --objective days or run-cost"
        raise PlanError(field, rule, remedy, value)
