"""Validates data as pydantic models; raises the most telling of pydantic's errors as a `MeshcastError`, with place,
rule and remedy."""

from __future__ import annotations

import re
import types
import typing
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from meshcast.hardware.documents.document import Place, line_of
from meshcast.hardware.errors import MAX_LISTED_KEYS, CatalogError, MeshcastError, nearest
from meshcast.hardware.schemas import BaseModel, ConfigDict, import_validation_error

if TYPE_CHECKING:
    from pydantic import ValidationError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Base of descriptions: unknown keys are refused, and fields do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


def validate_data(
    model: type[Model], data: Any, where: str, error: type[MeshcastError] = CatalogError, text: str = ""
) -> Model:
    """Validates `data` as a `model`. Raises `error` for the most telling mistake (see `explain`)."""
    try:
        return model.model_validate(data)
    except import_validation_error() as e:
        raise explain(e, where, error, text=text, model=model) from None


def explain(
    e: ValidationError,
    where: str,
    error: type[MeshcastError] = CatalogError,
    *,
    text: str = "",
    model: type[BaseModel] | None = None,
) -> MeshcastError:
    """Returns the most telling mistake in `e` as an `error`.

    Args:
        where: the file that `text` comes from, or without `text` the path of the field that was validated, or a file
            and a space.
        text: the YAML read; with it the error says ``where:line field``, without it ``where.field``.
        model: the model validated; with it an unknown key is answered with the nearest valid key.

    A validator's ``ValueError("rule. remedy")`` is split at its first ". ".
    """
    # A misspelt key is also reported as a missing key; the misspelling is the mistake.
    errors = sorted(e.errors(include_url=False), key=lambda error: error["type"] != "extra_forbidden")
    start = _place(errors[0])
    is_form = errors[0]["type"] != "extra_forbidden" and any(map(_names_form, errors[0]["loc"][1:]))
    # If several forms are valid, each reports why it does not match; that which was read furthest was meant.
    forms = [error for error in errors if _place(error)[: len(start)] == start] if is_form else errors[:1]
    place = max(map(_place, forms), key=len)
    here = [error for error in forms if _place(error) == place]
    numbers = [error["type"] for error in here if error["type"] in ("int_type", "float_type")]
    first, *more = (error for error in here if error["type"] != "int_type" or "float_type" not in numbers)
    keys = valid_keys(model, place[:-1] if first["type"] in ("extra_forbidden", "missing") else place)
    rule, remedy = _tell(first, place, keys)
    if first["type"] == "extra_forbidden":
        rule, remedy = _add_unknown_keys(errors, place, rule, remedy, model)
    for another in more:
        other, way = _tell(another, place, keys)
        rule = f"{rule}, or {other.removeprefix('must be ')}"
        remedy = f"{remedy}, or {way[0].lower()}{way[1:]}"
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{_show_key(part)}" for part in place).removeprefix(".")
    if text:
        where = f"{where}:{line_of(text, place)} {path}".rstrip()
    else:
        where += path if path.startswith("[") or where.endswith(" ") or not (where and path) else f".{path}"
    value = None if first["type"] in ("missing", "extra_forbidden") else first["input"]
    return error(where, rule, remedy, value)


MAX_UNKNOWN = 20
"""Unknown keys that are told, each with what it may mean; the others are counted."""


def _add_unknown_keys(
    errors: list[Any], place: Place, rule: str, remedy: str, model: type[BaseModel] | None
) -> tuple[str, str]:
    """Returns rule and remedy of an unknown key, with all other unknown keys, each with what it may mean."""
    others = []
    unknown = [other for error in errors if error["type"] == "extra_forbidden" and (other := _place(error)) != place]
    for other in unknown[:MAX_UNKNOWN]:
        keys = valid_keys(model, other[:-1])
        hint = nearest(str(other[-1]), keys).partition(" Valid: ")[0] if keys else ""
        name = ".".join(map(str, other))
        others.append(f"{name} ({hint[0].lower()}{hint[1:].rstrip('.')})" if "'" in hint else name)
    if not others:
        return rule, remedy
    more = len(unknown) - len(others)
    shown = ", ".join(others) + (f" and {more:,} more" if more else "")
    return f"{rule}, nor are {shown}" if len(others) > 1 else f"{rule}, nor is {shown}", remedy


def _show_key(key: str) -> str:
    """Returns a key as it was written; in quotes if it begins or ends with a blank, which nobody would see."""
    return key if key == key.strip() else repr(key)


_FORMS = ("str", "int", "constrained-int", "float", "bool")
"""Types whose names pydantic adds to a place if a field may have any of several."""


def _names_form(part: int | str) -> bool:
    return part in _FORMS or bool(re.search(r"[\[(]", str(part)))


def _place(error: Any) -> Place:
    """Returns the place of an error, without the names of types that pydantic adds."""
    loc = error["loc"]
    unknown = error["type"] == "extra_forbidden"
    return tuple(part for i, part in enumerate(loc) if not _names_form(part) or (unknown and i == len(loc) - 1))


_WORDING = {
    "int_type": ("must be a whole number", "Write it without quotes, unit or decimals"),
    "float_type": ("must be a number", "Write a plain number, without quotes or unit"),
    "finite_number": ("must be finite", "Write a plain number"),
    "bool_type": ("must be true or false", "Write true or false"),
    "string_type": ("must be text", "Write one word, or put it in quotes"),
    "string_too_short": ("must not be empty", "Write at least {min_length} character"),
    "too_short": ("must have at least {min_length} item", "Write at least {min_length}"),
    "too_long": ("must have at most {max_length} items", "Write at most {max_length}"),
    "union_tag_not_found": ("the key {discriminator} is missing", "Add {discriminator}, which says what it is"),
    "union_tag_invalid": ("{discriminator} must be one of {expected_tags}", "Write one of them"),
    "list_type": ("must be a list", "Write it like [a, b]"),
    "greater_than": ("must be above {gt}", "Write a number above {gt}"),
    "greater_than_equal": ("must be at least {ge}", "Write {ge} or more"),
    "less_than": ("must be below {lt}", "Write a number below {lt}"),
    "int_parsing_size": ("has too many digits", "Write a smaller number"),
    "less_than_equal": ("must be at most {le}", "Write {le} or less"),
    "invalid_key": ("keys must be text", "Put the key in quotes"),
}
"""Rule and remedy by pydantic's error types, filled in from the error's context."""

_SAME = {
    **{"int_parsing": "int_type", "int_from_float": "int_type"},
    **{"float_parsing": "float_type", "bool_parsing": "bool_type", "tuple_type": "list_type"},
}


def _tell(error: Any, place: Place, keys: list[str]) -> tuple[str, str]:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "string_type" and error["loc"][-1:] == ("[key]",):
        kind = "invalid_key"
    field = str(place[-1]) if place else ""
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return "no such key", nearest(field, keys, most=MAX_LISTED_KEYS) if keys else "Remove it"
    if kind == "int_type" and error.get("input") == "auto":
        return "must be a number: only a search opens fields", "Use `meshcast search`, or write a whole number"
    if kind == "missing":
        return "needed and missing", f"Add `{field}: ...`"
    if kind == "value_error":
        rule, _, remedy = str(context["error"]).partition(". ")
        return rule, remedy or "Correct the value"
    if kind in ("literal_error", "enum"):
        words = re.findall(r"'([^']*)'|(\d+)", context["expected"])
        return "not one of the valid words", nearest(str(error["input"]), ["".join(pair) for pair in words])
    if kind in ("model_type", "dict_type", "mapping_type", "model_attributes_type", "dataclass_type"):
        return "must be a mapping of keys to values", f"Keys: {', '.join(keys)}" if keys else "Write `key: value` lines"
    if kind in _WORDING or kind in _SAME:
        rule, remedy = _WORDING[_SAME.get(kind, kind)]
        return rule.format(**context), remedy.format(**context)
    return str(error["msg"]).replace("Input should", "should").rstrip("."), "Correct the value"


def valid_keys(model: type[BaseModel] | None, place: Place) -> list[str]:
    """Returns the keys that the mapping at `place` of a `model` may have; [] if unknown."""
    annotation: Any = model
    for part in place:
        fields = _fields(annotation)
        if part in fields:
            annotation = fields[part]
        else:  # below a dict or list: go on with the type of its items
            items = [item for item in typing.get_args(_plain(annotation)) if item is not ...]
            annotation = items[-1] if items else None
    return [str(key) for key in _fields(annotation)]


def _fields(annotation: Any) -> dict[int | str, Any]:
    """Returns key and type of each field of the (first) model in `annotation`."""
    annotation = _plain(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        return {field.alias or name: Annotated[(field.annotation, *field.metadata, None)] for name, field in fields}
    return {}


def _plain(annotation: Any) -> Any:
    """Returns `annotation` without Annotated; of a union, the first alternative that is a model, else the first."""
    if typing.get_origin(annotation) is Annotated:
        plain, *more = typing.get_args(annotation)
        return next((note.written for note in more if hasattr(note, "written")), _plain(plain))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        arms = [_plain(arm) for arm in typing.get_args(annotation) if arm is not type(None)]
        return next((arm for arm in arms if _fields(arm)), arms[0])
    return annotation
