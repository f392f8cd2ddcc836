"""Validators of plain values, as YAML and JSON hold them, made of the types of their fields.

A validator returns the value that pydantic returns for the type, or raises an error where pydantic has to judge: of a
value that is wrong, or that it converts.
"""

from __future__ import annotations

import datetime
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

Validate: TypeAlias = Callable[[object], object]


class NotPlain(Exception):
    """A value is not plainly of its type."""


SCALARS = (str, int, float, bool, NoneType)
SEQUENCES = (list, tuple)

LIMITS: Mapping[str, Callable[..., bool]] = {
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
    "min_length": lambda value, least: len(value) >= least,
    "max_length": lambda value, most: len(value) <= most,
    "pattern": lambda value, form: re.search(form, value) is not None and "\n" not in value,
    "strict": lambda value, strict: type(value) in SCALARS,  # which are never converted here, but for int to float
}
"""Whether a value keeps a limit, by the keywords of pydantic's `Field`."""

NO_LIMITS = frozenset({"allow_inf_nan", "description", "validate_default"})
"""Keywords that ask nothing of a value here: numbers are finite anyway."""

DAY = re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}")


def limit_values(validate: Validate, limits: Mapping[str, object]) -> Validate:
    """Returns a validator of values that keep limits, too."""
    limits = {word: limit for word, limit in limits.items() if word not in NO_LIMITS}
    if not limits:
        return validate
    if not limits.keys() <= LIMITS.keys():
        return leave_to_pydantic
    checks = [(LIMITS[word], limit) for word, limit in limits.items()]

    def validate_limits(value: object) -> object:
        value = validate(value)
        for keeps, limit in checks:
            if not keeps(value, limit):
                raise NotPlain
        return value

    return validate_limits


def make_validator(hint: object) -> Validate:
    """Returns the validator of a type as it stands in an annotation.

    A record validates itself by its `validate_fast`, a note of ``Annotated`` wraps the validator by its
    `wrap_validator`.
    """
    if hint is Any:
        return lambda value: value
    if hint in (str, bool, int):
        return _make_exact(hint)
    if hint in (None, NoneType):
        return _make_exact(NoneType)
    if hint is float:
        return _validate_float
    if hint is datetime.date:
        return _validate_date
    if isinstance(hint, type) and hasattr(hint, "validate_fast"):
        validate_record: Validate = hint.validate_fast
        return validate_record
    parts = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _make_annotated(*parts)
        case origin if origin is Literal:
            return _make_literal(parts)
        case origin if origin in (Union, UnionType):
            return _make_union(parts)
        case origin if origin is list:
            return _make_items(list, make_validator(*parts))
        case origin if origin is tuple:
            is_open = len(parts) == 2 and parts[1] is ...
            return _make_items(tuple, make_validator(parts[0])) if is_open else _make_tuple(parts, tuple)
        case origin if origin is dict:
            return _make_dict(*map(make_validator, parts))
        case None if isinstance(hint, type) and hasattr(hint, "_fields"):  # of a NamedTuple
            kinds = get_type_hints(hint, include_extras=True).values()
            return _make_tuple([*kinds], lambda values: hint(*values))
        case None if isinstance(hint, type) and hint not in (list, tuple, dict, set, frozenset):
            return _make_instance(hint)
    return leave_to_pydantic


def leave_to_pydantic(value: object) -> object:
    """Validates nothing here."""
    raise NotPlain


def _make_exact(kind: object) -> Validate:
    def validate(value: object) -> object:
        if type(value) is not kind:
            raise NotPlain
        return value

    return validate


def _make_instance(kind: type) -> Validate:
    def validate(value: object) -> object:
        if not isinstance(value, kind):
            raise NotPlain
        return value

    return validate


def _validate_float(value: object) -> object:
    if type(value) is int:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise NotPlain
    return value


def _validate_date(value: object) -> object:
    if type(value) is str and DAY.fullmatch(value):
        return datetime.date.fromisoformat(value)
    if type(value) is not datetime.date:
        raise NotPlain
    return value


def _make_literal(words: Sequence[object]) -> Validate:
    known = {(type(word), word) for word in words}

    def validate(value: object) -> object:
        if (type(value), value) not in known:
            raise NotPlain
        return value

    return validate


def _make_annotated(hint: object, *notes: object) -> Validate:
    validate = make_validator(hint)
    for note in notes:
        if hasattr(note, "wrap_validator"):
            validate = note.wrap_validator(validate)
        elif hasattr(note, "__get_pydantic_core_schema__") or type(note).__module__ == "annotated_types":
            return leave_to_pydantic
    return validate


def _make_union(arms: Sequence[object]) -> Validate:
    """Of a value, pydantic takes the arm of its very type; 1 is a float only if no arm has integers."""
    others = [arm for arm in arms if arm is not NoneType]
    shapes = [shape for arm in others if (shape := _find_shape(arm)) != "scalar"]
    if len(others) > 1 and ("" in shapes or len(shapes) > len({*shapes})):
        return leave_to_pydantic
    validators, optional = [*map(make_validator, others)], len(others) < len(arms)

    def validate(value: object) -> object:
        if value is None and optional:
            return None
        results = []
        for validate_arm in validators:
            try:
                result = validate_arm(value)
            except (NotPlain, ValueError, TypeError):
                continue
            if result is value:
                return value
            results.append(result)
        if len(results) != 1:
            raise NotPlain
        return results[0]

    return validate if len(validators) > 1 or optional else validators[0]


def _find_shape(hint: object) -> str:
    """Returns which values a type takes: scalars, sequences or mappings; "" if it may take several of these."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        takes_only_limits = all(hasattr(note, "limits") for note in parts[1:])
        return _find_shape(parts[0]) if takes_only_limits else ""
    if origin is Literal or hint in SCALARS:
        return "scalar"
    if origin in SEQUENCES:
        return "sequence"
    return "mapping" if origin is dict else ""


def _make_items(kind: Callable[[map[object]], object], validate_item: Validate) -> Validate:
    return lambda value: kind(map(validate_item, _take_sequence(value)))


def _take_sequence(value: object) -> Sequence[object]:
    if isinstance(value, SEQUENCES) and type(value) in SEQUENCES:
        return value
    raise NotPlain


def _make_tuple(kinds: Sequence[object], make: Callable[[tuple[object, ...]], object]) -> Validate:
    validators = [*map(make_validator, kinds)]

    def validate(value: object) -> object:
        items = _take_sequence(value)
        if len(items) != len(validators):
            raise NotPlain
        return make(tuple(validate_item(item) for validate_item, item in zip(validators, items, strict=True)))

    return validate


def _make_dict(validate_key: Validate, validate_item: Validate) -> Validate:
    def validate(value: object) -> object:
        if type(value) is not dict:
            raise NotPlain
        return {validate_key(key): validate_item(item) for key, item in value.items()}

    return validate
