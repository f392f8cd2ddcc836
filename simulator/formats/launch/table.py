"""Settings as a launch file states them, their values, and rows between settings and keys.

A job is here a flat mapping of dotted keys (see `keys`). A format turns its file into a mapping of
setting names to `Stated` values; rows of its table turn those into keys, and keys into settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass

UNSTATED: Any = object()
"""The value of a key that nothing states."""

Keys = dict[str, Any]
"""Dotted keys of a job, such as ``plan.tp``, with their values."""

SomeKeys = Mapping[str, Any]
"""The same, for reading."""

DEGREES = ("plan.tp", "plan.pp", "plan.cp", "plan.ep", "plan.etp")
"""Keys of a short plan that changes of a launch file may set even where the file needs a plan in long form."""


@dataclass(frozen=True)
class Stated:
    """A setting as a launch file states it.

    value: text, True for a flag without a value, or what YAML, JSON or TOML hold.
    shown: the name as the file writes it (``--tensor-model-parallel-size``).
    place: where the file says it (``run.sh:12``).
    unknown: variables of a script that nothing sets, and other parts of its value that nothing knows.
    value_place: where the value stands, if that is not where the setting is, as that of a variable.
    """

    value: Any
    shown: str
    place: str = ""
    unknown: tuple[str, ...] = ()
    value_place: str = ""

    @property
    def where(self) -> str:
        """File, line and name, for error messages."""
        return f"{self.place} {self.shown}".strip()

    def refuse(self, rule: str, remedy: str) -> PlanError:
        """Returns the error for a value that breaks a rule."""
        return PlanError(self.where, rule, remedy, self.value if isinstance(self.value, str | int | float) else None)


# ------------------------------------------------------------------------------------------- values


def read_number(stated: Stated) -> int | float:
    """Reads a number; a whole number as int. Raises PlanError for anything else."""
    value = stated.value
    if isinstance(value, str):
        try:
            value = float(value) if re.search(r"[.eE]", value) else int(value.replace("_", ""))
        except ValueError:
            raise stated.refuse("it takes a number", "Write a number such as 8") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise stated.refuse("it takes a number", "Write a number such as 8")
    return int(value) if abs(value) < 1e15 and value == int(value) else value


def read_count(stated: Stated) -> int:
    """Reads a whole number of at least 1. Raises PlanError for anything else."""
    number = read_number(stated)
    if not isinstance(number, int) or number < 1:
        raise stated.refuse("it takes a whole number of at least 1", "Write a number such as 8")
    return number


def read_switch(stated: Stated) -> bool:
    """Yes or no: a flag without a value is yes. Raises PlanError for other words."""
    word = str(stated.value).lower()
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off", "none", "null"):
        return False
    raise stated.refuse("it takes true or false", "Write true or false")


def read_words(stated: Stated) -> tuple[str, ...]:
    """Reads words: a list, or a text with spaces, commas and brackets around them."""
    value = stated.value
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(word for part in parts for word in re.split(r"[\s,\[\]'\"]+", str(part)) if word)


READERS: Mapping[str, Callable[[Stated], Any]] = {
    "count": read_count,
    "number": read_number,
    "switch": read_switch,
    "words": read_words,
    "text": lambda stated: str(stated.value),
}


# --------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class SettingRow:
    """One setting of a launch file, and the key of a job that says the same.

    name: of the setting, as the reader of the format normalises it.
    key: dotted key of the job.
    kind: how its value is read: count, number, switch, words or text.
    words: values of the setting and the values of the key that they mean; values that are missing here are not
        understood. None: the value itself.
    silent: value of the key where the file does not have the setting: the program's default. It is not written.
    demanded: whether it is written all the same, for the program does not start without it.
    """

    name: str
    key: str
    kind: str = "count"
    words: Mapping[Any, Any] | None = None
    silent: Any = UNSTATED
    demanded: bool = False

    def read(self, stated: Stated) -> Any:
        """Reads the value of the key, or UNSTATED if the value of the setting has no place in a job."""
        takes_none = self.kind == "count" and self.silent == 0
        value = 0 if takes_none and read_number(stated) == 0 else READERS[self.kind](stated)
        if self.words is None:
            return value
        plain = {_in_small(theirs): ours for theirs, ours in reversed(list(self.words.items()))}
        return plain.get(_in_small(value), UNSTATED)

    def means(self, value: Any) -> bool:
        """Returns whether a word of the table is meant, though it may look like a null (``none``)."""
        return isinstance(value, str) and _in_small(value) in map(_in_small, self.words or ())

    def write(self, value: Any) -> Any:
        """Writes the value of the setting; UNSTATED if it is left out, or if no value says this."""
        if value == self.silent and not self.demanded:
            return UNSTATED
        if self.words is None:
            return (
                int(value)
                if isinstance(value, float) and value == int(value) and self.kind == "number" and value > 1
                else value
            )
        return next((theirs for theirs, ours in self.words.items() if ours == value), UNSTATED)


def _in_small(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


ON: Mapping[Any, Any] = {True: True, False: False}
OFF: Mapping[Any, Any] = {True: False, False: True}
"""Switches, and switches that turn something off."""


def is_null(value: Any) -> bool:
    """Returns whether a value says that something is not set."""
    return value is None or str(value).lower() in ("none", "null", "auto", "")


def write_rows(rows: Iterable[SettingRow], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the settings that state these keys: of every key the first row that can say its value."""
    settings: dict[str, Any] = {}
    said = set()
    for row in rows:
        if row.key in keys and row.key not in said:
            value = row.write(keys[row.key])
            if value is not UNSTATED:
                settings[row.name] = value
                said.add(row.key)
            elif keys[row.key] == row.silent:
                said.add(row.key)
    return settings
