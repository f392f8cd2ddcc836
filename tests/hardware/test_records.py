"""Records behave as dataclasses of the standard library do, and nothing of a record is compiled before it is used."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from meshcast.hardware import records

ROOT = Path(__file__).parents[2]
ROOMS = ("hardware", "simulator", "experiments", "validation", "tools")


def make_plain(dataclass: Any) -> tuple[type, ...]:
    @dataclass(frozen=True)
    class Base:
        width: int
        names: dict[str, int] = field(default_factory=dict, hash=False)
        quiet: float = field(default=1.5, compare=False, repr=False)
        shared: ClassVar[int] = 3

    @dataclass(frozen=True)
    class Derived(Base):
        marks: tuple[str, ...] = field(default=(), kw_only=True)
        last: Any = None

        def __post_init__(self) -> None:
            if self.width < 0:
                raise ValueError("negative")

    @dataclass
    class Open:
        width: int
        made: list[int] = field(default_factory=list, init=False)

    @dataclass(eq=False)
    class Single:
        width: int

        def __repr__(self) -> str:
            return "stated"

    @dataclass(frozen=True, slots=True)
    class Slotted:
        width: int
        second: str = "b"

    @dataclass(frozen=True)
    class Short:
        width: int

        def __hash__(self) -> int:
            return 7

    class Undecorated(Derived):
        pass

    return Base, Derived, Open, Single, Slotted, Short, Undecorated


STANDARD, RECORDS = make_plain(dataclasses.dataclass), make_plain(records.dataclass)
for _kind in RECORDS:  # so that pickle finds them
    _kind.__qualname__ = f"RECORD_{_kind.__name__}"
    globals()[_kind.__qualname__] = _kind
    _kind.__qualname__ = _kind.__qualname__
"""The same classes, made by both decorators."""


def tell(act: Callable[[], Any]) -> str:
    """Returns what an action answers or raises, without the names of the two sets of classes."""
    try:
        text = repr(act())
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return re.sub(r"make_plain\.<locals>\.|RECORD_", "", text)


ACTS: dict[str, Callable[[Any], Any]] = {
    "made": lambda kind: kind(4),
    "by name": lambda kind: kind(width=4),
    "all": lambda kind: kind(4, "c"),
    "by name alone": lambda kind: kind(4, marks=("m",)),
    "missing": lambda kind: kind(),
    "unknown": lambda kind: kind(4, other=1),
    "too many": lambda kind: kind(1, 2, 3, 4, 5),
    "checked": lambda kind: kind(-1),
    "equal": lambda kind: (kind(4) == kind(4), kind(4) == kind(5), kind(4) == 4, kind(4) != kind(4)),
    "hash": lambda kind: hash(kind(4)) == hash(kind(4)),
    "hash of": lambda kind: kind.__hash__ is None or hash(kind(4)) if kind.__eq__ is not object.__eq__ else 0,
    "set": lambda kind: setattr(kind(4), "width", 5),
    "set another": lambda kind: kind.__name__ == "Slotted" or setattr(kind(4), "other", 5),  # another error there
    "delete": lambda kind: delattr(kind(4), "width"),
    "replace": lambda kind: dataclasses.replace(kind(4), width=6),
    "fields": lambda kind: [each.name for each in dataclasses.fields(kind)],
    "dict": lambda kind: dataclasses.asdict(kind(4)),
    "copy": lambda kind: copy.copy(kind(4)),
    "default": lambda kind: kind(4).names is kind(4).names,
}


@pytest.mark.parametrize("act", ACTS)
def test_a_record_does_what_a_dataclass_does(act: str) -> None:
    for standard, record in zip(STANDARD, RECORDS, strict=True):
        assert tell(lambda kind=record: ACTS[act](kind)) == tell(lambda kind=standard: ACTS[act](kind)), standard


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_a_record_is_pickled(kind: Any) -> None:
    again = pickle.loads(pickle.dumps(kind(4)))
    assert type(again) is kind and again.width == 4


def test_a_constructor_is_compiled_once_it_is_called() -> None:
    @records.dataclass(frozen=True)
    class Late:
        width: int

    before = Late.__init__
    Late(1)
    compiled = Late.__init__
    Late(2)
    assert before is not compiled is Late.__init__


def test_every_dataclass_of_the_product_is_a_record() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "records.py"]
    compiled = [
        str(path) for path in files if re.search(r"dataclasses import .*\bdataclass\b", path.read_text("utf-8"))
    ]
    assert not compiled, "take `dataclass` from meshcast.hardware.records: it compiles what is used alone"


def test_a_dataclass_may_derive_from_a_record() -> None:
    @dataclasses.dataclass(frozen=True)
    class Derived(RECORDS[0]):  # type: ignore[misc]
        depth: int = 2

    assert (Derived(1).depth, Derived(1)) == (2, Derived(1, depth=2))
    with pytest.raises(TypeError, match="non-frozen dataclass from a frozen one"):
        dataclasses.dataclass(type("Open", (RECORDS[0],), {}))
    with pytest.raises(TypeError, match="non-frozen dataclass from a frozen one"):
        records.dataclass(type("Open", (RECORDS[0],), {}))
