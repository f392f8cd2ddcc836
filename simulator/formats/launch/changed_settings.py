"""Which settings of a launch file another job changes: the flags to edit in a script that exists."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.formats.files import text as read_text
from meshcast.simulator.formats.launch.bash.files import find_beside
from meshcast.simulator.formats.launch.bash.script import ARGUMENTS
from meshcast.simulator.formats.launch.edits.setting_change import ENVIRONMENT, SettingChange, file_of_place
from meshcast.simulator.formats.launch.edits.shell_edits import edit_assignment, edit_script, order_neighbours
from meshcast.simulator.formats.launch.edits.toml_edits import edit_toml
from meshcast.simulator.formats.launch.edits.yaml_edits import edit_yaml
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import drop_inactive, flatten_for_export, flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchFile, LaunchOptions, parse_launch_text
from meshcast.simulator.formats.launch.program import LaunchFormat
from meshcast.simulator.formats.launch.programs.registry import find_format
from meshcast.simulator.formats.launch.table import Stated
from meshcast.simulator.job.job import Job


def list_changed_settings(launch: ImportedJob, file: LaunchFile, before: Job, after: Job) -> list[SettingChange]:
    """Returns the settings of a launch file that differ in another job; first those that it has, then those to add.

    launch, file: the file as a job, and the file.
    before: the checked job of the file.
    after: the other job. Both jobs are written as launch files, so that only what differs in meaning counts: a flag
        that states a default, or the same by another name, is no change.
    """
    form = find_format(launch.form)
    assert form.write is not None
    stated = {name: setting for name, setting in launch.settings.items() if setting.place}  # no default of a recipe
    texts = (form.write(flatten_for_export(job), []) for job in (before, after))
    written = [parse_launch_text(text, "", form.suffix, options=LaunchOptions()) for text in texts]
    old, new = (form.read(other) for other in written)
    beside, of_program = _leave_launchers(stated, file), _leave_launchers(new, written[1])
    differing = {name for name in {**old, **new} if _value(old.get(name)) != _value(new.get(name))}
    changed = _changed_keys(before, after)
    changes = [
        _change(setting, new[name].value if name in new else None)
        for name, setting in stated.items()
        if name in differing or (name in beside and _is_said_otherwise(name, setting, launch, changed, old, new))
    ]
    of_plan = {where for key, where in launch.places.items() if key.startswith(("plan.", "framework.", "precision."))}
    apart = {name for name, setting in stated.items() if setting.where not in of_plan}
    changes += [
        _add(name, new, stated, beside, apart) for name in of_program if name in differing and name not in stated
    ]
    edits = [form.override(change, file, beside) for change in changes]
    return edits + _list_changed_variables(form, file, before, after)


def _add(
    name: str,
    new: Mapping[str, Stated],
    stated: Mapping[str, Stated],
    beside: Mapping[str, Stated],
    apart: Collection[str],
) -> SettingChange:
    """Returns a setting to add. new: the settings of a file that is written anew. stated: those of the file that
    exists. beside, apart: see `order_neighbours`."""
    inside = _find_file_of_section(name, stated)
    shown = name.partition(".")[2] if inside else new[name].shown
    return SettingChange(shown, "", None, new[name].value, order_neighbours(name, [*new], inside or beside, apart))


def _find_file_of_section(name: str, stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """Returns the settings of the file that holds the section of a setting to add, as that of ``deepspeed: FILE``; {}
    if no file is such a section."""
    section = f"{name.partition('.')[0]}."
    return {
        other: setting
        for other, setting in stated.items()
        if name.startswith(section) and other == f"{section}{setting.shown}"
    }


def _is_said_otherwise(
    name: str,
    setting: Stated,
    launch: ImportedJob,
    changed: Collection[str],
    old: Mapping[str, Stated],
    new: Mapping[str, Stated],
) -> bool:
    """Returns whether a setting of a file is a degree that both jobs, as they are written, leave out, or is now said by
    another name.

    changed: keys in which they differ.
    old, new: their settings.
    """
    places = launch.places.items()
    keys = [key in changed for key, where in places if where == setting.where and key != "framework.name"]
    if name in new:
        return any(keys) and _value(setting) != _value(new[name])
    return name not in old and bool(keys) and all(keys)


def _change(setting: Stated, after: object) -> SettingChange:
    return SettingChange(setting.shown, setting.place, setting.value, after, value_place=setting.value_place)


def _leave_launchers(stated: Mapping[str, Stated], file: LaunchFile) -> dict[str, Stated]:
    """Returns the settings but for options of launchers, beside which none of the program belongs."""
    launchers = file.launch.launchers if file.launch is not None else ()
    places = {setting.where for launcher in launchers for setting in launcher.settings.values()}
    return {name: setting for name, setting in stated.items() if setting.where not in places}


def _list_changed_variables(form: LaunchFormat, file: LaunchFile, before: Job, after: Job) -> list[SettingChange]:
    """Returns the variables of the environment that a script sets as the program refuses for the other job, or does not
    set though only the other job needs them."""
    old, changes = form.demand_variables(flatten_for_export(before)), []
    for variable in form.demand_variables(flatten_for_export(after)):
        name, value = f"{ENVIRONMENT}{variable.name}", variable.value
        stated = form.read_variable(file, variable.name)
        if stated is not None and not variable.takes(stated.value):
            changes.append(SettingChange(name, stated.place, stated.value, value))
        elif stated is None and value is not None and variable not in old:
            changes.append(SettingChange(name, "", None, value))
    return changes


def _changed_keys(before: Job, after: Job) -> set[str]:
    """Returns the keys in which two jobs differ, by the names that imports give them."""
    old, new = drop_inactive(flatten_job(before)), drop_inactive(flatten_job(after))
    keys = {key for key in {**old, **new} if old.get(key) != new.get(key)}
    return keys | {key.replace("plan.pipeline.chunks", "plan.chunks") for key in keys}


def _value(stated: Stated | None) -> Any:
    """Returns a value for comparison: numbers as numbers, words in small letters."""
    if stated is None:
        return None
    try:
        return float(stated.value)
    except (TypeError, ValueError):
        return str(stated.value).lower()


@dataclass(frozen=True)
class EditedFiles:
    """A launch file with the files that it reads, as they are edited.

    file: the launch file, with its arguments.
    beside: the texts of others that are edited, by their resolved paths.
    """

    file: LaunchFile
    beside: Mapping[Path, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """What is edited, by the names of files, and by `ARGUMENTS`."""
        beside = {str(path): text for path, text in self.beside.items()}
        return {self.file.where: self.file.text, **beside, ARGUMENTS: shlex.join(self.file.options.arguments)}

    def replace_text(self, path: Path | None, text: str) -> EditedFiles:
        """Returns the files with another text of a file that is read; None: of the launch file itself."""
        if path is not None:
            return replace(self, beside={**self.beside, path: text})
        return replace(self, file=replace(self.file, text=text))


EDITS = {".toml": edit_toml, ".json": edit_yaml, ".yaml": edit_yaml, ".yml": edit_yaml}
"""Edits of files of settings by the end of their names; all others are scripts."""


def apply_setting_changes(edited: EditedFiles, changes: Sequence[SettingChange]) -> EditedFiles:
    """Returns the files with settings changed: in place where they have them, the others beside their neighbours.

    A setting of a file that a script reads is changed there, or in the script where that sets its value by a variable.
    Raises PlanError for a setting that is written in a way that is not edited, or that stands in another file.
    """
    later = []
    for change in changes:  # scripts first: a flag beside others shifts no line, and needs those that may be cut
        added = _add_to_script(edited, change)
        later += [change] if added is None else []
        edited = added or edited
    for change in sorted(later, key=lambda change: -change.line):  # from the last line on, for edits shift others
        edited = _apply(edited, change)
    return edited


def _add_to_script(edited: EditedFiles, change: SettingChange) -> EditedFiles | None:
    """Returns the files with a setting added to a script; None for a setting that is changed, or belongs elsewhere."""
    if change.place or change.variable or edited.file.data is not None:
        return None
    for place, neighbours in _list_places(edited.file, change):
        with suppress(PlanError):  # its neighbours are written in another way
            if Path(place).suffix not in EDITS:
                return _edit_file(edited, replace(change, neighbours=neighbours), place)
    return None


def _apply(edited: EditedFiles, change: SettingChange) -> EditedFiles:
    if change.place or change.variable:
        return _edit_file(edited, change, file_of_place(change.place) or edited.file.where)
    for place, neighbours in _list_places(edited.file, change):
        try:
            return _edit_file(edited, replace(change, neighbours=neighbours), place)
        except PlanError:  # its neighbours there are gone
            continue
    raise change.refuse()


def _edit_file(edited: EditedFiles, change: SettingChange, place: str) -> EditedFiles:
    """Returns the files with a changed setting."""
    file = edited.file
    if place == ARGUMENTS and change.place and change.before is None:
        return replace(edited, file=file.with_arguments(_add_words(file.options.arguments, change)))
    if place == ARGUMENTS:
        arguments = tuple(shlex.split(edit_script(shlex.join(file.options.arguments), change)))
        return replace(edited, file=file.with_arguments(arguments))
    if place == file.where and file.suffix != ".py":
        edit = edit_script if file.data is None else EDITS.get(file.suffix, edit_yaml)
        return edited.replace_text(None, edit(file.text, change))
    if file_of_place(change.value_place) == file.where and (text := edit_assignment(file.text, change)) is not None:
        return edited.replace_text(None, text)
    path = Path(place).resolve() if Path(place).is_file() else find_beside(file.folder, place)
    if path is None or path.suffix == ".py":
        raise change.refuse()
    text = edited.beside[path] if path in edited.beside else read_text(path, "Edit it by hand")
    return edited.replace_text(path, EDITS.get(path.suffix, edit_script)(text, change))


def _add_words(arguments: Sequence[str], change: SettingChange) -> tuple[str, ...]:
    """Returns arguments with those of a change: a flag before them, a word that chooses something behind them."""
    values = change.after if isinstance(change.after, list | tuple) else () if change.after is True else (change.after,)
    if change.name.startswith("-"):
        return (change.name, *map(str, values), *arguments)
    return (*arguments, change.name)


def _list_places(file: LaunchFile, change: SettingChange) -> Iterator[tuple[str, tuple[Stated, ...]]]:
    """Yields the files to which a setting may be added, with its neighbours there: the launch file itself, then those
    of its neighbours, the nearest first, then the arguments."""
    files = [file_of_place(beside.place) for beside in change.neighbours if beside.place]
    places = dict.fromkeys(sorted(files, key=lambda place: (place != file.where, place == ARGUMENTS)))
    for place in places or [file.where]:
        yield place, tuple(beside for beside in change.neighbours if file_of_place(beside.place) in ("", place))
