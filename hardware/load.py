"""Values with their source, and the catalog that ships with meshcast.

A catalog value is written ``{value: 900 GB/s, direction: both, kind: peak, source: <document>, checked: 2026-11-21}``
and becomes a `Value`: a float in SI that keeps all of that. Three layers, each usable alone::

    read_yaml(path or text)    -> Document: plain data, every fault of the file is a single error
    validate_data(Model, data) -> Model, a pydantic error turned into a MeshcastError (`explain`)
    load("gpus", "h100-sxm")   -> the catalog's GPU, read once
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from meshcast.hardware import units
from meshcast.hardware.documents.document import (
    MAX_DEPTH,
    MAX_NODES,
    Document,
    Loader,
    Place,
    line_of,
    read_yaml,
    read_yaml_documents,
)
from meshcast.hardware.documents.explain import Model, Strict, explain, valid_keys, validate_data
from meshcast.hardware.documents.shipped import read_shipped
from meshcast.hardware.errors import CatalogError, nearest
from meshcast.hardware.fast_validation import Validate, make_validator
from meshcast.hardware.plugins import find_files, remember_names, with_installed
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, BeforeValidator, Field

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

__all__ = [
    "MAX_DEPTH", "MAX_NODES", "Bandwidth", "BooleanFact", "Bytes", "Count", "Document", "Entry", "Fact", "Flops",
    "Frequency", "LinkRate", "Loader", "Place", "Power", "Ratio", "Sourced", "Strict", "Time", "Value",
    "assumed_value", "by_name", "catalog", "catalog_model", "explain", "line_of", "load", "quantity", "read_fields",
    "read_yaml", "read_yaml_documents", "valid_keys", "validate_data",
]  # fmt: skip

# -------------------------------------------------------------------------------------------- values


class Value(float):
    """A float in SI with its source.

    Attributes:
        text: as written (``900 GB/s``).
        kind: ``peak`` (stated by the maker), ``measured``, ``fitted`` or ``assumed``.
        source: document or address.
        note: for readers.
        checked: day on which the source was read (ISO), or "".
    """

    text: str
    kind: str
    source: str
    note: str
    checked: str

    def __new__(
        cls, number: float, text: str = "", kind: str = "assumed", source: str = "", note: str = "", checked: str = ""
    ) -> Value:
        self = super().__new__(cls, number)
        self.text, self.kind, self.source, self.note, self.checked = text, kind, source, note, checked
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return float(self), self.text, self.kind, self.source, self.note, self.checked


class Sourced(Strict):
    """The source of an entry of the catalog; see `Value`."""

    kind: Literal["peak", "measured", "fitted", "assumed"]
    source: str = Field(min_length=1)
    page: str | int | None = None
    note: str = ""
    checked: datetime.date | None = None


class Entry(Sourced):
    """A `Value` as the catalog writes it."""

    value: str | int | float
    per: Literal["gpu", "link", "port", "node"] | None = None
    direction: Literal["one", "both"] | None = None


class Fact(Sourced):
    """An entry of the catalog without a unit."""

    value: object


class BooleanFact(Fact):
    """Whether something is so."""

    value: bool


@dataclass(frozen=True)
class quantity:
    """The kind of quantity that a field holds: ``Annotated[Value, quantity("bandwidth", directed=True)]``.

    Args:
        dimension: of ``units.UNITS``.
        directed: the value must say ``direction: one`` or ``both``; ``both`` is halved, so that every bandwidth
            inside meshcast is that of one direction.
        per: the valid words of ``per``; a figure of a whole node is none of a GPU.
        zero: whether 0 is a possible value.
    """

    written: ClassVar[type[BaseModel]] = Entry
    """The model of the entry in the file."""

    dimension: str
    directed: bool = False
    per: tuple[str, ...] = ("gpu",)
    zero: bool = False

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_wrap_validator_function(self._read, handler.generate_schema(Entry))

    def wrap_validator(self, validate: Validate) -> Validate:
        return partial(self._read, validate_entry=make_validator(Entry))

    def _read(self, raw: object, validate_entry: Validate) -> Value:
        if isinstance(raw, Value):
            return raw
        if not isinstance(raw, dict):
            raise ValueError("a catalog value names its source. Write {value: ..., kind: ..., source: ...}")
        entry = validate_entry(raw)
        assert isinstance(entry, Entry)
        return self._value(entry)

    def _value(self, entry: Entry) -> Value:
        number = units.parse(entry.value, self.dimension)
        if number == 0 and not self.zero:
            raise ValueError("must be above 0. Leave the field out if the device has none")
        if self.directed and entry.direction is None:
            raise ValueError("a link's rate needs its direction. Add `direction: one` or `direction: both`")
        if not self.directed and entry.direction is not None:
            raise ValueError("this quantity has no direction. Remove `direction`")
        if entry.per is not None and entry.per not in self.per:
            raise ValueError(f"this quantity is per {' or '.join(self.per)}. Convert the value, or remove `per`")
        if entry.direction == "both":
            number /= 2
        source = entry.source if entry.page is None else f"{entry.source}, page {entry.page}"
        checked = entry.checked.isoformat() if entry.checked else ""
        return Value(number, str(entry.value), entry.kind, source, entry.note, checked)


Bytes = Annotated[Value, quantity("bytes")]
Bandwidth = Annotated[Value, quantity("bandwidth")]
LinkRate = Annotated[Value, quantity("bandwidth", directed=True, per=("link", "port"))]
Flops = Annotated[Value, quantity("flops")]
Time = Annotated[Value, quantity("time", zero=True)]
Frequency = Annotated[Value, quantity("frequency")]
Power = Annotated[Value, quantity("power")]
Count = Annotated[Value, quantity("count", per=("gpu", "node"))]
Ratio = Annotated[Value, quantity("ratio")]


def assumed_value(number: float, source: str, text: str = "") -> Value:
    """Returns a `Value` (SI) that is assumed in code; `source` says why."""
    return Value(number, text or f"{number:g}", "assumed", source)


# ------------------------------------------------------------------------------------------- catalog

_MODELS: dict[str, dict[str, tuple[type[BaseModel], Callable[[Any], Any]]]] = {}


def catalog_model(
    kind: str, key: str = "", make: Callable[[Any], Any] = lambda read: read
) -> Callable[[type[Model]], type[Model]]:
    """Decorates a class: files of the catalog folder `kind` are read as this model.

    key: only files that have this key; "": all others.
    make: the entry of what was read.
    """

    def register(model: type[Model]) -> type[Model]:
        _MODELS.setdefault(kind, {})[key] = model, make
        return model

    return register


def _read_entry(kind: str, data: Any, where: str, text: str) -> Any:
    """Returns the entry of the catalog of `kind` that `data` describes."""
    if kind not in _MODELS:  # the module of a kind that few jobs name registers its models when it is imported
        import_module(f"meshcast.hardware.{kind}")
    forms = _MODELS[kind]
    key = next((key for key in forms if key and isinstance(data, dict) and key in data), "")
    model, make = forms[key]
    return make(validate_data(model, data, where, text=text))


CATALOG = Path(__file__).parent / "catalog"

FILES = (".yaml", ".yml")
"""Endings of file names."""


@remember_names
def catalog(kind: str) -> tuple[str, ...]:
    """Returns the names in the catalog of `kind` (gpus, links, nodes, clusters), with those of plug-ins, sorted."""
    return tuple(sorted((*_list_shipped(kind), *_find_added(kind))))


@cache
def _list_shipped(kind: str) -> tuple[str, ...]:
    return tuple(file.stem for file in (CATALOG / kind).iterdir() if file.suffix == ".yaml")


@remember_names
def _find_added(kind: str) -> Mapping[str, Path]:
    """Returns the files of plug-ins by the names of what they describe."""
    return find_files(kind, ".yaml", _list_shipped(kind))


@with_installed
def load(kind: str, name: str) -> Any:
    """Returns the catalog's GPU, Link, Node or Cluster called `name`, or that of the file `name` (``.yaml``); read and
    checked once, a file again when it or a file that it names has changed: notebooks live long."""
    if (added := _find_added(kind).get(name)) is not None:
        return _load_file(kind, str(added))
    return _load_file(kind, name) if name.endswith(FILES) else _load_known(kind, name)


Statuses = dict[str, tuple[int, ...]]
"""Files by their names, each with what changes when it does; () for none."""

_loaded: dict[tuple[str, str], tuple[Statuses, object]] = {}
_being_read: list[Statuses] = []


def _load_file(kind: str, name: str) -> object:
    """Returns the entry in a file of a user."""
    files, entry = _loaded.get((kind, name), ({}, None))
    if not files or any(_find_status(path) != before for path, before in files.items()):
        files = {name: _find_status(name)}
        _being_read.append(files)  # the files that this file names are added
        try:
            data, text, where = read_yaml(Path(name))
            named = {"name": Path(name).stem, **data} if isinstance(data, dict) else data
            entry = _read_entry(kind, named, where, text)
        finally:
            _being_read.pop()
        _loaded[kind, name] = files, entry
    for others in _being_read:
        others |= files
    return entry


def list_statuses() -> frozenset[tuple[str, tuple[int, ...]]]:
    """Returns what the files of users that were read so far are like now: part of the key of whatever is kept of
    them."""
    return frozenset((path, _find_status(path)) for files, _ in _loaded.values() for path in files)


def _find_status(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def read_fields(kind: str, name: str) -> Document:
    """Returns what the file of an entry of the catalog says, which takes a tenth of the time of its validation."""
    added = _find_added(kind).get(name)
    return _read_known(kind, name) if added is None else read_yaml(added)


@cache
def _read_known(kind: str, name: str) -> Document:
    """Returns what the file of an entry that ships says."""
    if name not in catalog(kind):
        raise CatalogError(kind.removesuffix("s"), "not in the catalog", nearest(name, catalog(kind)), name)
    data, text, where = read_shipped(CATALOG / kind / f"{name}.yaml", f"{kind}/{name}.yaml")
    return Document({"name": name, **data} if isinstance(data, dict) else data, text, where)


@cache
def _load_known(kind: str, name: str) -> object:
    """Returns the entry of the catalog that ships."""
    data, text, where = _read_known(kind, name)
    return _read_entry(kind, data, where, text)


def by_name(kind: str, model: type[BaseModel]) -> BeforeValidator:
    """Returns the validator of a field that may hold a catalog name, or the path of a file like those of the catalog,
    in place of the description itself, a `model`."""

    def read(raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        if raw not in catalog(kind) and not raw.endswith(FILES):
            raise ValueError(f"not in the catalog of {kind}. {nearest(raw, catalog(kind))}")
        return load(kind, raw)

    return BeforeValidator(read, json_schema_input_type=str | model)
