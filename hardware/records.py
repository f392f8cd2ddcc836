"""Dataclasses that cost little until they are used: `dataclass` takes the place of that of ``dataclasses``.

A forecast imports about 200 of them, makes instances of half and compares few. The standard library compiles four or
more methods for each, a tenth of the time of the process. Here a constructor is compiled when the first instance is
made; the other methods are closures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from reprlib import recursive_repr
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: bool) -> Any:
        """Makes a class a dataclass.

        options: `frozen`, `eq`, `slots`, `kw_only` and `weakref_slot`, with the meaning that they have in
        ``dataclasses.dataclass``.
        """
        return _add_methods(cls, **options) if cls is not None else lambda cls: _add_methods(cls, **options)


def _add_methods(
    cls: type,
    *,
    frozen: bool = False,
    eq: bool = True,
    slots: bool = False,
    kw_only: bool = False,
    weakref_slot: bool = False,
) -> type:
    """Returns the class, or with `slots` a new one, with its fields and the methods that it does not define itself."""
    defined = {name for name, value in vars(cls).items() if value is not None or name != "__hash__"}
    bases = [vars(base).get("__dataclass_params__") for base in cls.__mro__[1:]]
    inherits = any(params.frozen for params in bases if params is not None)  # then all of them must be frozen
    plain = {"init": False, "repr": False, "eq": False, "frozen": frozen and inherits}
    cls = dataclasses.dataclass(**plain, slots=slots, kw_only=kw_only, weakref_slot=weakref_slot)(cls)
    vars(cls)["__dataclass_params__"].frozen = frozen
    methods: dict[str, Any] = {"__init__": _make_init(cls, frozen), "__repr__": _show}
    if eq:
        methods |= {"__eq__": _make_eq(cls), "__hash__": _make_hash(cls) if frozen else None}
    if frozen:
        methods |= _refuse_changes(cls)
        if slots:  # pickle would set its attributes
            methods |= {"__getstate__": _get_state, "__setstate__": _set_state}
    for name, method in methods.items():
        if name not in defined:
            setattr(cls, name, method)
    return cls


def _make_init(cls: Any, frozen: bool) -> Callable[..., None]:
    """Returns a constructor that puts a compiled one in its place when it is first called."""

    def __init__(self: Any, *args: Any, **values: Any) -> None:
        cls.__init__ = _compile_init(cls, frozen)
        cls.__init__(self, *args, **values)

    return __init__


_DEFAULT = object()
"""Stands for an argument that is not stated and whose default is made for each instance."""


def _compile_init(cls: Any, frozen: bool) -> Any:
    """Compiles the constructor of a class: its arguments are fields, in their order, those by name alone last."""
    scope: dict[str, Any] = {"__default": _DEFAULT}
    arguments: dict[bool, list[str]] = {False: [], True: []}
    lines = ["__fields = self.__dict__"] if frozen and cls.__dictoffset__ else []
    for field in dataclasses.fields(cls):
        value, default = field.name, ""
        if field.default is not dataclasses.MISSING:
            scope[f"__{value}"], default = field.default, f"=__{value}"
        elif field.default_factory is not dataclasses.MISSING:
            scope[f"__{value}"], default = field.default_factory, "=__default"
            value = f"__{value}() if {value} is __default else {value}" if field.init else f"__{value}()"
        if field.init:
            arguments[bool(field.kw_only)].append(field.name + default)
        elif not default:
            continue
        lines.append(_write_field(cls, field.name, value, scope) if frozen else f"self.{field.name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    names = ", ".join(["self", *arguments[False], *(["*", *arguments[True]] if arguments[True] else ())])
    exec(f"def __init__({names}):\n  " + "\n  ".join(lines or ["pass"]), scope)
    scope["__init__"].__qualname__ = f"{cls.__qualname__}.__init__"  # errors of arguments name it
    return scope["__init__"]


def _write_field(cls: Any, name: str, value: str, scope: dict[str, Any]) -> str:
    """Returns the line of a constructor that sets a field of an instance whose fields do not change: in its slot or its
    `__dict__`, a third of the time of `object.__setattr__`. scope: of the constructor; slots are added."""
    slot = getattr(cls, name, None)
    if not isinstance(slot, MemberDescriptorType):
        return f"__fields[{name!r}] = {value}"
    scope[f"__set_{name}"] = slot.__set__
    return f"__set_{name}(self, {value})"


@recursive_repr()
def _show(self: Any) -> str:
    values = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{type(self).__qualname__}({', '.join(values)})"


def _get_values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Returns the function of the values of some fields of an instance."""
    if not names:
        return lambda instance: ()
    values = attrgetter(*names)
    return values if len(names) > 1 else lambda instance: (values(instance),)


def _make_eq(cls: Any) -> Callable[[Any, Any], bool]:
    values = _get_values([field.name for field in dataclasses.fields(cls) if field.compare])

    def __eq__(self: Any, other: Any) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _make_hash(cls: Any) -> Callable[[Any], int]:
    fields = dataclasses.fields(cls)
    values = _get_values([field.name for field in fields if (field.compare if field.hash is None else field.hash)])

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _refuse_changes(cls: Any) -> dict[str, Callable[..., None]]:
    """Returns the methods that let no field of an instance change; nor anything else, but for subclasses."""
    names = frozenset(field.name for field in dataclasses.fields(cls))

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _get_state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
