"""Records are what pydantic makes of the same data; it is not imported for data that are plainly of their types."""

from __future__ import annotations

import copy
import datetime
import pickle
import subprocess
import sys
from collections.abc import Hashable, Mapping
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from pkgutil import walk_packages
from random import Random
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import pytest
from annotated_types import Gt
from pydantic import TypeAdapter

import meshcast.hardware
import meshcast.simulator
from meshcast.hardware.fast_validation import make_validator
from meshcast.hardware.load import _load_known, catalog, load
from meshcast.hardware.schemas import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from meshcast.hardware.shared import _made
from meshcast.simulator.ir.registry import find_scheme, scheme_names
from meshcast.simulator.loading.load import load_job
from tests.pythons import ROOT

JOBS = ("gpt3-175b-dgx-a100", "llama3-70b-dgx-h100")


class Inner(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)

    kind: Literal["a", "b", 1]
    rate: float = Field(default=0.5, ge=0, lt=1)


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    count: Annotated[int, Field(strict=True, gt=0)] | None = None
    names: Annotated[tuple[str, ...], BeforeValidator(lambda word: (word,) if isinstance(word, str) else word)] = ()
    inner: Inner | None = None
    sizes: dict[str, int | float] = {}
    shape: tuple[int, ...] | dict[str, Inner] | bool = False
    day: datetime.date | None = None
    strict: tuple[int, ...] = Field(default=(), strict=True)
    total: int = Field(default_factory=lambda fields: len(fields["names"]), alias="all")

    @field_validator("sizes", mode="after")
    @classmethod
    def _sort_sizes(cls, sizes: dict[str, float]) -> dict[str, float]:
        return dict(sorted(sizes.items()))

    @model_validator(mode="after")
    def _check_total(self) -> Outer:
        if self.total > 3:
            raise ValueError("at most 3. Write fewer")
        return self


DAMAGED: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**53 + 1, 10**400, 0.5, 1.0, -0.0, float("inf"), float("nan"), 1 + 0j),
    *("", "a", "3", "1.5", "true", "auto", "all", "2026-11-21", "2026-W47-6", "20261121", "x\n", b"a", object),
    *([], [1], [1.0], ["a"], (), (1, 2), {}, {"a": 1}, {1: 2}, {"value": 1}, {"kind": "a"}, {1}, [[1, 2], [2, 1]]),
    *(datetime.date(2026, 11, 21), datetime.datetime(2026, 11, 21), Path("a"), range(2)),
)
"""Values that few fields take, or only if they are converted."""


def draw_value(hint: Any, random: Random, limits: Mapping[str, Any]) -> Any:
    """Draws a value of a type, or a damaged one."""
    if random.random() < 0.04:
        return random.choice(DAMAGED)
    parts, origin = get_args(hint), get_origin(hint)
    low = limits.get("ge", limits.get("gt", 0))
    some = range(max(limits.get("min_length", 0), random.randrange(3)))
    if origin is Annotated:
        for note in parts[1:]:
            limits = {**limits, **getattr(note, "limits", {})}
        return draw_value(getattr(parts[1], "written", parts[0]), random, limits)
    if origin is Literal:
        return random.choice(parts)
    if origin in (Union, UnionType):
        return draw_value(random.choice(parts), random, limits)
    if origin is dict:
        return {draw_key(parts[0], random): draw_value(parts[1], random, {}) for _ in some}
    if origin is list or (origin is tuple and parts[-1] is ...):
        return random.choice((list, list, tuple))(draw_value(parts[0], random, {}) for _ in some)
    if origin is tuple or hasattr(hint, "_fields"):
        return [draw_value(part, random, {}) for part in parts or get_type_hints(hint, include_extras=True).values()]
    if hint is bool:
        return random.random() < 0.5
    if hint is int:
        return int(low) + random.choice((1, 1, 2, 4, 8))
    if hint is float:
        return random.choice((low + 0.25, low + 1, limits.get("le", low + 2)))
    if hint is str:
        return random.choice(("a", "dgx-h100", "h100-sxm", "nvlink4", "900 GB/s", "80 GiB", "3 us", "0.5", "1.2"))
    if hint in (None, NoneType):
        return None
    if hint is datetime.date:
        return "2026-11-21"
    return draw_data(hint, random) if hasattr(hint, "model_fields") else random.choice(DAMAGED)


def draw_key(hint: Any, random: Random) -> Any:
    key = draw_value(hint, random, {})
    return key if isinstance(key, Hashable) else "a"


def draw_data(record: Any, random: Random) -> dict[Any, Any]:
    """Draws what a file may state of a record: required fields and some others, seldom a wrong key."""
    data: dict[Any, Any] = {}
    for name, field in record.model_fields.items():
        if random.random() < (0.98 if field.is_required() else 0.25):
            key = random.choice(field.list_keys(name)) if random.random() < 0.98 else name
            data[key] = draw_value(field.hint, random, field.limits)
    if random.random() < 0.05:
        data[random.choice(("odd", 1, *record.model_fields))] = 1
    return data


def damage(data: Any, random: Random) -> Any:
    """Returns data with a value in them that is damaged, left out or stated twice."""
    if not (isinstance(data, dict | list) and data) or random.random() < 0.1:
        return random.choice(DAMAGED)
    place = random.choice([*data] if isinstance(data, dict) else range(len(data)))
    damaged = copy.copy(data)
    if random.random() < 0.1:
        del damaged[place]
    elif random.random() < 0.1 and isinstance(damaged, dict):
        damaged[random.choice((f"{place}s", 1))] = damaged[place]
    else:
        damaged[place] = damage(data[place], random)
    return damaged


def list_records() -> list[Any]:
    """Returns all records of hardware/ and simulator/."""
    for package in (meshcast.hardware, meshcast.simulator):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if not {"schemes", "trace"} & {*module.name.split(".")}:  # a trace imports torch
                import_module(module.name)
    for use in scheme_names():
        find_scheme(use)
    records: list[Any] = []
    waiting = BaseModel.__subclasses__()
    while waiting:
        records.append(waiting.pop())
        waiting += records[-1].__subclasses__()
    return sorted(
        (record for record in records if record.__module__.startswith(("meshcast.hardware", "meshcast.simulator"))),
        key=str,
    )


def show(value: object) -> object:
    """Returns all of a value that may differ: types, fields that are stated, digits."""
    if isinstance(value, BaseModel):
        return type(value), show(dict(value)), value.model_fields_set, show(value.model_extra)
    if isinstance(value, dict):
        return [(show(key), show(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(show, value)]
    return type(value), repr(value), *([*vars(value).values()] if isinstance(value, meshcast.hardware.Value) else [])


make_adapter = cache(TypeAdapter)


def assert_equal_to_pydantic(record: Any, data: Any) -> bool:
    """Returns whether data are validated without pydantic; then as by it."""
    try:
        fast = record.validate_fast(data)
    except Exception:  # whatever it is, pydantic judges
        return False
    by_pydantic = make_adapter(record).validate_python(data)
    assert show(fast) == show(by_pydantic), data
    assert fast == by_pydantic
    return True


class Pair(NamedTuple):
    first: int
    second: Annotated[float, Field(gt=0)] = 1.0


HINTS = (
    *(str, int, float, bool, None, Any, object, datetime.date, Path, list, dict, Pair, Inner, Literal[1, "a", "auto"]),
    *(list[int], tuple[float, ...], tuple[int, float], tuple[tuple[int, ...], ...], dict[str, int], dict[str, Inner]),
    *(int | None, str | int | float, float | bool | str, int | Literal["auto"], Inner | None, datetime.date | str),
    *(int | tuple[int, ...], bool | tuple[str, ...], str | dict[str, Any], list[int] | tuple[float, ...], int | Inner),
    *(Inner | Outer, Inner | dict[str, int], Any | float, Pair | int, float | Annotated[Any, AfterValidator(repr)]),
    *(Annotated[hint, Field(strict=True)] for hint in (int, float, tuple[int, ...], datetime.date)),
    *(Annotated[str, Field(pattern="^[a-z]+$")], Annotated[list[int], Field(min_length=1, max_length=1)]),
    *(Annotated[int, BeforeValidator(len)], Annotated[float | None, AfterValidator(bool)], Annotated[int, Gt(0)]),
)


@pytest.mark.parametrize("hint", HINTS)
def test_values_of_any_type_are_validated_as_by_pydantic(hint: Any) -> None:
    validate, adapter = make_validator(hint), TypeAdapter(hint)
    for value in DAMAGED:
        try:
            fast = validate(value)
        except Exception:  # whatever it is, pydantic judges
            continue
        assert show(fast) == show(adapter.validate_python(value)), value


def test_data_are_validated_as_by_pydantic() -> None:
    random = Random(0)
    assert sum([assert_equal_to_pydantic(Outer, draw_data(Outer, random)) for _ in range(400)]) > 100


RECORDS = list_records()


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.__module__}.{record.__qualname__}")
def test_drawn_data_of_any_record_are_validated_as_by_pydantic(record: Any) -> None:
    random = Random(record.__qualname__)
    for _ in range(20):
        assert_equal_to_pydantic(record, draw_data(record, random))


def test_no_record_asks_for_a_context() -> None:
    """Options of commands do, which are no parts of others: under pydantic alone, parts would see it."""
    methods = {getattr(record, name) for record in RECORDS for name in record.__validators__}
    assert len(methods) > 20
    assert not [method for method in methods if "info" in signature(method).parameters]


def compare_while_reading(random: Random, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Compares data of any record that is read from here on, and damaged ones, with pydantic; returns which were
    validated without it."""
    fast = []

    def compare(cls: Any, data: Any, *, context: object = None) -> Any:
        fast.append(assert_equal_to_pydantic(cls, data))
        for _ in range(2):
            assert_equal_to_pydantic(cls, damage(data, random))
        return make_adapter(cls).validate_python(data, context=context)

    monkeypatch.setattr(BaseModel, "model_validate", classmethod(compare))
    _load_known.cache_clear()
    _made.clear()
    return fast


def test_the_catalog_and_damaged_entries_are_validated_as_by_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = compare_while_reading(Random(0), monkeypatch)
    for kind in ("links", "gpus", "nodes", "clusters"):
        for name in catalog(kind):
            load(kind, name)
    assert all(fast) and len(fast) > 150


def test_jobs_and_damaged_ones_are_validated_as_by_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = compare_while_reading(Random(0), monkeypatch)
    for name in JOBS:
        load_job(ROOT / "examples" / f"{name}.yaml")
    assert all(fast) and len(fast) > 20


def test_copies_and_pickles_are_equal() -> None:
    outer = Outer.model_validate({"names": "a", "inner": {"kind": 1, "more": [2]}})
    assert outer == copy.copy(outer) == copy.deepcopy(outer) == pickle.loads(pickle.dumps(outer))
    stated = outer.model_dump(by_alias=True, exclude_unset=True)
    assert show(outer.model_copy(update={"count": 2})) == show(Outer.model_validate({**stated, "count": 2}))


def test_a_default_in_a_note_is_refused() -> None:
    class Noted(BaseModel):
        count: Annotated[int, Field(default=1)]

    with pytest.raises(TypeError, match="are not read"):
        Noted.model_validate({})


def test_faults_are_worded_by_pydantic() -> None:
    faults: tuple[dict[str, Any], ...] = ({"count": 0}, {"odd": 1}, {"inner": {}}, {"all": 4}, {"names": [1]})
    for fault in faults:
        with pytest.raises(ValueError, match="validation error"):
            Outer.model_validate(fault)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_without_fault_is_forecast_without_slow_packages(job: str) -> None:
    simulate = f"import sys, meshcast; meshcast.simulate('examples/{job}.yaml').to_dict()"
    code = f"{simulate}; print({{'pydantic', 'numpy.ma', 'rich', 'typer'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "set()\n"
