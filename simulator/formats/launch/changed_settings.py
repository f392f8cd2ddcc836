"""Which settings of a launch file another job changes: the flags to edit in a script that exists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshcast.simulator.formats.launch.edits.python_edits import edit_python
from meshcast.simulator.formats.launch.edits.setting_change import ENVIRONMENT, SettingChange
from meshcast.simulator.formats.launch.edits.shell_edits import edit_script, order_neighbours
from meshcast.simulator.formats.launch.edits.toml_edits import edit_toml
from meshcast.simulator.formats.launch.edits.yaml_edits import edit_yaml
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import drop_inactive, flatten_for_export, flatten_job
from meshcast.simulator.formats.launch.launch_file import LaunchFile, parse_launch_text
from meshcast.simulator.formats.launch.program import LaunchFormat
from meshcast.simulator.formats.launch.programs.registry import FORMATS
from meshcast.simulator.formats.launch.table import Stated
from meshcast.simulator.job.job import Job


def list_changed_settings(found: ImportedJob, file: LaunchFile, before: Job, after: Job) -> list[SettingChange]:
    """The settings of a launch file that differ in another job; first those that it has, then those to add.

    found, file: the file as a job, and the file. before: the checked job of the file. after: the other job.
    Both jobs are written as launch files, so that only what differs in meaning counts: a flag that states a default, or
    the same by another name, is no change.
    """
    form = FORMATS[found.form]
    assert form.write is not None
    stated = form.read(file)
    texts = (form.write(flatten_for_export(job), []) for job in (before, after))
    old, new = (form.read(parse_launch_text(text, "", form.suffix)) for text in texts)
    differing = {name for name in {**old, **new} if _value(old.get(name)) != _value(new.get(name))}
    changed, changes = _changed_keys(before, after), []
    for name, one in stated.items():
        own = {key for key, where in found.places.items() if where == one.where}
        if name in differing:
            changes.append(SettingChange(one.shown, one.place, one.value, new[name].value if name in new else None))
        elif name not in old and name not in new and own and own <= changed:  # what is now said by another name
            changes.append(SettingChange(one.shown, one.place, one.value, None))
    of_plan = {where for key, where in found.places.items() if key.startswith(("plan.", "framework.", "precision."))}
    apart = {name for name, setting in stated.items() if setting.where not in of_plan}
    changes += [
        SettingChange(new[name].shown, "", None, new[name].value, order_neighbours(name, [*new], stated, apart))
        for name in new
        if name in differing and name not in stated
    ]
    return changes + _list_changed_variables(form, file, before, after)


def _list_changed_variables(form: LaunchFormat, file: LaunchFile, before: Job, after: Job) -> list[SettingChange]:
    """The variables of the environment that a script sets as the program refuses for the other job, or does not set
    though only the other job needs them."""
    old, changes = form.demand_variables(flatten_for_export(before)), []
    for one in form.demand_variables(flatten_for_export(after)):
        stated = form.read_variable(file, one.name)
        if stated is not None and not one.takes(stated.value):
            changes.append(SettingChange(f"{ENVIRONMENT}{one.name}", stated.place, stated.value, one.value))
        elif stated is None and one.value is not None and one not in old:
            changes.append(SettingChange(f"{ENVIRONMENT}{one.name}", "", None, one.value))
    return changes


def _changed_keys(before: Job, after: Job) -> set[str]:
    """The keys in which two jobs differ, by the names that imports give them."""
    old, new = drop_inactive(flatten_job(before)), drop_inactive(flatten_job(after))
    found = {key for key in {**old, **new} if old.get(key) != new.get(key)}
    return found | {key.replace("plan.pipeline.chunks", "plan.chunks") for key in found}


def _value(stated: Stated | None) -> Any:
    """A value for comparison: numbers as numbers, words in small letters."""
    if stated is None:
        return None
    try:
        return float(stated.value)
    except (TypeError, ValueError):
        return str(stated.value).lower()


def apply_setting_changes(file: LaunchFile, changes: Sequence[SettingChange]) -> str:
    """The content of a launch file with settings changed: in place where it has them, the others beside their
    neighbours.

    Raises PlanError for a setting that is written in a way that is not edited, or that stands in another file.
    """
    if file.suffix == ".py":
        return edit_python(file, changes)
    edit = edit_script
    if file.data is not None:
        edit = edit_toml if file.suffix == ".toml" else edit_yaml
    text = file.text
    for change in sorted(
        changes, key=lambda change: -change.line
    ):  # from the last line on, for edits shift those behind
        if change.place and change.place.rpartition(":")[0] != file.where:
            raise change.refuse()
        text = edit(text, change)
    return text
