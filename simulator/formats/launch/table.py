"""The core of all formats: settings as a launch file states them, rows between settings and keys, and a `Reading`.

A job is here a flat mapping of dotted keys (see `keys`). A format turns its file into a mapping of
setting names to `Stated` values; rows of its table turn those into keys, and keys into settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshcast.hardware.errors import PlanError

UNSTATED: Any = object()
"""The value of a key that nothing states."""

Keys = dict[str, Any]
"""Dotted keys of a job, such as ``plan.tp``, with their values."""


@dataclass(frozen=True)
class Stated:
    """A setting as a launch file states it.

    value: text, True for a flag without a value, or what YAML, JSON or TOML hold.
    shown: the name as the file writes it (``--tensor-model-parallel-size``).
    place: where the file says it (``run.sh:12``).
    unknown: variables of a script that nothing sets, and other parts of its value that nothing knows.
    """

    value: Any
    shown: str
    place: str = ""
    unknown: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """File, line and name, for error messages."""
        return f"{self.place} {self.shown}".strip()

    def refuse(self, rule: str, remedy: str) -> PlanError:
        """The error for a value that breaks a rule."""
        return PlanError(self.where, rule, remedy, self.value if isinstance(self.value, str | int | float) else None)


# ------------------------------------------------------------------------------------------- values


def read_number(stated: Stated) -> int | float:
    """A number; whole ones as int. Raises PlanError for anything else."""
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
    """A whole number of at least 1. Raises PlanError for anything else."""
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
    """Words: a list, or a text with spaces, commas and brackets around them."""
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
        """The value of the key, or UNSTATED if the value of the setting has no place in a job."""
        value = READERS[self.kind](stated)
        if self.words is None:
            return value
        plain = {_in_small(theirs): ours for theirs, ours in reversed(list(self.words.items()))}
        return plain.get(_in_small(value), UNSTATED)

    def means(self, value: Any) -> bool:
        """Whether a word of the table is meant, though it may look like a null (``none``)."""
        return isinstance(value, str) and _in_small(value) in map(_in_small, self.words or ())

    def write(self, value: Any) -> Any:
        """The value of the setting; UNSTATED if it is left out, or if no value says this."""
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


DOES_NOT_KNOW = "meshcast does not know it"

CLOSE = 0.8
"""Likeness of a name to a known one that it may have been meant for."""

ON: Mapping[Any, Any] = {True: True, False: False}
OFF: Mapping[Any, Any] = {True: False, False: True}
"""Switches, and switches that turn something off."""


# ------------------------------------------------------------------------------------------- reading


@dataclass
class Reading:
    """What a launch file says, while it becomes a job.

    program: name of the program for messages.
    stated: all settings of the file by their normalised names.
    keys: the keys of the job so far. origins: the setting behind each, or "default of PROGRAM".
    assumed: keys that the file cannot or does not state, each with the reason.
    unknown: settings that were not understood, as the file writes them, each with the reason.
    used: names of settings that were asked for. unrecognised: settings of names that nothing knows.
    changed: degrees that a change sets in place of those of the file: what the program derives from them follows.
    own: those of the file.
    """

    program: str
    stated: Mapping[str, Stated]
    keys: Keys = field(default_factory=dict)
    origins: dict[str, Stated | str] = field(default_factory=dict)
    assumed: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    unrecognised: list[str] = field(default_factory=list)
    changed: Mapping[str, Any] = field(default_factory=dict)
    own: Keys = field(default_factory=dict)

    def take(self, *names: str) -> Stated | None:
        """The setting of the first of these names that the file has; all of them count as understood."""
        self.used.update(names)
        return next((self.stated[name] for name in names if name in self.stated), None)

    def take_switch(self, *names: str) -> bool:
        """Whether a switch is on."""
        found = self.take(*names)
        return found is not None and read_switch(found)

    def take_count(self, *names: str) -> int | None:
        """A whole number, if the file has the setting and it is not null."""
        found = self.take(*names)
        return read_count(found) if found is not None and not is_null(found.value) else None

    def take_word(self, *names: str) -> str:
        """A word in small letters; empty if the file does not have the setting."""
        found = self.take(*names)
        return "" if found is None or is_null(found.value) else str(found.value).strip("'\"").lower()

    def set_key(self, key: str, value: Any, *names: str) -> None:
        """Sets a key. names: the settings that say so; none: a default of the program."""
        if key in self.changed:
            self.own[key] = value
        self.keys[key] = self.changed.get(key, value)
        stated = next((self.stated[name] for name in names if name in self.stated), None)
        self.origins[key] = stated or f"default of {self.program}"

    def assume(self, key: str, value: Any, why: str) -> None:
        """Sets a key that the file does not state."""
        self.keys[key] = value
        self.assumed[key] = why

    def set_checkpoints(self, every: int | None, asynchronous: bool, *names: str) -> None:
        """The checkpoints of a run, if the file says how often. names: of the settings of the interval."""
        if every:
            self.set_key("run.checkpoints.kind", "asynchronous" if asynchronous else "sharded", *names)
            self.set_key("run.checkpoints.every_steps", every, *names)

    def reject(self, stated: Stated | None, why: str) -> None:
        """Lists a setting that was not understood."""
        if stated is not None:
            self.unknown[stated.shown] = why

    def read_rows(self, rows: Iterable[SettingRow]) -> None:
        """Reads all settings of a table; keys of settings that the file does not have get their silent value."""
        silent: Keys = {}
        for row in rows:
            stated = self.take(row.name)
            if stated is None or (is_null(stated.value) and not row.means(stated.value)):
                if row.silent is not UNSTATED:
                    silent.setdefault(row.key, row.silent)
                continue
            value = row.read(stated)
            if value is UNSTATED:
                known = ", ".join(str(word) for word in row.words or ())
                self.reject(stated, f"{stated.value!r} has no counterpart in a job; understood are {known}")
            elif row.key not in self.origins:
                self.set_key(row.key, value, row.name)
        for key, value in silent.items():
            if key not in self.keys:
                self.set_key(key, value)

    def sort_rest(self, without_influence: str, reasons: Mapping[str, str]) -> list[str]:
        """Lists the settings that nothing has read. Returns those without influence on time or memory.

        without_influence: pattern of their names. reasons: patterns of names that are known and have no place in a job.
        """
        ignored = []
        for name, stated in self.stated.items():
            if name in self.used:
                continue
            if stated.value is False or is_null(stated.value):  # what is off
                ignored.append(stated.shown)
            elif (
                why := next((why for pattern, why in reasons.items() if re.fullmatch(pattern, name)), None)
            ) is not None:
                self.reject(stated, why)
            elif re.fullmatch(without_influence, name):
                ignored.append(stated.shown)
            else:
                self.unrecognised.append(stated.shown)
                self.reject(stated, f"{DOES_NOT_KNOW}{self._suggest(name, stated)}")
        return ignored

    def _suggest(self, name: str, stated: Stated) -> str:
        """The known setting that a name is close to, as the file would write it."""
        known = sorted(self.used - self.stated.keys())
        close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
        if not close:
            return ""
        written = f"--{close[0].replace('_', '-')}" if stated.shown.startswith("--") else close[0]
        return f". Did you mean {written}?"


def is_null(value: Any) -> bool:
    """Whether a value says that something is not set."""
    return value is None or str(value).lower() in ("none", "null", "auto", "")


def write_rows(rows: Iterable[SettingRow], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that state these keys: of every key the first row that can say its value."""
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
