"""A launch file while it becomes a job: its settings, the keys so far, and what became of every setting."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from meshcast.hardware.documents.input_file import is_file
from meshcast.hardware.records import dataclass
from meshcast.hardware.units import read_digits
from meshcast.simulator.formats.launch.keys import flatten_model
from meshcast.simulator.formats.launch.launch_file import LaunchFile
from meshcast.simulator.formats.launch.table import (
    DEGREES,
    UNSTATED,
    Keys,
    SettingRow,
    SomeKeys,
    Stated,
    is_null,
    read_count,
    read_switch,
)
from meshcast.simulator.formats.launch.verdicts import (
    ApproximatedSetting,
    Approximation,
    Decision,
    Findings,
    IgnoredSetting,
    NoInfluence,
    Question,
    TakenSetting,
    Verdicts,
    looks_decisive,
    place_of,
)
from meshcast.simulator.job.framework import framework_versions
from meshcast.simulator.job.release import find_month
from meshcast.simulator.models.load import find_model, load_model


def is_off(stated: Stated) -> bool:
    """Returns whether a setting is null or a switch that is off."""
    return is_null(stated.value) or str(stated.value).lower() == "false"


SAME_WITHOUT = "the job is the same without it"

DOES_NOT_KNOW = "meshcast does not know it, and leaves it out of the forecast"

MAX_LISTED = 20
"""Settings that nothing knows, or that are asked for because nothing does, that are listed; the others are counted."""

MAX_NAME = 1_000
"""Letters of a setting's name: no program has longer ones, and every pattern would read all of it."""

MAX_COMPARED = 200
"""Settings that nothing knows whose names are compared with all known names."""

CLOSE = 0.8
"""Likeness of a name to a known name that it may have been meant for."""


@dataclass
class Reading:
    """What a launch file says, while it becomes a job.

    program: name of the program for messages.
    file: the launch file.
    stated: all settings of the file by their normalised names.
    answers: what the user sets, by field of the job (``plan.zero``). Degrees replace those of the file, so that what
        the program derives from them follows.
    _left_out: a setting that the file is read without.
    keys: the keys of the job so far.
    origins: the setting behind each key, or "default of PROGRAM".
    assumed: keys that the file cannot or does not state, each with the reason.
    findings: settings by class.
    """

    program: str
    file: LaunchFile
    stated: dict[str, Stated]
    answers: Mapping[str, str] = field(default_factory=dict)
    _left_out: Stated | None = None
    keys: Keys = field(default_factory=dict, init=False)
    origins: dict[str, Stated | str] = field(default_factory=dict, init=False)
    assumed: dict[str, str] = field(default_factory=dict, init=False)
    findings: Findings = field(default_factory=Findings, init=False)

    def __post_init__(self) -> None:
        self.stated = self._leave_out(self.stated)
        numbers = {key: read_digits(word) for key, word in self.answers.items() if key in DEGREES}
        self._changed = {key: number for key, number in numbers.items() if number}
        self._replaced: Keys = {}  # degrees of the file that a change replaces
        self._used: set[str] = set()  # names of settings that were asked for
        self._unknown: list[ApproximatedSetting] = []
        self._decisive: list[tuple[Stated, str]] = []  # settings that nothing knows, and why they are asked for
        self._credits: dict[str, list[str]] = {}  # keys that each setting states

    # ------------------------------------------------------------------------------------ taking settings

    def take(self, *names: str, decisive: bool = True, answers: tuple[str, ...] = ()) -> Stated | None:
        """Reads the setting of the first of these names that the file has; all of them count as understood.

        decisive: whether a value that holds what nothing sets (``$TP``) is asked for. It counts as not stated.
        answers: changes of the job that answer that, too.
        """
        self._used.update(names)
        stated = next((self.stated[name] for name in names if name in self.stated), None)
        if stated is None or not stated.unknown or self.file.writes(str(stated.value)):
            return stated
        if decisive:
            self._ask_unresolved(stated, *answers)
        return None

    def take_switch(self, *names: str) -> bool:
        """Reads whether a switch is on."""
        stated = self.take(*names)
        return stated is not None and read_switch(stated)

    def take_count(self, *names: str, decisive: bool = True, answers: tuple[str, ...] = ()) -> int | None:
        """Reads a whole number, if the file has the setting and it is not null."""
        stated = self.take(*names, decisive=decisive, answers=answers)
        return read_count(stated) if stated is not None and not is_null(stated.value) else None

    def take_word(self, *names: str) -> str:
        """Reads a word in small letters; empty if the file does not have the setting."""
        stated = self.take(*names)
        return "" if stated is None or is_null(stated.value) else str(stated.value).strip("'\"").lower()

    def read_rows(self, rows: Iterable[SettingRow]) -> None:
        """Reads all settings of a table; keys of settings that the file does not have get their silent value.

        Of several settings for the same key, the first row that the file has counts.
        """
        silent: Keys = {}
        for row in rows:
            unresolved = self.stated.get(row.name)
            if unresolved is not None and unresolved.unknown and not row.key.startswith("run."):
                self._ask_unresolved(unresolved, f"{row.key}=...")
            stated = self.take(row.name, decisive=False)
            if stated is None or (is_null(stated.value) and not row.means(stated.value)):
                if row.silent is not UNSTATED:
                    silent.setdefault(row.key, row.silent)
                continue
            value = row.read(stated)
            if value is UNSTATED:
                known = ", ".join(str(word) for word in row.words or ())
                self.ask(
                    stated, f"{stated.value!r} has no counterpart in a job; understood are {known}", f"{row.key}=..."
                )
            elif row.key not in self.origins:
                self.set_key(row.key, value, row.name)
            elif isinstance(before := self.origins[row.key], Stated) and before is not stated:
                self.ignore(stated, f"{before.shown} says it, too, and counts")
        for key, value in silent.items():
            if key not in self.keys:
                self.set_key(key, value)

    def add_stated(self, settings: Mapping[str, Stated]) -> None:
        """Adds the settings of a companion file; those that the file has itself count more."""
        self.stated = {**self._leave_out(settings), **self.stated}

    def _leave_out(self, settings: Mapping[str, Stated]) -> dict[str, Stated]:
        """Returns the settings but for that which the file is read without."""
        left = self._left_out
        return {
            name: stated
            for name, stated in settings.items()
            if left is None or (stated.shown, stated.place) != (left.shown, left.place)
        }

    def read_companion(self, stated: Stated) -> LaunchFile | None:
        """Returns the file that a setting names; asks for a file that is not there."""
        is_known = not stated.unknown or self.file.writes(str(stated.value))
        companion = self.file.find_companion(str(stated.value)) if is_known else None
        if companion is None:
            name = str(stated.value)
            why = f"it names a file, {name}, which decides the plan and is not beside {self.file.where}"
            self.ask(stated, why, "plan.zero=3", "plan.fsdp=true")
        return companion

    def read_model(self, *names: str) -> None:
        """Reads the model by its id on the hub or by a folder that holds its config.json; otherwise it is asked for."""
        stated = self.take(*names, answers=("model=llama3-8b",))
        if "model.layers" in self.keys and "model.preset" not in self.keys:
            self.ignore(stated, "the sizes of the model are given, and count")
        if stated is None or is_null(stated.value) or "model.layers" in self.keys:
            return
        name = str(stated.value)
        folder = self.file.folder / name
        spec: Any = str(folder / "config.json") if is_file(folder / "config.json") else find_model(name)
        if spec is None:
            why = "meshcast has no preset of this model: give one, or the config.json of the model"
            self.ask(stated, why, "model=llama3-8b", "model=config.json")
            return
        self.set_key("model.preset", spec, *names)
        self.keys |= flatten_model(load_model(spec, base=self.file.folder))

    # ------------------------------------------------------------------------------------- setting keys

    def set_key(self, key: str, value: Any, *names: str) -> None:
        """Sets a key. names: the settings that say so, each of which is listed with it; none: a default."""
        if key in self._changed:
            self._replaced[key] = value
        self.keys[key] = self._changed.get(key, value)
        stated = [name for name in names if name in self.stated]
        for name in stated:
            self._credits.setdefault(name, []).append(key)
        self.origins[key] = self.stated[stated[0]] if stated else f"default of {self.program}"

    def keys_of_file(self) -> Keys:
        """Returns the keys without the degrees that a change replaces: of those that the file leaves out, 1."""
        return {**self.keys, **dict.fromkeys(self._changed, 1), **self._replaced}

    def assume(self, key: str, value: Any, why: str) -> None:
        """Sets a key that no file of this program states."""
        self.keys[key] = value
        self.assumed[key] = why

    def set_checkpoints(self, every: int | None, asynchronous: bool, *names: str) -> None:
        """Keeps the checkpoints of a run, if the file says how often. names: of the settings of the interval."""
        if every:
            self.set_key("run.checkpoints.kind", "asynchronous" if asynchronous else "sharded", *names)
            self.set_key("run.checkpoints.every_steps", every, *names)

    # --------------------------------------------------------------------------------- the other classes

    def ignore(self, stated: Stated | None, why: str) -> None:
        """Lists a setting that has no influence on time and memory here."""
        if stated is not None:
            self.findings.ignored.append(IgnoredSetting(stated.shown, stated.place, why))

    def approximate(self, stated: Stated | None, why: str, errs: str = "", other: SomeKeys | None = None) -> None:
        """Lists a setting that the forecast does not follow.

        why: what is forecast instead.
        errs: which way the answer errs.
        other: keys with the values of a second forecast, which bounds the error.
        """
        if stated is not None:
            entry = ApproximatedSetting(stated.shown, stated.place, why, errs, dict(other or {}))
            self.findings.approximated.append(entry)

    def ask(self, stated: Stated | None, why: str, *answers: str) -> None:
        """Asks what decides the plan or the memory, unless a change of the job answers it.

        stated: the setting that was not understood; None: the file lacks it.
        answers: changes of the job such as ``plan.zero=3``, or options of the command line.
        """
        question = Question(*place_of(stated, self.file.where), why, answers)
        if question.is_answered(self.answers):
            self.ignore(stated, "a change of the job says it")
        elif question not in self.findings.questions:
            self.findings.questions.append(question)

    def ask_key(self, key: str, fallback: Any, why: str, stated: Stated | None = None, example: Any = None) -> None:
        """Asks for the value of a key.

        fallback: what is taken with ``--assume-defaults``; UNSTATED: nothing.
        example: of an answer.
        """
        shown = example if example is not None else "..." if fallback is UNSTATED else fallback
        self.ask(stated, why, f"{key}={shown}")
        if fallback is not UNSTATED:
            self.assume(key, fallback, why)

    def _ask_unresolved(self, stated: Stated, *answers: str) -> None:
        plain = [name.removeprefix("$") for name in stated.unknown]
        names = [name for name in plain if re.fullmatch(r"\w+", name)]
        options = (f"--env {name}=..." if not name.isdigit() else "--args ..." for name in names)
        what = ", ".join(f"${name}" if re.fullmatch(r"\w+", name) else name for name in stated.unknown)
        why = f"it is {stated.value!r}, and nothing here says what {what} is"
        self.ask(stated, why, *dict.fromkeys(options), *answers)

    # ----------------------------------------------------------------------------------- sorting the rest

    def sort_settings(self, verdicts: Verdicts, find_influence: Callable[[Stated], SomeKeys | None]) -> None:
        """Puts every setting of the file into a class of the four.

        verdicts: on those that nothing has taken.
        find_influence: returns the keys that a setting changes; None if the file cannot be read without it. It is asked
            about those that were taken, and that set no key by themselves.
        """
        self._list_taken(find_influence)
        listed = self.findings.listed
        for name, stated in self.stated.items():
            if name not in self._used and (stated.shown, stated.place) not in listed:
                listed.add((stated.shown, stated.place))
                self._judge(name, stated, verdicts)
        self._list_unknown()

    def _list_unknown(self) -> None:
        """Lists the first settings that nothing knows, and counts the others."""
        for stated, why in self._decisive[:MAX_LISTED]:
            self.ask(stated, why, "--assume-defaults")
        if (more := len(self._decisive) - MAX_LISTED) > 0:
            self.ask(None, f"meshcast does not know {more:,} further settings of this kind", "--assume-defaults")
        approximated = self.findings.approximated
        approximated += self._unknown[:MAX_LISTED]
        if (more := len(self._unknown) - MAX_LISTED) > 0:
            shown = f"{more:,} further settings"
            approximated.append(ApproximatedSetting(shown, self.file.where, DOES_NOT_KNOW, is_known=False))

    def _list_taken(self, find_influence: Callable[[Stated], SomeKeys | None]) -> None:
        listed = self.findings.listed
        for name, stated in self.stated.items():
            if name not in self._used and name not in self._credits:
                continue
            credited: SomeKeys = {key: self.keys[key] for key in self._credits.get(name, ()) if key in self.keys}
            if credited:
                self.findings.taken.append(TakenSetting(stated.shown, stated.place, stated.value, credited))
            elif (stated.shown, stated.place) in listed:
                continue
            elif is_off(stated):
                self.ignore(stated, "it is off")
            elif stated.unknown:
                self.ignore(stated, "nothing here says its value, and only a whole run depends on it")
            elif (changed := find_influence(stated)) is None or changed:
                self.findings.taken.append(TakenSetting(stated.shown, stated.place, stated.value, changed or {}))
            else:
                self.ignore(stated, SAME_WITHOUT)

    def _judge(self, name: str, stated: Stated, verdicts: Verdicts) -> None:
        """Lists a setting that nothing has taken."""
        if is_off(stated):
            self.ignore(stated, "it is off")
            return
        if len(name) > MAX_NAME:
            self._unknown.append(ApproximatedSetting(stated.shown, stated.place, DOES_NOT_KNOW, is_known=False))
            return
        match next((verdict for pattern, verdict in verdicts.items() if re.fullmatch(pattern, name)), None):
            case NoInfluence(why):
                self.ignore(stated, why)
            case Approximation(why, errs):
                self.approximate(stated, why, errs)
            case Decision(why, answers):
                self.ask(stated, why, *answers)
            case None if stated.value in (0, "0") and looks_decisive(name):
                self.ignore(stated, "it is 0, which stands for none")
            case None if (meant := self._suggest(name, stated)) or looks_decisive(name):
                decides = "" if meant else ", and by its name it decides the plan or the memory"
                self._decisive.append((stated, f"meshcast does not know it{decides}{meant}"))
            case None:
                self._unknown.append(ApproximatedSetting(stated.shown, stated.place, DOES_NOT_KNOW, is_known=False))

    def _suggest(self, name: str, stated: Stated) -> str:
        """Returns the known setting that a name is close to, as the file would write it; of the first
        `MAX_COMPARED`."""
        if len(self._unknown) + len(self._decisive) >= MAX_COMPARED:
            return ""
        known = sorted(self._used - self.stated.keys())
        close = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
        if not close:
            return ""
        prefix = name.removesuffix(stated.shown) if name.endswith(stated.shown) else ""
        plain = close[0].removeprefix(prefix)
        written = f"--{plain.replace('_', '-')}" if stated.shown.startswith("--") else plain
        return f". Did you mean {written}?"


def date_release(reading: Reading, month: str | None, why: str) -> None:
    """Sets the release of the framework, if a change of the job does not. month: None: it is today's."""
    if (stated := reading.answers.get("framework.release")) is not None:
        versions = framework_versions(str(reading.keys["framework.name"]))
        reading.keys["framework.release"] = find_month(stated.strip("\"'"), versions, "--set framework.release")
    elif month is not None:
        reading.assume("framework.release", month, why)


def set_gpus(reading: Reading, nodes: int | None, each: int, *names: str) -> None:
    """Sets the number of GPUs. nodes: None: a single one. each: GPUs of a node. names: the settings that say so."""
    reading.set_key("cluster.gpus", (nodes or 1) * each, *names)
    if nodes is not None and nodes > 1:
        reading.keys["cluster.gpus_per_node"] = each
