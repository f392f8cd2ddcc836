"""Records of data, such as the keys of a job or an entry of the catalog, with what pydantic's `BaseModel` offers.

A class states its fields as for pydantic. Data that are plainly of their types are validated here (`fast_validation`):
pydantic, and what it makes of a hundred classes, take longer than a forecast. It is imported for all else, and then
reads the same class: it words faults, converts values and makes JSON schemas.
"""

from __future__ import annotations

import copy
import datetime
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from functools import cache, cached_property, partial
from itertools import repeat
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple, dataclass_transform, get_args, get_origin

from meshcast.hardware.fast_validation import NotPlain, Validate, limit_values, make_validator

if TYPE_CHECKING:  # checkers see the signatures of pydantic's notes and decorators
    from typing import Self

    import pydantic
    from pydantic import (
        AfterValidator,
        AliasChoices,
        BeforeValidator,
        ConfigDict,
        Field,
        GetCoreSchemaHandler,
        GetJsonSchemaHandler,
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
    from pydantic_core import CoreSchema

    State = tuple[dict[str, object], set[str], dict[str, object] | None]

MISSING = object()
"""Stands for the default of a field that has none, and for the value of one that a record lacks."""

# ---------------------------------------------------------------------------------------------------------------- notes


class _Limits:
    """Limits of values: a note in ``Annotated``, or in place of the default of a field, which it then states, too."""

    def __init__(self, default: object = MISSING, **limits: Any) -> None:
        self.default, self.limits = default, limits

    def wrap_validator(self, validate: Validate) -> Validate:
        return limit_values(validate, self.limits)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        import pydantic

        return handler.generate_schema(Annotated[source, pydantic.Field(**self.limits)])


class _FunctionNote:
    """A function that reads a value before, after or in place of its type."""

    def __init__(self, func: Validate, **words: object) -> None:
        self.func, self.words = func, words

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        import pydantic

        note = getattr(pydantic, type(self).__name__.lstrip("_"))(self.func, **self.words)
        schema: CoreSchema = note.__get_pydantic_core_schema__(source, handler)
        return schema


class _BeforeValidator(_FunctionNote):
    def wrap_validator(self, validate: Validate) -> Validate:
        return lambda value: validate(self.func(value))


class _AfterValidator(_FunctionNote):
    def wrap_validator(self, validate: Validate) -> Validate:
        return lambda value: self.func(validate(value))


class _PlainValidator(_FunctionNote):
    def wrap_validator(self, validate: Validate) -> Validate:
        return self.func


class _WithJsonSchema:
    """The JSON schema of a type."""

    def __init__(self, schema: dict[str, object]) -> None:
        self.schema = schema

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        return dict(self.schema)


class _AliasChoices:
    """Keys of which the first that is stated counts."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices


if not TYPE_CHECKING:
    Field, ConfigDict = _Limits, dict
    AfterValidator, BeforeValidator, PlainValidator = _AfterValidator, _BeforeValidator, _PlainValidator
    AliasChoices, WithJsonSchema = _AliasChoices, _WithJsonSchema
    StrictBool, StrictInt, StrictStr = (Annotated[kind, Field(strict=True)] for kind in (bool, int, str))


# --------------------------------------------------------------------------------------------------------------- fields


OF_FIELDS = frozenset({"default_factory", "alias", "validation_alias"})
"""Keywords of `Field` that say more of a field than limits of its values."""


class ModelField:
    """A field of a record.

    default: MISSING for one that is required, or that a factory makes.
    default_factory: makes the default, of nothing or of the fields before.
    """

    def __init__(self, hint: object, names: dict[str, object], declared: object) -> None:
        """hint: its type, maybe as text, with the names of its module. declared: its default or `Field`."""
        limits = declared if isinstance(declared, _Limits) else _Limits(declared)
        words = dict(limits.limits)
        self.default: Any = limits.default
        self.default_factory = words.pop("default_factory", None)
        self.alias = words.pop("alias", None)
        self.validation_alias = words.pop("validation_alias", None)
        self.limits = words
        self._hint, self._names = hint, names

    @cached_property
    def hint(self) -> Any:
        """The type with its notes."""
        hint = eval(self._hint, self._names) if isinstance(self._hint, str) else self._hint
        for note in get_args(hint) if get_origin(hint) is Annotated else ():
            if isinstance(note, _Limits) and (note.default is not MISSING or note.limits.keys() & OF_FIELDS):
                raise TypeError("write `= Field(...)`: defaults and aliases in notes are not read")
        return hint

    @property
    def annotation(self) -> Any:
        """The type without its notes."""
        return get_args(self.hint)[0] if get_origin(self.hint) is Annotated else self.hint

    @property
    def metadata(self) -> tuple[object, ...]:
        """The notes of the type."""
        return get_args(self.hint)[1:] if get_origin(self.hint) is Annotated else ()

    @cached_property
    def validate(self) -> Validate:
        """Validates a value by the type."""
        return limit_values(make_validator(self.hint), self.limits)

    def list_keys(self, name: str) -> tuple[str, ...]:
        """Returns the keys that state it, of which the first counts. name: in the record."""
        return self.validation_alias.choices if self.validation_alias is not None else (self.alias or name,)

    def is_required(self) -> bool:
        """Returns whether it has no default."""
        return self.default is MISSING and self.default_factory is None

    def get_default(
        self, *, call_default_factory: bool = True, validated_data: Mapping[str, object] | None = None
    ) -> object:
        """Returns the default. validated_data: the fields before, with their values."""
        if self.default_factory is not None and call_default_factory:
            takes_data = _count_parameters(self.default_factory) == 1
            return self.default_factory(validated_data) if takes_data else self.default_factory()
        return copy.deepcopy(self.default) if isinstance(self.default, dict | list | set) else self.default


# ----------------------------------------------------------------------------------------------------------- validators


class _ValidationInfo(NamedTuple):
    """What a validator may ask for; see pydantic's class."""

    context: object
    field_name: str | None = None
    data: Mapping[str, object] = {}


MODES = ("before", "after")


class _Validator:
    """A method that validates a record, or some of its fields."""

    def __init__(self, *fields: str, mode: str = "after") -> None:
        if mode not in MODES:
            raise TypeError(f"{mode} is none of the modes {MODES}")
        self.fields, self.mode = fields, mode

    def __call__(self, method: object) -> _Validator:
        self.method = method
        return self


def _call(function: Callable[..., Any], value: object, info: ValidationInfo | _ValidationInfo) -> Any:
    """Calls a validator with its value, and with what it may ask for if it takes that."""
    return function(value, info) if _count_parameters(function) == 2 else function(value)


def _count_parameters(function: Callable[..., object]) -> int:
    """Counts what a function, or a method of an instance or a class, is called with; 0 for a type."""
    code = getattr(function, "__code__", None)
    return code.co_argcount - hasattr(function, "__self__") if code is not None else 0


# -------------------------------------------------------------------------------------------------------------- records

FAST_CONFIG = frozenset({"extra", "frozen", "allow_inf_nan", "defer_build", "arbitrary_types_allowed"})
"""Keywords of pydantic's `ConfigDict` that are known here; records with others are left to it."""


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class RecordType(ABCMeta):
    """Collects fields and validators of a record."""

    model_config: dict[str, Any]
    model_fields: dict[str, ModelField]
    __own_fields__: dict[str, ModelField]
    __validators__: dict[str, _Validator]
    __keys__: dict[str, str]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> RecordType:
        names = sys._getframe(1).f_globals  # a scheme of a user is in no module of `sys.modules` yet
        fields = {
            field: ModelField(hint, names, namespace.pop(field, MISSING))
            for field, hint in namespace.get("__annotations__", {}).items()
            if not (field.startswith("_") or field == "model_config" or "ClassVar[" in str(hint))
        }
        validators = {key: value for key, value in namespace.items() if isinstance(value, _Validator)}
        cls = super().__new__(mcs, name, bases, namespace | {key: value.method for key, value in validators.items()})
        cls.__own_fields__, cls.model_fields, cls.__validators__ = fields, {}, {}
        config = dict[str, Any]()
        for base in reversed(cls.__mro__):
            if isinstance(base, RecordType):
                cls.model_fields |= base.__own_fields__
                cls.__validators__ |= validators if base is cls else base.__validators__
                config |= base.model_config
        cls.model_config = config
        cls.__keys__ = {key: name for name, field in cls.model_fields.items() for key in field.list_keys(name)}
        if "__eq__" in namespace and "__hash__" not in namespace:
            cls.__hash__ = cls.__mro__[1].__hash__  # type: ignore[method-assign]
        return cls


class BaseModel(metaclass=RecordType):
    """Base class of records; see pydantic's `BaseModel`."""

    __slots__ = ("__dict__", "__weakref__", "_more", "_stated")
    model_config: ClassVar[ConfigDict] = {}

    if TYPE_CHECKING:  # no fields
        _stated: set[str] = Field(init=False)
        _more: dict[str, object] | None = Field(init=False)

    def __init__(self, **data: object) -> None:
        self.__setstate__(type(self).model_validate(data).__getstate__())

    @classmethod
    def model_validate(cls, data: object, *, context: object = None) -> Self:
        """Returns the record of data. Raises pydantic's ValidationError for a fault of them.

        context: for validators of this record; those of its parts see none.
        """
        try:
            return cls.validate_fast(data, context)
        except Exception:  # pydantic says what is wrong, or the same is raised again
            pass
        record: Self = _make_adapter(cls).validate_python(data, context=context)
        return record

    @classmethod
    def validate_fast(cls, data: object, context: object = None) -> Self:
        """Returns the record of data that are plainly of the types of its fields. Raises NotPlain, or what a validator
        raises, for others."""
        if isinstance(data, cls):
            return data
        for validator in _list_validators(cls, "before"):
            data = _call(validator, data, _ValidationInfo(context))
        if type(data) is not dict or not cls.model_config.keys() <= FAST_CONFIG:
            raise NotPlain
        stated, more = dict[str, object](), dict[str, object]()
        for key, value in data.items():
            name = cls.__keys__.get(key)
            if name is None:
                more[key] = value
            elif name not in stated:
                stated[name] = value
            elif cls.model_config.get("extra") in ("forbid", "allow"):
                raise NotPlain
            else:  # of synonyms the first that the field lists
                stated[name] = next(data[word] for word in cls.model_fields[name].list_keys(name) if word in data)
        extra = cls.model_config.get("extra")
        if more and (extra == "forbid" or not all(isinstance(key, str) for key in more)):
            raise NotPlain
        values = dict[str, object]()
        for name, field in cls.model_fields.items():
            if name in stated or "validate_default" in field.limits:
                value = stated.get(name, field.default)
                values[name] = _validate_field(cls, name, value, _ValidationInfo(context, name, values))
            elif field.is_required():
                raise NotPlain
            else:
                values[name] = field.get_default(validated_data=values)
        allowed = more if extra == "allow" else None
        return cls._finish((values, stated.keys() | (allowed or {}).keys(), allowed), context)

    @classmethod
    def _finish(cls, state: State, context: object) -> Self:
        """Returns the record of values of all fields, once its validators have seen it."""
        record = cls.__new__(cls)
        record.__setstate__(state)
        for validator in _list_validators(cls, "after"):
            record = _call(validator, record, _ValidationInfo(context))
        return record

    @classmethod
    def model_construct(cls, **values: object) -> Self:
        """Returns the record of values that are checked."""
        record = cls.__new__(cls)
        defaults = {
            name: field.get_default(validated_data=values)
            for name, field in cls.model_fields.items()
            if name not in values and not field.is_required()
        }
        record.__setstate__((defaults | values, {*values}, None))
        return record

    @classmethod
    def model_json_schema(cls, **options: Any) -> dict[str, Any]:
        """Returns the JSON schema of data."""
        return to_pydantic(cls).model_json_schema(**options)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Returns how pydantic reads the record, also as a part of another."""
        from pydantic_core import core_schema

        return core_schema.with_info_wrap_validator_function(
            partial(_validate_by_pydantic, cls), handler.generate_schema(to_pydantic(cls))
        )

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that are stated."""
        return self._stated

    @property
    def model_extra(self) -> dict[str, Any] | None:
        """Further keys, where the record may have some."""
        return self._more

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Returns a copy with other values of some fields, which nothing checks. Cached properties are not copied, as
        they may follow from these."""
        kept, stated, more = self.__getstate__()
        values = {name: kept[name] for name in type(self).model_fields if name in kept}
        changes = dict(update or {})
        if more is not None:
            more = more | {key: changes.pop(key) for key in [*changes] if key not in type(self).model_fields}
        copied = type(self).__new__(type(self))
        copied.__setstate__((values | changes, stated | (update or {}).keys(), more))
        return copied

    def model_dump(
        self,
        *,
        mode: str = "python",
        include: Iterable[str] | None = None,
        exclude: Iterable[str] = (),
        by_alias: bool = False,
        exclude_none: bool = False,
        exclude_unset: bool = False,
        exclude_defaults: bool = False,
    ) -> dict[str, Any]:
        """Returns the fields as a mapping, records in them, too. mode: ``json`` for what JSON has."""
        inside = partial(
            dump,
            mode=mode,
            by_alias=by_alias,
            exclude_none=exclude_none,
            exclude_unset=exclude_unset,
            exclude_defaults=exclude_defaults,
        )
        dumped = dict[str, object]()
        for name, value in self:
            field = type(self).model_fields.get(name)
            if (
                (include is not None and name not in include)
                or name in exclude
                or (exclude_none and value is None)
                or (exclude_unset and name not in self._stated)
                or (exclude_defaults and field is not None and value == field.get_default(validated_data=vars(self)))
            ):
                continue
            dumped[field.alias or name if by_alias and field is not None else name] = inside(value)
        return dumped

    def __copy__(self) -> Self:
        return self.model_copy()

    def __iter__(self) -> Iterator[tuple[str, object]]:
        values = vars(self)
        yield from ((name, values[name]) for name in type(self).model_fields if name in values)
        yield from (self._more or {}).items()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BaseModel):
            return NotImplemented
        if type(self) is not type(other):
            return False
        # Field by field without a loop of its own: jobs are compared whenever what was kept for one is looked up.
        fields, absent = type(self).model_fields, repeat(MISSING)
        if [*map(vars(self).get, fields, absent)] != [*map(vars(other).get, fields, absent)]:
            return False
        return [*(self._more or {}).items()] == [*(other._more or {}).items()]

    def __hash__(self) -> int:
        values = (*map(vars(self).get, type(self).model_fields),)
        try:
            return hash((type(self), *values))
        except TypeError:  # maps, such as the layouts of operators
            return hash((type(self), *map(_freeze, values)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    if not TYPE_CHECKING:  # checkers know no further keys

        def __getattr__(self, name):
            more = None if name.startswith("_") else self._more
            if more and name in more:
                return more[name]
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> State:
        return vars(self), self._stated, self._more

    def __setstate__(self, state: State) -> None:
        for slot, part in zip(("__dict__", "_stated", "_more"), state, strict=True):
            object.__setattr__(self, slot, part)


def _freeze(value: object) -> object:
    """Returns a value that is hashable: maps and lists in it, at any depth, as tuples; equal values stay equal."""
    if isinstance(value, Mapping):
        return frozenset((key, _freeze(inside)) for key, inside in value.items())
    return tuple(map(_freeze, value)) if isinstance(value, list | tuple) else value


def _validate_field(cls: type[BaseModel], name: str, value: object, info: _ValidationInfo) -> object:
    """Returns the value of a field, as its type and its validators read it."""
    for validator in _list_validators(cls, "before", name):
        value = _call(validator, value, info)
    value = cls.model_fields[name].validate(value)
    for validator in _list_validators(cls, "after", name):
        value = _call(validator, value, info)
    return value


@cache
def _list_validators(cls: type[BaseModel], mode: str, field: str = "") -> tuple[Callable[..., object], ...]:
    """Returns the validators of a record, or of one of its fields, in the order in which they are run."""
    names = [
        name
        for name, validator in cls.__validators__.items()
        if validator.mode == mode and (field in validator.fields if field else not validator.fields)
    ]
    return tuple(getattr(cls, name) for name in (names if mode == "after" else reversed(names)))


def dump(value: object, *, mode: str, **options: Any) -> object:
    """Returns a value without records in it, which become mappings; see `BaseModel.model_dump`."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode=mode, **options)
    if isinstance(value, dict):
        return {key: dump(item, mode=mode, **options) for key, item in value.items()}
    if isinstance(value, list | tuple):
        kind = tuple if isinstance(value, tuple) and mode == "python" else list
        return kind(dump(item, mode=mode, **options) for item in value)
    if mode == "json" and isinstance(value, PurePath | datetime.date):
        return str(value) if isinstance(value, PurePath) else value.isoformat()
    return value


# ------------------------------------------------------------------------------------------------------------- pydantic


@cache
def _make_adapter(cls: type[BaseModel]) -> pydantic.TypeAdapter[Any]:
    """Returns pydantic's reader of a record."""
    import pydantic

    return pydantic.TypeAdapter(cls)


@cache
def to_pydantic(cls: type[BaseModel]) -> type[pydantic.BaseModel]:
    """Returns pydantic's model of the fields of a record, with their validators."""
    import pydantic

    validators: dict[str, Any] = {
        name: pydantic.field_validator(*validator.fields, mode=validator.mode)(_take_info(getattr(cls, name)))  # type: ignore[call-overload]
        for name, validator in cls.__validators__.items()
        if validator.fields
    }
    fields = {name: (field.hint, _write_field(field)) for name, field in cls.model_fields.items()}
    model: type[pydantic.BaseModel] = pydantic.create_model(  # type: ignore[call-overload]
        cls.__name__,
        __config__=cls.model_config,
        __module__=cls.__module__,
        __doc__=cls.__doc__,
        __validators__=validators,
        **fields,
    )
    return model


def _take_info(validator: Callable[..., object]) -> Callable[[object, ValidationInfo], object]:
    return lambda value, info: _call(validator, value, info)


def _write_field(field: ModelField) -> object:
    import pydantic

    words = dict(field.limits)
    if field.default is not MISSING:
        words["default"] = field.default
    if field.default_factory is not None:
        words["default_factory"] = field.default_factory
    if field.validation_alias is not None:
        words["validation_alias"] = pydantic.AliasChoices(*field.validation_alias.choices)
    return pydantic.Field(alias=field.alias, **words)


def _validate_by_pydantic(
    cls: type[BaseModel], data: object, read: Callable[[object], pydantic.BaseModel], info: ValidationInfo
) -> BaseModel:
    """Returns the record of data, whose fields pydantic reads."""
    if isinstance(data, cls):
        return data
    of_record = _ValidationInfo(info.context)
    for validator in _list_validators(cls, "before"):
        data = _call(validator, data, of_record)
    model = read(data)
    return cls._finish((vars(model), model.model_fields_set, model.model_extra), info.context)


def import_validation_error() -> type[ValidationError]:
    """Returns pydantic's error of a fault in data; called by ``except``, once there is one."""
    from pydantic import ValidationError

    return ValidationError


if not TYPE_CHECKING:
    ValidationInfo = _ValidationInfo

    def model_validator(*, mode):
        return _Validator(mode=mode)

    def field_validator(*fields, mode="after"):
        return _Validator(*fields, mode=mode)
