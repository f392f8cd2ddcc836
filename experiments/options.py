"""Options of a command or a Python function: one model, of which the command line, the checks and a JSON schema are
made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.hardware.schemas import BaseModel, ConfigDict, ValidationInfo, import_validation_error

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

OUTPUT = "Output"
"""Heading of what a command writes and draws."""

WRITTEN = ("--json", "--out", "--plot", "--width", "--trace", "--snapshot", "--jobs-to")
"""Options that stand under it."""


@dataclass(frozen=True)
class Flag:
    """How a field is written on the command line: metadata in its ``Annotated``.

    Attributes:
        names: ``--top``, or a pair ``--check/--no-check``; empty for an argument.
        metavar: placeholder of the value.
        help: what it does, for the help of the command and the schema.
        panel: heading in the help under which it stands; None: that of all options.
        min, max: least and most value that the command line takes.
        reads: what a word of the command line is read as; None: the type of the field.
        written: the default as it is written there; None: that of the field.
        words: completions in a shell.
        show_default: whether the help states the default.
    """

    names: tuple[str, ...]
    metavar: str | None
    help: str
    panel: str | None = None
    min: float | None = None
    max: float | None = None
    reads: type | None = None
    written: str | None = None
    words: tuple[str, ...] = ()
    show_default: bool = True

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Adds the help and the bounds to the schema of the field."""
        words = {"description": self.help, "minimum": self.min, "maximum": self.max}
        return handler(schema) | {key: word for key, word in words.items() if word is not None}


def option(name: str, help: str, metavar: str | None = None, *, short: str = "", **more: Any) -> Flag:
    """Returns the flag of an option, under the heading `OUTPUT` where it says what is written; see `Flag`.

    name: ``--top``, or a pair ``--check/--no-check``. short: another one, of one letter.
    """
    more.setdefault("panel", OUTPUT if name in WRITTEN else None)
    return Flag((name, short) if short else (name,), metavar, help, **more)


def argument(metavar: str, help: str, **more: Any) -> Flag:
    """Returns the flag of an argument, which is written without its name; see `Flag`."""
    return Flag((), metavar, help, **more)


class Options(BaseModel):
    """Options of a command or a function. Their validators raise PlanError, whose place `place_of` names."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, arbitrary_types_allowed=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], of_command: bool = False) -> Self:
        """Checks values by the names of their fields.

        of_command: whether they come from the command line, where None is not stated, and by whose flags errors then
            name them. Raises PlanError.
        """
        stated = {name: value for name, value in values.items() if value is not None or not of_command}
        try:
            return cls.model_validate(stated, context=of_command)
        except import_validation_error() as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else cls.__name__
            place = cls.flag(name) if of_command else name
            raise PlanError(place, first["msg"], "See the help of this option", first["input"]) from None

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """Returns how each field is written on the command line."""
        return {
            name: flag for name, field in cls.model_fields.items() for flag in field.metadata if isinstance(flag, Flag)
        }

    @classmethod
    def flag(cls, name: str) -> str:
        """Returns the name of a field on the command line."""
        flag = cls.flags().get(name)
        return name if flag is None else flag.names[0].partition("/")[0] if flag.names else str(flag.metavar)

    def find_stated(self, flags: Sequence[str]) -> dict[str, Any]:
        """Returns the values of those of some flags that differ from their defaults, by the names of their fields."""
        values = {name: getattr(self, name) for name in self.flags() if self.flag(name) in flags}
        return {name: value for name, value in values.items() if value != type(self).model_fields[name].default}

    def refuse_others(self, special: Sequence[str], taken: Sequence[str], subject: str, remedy: str) -> None:
        """Raises PlanError for an option that is stated and that `subject` does not take.

        special: flags that some subjects take and others do not. taken: those of them that this one does.
        """
        for name, value in self.find_stated([flag for flag in special if flag not in taken]).items():
            shown = value if isinstance(value, str | int) else str([*value] if isinstance(value, tuple) else value)
            raise PlanError(self.flag(name), f"{subject} takes no such option", remedy, shown)


def place_of(info: ValidationInfo, name: str | None = None) -> str:
    """Returns a field as the user wrote it: by its flag on the command line, by its name in Python.

    name: of another field than the one that is validated.
    """
    name = name or info.field_name or ""
    return f"--{name.replace('_', '-')}" if info.context else name


def read_number(text: str) -> float:
    """Returns a number that is written as a percentage or a fraction; NaN of any other text."""
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan
