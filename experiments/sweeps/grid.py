"""The sweep file: a job, the fields that vary, and the grid of points that they span, read and checked.

A point is a mapping of changes to the job: ``{"plan.tp": 8, "batch.micro": 1}``. Points are made from their index on
demand, so a sweep of millions needs no memory for them.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from meshcast.experiments.sweeps.expressions import Expression, parse_constraint
from meshcast.hardware import load_cluster
from meshcast.hardware.documents.plain_data import to_plain_data
from meshcast.hardware.errors import MeshcastError, PlanError, nearest
from meshcast.hardware.load import Document, Place, Strict, line_of, read_yaml, valid_keys, validate_data
from meshcast.hardware.records import dataclass
from meshcast.hardware.remembered import remembered_by
from meshcast.hardware.schemas import BaseModel, Field
from meshcast.simulator.formats.launch import LAUNCH_SUFFIXES
from meshcast.simulator.ir.divisors import list_divisors
from meshcast.simulator.job.job import JobFile, LongPlan
from meshcast.simulator.job.plan_keys import ShortPlan
from meshcast.simulator.job.remedies import suggest_key
from meshcast.simulator.loading.load import read_job, set_field
from meshcast.simulator.models.load import load_model

MAX_POINTS = 10_000_000
"""Maximum number of points of a sweep: days of work on a large machine; more are a mistyped range."""

MAX_VALUES = 100_000
"""Maximum number of values of a list."""

MAX_CONSTRAINTS = 100

LARGEST = 2**63 - 1
"""Largest integer that a column of the results can hold."""

DERIVED = ("gpus", "layers")
"""Names in constraints besides fields of the job; ``model.heads`` and other integers of the model are known too."""

Changes = dict[str, Any]
"""Changed fields of a job with their values at a point."""

MISSING = object()


class SweepFile(Strict):
    """The keys of a sweep file."""

    job: Any
    """A job, or the path of a job file from the sweep's folder."""
    vary: dict[str, Any] = {}
    """Fields and their values: a list, {divisors: 64}, {powers: [1, 64]} or {range: [1, 16, 1]}."""
    zipped: list[dict[str, list[Any]]] = Field(default=[], alias="zip")
    """Mappings from fields to lists of equal length; the lists of a mapping vary together."""
    listed: list[dict[str, Any]] | None = Field(default=None, alias="list")
    """Mappings of changes that are made together, each a point."""
    where: list[str] = Field(default=[], max_length=MAX_CONSTRAINTS)
    """Constraints; a point that violates any is left out."""

    @property
    def varying(self) -> list[str]:
        """Fields that `vary`, `zip` or `list` change, each once."""
        groups = [self.vary, *self.zipped, *(self.listed or ())]
        return [*dict.fromkeys(name for group in groups for name in group)]


class Inline(BaseModel):
    """A sweep file that contains its job."""

    job: JobFile


class Spot(NamedTuple):
    """A place in the sweep file, for error messages."""

    document: Document
    place: Place

    def below(self, *more: int | str) -> Spot:
        return Spot(self.document, (*self.place, *more))

    @property
    def name(self) -> str:
        """``sweep.yaml:3 vary.plan.tp``."""
        _, text, where = self.document
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.place).removeprefix(".")
        return f"{where}:{line_of(text, self.place)} {path}" if text else f"{where}.{path}"

    def wrong(self, rule: str, remedy: str, value: Any = None) -> PlanError:
        return PlanError(self.name, rule, remedy, value)


@dataclass(frozen=True)
class Sweep:
    """A sweep after reading and checking: its points are the product of its axes, the last varies fastest."""

    job: dict[str, Any]
    """The job as plain data, without changes."""
    base: Path
    """Folder of relative paths in the job."""
    axes: tuple[tuple[Changes, ...], ...]
    where: tuple[Expression, ...] = ()
    name: str = "sweep"

    @cached_property
    def points(self) -> int:
        """Number of points of the grid, those that `where` leaves out included."""
        return math.prod(map(len, self.axes))

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Fields that vary, in the order of the file."""
        return tuple(dict.fromkeys(name for axis in self.axes for changes in axis for name in changes))

    def point(self, index: int) -> Changes:
        """Returns changes of a point in the order in which they are made: a field before fields inside it."""
        changes: Changes = {}
        for axis in reversed(self.axes):
            index, at = divmod(index, len(axis))
            changes = {**axis[at], **changes}
        return {name: changes[name] for name in self._outermost_first if name in changes}

    @cached_property
    def _outermost_first(self) -> list[str]:
        return sorted(self.fields, key=lambda name: name.count("."))

    def values(self, name: str) -> Iterator[Any]:
        return (changes[name] for axis in self.axes for changes in axis if name in changes)


# ------------------------------------------------------------------------------------------- reading


def load_sweep(source: str | Path | Mapping[str, Any], base: str | Path | None = None) -> Sweep:
    """Reads a sweep from a YAML or JSON file or a mapping.

    base: folder of relative paths; that of the file, or the current folder, if None.
    Raises PlanError for the first mistake.
    """
    if isinstance(source, Mapping):
        document, folder = Document(to_plain_data(source), "", "sweep"), Path(".")
    elif isinstance(source, str | Path):
        if Path(source).suffix.lower() in LAUNCH_SUFFIXES:
            rule = "this is a launch file, and a sweep says what varies"
            remedy = f"Write a file with the lines `job: {Path(source).name}` and `vary: {{plan.tp: [2, 4, 8]}}`"
            raise PlanError(str(source), rule, remedy)
        document, folder = read_yaml(Path(source), str(source), PlanError), Path(source).parent
    else:
        raise PlanError("sweep", "a sweep is the path of a file, or a mapping", "Name a YAML or JSON file", source)
    if not isinstance(document.data, dict):
        rule = "a sweep is a mapping of keys to values"
        raise PlanError(document.where, rule, "Start with `job:` and `vary:`", document.data)
    if "job" not in document.data and {"model", "cluster"} <= document.data.keys():
        rule = "this is a job, and a sweep says what varies"
        raise PlanError(document.where, rule, "Write `job: FILE`, which names it, and `vary: {plan.tp: [2, 4, 8]}`")
    file = validate_data(SweepFile, document.data, document.where, PlanError, text=document.text)
    top = Spot(document, ())
    job_document, folder, microbatches = _job(file.job, folder if base is None else Path(base), top.below("job"))
    _check_job(job_document, file.varying, top)
    job: dict[str, Any] = job_document.data
    taken: dict[str, Spot] = {}
    axes = tuple(_axes(file, Sweep(job, folder, ()), top, taken))
    if microbatches is not None and not any(name.startswith("batch.") and name != "batch.micro" for name in taken):
        del job["batch"]["global"]
        job["batch"]["microbatches"] = microbatches
    sweep = Sweep(job, folder, axes, name=document.where)
    if not sweep.fields:
        raise top.wrong("nothing varies", "Give `vary` a field, like plan.tp: [1, 2, 4, 8]")
    if sweep.points > MAX_POINTS:
        sizes = " x ".join(f"{len(axis):,}" for axis in axes)
        rule = f"{sizes} = {sweep.points:,} points, a sweep has at most {MAX_POINTS:,}"
        raise top.wrong(rule, "Vary less at once, or in larger steps")
    _check_changes(sweep, taken)
    return Sweep(job, folder, axes, _constraints(file, sweep, top), document.where)


def _job(stated: Any, folder: Path, spot: Spot) -> tuple[Document, Path, int | None]:
    """Returns the job, the folder of relative paths in it, and the micro-batches of a replica that its global batch
    follows from in a launch file without one: every point derives its own."""
    microbatches = None
    if not isinstance(stated, str):
        document = spot.document._replace(data=stated)
    else:
        try:
            read = read_job(folder / stated)
        except MeshcastError as error:
            raise error.at(spot.name) from None
        document, folder = Document(read.data, read.text, read.where), read.folder
        microbatches = read.launch.microbatches if read.launch is not None else None
    if not isinstance(document.data, dict):
        rule = "a job is a mapping of keys to values, or the path of a file"
        raise spot.wrong(rule, "Name a job file, or start with `model:` and `cluster:`", document.data)
    return document, folder, microbatches


def _axes(file: SweepFile, bare: Sweep, top: Spot, taken: dict[str, Spot]) -> Iterator[tuple[Changes, ...]]:
    """Yields axes of the grid: for every field of `vary`, every mapping of `zip`, and `list`.

    taken: places where fields vary; this function fills it.
    """

    def take(name: str, spot: Spot) -> None:
        _check_field(name, spot)
        if name in taken:
            raise spot.wrong(f"{name} varies in {taken[name].name} already", "Keep one of the two")
        taken[name] = spot

    for name, listed in file.vary.items():
        spot = top.below("vary", name)
        take(name, spot)
        values = _values(listed, spot, lambda number, spot: _number_of(number, bare, file.varying, spot))
        yield tuple({name: value} for value in values)
    for i, group in enumerate(file.zipped):
        spot = top.below("zip", i)
        for name, listed in group.items():
            take(name, spot.below(name))
            _check_values(listed, spot.below(name))
        lengths = {name: len(listed) for name, listed in group.items()}
        if len(set(lengths.values())) != 1:
            stated = ", ".join(f"{name} has {length}" for name, length in lengths.items()) or "there are none"
            raise spot.wrong(f"lists that move together are equally long, but {stated}", "Make them equally long")
        yield tuple(dict(zip(group, together, strict=True)) for together in zip(*group.values(), strict=True))
    if file.listed is not None:
        spot = top.below("list")
        for name in dict.fromkeys(name for changes in file.listed for name in changes):
            take(name, spot)
        _check_values(file.listed, spot)
        yield tuple(file.listed)


def _check_field(name: str, spot: Spot) -> None:
    """Refuses fields that no job has. Fields of models and frameworks are checked with the job."""
    keys = name.split(".")
    if not all(keys):
        raise spot.wrong("a field is written with dots between its keys", "For example plan.tp", name)
    for i, key in enumerate(keys):
        known = valid_keys(JobFile, tuple(keys[:i]))
        if keys[:i] == ["plan"]:
            known = [*ShortPlan.model_fields, *LongPlan.model_fields]
        if known and key not in known:
            remedy = nearest(key, known) if i else suggest_key(key, known)
            raise spot.wrong("a job has no such field", remedy, name)


def _check_job(job: Document, varying: Collection[str], top: Spot) -> None:
    """Refuses a job that is invalid at every point. job: as read. varying: fields that it need not have."""
    sections = {name.split(".")[0] for name in varying}
    data = {name: None for name in ("model", "cluster") if name in sections} | job.data
    if job.where == top.document.where:
        validate_data(Inline, {"job": data}, job.where, PlanError, text=job.text)
    else:
        validate_data(JobFile, data, job.where, PlanError, text=job.text)


def _check_changes(sweep: Sweep, taken: Mapping[str, Spot]) -> None:
    """Refuses changes of fields that the job cannot have."""
    try:
        apply_changes(sweep.job, sweep.point(0))
    except PlanError as error:
        raise taken[error.where].wrong(error.rule, error.remedy, error.value) from None


def _constraints(file: SweepFile, sweep: Sweep, top: Spot) -> tuple[Expression, ...]:
    """Parses the constraints and evaluates them at the first point, so that a mistake shows before the sweep starts."""
    names = Names(sweep.job, sweep.base)
    first = sweep.point(0)
    constraints = []
    for i, text in enumerate(file.where):
        spot = top.below("where", i)
        expression = parse_constraint(text, spot.name)
        try:
            for name in expression.names:
                if names.find(name, first) is MISSING and name not in sweep.fields:
                    known = [*sweep.fields, *DERIVED]
                    raise spot.wrong(f"neither a field of the job nor known: {name}", nearest(name, known), text)
            expression(names.at(first))
        except MeshcastError as error:
            if error.where == spot.name:  # otherwise model or cluster of the point are invalid, which its row says
                raise
        constraints.append(expression)
    return tuple(constraints)


# -------------------------------------------------------------------------------------------- values


def _values(listed: Any, spot: Spot, number_of: Callable[[Any, Spot], int]) -> Sequence[Any]:
    """Returns values of a field that varies. number_of: resolves a number, or the name of a number."""
    if isinstance(listed, list):
        _check_values(listed, spot)
        seen: set[str] = set()
        for i, value in enumerate(listed):
            text = json.dumps(value, sort_keys=True)
            if text in seen:
                raise spot.below(i).wrong("the value is given twice", "Keep one of the two", value)
            seen.add(text)
        return listed
    if not (isinstance(listed, dict) and len(listed) == 1 and next(iter(listed)) in _MAKERS):
        remedy = "Write [1, 2, 4], {divisors: 64}, {powers: [1, 64]} or {range: [1, 16, 1]}"
        raise spot.wrong("values are a list, or one of " + ", ".join(_MAKERS), remedy, listed)
    ((kind, stated),) = listed.items()
    return _MAKERS[kind](stated, spot.below(kind), number_of)


def _check_values(values: list[Any], spot: Spot) -> None:
    if not values:
        raise spot.wrong("there are no values", "Give one at least, or leave it out")
    if len(values) > MAX_VALUES:
        raise spot.wrong(f"{len(values):,} values, a list has at most {MAX_VALUES:,}", "Vary less at once")
    for i, value in enumerate(values):
        _check_plain(value, spot.below(i))


def _check_plain(value: Any, spot: Spot) -> None:
    """Refuses values that JSON cannot express, and integers too large for a column."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise spot.wrong("keys must be text", "Put the key in quotes", key)
            _check_plain(inner, spot.below(key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_plain(inner, spot.below(i))
    elif isinstance(value, float) and not math.isfinite(value):
        raise spot.wrong("a number must be finite", "Write a plain number", value)
    elif isinstance(value, int) and abs(value) > LARGEST:
        raise spot.wrong(f"a whole number is at most {LARGEST:,}", "Write a smaller number")
    elif not isinstance(value, str | int | float | bool | None):
        remedy = "Put it in quotes" if hasattr(value, "isoformat") else "Write numbers, words, true, false or null"
        raise spot.wrong("a value is a number, a word, true, false, null, a list or a mapping", remedy, str(value))


def _divisors(stated: Any, spot: Spot, number_of: Callable[[Any, Spot], int]) -> Sequence[int]:
    return list_divisors(number_of(stated, spot))


def _powers(stated: Any, spot: Spot, _: Any) -> Sequence[int]:
    ends = _numbers(stated, spot, (2,), "{powers: [1, 64]}")
    if not all(isinstance(end, int) and 1 <= end <= LARGEST for end in ends):
        raise spot.wrong("powers of two go from a whole number above 0 to another", "For example [1, 64]", stated)
    powers = [2**k for k in range(64) if ends[0] <= 2**k <= ends[1]]
    if not powers:
        raise spot.wrong(f"there is no power of two from {ends[0]} to {ends[1]}", "Write the smaller one first", stated)
    return powers


def _range(stated: Any, spot: Spot, _: Any) -> Sequence[float]:
    numbers = _numbers(stated, spot, (2, 3), "{range: [1, 16, 1]}")
    first, last, step = (Decimal(str(n)) for n in (*numbers, 1)[:3])  # as written: 0.1 + 0.2 is 0.3
    if step <= 0 or last < first:
        raise spot.wrong("a range goes up from the first number to the second", "For example [1, 16, 1]", stated)
    count = (last - first) / step + 1
    if count >= MAX_VALUES + 1:
        raise spot.wrong(f"more than {MAX_VALUES:,} values", "Write a larger step", stated)
    whole = all(isinstance(n, int) for n in numbers)
    return [int(n) if whole else float(n) for n in (first + i * step for i in range(int(count)))]


_MAKERS: dict[str, Callable[[Any, Spot, Callable[[Any, Spot], int]], Sequence[Any]]] = {
    "divisors": _divisors,
    "powers": _powers,
    "range": _range,
}


def _numbers(stated: Any, spot: Spot, lengths: tuple[int, ...], example: str) -> list[Any]:
    """Checks that a value is a list of finite numbers of any of the `lengths`."""
    good = isinstance(stated, list) and len(stated) in lengths
    if not good or any(isinstance(n, bool) or not isinstance(n, int | float) for n in stated):
        raise spot.wrong(f"needs a list of {' or '.join(map(str, lengths))} numbers", f"Write {example}", stated)
    for i, number in enumerate(stated):
        _check_plain(number, spot.below(i))
    return list(stated)


def _number_of(stated: Any, bare: Sweep, varying: list[str], spot: Spot) -> int:
    """Returns a positive integer, stated as a number or by the name of a number."""
    number = stated
    if isinstance(stated, str):
        roots = {"gpus": "cluster", "layers": "model"}.get(stated, stated)
        owner = roots.split(".")[0] if roots.split(".")[0] in ("model", "cluster") else roots
        moved = next((field for field in varying if _touches(field, owner)), None)
        if moved is not None:
            rule = f"{stated} changes from point to point, as {moved} varies"
            raise spot.wrong(
                rule, f"Give a number, and say the rest with `where`, like {stated} % plan.tp == 0", stated
            )
        try:
            number = Names(bare.job, bare.base).find(stated, {})
        except MeshcastError as error:
            raise error.at(spot.name) from None
        if number is MISSING:
            raise spot.wrong("neither a field of the job nor known", f"Valid: a number, {', '.join(DERIVED)}", stated)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 10**12:
        raise spot.wrong("divisors are those of a whole number from 1 to 10^12", "For example {divisors: 64}", stated)
    return number


def _touches(field: str, other: str) -> bool:
    """Returns whether two fields are equal or either contains the other."""
    return field == other or field.startswith(other + ".") or other.startswith(field + ".")


# ------------------------------------------------------------------------------------------ points


def apply_changes(job: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Returns the job with the changes of a point, as plain data. Raises PlanError for a field that no job has."""
    changed = copy.deepcopy(job)
    for name, value in changes.items():
        set_field(changed, name, copy.deepcopy(value), name)
    return changed


class Names:
    """Values of names in constraints: fields of a point's job, and numbers of its model and cluster."""

    def __init__(self, job: dict[str, Any], base: Path) -> None:
        self.job, self.base = job, base

    def at(self, changes: Changes) -> Callable[[str], Any]:

        def look(name: str) -> Any:
            value = self.find(name, changes)
            if value is MISSING:
                raise ValueError(f"{name} is not set at this point. Set it in the job")
            return value

        return look

    def find(self, name: str, changes: Changes) -> Any:
        """Returns the value of a name, or MISSING. Raises MeshcastError for an invalid model or cluster."""
        if name in changes:
            return changes[name]
        keys = name.split(".")
        for i in range(len(keys) - 1, 0, -1):
            if (owner := ".".join(keys[:i])) in changes:
                return self._inside(changes[owner], keys[i:], name, changes)
        return self._inside(self.job, keys, name, changes)

    def _inside(self, data: Any, keys: Sequence[str], name: str, changes: Changes) -> Any:
        for key in keys:
            data = data.get(key, MISSING) if isinstance(data, dict) else MISSING
        return self._derive_count(name, changes) if data is MISSING else data

    def _derive_count(self, name: str, changes: Changes) -> Any:
        """Returns number of the model or the cluster of a point."""
        if name in ("gpus", "cluster.gpus"):
            return self._part("cluster", changes).gpus
        key = re.fullmatch(r"(?:model\.)?(\w+)", name)
        if key is None or not (name == "layers" or name.startswith("model.")):
            return MISSING
        value = getattr(self._part("model", changes), key[1], MISSING)
        return value if isinstance(value, int) else MISSING

    @remembered_by(lambda names, key, changes: (key, json.dumps(_changes_of(key, changes))))
    def _part(self, key: str, changes: Changes) -> Any:
        """Returns model or cluster of a point; equal ones are loaded once."""
        load = load_cluster if key == "cluster" else load_model
        return load(apply_changes({key: self.job.get(key)}, _changes_of(key, changes))[key], key, self.base)


def _changes_of(key: str, changes: Changes) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if name.split(".")[0] == key}
