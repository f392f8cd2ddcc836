"""The files of claims: their schema, and how they are read and checked.

A file has the claims of a system. A claim names jobs (the keys of job files), pipeline cases (the keys of
``validate pipeline``) or plans (runs of planners, `planner_run.py`), a number that is read off each of them
(`measures.py`), a relation between these numbers, and what the paper says of it. A job may begin as a copy of another
job::

    jobs:
      base: {model: gpt2, cluster: dgx-h100:1, plan: {tp: 8}}
      late: {from: base, set: {framework.set.overlap.dp: false}}     # dotted keys, as --set
      each: {from: base, over: {plan.tp: [2, 4, 8]}}                 # a job for every combination
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.load import read_yaml, validate_data
from meshcast.hardware.schemas import BaseModel, ConfigDict, Field, field_validator, model_validator
from meshcast.simulator.loading.load import set_field
from meshcast.validation.claims.measures import check_measure
from meshcast.validation.claims.planner_run import PlannerRun
from meshcast.validation.claims.relation import FUNCTIONS, Relation, parse_relation

Family = Literal["pipeline", "tensor", "sequence", "expert", "data", "memory", "hybrid", "auto"]

KINDS = ("jobs", "cases", "plans")
"""What a relation may compare."""

CLAIMS = "meshcast.validation.claims"
"""Package with the files of claims of meshcast."""

MAX_JOBS = 1_000
"""Most jobs of a claim, over all points and assumptions."""

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(ge=-1e18, le=1e18, allow_inf_nan=False)]
Values = Annotated[list[Any], Field(min_length=1, max_length=100)]


class ClaimModel(BaseModel):
    """Base of the parts of a file: immutable, exact types, unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NamedJobs(ClaimModel):
    """Jobs, pipeline cases and runs of planners by name, which relations compare."""

    jobs: dict[str, dict[str, Any]] = {}
    cases: dict[str, dict[str, Any]] = {}
    plans: dict[str, dict[str, Any]] = {}

    def merge_jobs(self, others: NamedJobs, kind: str) -> dict[str, dict[str, Any]]:
        """Returns those of a kind (`KINDS`), and those of others, which win."""
        return {**getattr(self, kind), **getattr(others, kind)}


class DerivedJob(ClaimModel):
    """A job that begins as a copy of another.

    base: name of the other.
    set: changed fields by dotted keys.
    over: fields with lists of values; the job stands for all combinations.
    """

    base: Text = Field(alias="from")
    set: dict[str, Any] = {}
    over: dict[str, Values] = {}


class Claim(NamedJobs):
    """One claim.

    Attributes:
        says: the claim in words.
        source: place in the paper: section, table, figure.
        provenance: ``checked`` if that place was read; ``recalled`` claims are shown and not scored.
        jobs, cases, plans: named jobs, pipeline cases, or runs of planners; those of the file can be used, too.
        measure: the number that is read off each of them (`measures.py`).
        relation: arithmetic over their names, or an order such as ``a < b``.
        value, at_least, at_most, between: what the paper says of the relation.
        tolerance: relative deviation of a `value` that is in the claim's sense; absolute where the value is 0.
        assumed: fields that the paper leaves open, with the ends of what is plausible; set in every job that is no
            copy, before jobs are copied.
        note: why it misses, or what is special.
        cannot_judge: why no job can judge it.
        slow: whether it runs only with ``--slow``.
    """

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
    says: Text
    source: Text
    provenance: Literal["checked", "recalled"]
    measure: str = ""
    relation: str = ""
    value: Number | None = None
    at_least: Number | None = None
    at_most: Number | None = None
    between: tuple[Number, Number] | None = Field(default=None, strict=False)
    tolerance: Annotated[float, Field(gt=0, le=1)] | None = None
    assumed: dict[str, Values] = {}
    note: str = ""
    cannot_judge: str = ""
    slow: bool = False

    @field_validator("relation")
    @classmethod
    def _check_relation(cls, text: str) -> str:
        if text:
            parse_relation(text)
        return text

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        targets = [key for key in ("value", "at_least", "at_most", "between") if getattr(self, key) is not None]
        if self.cannot_judge:
            if self.relation or targets:
                raise ValueError("cannot_judge says that nothing judges it. Remove it, or the relation and its value")
            return self
        if not self.relation:
            raise ValueError("it has no relation. Write one such as base / split, or say why: cannot_judge")
        relation = parse_relation(self.relation)
        if len(targets) != (not relation.is_order):
            rule = "an order needs no value" if relation.is_order else "a relation is held against one number"
            raise ValueError(f"{rule}. Write one of value, at_least, at_most, between; none beside an order a < b")
        if (self.value is None) != (self.tolerance is None):
            raise ValueError("value and tolerance belong together. Write both, or at_least, at_most or between alone")
        if self.between is not None and not self.between[0] < self.between[1]:
            raise ValueError("between is an interval. Write its lower end first")
        return self

    @cached_property
    def parsed_relation(self) -> Relation:
        return parse_relation(self.relation)


class ClaimFile(NamedJobs):
    """The claims of a system, with jobs, cases and plans that several of them use."""

    system: Text
    family: Family
    paper: Text
    entries: list[Claim] = Field(min_length=1, alias="claims")

    def jobs_of(self, claim: Claim, kind: str) -> Mapping[str, dict[str, Any]]:
        """Returns the jobs, cases or plans that the relation of a claim may name. kind: of `KINDS`."""
        return self.merge_jobs(claim, kind)

    def kind_of(self, claim: Claim, name: str) -> str:
        """Returns of which of `KINDS` a name of the relation is."""
        return next((kind for kind in reversed(KINDS) if name in self.jobs_of(claim, kind)), KINDS[0])

    def uses_cases(self, claim: Claim) -> bool:
        """Returns whether the relation of a claim is between pipeline cases."""
        names, cases = claim.parsed_relation.names, self.jobs_of(claim, "cases")
        return bool(names) and all(name in cases for name in names)

    def alternatives(self, claim: Claim) -> Iterator[dict[str, Any]]:
        """Yields every combination of what the claim assumes: a value for each of its fields."""
        for values in product(*claim.assumed.values()):
            yield dict(zip(claim.assumed, values, strict=True))

    def expand(self, claim: Claim, assumed: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
        """Returns the jobs, cases or plans of a relation by name: a single job, or a job for each point of its `over`.

        Raises PlanError for a copy of a job that does not exist, and for fields that cannot be set.
        """
        names = claim.parsed_relation.names
        stated = {name: self.jobs_of(claim, self.kind_of(claim, name)) for name in names}
        return {name: _expand_job(name, stated[name], assumed, ()) for name in names}


def _expand_job(
    name: str, stated: Mapping[str, dict[str, Any]], assumed: Mapping[str, Any], above: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a job, copied from others where it says so. above: the jobs that are copies of it."""
    if name in above:
        raise PlanError(f"jobs.{name}", "it is a copy of itself", "Name another job", name)
    if "from" not in stated[name]:
        job = copy.deepcopy(stated[name])
        for field, value in assumed.items():
            set_field(job, field, copy.deepcopy(value), f"assumed.{field}")
        return [job]
    derived = validate_data(DerivedJob, stated[name], f"jobs.{name}", PlanError)
    if derived.base not in stated:
        raise PlanError(f"jobs.{name}.from", "there is no such job", nearest(derived.base, list(stated)), derived.base)
    bases = _expand_job(derived.base, stated, assumed, (*above, name))
    derived_jobs = []
    for base, *values in product(bases, *derived.over.values()):
        job = copy.deepcopy(base)
        for field, value in {**derived.set, **dict(zip(derived.over, values, strict=True))}.items():
            set_field(job, field, copy.deepcopy(value), f"jobs.{name}.set.{field}")
        derived_jobs.append(job)
        if len(derived_jobs) > MAX_JOBS:
            raise PlanError(f"jobs.{name}.over", f"it stands for more than {MAX_JOBS:,} jobs", "Give fewer values")
    return derived_jobs


# ------------------------------------------------------------------------------------------ reading


def read_claims(paths: Sequence[Path] = ()) -> list[ClaimFile]:
    """Returns the files of claims; without paths those of meshcast. Raises PlanError for a malformed file and for an id
    that two claims have."""
    read, places = [], dict[str, str]()
    for file in paths or find_files(CLAIMS).values():
        claim_file = read_claim_file(file)
        for claim in claim_file.entries:
            if claim.id in places:
                rule = f"a claim of {places[claim.id]} has the same id"
                raise PlanError(f"{file.name} {claim.id}", rule, "Rename one of the two")
            places[claim.id] = file.name
        read.append(claim_file)
    return read


def find_files(package: str, names: Sequence[str] = (), where: str = "") -> dict[str, Traversable]:
    """Returns the YAML files of a package by their names without the ending, sorted; of those named if some are.

    Raises PlanError at `where` for a name that no file has.
    """
    files = {file.name.removesuffix(".yaml"): file for file in resources.files(package).iterdir()}
    known = {name: files[name] for name in sorted(files) if files[name].name.endswith(".yaml")}
    for name in names:
        if name not in known:
            folder = package.removeprefix("meshcast.").replace(".", "/")
            raise PlanError(where, f"{folder} has no such file", nearest(name, list(known)), name)
    return {name: known[name] for name in names} if names else known


def read_claim_file(path: Path | Traversable) -> ClaimFile:
    """Reads a file of claims. Raises PlanError if it is malformed."""
    document = read_yaml(path, error=PlanError)
    file = validate_data(ClaimFile, document.data, document.where, PlanError, document.text)
    for number, claim in enumerate(file.entries):
        try:
            check_claim(file, claim)
        except PlanError as error:
            raise error.at(f"{document.where} claims[{number}] {claim.id}") from None
    return file


def check_claim(file: ClaimFile, claim: Claim) -> None:
    """Raises PlanError for names that the relation must not have, and for an unknown measure."""
    if claim.cannot_judge:
        return
    for key in KINDS:
        for name in file.jobs_of(claim, key):
            if not re.fullmatch(r"[A-Za-z_]\w*", name) or name in FUNCTIONS:
                rule = "names are of letters, digits and _, and none of " + ", ".join(FUNCTIONS)
                raise PlanError(key, rule, "Rename it", name)
    names = claim.parsed_relation.names
    every = [name for kind in KINDS for name in file.jobs_of(claim, kind)]
    for name in names:
        if name not in every:
            remedy = nearest(name, every) if every else "Add it to jobs"
            raise PlanError("relation", f"there is no job {name!r}", remedy, claim.relation)
    if not names:
        raise PlanError("relation", "it names no job", "Name one of jobs, cases or plans", claim.relation)
    if len({file.kind_of(claim, name) == "cases" for name in names}) > 1:
        raise PlanError("relation", "pipeline cases beside jobs in one relation", "Compare like things", claim.relation)
    for name, measure in claim.parsed_relation.reads:
        check_measure(measure or claim.measure, file.kind_of(claim, name))
    count = sum(len(values) for values in claim.assumed.values())
    if count > MAX_JOBS:
        raise PlanError("assumed", f"it has more than {MAX_JOBS:,} values", "Give the ends only", count)
    for name, runs in file.expand(claim, next(file.alternatives(claim))).items():
        if file.kind_of(claim, name) == "plans":
            for run in runs:
                validate_data(PlannerRun, run, f"plans.{name}", PlanError)
