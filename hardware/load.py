"""Reading descriptions: YAML files, the catalog that ships with meshcast, and values that know their source.

Three layers, each usable alone::

    read_yaml(path or text)   -> Document: plain data, with every way of not being YAML told as one error
    validated(Model, data)    -> Model, a pydantic error turned into one MeshcastError (`explain`)
    load("gpus", "h100-sxm")  -> the catalog's GPU, read once

A catalog value is written ``{value: 900 GB/s, direction: both, kind: peak, source: <document>, checked: 2026-11-21}``
and becomes a `Value`: a float in SI that still knows all that.
"""

from __future__ import annotations

import datetime
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from hardware import units
from hardware.errors import CatalogError, MeshcastError, nearest

try:
    from yaml import CSafeLoader as SafeLoader  # libyaml, many times faster
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

MAX_BYTES = 10_000_000
"""Longest file that is read, in bytes: no description is near it, and parsing more would look like a hang."""

MAX_NODES = 1_000_000
"""Most items a document may hold once its aliases are written out (``*a`` of ``*b`` of ``*c`` grows without bound)."""

MAX_DEPTH = 100
"""Deepest nesting that is read: libyaml ends the process where its stack ends."""

Place = tuple[int | str, ...]
"""Keys and indices from a document's top to a field."""

Model = TypeVar("Model", bound=BaseModel)
Plain = TypeVar("Plain")


# ---------------------------------------------------------------------------------------------- YAML


class Document(NamedTuple):
    """A YAML document: its plain data, its text (to find lines in) and the name to call it by."""

    data: Any
    text: str
    where: str


class GivenTwice(yaml.MarkedYAMLError):
    """A mapping has a key twice."""


class Loader(SafeLoader):
    """PyYAML's safe loader, for YAML 1.2.

    Words without quotes are what the core schema of YAML 1.2 says: ``yes``, ``off`` and ``1:30`` are text, ``1e3`` is a
    number. Beyond it ``2026-11-21`` is a day, and ``1_000``, ``0b11`` and the merging of ``<<`` are understood.
    """

    yaml_implicit_resolvers = {  # without numbers and truth as YAML 1.1 had them
        first: [one for one in found if one[0].endswith((":null", ":timestamp", ":merge"))]
        for first, found in SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def descend_resolver(self, *_: Any) -> None:
        """Called before each node that is composed."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RecursionError

    def ascend_resolver(self) -> None:
        """Called after each node that was composed."""
        self.depth -= 1

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        return int(text, 0 if text.lstrip("+-")[1:2] in ("b", "o", "x") else 10)  # 012 is twelve

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Called before each mapping that is constructed: refuses a key given twice and merges ``<<``."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self._key(key_node)
            if key in seen:
                raise GivenTwice(problem=f"the key {str(key)!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        if "<<" in seen:
            super().flatten_mapping(node)
            # Each key once, or mappings merged into each other would grow without bound.
            node.value = list({self._key(pair[0]): pair for pair in node.value}.values())

    def _key(self, node: yaml.Node) -> Any:
        if node.tag == "tag:yaml.org,2002:merge":
            return node.value
        key = self.construct_object(node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.MarkedYAMLError(problem="found unhashable key", problem_mark=node.start_mark)
        return key


CORE = (
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?(?:[0-9][0-9_]*|0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+)"),
    ("float", r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)
for _tag, _form in CORE:
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_form})\Z"), list("tTfF-+.0123456789"))
Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)


def read_yaml(source: str | Path | Traversable, where: str = "", error: type[MeshcastError] = CatalogError) -> Document:
    """The YAML 1.2 document in a file (`source` is a path) or in text (`source` is a str).

    Duplicate keys, tags that would build objects, several documents, binary files, and whatever else stops
    reading raise one `error` naming `where` (the path if not given) and the line.
    """
    where = where or ("text" if isinstance(source, str) else str(source))
    text = source if isinstance(source, str) else _read_text(source, where, error)
    try:
        data = yaml.load(text, Loader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        where += f":{mark.line + 1}" if mark else ""
        if isinstance(e, GivenTwice):
            raise error(where, str(e.problem), "Keep one of the two") from None
        problem = str(getattr(e, "problem", None) or e).splitlines()[0]
        problem = "the anchor is given twice" if problem == "second occurrence" else problem
        rule = f"not valid YAML 1.2 ({problem})"
        raise error(where, rule, "Correct the line; `key: value`, spaces for indentation") from None
    except RecursionError:
        raise error(where, "nested too deeply", "Simplify the file") from None
    except (ValueError, LookupError, AttributeError) as e:  # a day or a number that is none, or !!int before a word
        raise error(where, f"not valid YAML 1.2 ({e})", "Simplify the file") from None
    if "&" in text and "*" in text and _too_large(data):
        rule = f"its aliases write out to more than {MAX_NODES:,} items"
        raise error(where, rule, "Write the values out instead of using & and *")
    return Document(data, text, where)


def _read_text(path: Path | Traversable, where: str, error: type[MeshcastError]) -> str:
    try:
        if not path.is_file():
            there = isinstance(path, Path) and path.exists()
            rule = "not a regular file" if there else "no such file"
            raise error(where, rule, "Name a YAML file that exists")
        if isinstance(path, Path) and (size := path.stat().st_size) > MAX_BYTES:
            rule = f"{size:,} bytes, a description has at most {MAX_BYTES:,}"
            raise error(where, rule, "Name the description itself, not data")
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        raise error(where, "not UTF-8 text", "Name a YAML file") from None
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise error(where, f"cannot be read ({reason})", "Name a readable YAML file") from None


def _too_large(data: Any) -> bool:
    stack, seen = [data], 0
    while stack:
        item = stack.pop()
        seen += 1
        if seen > MAX_NODES:
            return True
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False


def line_of(text: str, place: Place) -> int:
    """The line (from 1) of the field at `place` in YAML `text`, or of the innermost parent that is there."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return 1
    line = 1
    for part in place:
        if isinstance(node, yaml.MappingNode):
            found = [(k, v) for k, v in node.value if str(k.value) == str(part)]
            if not found:
                break
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


# ----------------------------------------------------------------------------------- pydantic's errors


class Strict(BaseModel):
    """A description: unknown keys are refused, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def validated(
    model: type[Model], data: Any, where: str, error: type[MeshcastError] = CatalogError, text: str = ""
) -> Model:
    """`data` as a `model`; whatever is wrong with it raises one `error` (see `explain`)."""
    try:
        return model.model_validate(data)
    except ValidationError as e:
        raise explain(e, where, error, text=text, model=model) from None


def explain(
    e: ValidationError,
    where: str,
    error: type[MeshcastError] = CatalogError,
    *,
    text: str = "",
    model: type[BaseModel] | None = None,
) -> MeshcastError:
    """The most telling mistake in `e` as one `error`.

    Args:
        where: the file that `text` comes from, or without `text` the path of the field that was validated.
        text: the YAML read; with it the error says ``where:line field``, without it ``where.field``.
        model: the model validated; with it an unknown key is answered with the nearest valid one.

    A validator's own ``ValueError("rule. remedy")`` is split at its first ". ".
    """
    # A misspelt key is also reported as a missing one; the misspelling is the mistake.
    first = min(e.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    place = tuple(part for part in first["loc"] if not re.search(r"[\[(]", str(part)))
    keys = valid_keys(model, place[:-1] if first["type"] in ("extra_forbidden", "missing") else place)
    rule, remedy = _tell(first, place, keys)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    if text:
        where = f"{where}:{line_of(text, place)} {path}".rstrip()
    else:
        where += path if path.startswith("[") or not (where and path) else f".{path}"
    value = None if first["type"] in ("missing", "extra_forbidden") else first["input"]
    return error(where, rule, remedy, value)


_WORDING = {
    "int_type": ("must be a whole number", "Write it without quotes, unit or decimals"),
    "float_type": ("must be a number", "Write a plain number, without quotes or unit"),
    "finite_number": ("must be finite", "Write a plain number"),
    "bool_type": ("must be true or false", "Write true or false"),
    "string_type": ("must be text", "Write one word, or put it in quotes"),
    "string_too_short": ("must not be empty", "Write at least {min_length} character"),
    "too_short": ("must have at least {min_length} item", "Write at least {min_length}"),
    "list_type": ("must be a list", "Write it like [a, b]"),
    "greater_than": ("must be above {gt}", "Write a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "Write {ge} or more"),
    "less_than": ("must be below {lt}", "Write a number below {lt}"),
    "int_parsing_size": ("has too many digits", "Write a smaller number"),
    "less_than_equal": ("must be at most {le}", "Write {le} or less"),
    "invalid_key": ("keys must be text", "Put the key in quotes"),
}
"""Rule and remedy for pydantic's error types, filled from the error's context."""

_SAME = {
    **{"int_parsing": "int_type", "int_from_float": "int_type"},
    **{"float_parsing": "float_type", "bool_parsing": "bool_type", "tuple_type": "list_type"},
}


def _tell(one: Any, place: Place, keys: list[str]) -> tuple[str, str]:
    """Rule and remedy of one pydantic error."""
    kind, context = one["type"], one.get("ctx", {})
    field = str(place[-1]) if place else ""
    if kind == "extra_forbidden":
        return "no such key", nearest(field, keys) if keys else "Remove it"
    if kind == "missing":
        return "needed and missing", f"Add `{field}: ...`"
    if kind == "value_error":
        rule, _, remedy = str(context["error"]).partition(". ")
        return rule, remedy or "Correct the value"
    if kind in ("literal_error", "enum"):
        words = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        return "not one of the valid words", nearest(str(one["input"]), ["".join(pair) for pair in words])
    if kind in ("model_type", "dict_type", "mapping_type", "model_attributes_type", "dataclass_type"):
        return "must be a mapping of keys to values", f"Keys: {', '.join(keys)}" if keys else "Write `key: value` lines"
    if kind in _WORDING or kind in _SAME:
        rule, remedy = _WORDING[_SAME.get(kind, kind)]
        return rule.format(**context), remedy.format(**context)
    return str(one["msg"]).replace("Input should", "should").rstrip("."), "Correct the value"


def valid_keys(model: type[BaseModel] | None, place: Place) -> list[str]:
    """The keys that the mapping at `place` of a `model` may have; empty where that is not known."""
    found: Any = model
    for part in place:
        fields = _fields(found)
        if part in fields:
            found = fields[part]
        else:  # below a dict or list: go on with the type of its items
            found = next((a for a in reversed(typing.get_args(_plain(found))) if a is not type(None)), None)
    return [str(key) for key in _fields(found)]


def _fields(annotation: Any) -> dict[int | str, Any]:
    """Key and type of each field of the (first) model in `annotation`."""
    annotation = _plain(annotation)
    if annotation is Value:
        annotation = Entry
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
    return {}


def _plain(annotation: Any) -> Any:
    """`annotation` without Annotated, and without the alternatives of a union that are no models."""
    if typing.get_origin(annotation) is Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        arms = [_plain(arm) for arm in typing.get_args(annotation) if arm is not type(None)]
        return next((arm for arm in arms if _fields(arm)), arms[0])
    return annotation


# -------------------------------------------------------------------------------------------- values


class Value(float):
    """A float in SI that remembers where it comes from.

    text: as written (``900 GB/s``). kind: ``peak`` (stated by the maker), ``measured``, ``fitted`` or ``assumed``.
    source: document or address. note: what a reader should know. checked: the day the source was read (ISO), or "".
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
    """Where something in the catalog comes from; the words of `Value`."""

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


class Fact(Sourced, Generic[Plain]):
    """What the catalog says without a unit: yes or no, or how things are joined."""

    value: Plain


@dataclass(frozen=True)
class quantity:
    """What a field's catalog value must be: ``Annotated[Value, quantity("bandwidth", directed=True)]``.

    Args:
        dimension: one of ``units.UNITS``.
        directed: the value must say ``direction: one`` or ``both``; ``both`` is halved, so that every bandwidth
            inside meshcast is that of one direction.
        per: the valid words of ``per``; a figure of a whole node is not one of a GPU.
        zero: whether 0 is a possible value.
    """

    dimension: str
    directed: bool = False
    per: tuple[str, ...] = ("gpu",)
    zero: bool = False

    def __get_pydantic_core_schema__(self, _: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._read, handler.generate_schema(Entry))

    def _read(self, raw: Any, entry: Callable[[Any], Entry]) -> Value:
        if isinstance(raw, Value):
            return raw
        if not isinstance(raw, dict):
            raise ValueError("a catalog value names its source. Write {value: ..., kind: ..., source: ...}")
        return self._value(entry(raw))

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


def assumed(number: float, source: str, text: str = "") -> Value:
    """A `Value` (SI) made up in code, for want of a better one; `source` says by which reasoning."""
    return Value(number, text or f"{number:g}", "assumed", source)


# ------------------------------------------------------------------------------------------- catalog

_MODELS: dict[str, type[BaseModel]] = {}


def described(kind: str) -> Callable[[type[Model]], type[Model]]:
    """Class decorator: files of the catalog folder `kind` are read as this model."""

    def register(model: type[Model]) -> type[Model]:
        _MODELS[kind] = model
        return model

    return register


@cache
def catalog(kind: str) -> tuple[str, ...]:
    """Names of what the catalog holds of `kind` (gpus, links, nodes, clusters), sorted."""
    files: Iterable[Traversable] = (resources.files("hardware") / "catalog" / kind).iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


@cache
def load(kind: str, name: str) -> Any:
    """The catalog's GPU, Link, Node or Cluster called `name`; read and checked once."""
    if name not in catalog(kind):
        raise CatalogError(kind.removesuffix("s"), "not in the catalog", nearest(name, catalog(kind)), name)
    file = resources.files("hardware") / "catalog" / kind / f"{name}.yaml"
    data, text, where = read_yaml(file, f"{kind}/{name}.yaml")
    if isinstance(data, dict):
        data = {"name": name, **data}
    return validated(_MODELS[kind], data, where, text=text)


def by_name(kind: str, model: type[BaseModel]) -> BeforeValidator:
    """Validator of a field that may hold a catalog name in place of the description itself, a `model`."""

    def read(raw: Any) -> Any:
        if not isinstance(raw, str):
            return raw
        if raw not in catalog(kind):
            raise ValueError(f"not in the catalog of {kind}. {nearest(raw, catalog(kind))}")
        return load(kind, raw)

    return BeforeValidator(read, json_schema_input_type=str | model)
