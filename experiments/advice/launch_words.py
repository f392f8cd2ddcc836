"""The launch file behind a job: what its program can be told, in whose words, and the file edited to say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from meshcast.experiments.advice.neighbours import PlanChange, name_flat_key
from meshcast.experiments.explain.edited_launch import EditedLaunch, edit_until_same
from meshcast.hardware.documents.plain_data import Fields
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.formats.launch.convert import export_job, import_text
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.launch_file import LaunchFile, LaunchOptions
from meshcast.simulator.formats.launch.programs.registry import find_format
from meshcast.simulator.job.job import Job
from meshcast.simulator.loading.load import load_job


class LaunchWords:
    """What a launch file of a training program can say.

    file: the launch file. launch: what it says. job: as it is.
    """

    def __init__(self, file: LaunchFile, launch: ImportedJob, job: Job) -> None:
        self.file, self._launch, self._job = file, launch, job
        self.format = find_format(launch.form)
        self._edits: dict[int, EditedLaunch | MeshcastError] = {}

    @property
    def is_written(self) -> bool:
        """Whether launch files of the program are written; otherwise they are read only."""
        return self.format.write is not None

    def tell(self, change: PlanChange, job: Job) -> PlanChange | None:
        """Returns a change as the program can be told it; None if it cannot.

        job: with the change. What comes along with it in the program, such as the engine that shards its states and the
        formats of these, is added to its fields. Of a program whose files are read only, what the file states can be
        stated otherwise.
        """
        if not self.is_written:
            fields = [field for field, value in change.fields.items() if value is not None]
            return change if all(self._find_place(field) for field in fields) else None
        unsaid = self._list_unsaid(job)
        if unsaid is None:
            return None
        keys = {key for key, values in unsaid.items() if self._unsaid_now.get(key) != values}
        changed = tuple(map(name_flat_key, change.fields))
        if any(key.startswith(changed) or not _comes_along(key) for key in keys):
            return None
        return self._add_sections(change, job) if keys else change

    def _add_sections(self, change: PlanChange, job: Job) -> PlanChange | None:
        """Returns a change with the program and the formats that a launch file of the changed job means."""
        form, written = self.format, job.as_written
        try:
            text = export_job(job, form.name, load_in_folder, accept).text
            silent = LaunchOptions(assume_defaults=True)
            cluster, model = written["cluster"], written["model"]
            back = import_text(text, "exported file", form.name, cluster, model, folder=job.folder, options=silent)
        except MeshcastError:
            return None
        sections = {name: back.job.get(name, {}) for name in ("framework", "precision")}
        return replace(change, fields={**sections, **change.fields})

    def _find_place(self, field: str) -> str:
        """Returns the key by which the file's places name a field; empty if the file does not state it."""
        return next((key for key in (field, name_flat_key(field)) if key in self._launch.places), "")

    @cached_property
    def _unsaid_now(self) -> Mapping[str, object]:
        return self._list_unsaid(self._job) or {}

    def _list_unsaid(self, job: Job) -> Mapping[str, object] | None:
        """Returns the keys that the program cannot be told of a job, with their values; None if it runs no such job."""
        try:
            return export_job(job, self.format.name, load_in_folder, accept).unsaid
        except MeshcastError:
            return None

    def edit(self, job: Job) -> EditedLaunch:
        """Returns the launch file edited to be forecast as a job. Raises PlanError where it is not edited so."""
        if id(job) not in self._edits:
            try:
                self._edits[id(job)] = edit_until_same(self.file, self.format.name, job)
            except MeshcastError as error:
                self._edits[id(job)] = error
        edited = self._edits[id(job)]
        if isinstance(edited, MeshcastError):
            raise edited
        return edited

    def list_settings(self, change: PlanChange, job: Job) -> tuple[str, ...]:
        """Returns the settings that a change is to the program, in its own words; job: with it.

        () where they are not known: the file is not edited in place.
        """
        if not self.is_written:
            place = self._launch.places.get(self._find_place(change.key), "")
            name = place.rpartition(" ")[2]
            return (f"{name}, so that {change.key} is {write_value(change.after)}",) if name else ()
        try:
            return tuple(map(describe_setting, self.edit(job).changes))
        except MeshcastError:
            return ()


def _comes_along(key: str) -> bool:
    """Returns whether a key follows from others in a program: its name and traits, and the formats of its states."""
    return key.startswith("framework.") or (key.startswith("precision.") and key != "precision.compute")


def describe_setting(change: SettingChange) -> str:
    """Returns a changed setting in words: ``--micro-batch-size 1 -> 2``."""
    name = change.name
    if change.after is None:
        return f"without {name}"
    after = write_value(change.after)
    if change.before is None:
        return f"add {name}{'' if change.after is True else f' {after}'}"
    return f"{name} {write_value(change.before)} -> {after}"


def write_value(value: object) -> str:
    """Returns the value of a setting in a line."""
    if isinstance(value, list | tuple):
        return " ".join(map(write_value, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_in_folder(data: Fields, folder: Path) -> Job:
    """Loads a job whose paths are relative to a folder."""
    return load_job(data, base=folder)


def accept(job: Job) -> None:
    """Checks nothing: a job that was forecast runs."""
