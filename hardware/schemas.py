"""Models of data, such as the keys of a job or an entry of the catalog: what pydantic's `BaseModel` offers, without
pydantic until there is a fault to word.

A class states its fields as pydantic reads them. Data that are plainly of the types of its fields are read here, since
pydantic, and what it makes of a hundred classes, take longer than a forecast. Whatever else is left to pydantic, which
reads the same class: a fault, or a value that it converts. It makes the JSON schemas, too.
"""

from __future__ import annotations

import copy
import datetime
import math
import re
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from functools import cache, cached_property
from pathlib import PurePath
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Data: TypeAlias = Any
"""What a file holds and what is made of it, up to a model."""

Hint: TypeAlias = Any
"""The type of a field, as the module of its model states it."""

Check = Callable[[Data], Data]
"""Returns a value as its field holds it. Raises Unsure, or any other error, for one that pydantic has to judge."""


class Unsure(Exception):
    """A value is not plainly of the type of its field."""


class _Missing:
    """Stands for the default of a field that has none."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Data = _Missing()

# ------------------------------------------------------------------------------------------ fields and their validators

LIMITS: Mapping[str, Check] = {
    "gt": lambda least: lambda value: value > least,
    "ge": lambda least: lambda value: value >= least,
    "lt": lambda most: lambda value: value < most,
    "le": lambda most: lambda value: value <= most,
    "min_length": lambda least: lambda value: len(value) >= least,
    "max_length": lambda most: lambda value: len(value) <= most,
    "pattern": lambda form: lambda value: bool(re.search(form, value)) and "\n" not in value,
}
"""Whether a value keeps a limit of its field, by the words of pydantic; values are of the strictest types anyway."""

ANYWAY = ("allow_inf_nan", "strict", "discriminator", "description", "validate_default")
"""Words that ask for nothing of a value that is plainly of its type."""


class _Field:
    """Limits of a value, as a note in ``Annotated`` or in place of a default."""

    def __init__(self, words: Mapping[str, Data]) -> None:
        self.words = words

    def narrow(self, check: Check) -> Check:
        limits = [LIMITS[word](limit) for word, limit in self.words.items() if word not in ANYWAY]
        if not limits:
            return check

        def check_limits(value: Data) -> Data:
            value = check(value)
            if not all(keeps(value) for keeps in limits):
                raise Unsure
            return value

        return check_limits

    def __get_pydantic_core_schema__(self, source: Data, handler: Data) -> Data:
        import pydantic

        return handler.generate_schema(Annotated[source, pydantic.Field(**self.words)])


class _Validator:
    """A function that reads a value before, after or in place of the type of its field."""

    kind: ClassVar[str]

    def __init__(self, func: Callable[[Data], Data], **words: Data) -> None:
        self.func, self.words = func, words

    def __get_pydantic_core_schema__(self, source: Data, handler: Data) -> Data:
        import pydantic

        return getattr(pydantic, self.kind)(self.func, **self.words).__get_pydantic_core_schema__(source, handler)


class _BeforeValidator(_Validator):
    kind = "BeforeValidator"

    def narrow(self, check: Check) -> Check:
        return lambda value: check(self.func(value))


class _AfterValidator(_Validator):
    kind = "AfterValidator"

    def narrow(self, check: Check) -> Check:
        return lambda value: self.func(check(value))


class _PlainValidator(_Validator):
    kind = "PlainValidator"

    def narrow(self, check: Check) -> Check:
        return self.func


class _WithJsonSchema:
    """The JSON schema of a type."""

    def __init__(self, schema: dict[str, Data]) -> None:
        self.schema = schema

    def __get_pydantic_json_schema__(self, schema: Data, handler: Data) -> Data:
        import pydantic

        return pydantic.WithJsonSchema(self.schema).__get_pydantic_json_schema__(schema, handler)


class _AliasChoices:
    """Keys of which the first that is stated counts."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices


class ModelField:
    """A field of a model.

    default: MISSING for one that is required, or that a factory makes.
    default_factory: makes the default, of nothing or of the fields before.
    """

    def __init__(self, hint: Hint, names: dict[str, Data], declared: Data) -> None:
        """hint: its type, maybe as text. names: those that the text may hold. declared: its default or `Field`."""
        words = dict(declared.words) if isinstance(declared, _Field) else {"default": declared}
        self.default = words.pop("default", MISSING)
        self.default_factory = words.pop("default_factory", None)
        self.alias: str | None = words.pop("alias", None)
        self.validation_alias: _AliasChoices | None = words.pop("validation_alias", None)
        self.limits = words
        self._hint, self._names = hint, names

    @cached_property
    def hint(self) -> Data:
        """The type with all notes, as it is stated."""
        return eval(self._hint, self._names) if isinstance(self._hint, str) else self._hint

    @property
    def annotation(self) -> Data:
        """The type without the notes."""
        return get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint

    @property
    def metadata(self) -> list[Data]:
        """The notes of the type."""
        return [*self.hint.__metadata__] if get_origin(self.hint) is Annotated else []

    def list_aliases(self, name: str) -> tuple[str, ...]:
        """Returns the keys that state it, of which the first counts. name: in the model."""
        return self.validation_alias.choices if self.validation_alias is not None else (self.alias or name,)

    def is_required(self) -> bool:
        """Returns whether it has no default."""
        return self.default is MISSING and self.default_factory is None

    def get_default(self, *, call_default_factory: bool = True, validated_data: Data = None) -> Data:
        """Returns the default. validated_data: the fields before, with their values."""
        if self.default_factory is not None and call_default_factory:
            return (
                self.default_factory(validated_data)
                if _count_parameters(self.default_factory)
                else self.default_factory()
            )
        return copy.deepcopy(self.default) if self.default.__class__ in (dict, list, set) else self.default

    def make_check(self) -> Check:
        """Returns the check of its values."""
        return _Field(self.limits).narrow(make_check(self.hint))


def make_check(hint: Hint) -> Check:
    """Returns the check of values of a type."""
    if hint is Any:
        return lambda value: value
    if hint in (str, bool, int):
        return _make_exact_check(hint)
    if hint is float:
        return _read_float
    if hint is datetime.date:
        return _read_date
    if hint in (None, NoneType):
        return _make_exact_check(NoneType)
    if is_model(hint):
        return hint.check_quickly  # type: ignore[no-any-return]
    parts = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            check = make_check(parts[0])
            for note in hint.__metadata__:
                if hasattr(note, "narrow"):
                    check = note.narrow(check)
                elif hasattr(note, "__get_pydantic_core_schema__") or type(note).__module__ == "annotated_types":
                    return _leave_to_pydantic
            return check
        case origin if origin is Literal:
            return _make_literal_check(parts)
        case origin if origin in (Union, UnionType):
            return _make_union_check([make_check(part) for part in parts], NoneType in parts)
        case origin if origin is tuple and len(parts) == 2 and parts[1] is ...:
            return _make_items_check(tuple, make_check(parts[0]))
        case origin if origin is list and parts:
            return _make_items_check(list, make_check(parts[0]))
        case origin if origin is tuple and parts:
            return _make_fixed_tuple_check([make_check(part) for part in parts])
        case origin if origin is dict:
            return _make_dict_check(*map(make_check, parts))
        case None if isinstance(hint, type) and hasattr(hint, "_fields"):
            check = _make_fixed_tuple_check([*map(make_check, get_type_hints(hint, include_extras=True).values())])
            return lambda value: hint(*check(value))
        case None if isinstance(hint, type):
            return _make_instance_check(hint)
    return _leave_to_pydantic


def _leave_to_pydantic(value: Data) -> Data:
    raise Unsure


def _make_exact_check(kind: type) -> Check:
    def check(value: Data) -> Data:
        if type(value) is not kind:
            raise Unsure
        return value

    return check


def _make_instance_check(kind: type) -> Check:
    def check(value: Data) -> Data:
        if not isinstance(value, kind):
            raise Unsure
        return value

    return check


def _read_float(value: Data) -> float:
    if type(value) is int and abs(value) < 2**53:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise Unsure
    return value


def _read_date(value: Data) -> datetime.date:
    if type(value) is datetime.date:
        return value
    if type(value) is not str or len(value) != len("2026-11-21"):
        raise Unsure
    return datetime.date.fromisoformat(value)


def _make_literal_check(words: tuple[Data, ...]) -> Check:
    known = {(type(word), word) for word in words}

    def check(value: Data) -> Data:
        if (type(value), value) not in known:
            raise Unsure
        return value

    return check


def _make_union_check(arms: list[Check], optional: bool) -> Check:
    def check(value: Data) -> Data:
        if value is None and optional:
            return None
        read = []
        for arm in arms:
            try:
                result = arm(value)
            except (Unsure, ValueError, TypeError):
                continue
            if result is value:
                return value
            read.append(result)
        if len(read) != 1:
            raise Unsure
        return read[0]

    return check


def _make_items_check(kind: type, item: Check) -> Check:
    def check(value: Data) -> Data:
        if type(value) not in (list, tuple):
            raise Unsure
        return kind(map(item, value))

    return check


def _make_fixed_tuple_check(items: list[Check]) -> Check:
    def check(value: Data) -> Data:
        if type(value) not in (list, tuple) or len(value) != len(items):
            raise Unsure
        return tuple(item(part) for item, part in zip(items, value, strict=True))

    return check


def _make_dict_check(key: Check, item: Check) -> Check:
    def check(value: Data) -> Data:
        if type(value) is not dict:
            raise Unsure
        return {key(name): item(part) for name, part in value.items()}

    return check


# ---------------------------------------------------------------------------------------------------------- validators


class _Info(NamedTuple):
    """What a validator may ask for."""

    context: Data
    field_name: str | None = None
    data: Mapping[str, Data] = {}


class _Marked(NamedTuple):
    """A method of a model that validates.

    fields: that it reads; none: the model.
    """

    function: Data
    mode: str
    fields: tuple[str, ...] = ()


def _model_validator(*, mode: str) -> Callable[[Data], _Marked]:
    return lambda function: _Marked(function, mode)


def _field_validator(*fields: str, mode: str = "after") -> Callable[[Data], _Marked]:
    return lambda function: _Marked(function, mode, fields)


def _call(function: Callable[..., Data], value: tuple[Data, ...], info: _Info) -> Data:
    """Calls a validator with its value, and with what it may ask for if it takes that."""
    return function(*value, info) if _count_parameters(function) > len(value) else function(*value)


def _take_info(validator: Callable[..., Data]) -> Callable[[Data, Data], Data]:
    return lambda value, info: _call(validator, (value,), info)


def _count_parameters(function: Data) -> int:
    """Counts what a function, or a method of an instance or a class, is called with; 0 for a type."""
    return function.__code__.co_argcount - hasattr(function, "__self__") if hasattr(function, "__code__") else 0


# --------------------------------------------------------------------------------------------------------------- models


class _ModelType(ABCMeta):
    """Collects the fields and validators of a model."""

    __fields__: dict[str, ModelField]
    __validators__: dict[str, _Marked]
    __aliases__: dict[str, str]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Data], names: dict[str, Data] | None = None
    ) -> _ModelType:
        names = sys._getframe(1).f_globals if names is None else names
        declared = {
            field: (hint, namespace.pop(field, MISSING))
            for field, hint in namespace.get("__annotations__", {}).items()
            if not (field.startswith("_") or field == "model_config" or "ClassVar" in str(hint))
        }
        marked = {key: value for key, value in namespace.items() if isinstance(value, _Marked)}
        cls: Data = super().__new__(
            mcs, name, bases, namespace | {key: value.function for key, value in marked.items()}
        )
        parents = [base for base in reversed(cls.__mro__[1:]) if isinstance(base, _ModelType)]
        fields, validators, config = dict[str, ModelField](), dict[str, _Marked](), dict[str, Data]()
        for parent in parents:
            fields |= vars(parent)["__own_fields__"]
            validators |= parent.__validators__
            config |= vars(parent).get("model_config", {})
        cls.__own_fields__ = {key: ModelField(hint, names, value) for key, (hint, value) in declared.items()}
        cls.__fields__ = fields | cls.__own_fields__
        cls.__validators__ = validators | marked
        cls.model_config = config | namespace.get("model_config", {})
        cls.__aliases__ = {alias: key for key, field in cls.__fields__.items() for alias in field.list_aliases(key)}
        cls.__checks__ = {}
        if "__eq__" in namespace and "__hash__" not in namespace:
            cls.__hash__ = next(base.__hash__ for base in bases if base.__hash__ is not None)
        return cls  # type: ignore[no-any-return]

    @property
    def model_fields(cls) -> dict[str, ModelField]:
        """The fields by their names."""
        return cls.__fields__


class _BaseModel(metaclass=_ModelType):
    """Base class of models; as pydantic's."""

    __slots__ = ("__dict__", "__weakref__", "_more", "_stated")
    model_config: ClassVar[dict[str, Data]] = {}

    def __init__(self, **data: Data) -> None:
        self.__setstate__(type(self).model_validate(data).__getstate__())

    @classmethod
    def model_validate(cls, data: Data, *, context: Data = None) -> Data:
        """Returns the model of data. Raises pydantic's ValidationError for a fault of them."""
        try:
            return cls.check_quickly(data, context)
        except Exception:  # of which pydantic says what is wrong, or it is raised again
            return to_pydantic(cls).validate(data, context)

    @classmethod
    def check_quickly(cls, data: Data, context: Data = None) -> Data:
        """Returns the model of data that are plainly of the types of its fields. Raises Unsure, or whatever a validator
        raises, for others."""
        if isinstance(data, cls):
            return data
        for validator in _list_validators(cls, "before"):
            data = validator(data)
        if not isinstance(data, Mapping):
            raise Unsure
        stated, more = dict[str, Data](), dict[str, Data]()
        for key, name in cls.__aliases__.items():
            if key in data:
                stated.setdefault(name, data[key])
        for key, value in data.items():
            if key in cls.__aliases__:
                continue
            if type(key) is not str or cls.model_config.get("extra") == "forbid":
                raise Unsure
            else:
                more[key] = value
        values = dict[str, Data]()
        for name, field in cls.__fields__.items():
            if name in stated or "validate_default" in field.limits:
                info = _Info(context, name, values)
                values[name] = _read_field(cls, name, stated.get(name, field.default), info)
            elif field.is_required():
                raise Unsure
            else:
                values[name] = field.get_default(validated_data=values)
        return cls._finish(values, set(stated), more if cls.model_config.get("extra") == "allow" else None, context)

    @classmethod
    def _finish(cls, values: dict[str, Data], stated: set[str], more: dict[str, Data] | None, context: Data) -> Data:
        """Returns the model of values of all fields, once its validators have seen it."""
        model = cls.__new__(cls)
        model.__setstate__((values, stated, more))
        for validator in _list_validators(cls, "after"):
            model = _call(validator, (model,), _Info(context))
        return model

    @classmethod
    def model_construct(cls, **values: Data) -> Data:
        """Returns the model of values that are checked."""
        model = cls.__new__(cls)
        fields = cls.__fields__.items()
        defaults = {
            name: field.get_default(validated_data={})
            for name, field in fields
            if name not in values and not field.is_required()
        }
        model.__setstate__(({**defaults, **values}, set(values), None))
        return model

    @classmethod
    def model_json_schema(cls, **options: Data) -> dict[str, Data]:
        """Returns the JSON schema of data."""
        return to_pydantic(cls).model_json_schema(**options)  # type: ignore[no-any-return]

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Data, handler: Data) -> Data:
        """Returns how pydantic reads the model as a part of another."""
        from pydantic_core import core_schema

        twin = to_pydantic(cls)
        dumped = core_schema.plain_serializer_function_ser_schema(
            lambda model, info: model.model_dump(mode=info.mode, by_alias=bool(info.by_alias)), info_arg=True
        )
        return core_schema.with_info_wrap_validator_function(
            twin.read_part, handler.generate_schema(twin), serialization=dumped
        )

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that are stated."""
        return self._stated  # type: ignore[attr-defined,no-any-return]

    @property
    def model_extra(self) -> dict[str, Data] | None:
        """Further keys, where the model may have some."""
        return self._more  # type: ignore[attr-defined,no-any-return]

    def model_copy(self, *, update: Mapping[str, Data] | None = None) -> Data:
        """Returns a copy with other values of some fields, which nothing checks."""
        values, stated, more = self.__getstate__()
        values, update = dict(values), update or {}
        if more is None:
            values |= update
        else:
            values |= {key: value for key, value in update.items() if key in type(self).__fields__}
            more = more | {key: value for key, value in update.items() if key not in type(self).__fields__}
        copied = type(self).__new__(type(self))
        copied.__setstate__((values, stated | update.keys(), more))
        return copied

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        by_alias: bool = False,
        **without: bool,
    ) -> dict[str, Data]:
        """Returns the fields as a mapping, models in them, too.

        mode: ``json`` for what JSON has. without: `exclude_none`, `exclude_unset`, `exclude_defaults`.
        """
        dumped = {}
        for name, value in self:
            field = type(self).__fields__.get(name)
            left_out = (
                (include is not None and name not in include)
                or name in exclude
                or (without.get("exclude_none") and value is None)
                or (field is not None and without.get("exclude_unset") and name not in self.model_fields_set)
                or (
                    field is not None
                    and without.get("exclude_defaults")
                    and value == field.get_default(validated_data=vars(self))
                )
            )
            if not left_out:
                key = field.alias if by_alias and field is not None and field.alias else name
                dumped[key] = dump(value, mode=mode, by_alias=by_alias, **without)
        return dumped

    def __copy__(self) -> Data:
        return self.model_copy()

    def __iter__(self) -> Iterator[tuple[str, Data]]:
        values = vars(self)
        yield from ((name, values[name]) for name in type(self).__fields__ if name in values)
        yield from (self.model_extra or {}).items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _BaseModel):
            return NotImplemented
        return type(self) is type(other) and [*self] == [*other]

    def __hash__(self) -> int:
        values = vars(self)
        return hash((type(self), *[values[name] for name in type(self).__fields__]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    def __str__(self) -> str:
        return " ".join(f"{name}={value!r}" for name, value in self)

    def __getattr__(self, name: str) -> Data:
        slot = None if name in ("_more", "_stated") else self._more  # type: ignore[attr-defined]
        if slot and name in slot:
            return slot[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Data) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> tuple[dict[str, Data], set[str], dict[str, Data] | None]:
        return vars(self), self._stated, self._more  # type: ignore[attr-defined]

    def __setstate__(self, state: tuple[dict[str, Data], set[str], dict[str, Data] | None]) -> None:
        for slot, value in zip(("__dict__", "_stated", "_more"), state, strict=True):
            object.__setattr__(self, slot, value)


def _read_field(cls: Data, name: str, value: Data, info: _Info) -> Data:
    """Returns the value of a field, as its type and its validators read it."""
    check = cls.__checks__.get(name)
    if check is None:
        check = cls.__checks__[name] = cls.__fields__[name].make_check()
    for validator in _list_validators(cls, "before", name):
        value = _call(validator, (value,), info)
    value = check(value)
    for validator in _list_validators(cls, "after", name):
        value = _call(validator, (value,), info)
    return value


@cache
def _list_validators(cls: Data, mode: str, field: str = "") -> tuple[Callable[..., Data], ...]:
    """Returns the validators of a model, or of one of its fields, in the order in which they are run."""
    marked = {
        name: validator
        for name, validator in cls.__validators__.items()
        if validator.mode == mode and (field in validator.fields if field else not validator.fields)
    }
    names = [*marked] if mode == "after" else [*reversed(marked)]
    return tuple(getattr(cls, name) for name in names)


def dump(value: Data, *, mode: str, **options: Data) -> Data:
    """Returns a value without models in it, which become mappings; see `BaseModel.model_dump`."""
    if isinstance(value, _BaseModel):
        return value.model_dump(mode=mode, **options)
    if isinstance(value, dict):
        return {key: dump(item, mode=mode, **options) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind = tuple if isinstance(value, tuple) and mode == "python" else list
        return kind(dump(item, mode=mode, **options) for item in value)
    if mode == "json" and isinstance(value, PurePath | datetime.date):
        return str(value) if isinstance(value, PurePath) else value.isoformat()
    return value


def is_model(kind: Data) -> bool:
    """Returns whether a type is a model of this module."""
    return isinstance(kind, _ModelType)


# ------------------------------------------------------------------------------------------------------------- pydantic


@cache
def to_pydantic(cls: Data) -> Data:
    """Returns pydantic's model of the same fields, which reads data and makes `cls` of them."""
    import pydantic

    def write(field: ModelField) -> Data:
        words = {"default": field.default, "default_factory": field.default_factory, "alias": field.alias}
        if field.validation_alias is not None:
            words["validation_alias"] = pydantic.AliasChoices(*field.validation_alias.choices)
        stated = {word: value for word, value in words.items() if value is not MISSING and value is not None}
        stated |= {"default": None} if field.default is None else {}
        return pydantic.Field(**stated, **field.limits)

    def read_part(data: Data, read: Callable[[Data], Data], info: Data) -> Data:
        if isinstance(data, cls):
            return data
        for validator in _list_validators(cls, "before"):
            data = validator(data)
        twin = read(data)
        return cls._finish(vars(twin), twin.model_fields_set, twin.model_extra, info.context)

    class Twin(pydantic.BaseModel):
        model_config = cls.model_config

    fields = {name: (field.hint, write(field)) for name, field in cls.__fields__.items()}
    validators = {
        name: pydantic.field_validator(*marked.fields, mode=marked.mode)(_take_info(getattr(cls, name)))
        for name, marked in cls.__validators__.items()
        if marked.fields
    }
    twin: Data = pydantic.create_model(  # type: ignore[call-overload]
        cls.__name__, __base__=Twin, __module__=cls.__module__, __doc__=cls.__doc__, __validators__=validators, **fields
    )
    reader = cache(lambda: pydantic.TypeAdapter(cls))
    twin.read_part = staticmethod(read_part)
    twin.validate = staticmethod(lambda data, context: reader().validate_python(data, context=context))
    return twin


def import_validation_error() -> type[ValidationError]:
    """Returns pydantic's error of a fault in data; called by ``except``, once there is one."""
    from pydantic import ValidationError

    return ValidationError


if TYPE_CHECKING:
    from pydantic import (
        AfterValidator,
        AliasChoices,
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        PlainValidator,
        StrictBool,
        StrictInt,
        StrictStr,
        ValidationError,
        ValidationInfo,
        WithJsonSchema,
        field_validator,
        model_validator,
    )
else:
    BaseModel, ConfigDict, ValidationInfo = _BaseModel, dict, _Info
    AfterValidator, BeforeValidator, PlainValidator = _AfterValidator, _BeforeValidator, _PlainValidator
    AliasChoices, WithJsonSchema = _AliasChoices, _WithJsonSchema
    model_validator, field_validator = _model_validator, _field_validator

    def Field(default: Data = MISSING, **words: Data) -> Data:
        """Returns limits of a value, or the default of a field with them."""
        return _Field({**({} if default is MISSING else {"default": default}), **words})

    StrictBool, StrictInt, StrictStr = (Annotated[kind, Field(strict=True)] for kind in (bool, int, str))
