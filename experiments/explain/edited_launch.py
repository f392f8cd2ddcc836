"""Edits of a launch file until it is forecast as a job is."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from meshcast.hardware.documents.input_file import split_lines
from meshcast.hardware.errors import PlanError, cut_middle
from meshcast.hardware.units import GIB
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.formats.files import text as read_text
from meshcast.simulator.formats.launch.changed_settings import (
    EditedFiles,
    apply_setting_changes,
    list_changed_settings,
)
from meshcast.simulator.formats.launch.convert import compare_keys
from meshcast.simulator.formats.launch.edited import reading_edited
from meshcast.simulator.formats.launch.edits.setting_change import SettingChange
from meshcast.simulator.formats.launch.imported_job import ImportedJob
from meshcast.simulator.formats.launch.keys import flatten_for_export
from meshcast.simulator.formats.launch.launch_file import LaunchFile, parse_launch_text
from meshcast.simulator.formats.launch.programs.registry import find_format
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.program_rules import broken_rules
from meshcast.simulator.loading.load import load_job, read_job_of_file

MAX_ROUNDS = 3
"""Most rounds of edits: what a file leaves to its program, such as a global batch, may follow from what the first one
changes, and has to be stated then."""

SAME = 1e-6
"""Largest relative difference of figures that are the same."""


class EditedLaunch(NamedTuple):
    """A launch file that was edited to have the settings of a job.

    files: the edited file, with those that it reads.
    job: what it is read as.
    changes: the settings that were changed, those that the file has first, each with its value before the first edit.
    """

    files: EditedFiles
    job: Job
    changes: tuple[SettingChange, ...]


def edit_until_same(file: LaunchFile, form: str, wanted: Job) -> EditedLaunch:
    """Edits a launch file until it has the settings of a job, in at most `MAX_ROUNDS` rounds.

    form: name of its format. Raises PlanError where the edits break its syntax.
    """
    edited, (launch, back) = EditedFiles(file), import_beside(file, form, wanted)
    before, changes = back, dict[str, SettingChange]()
    for _ in range(MAX_ROUNDS):
        listed = list_changed_settings(launch, edited.file, back, wanted)
        if not listed and edited != EditedFiles(file):
            break
        for change in listed:
            first = changes.get(change.name, change)
            changes[change.name] = replace(change, before=first.before, place=first.place)
        edited = apply_setting_changes(edited, listed)
        try:
            with reading_edited(edited.beside):
                edited = replace(edited, file=_parse_again(edited.file))
                launch, back = import_beside(edited.file, form, wanted, before)
        except PlanError as error:
            raise PlanError(f"edited {error.where}", error.rule, error.remedy, error.value) from None
    return EditedLaunch(edited, back, tuple(changes.values()))


def list_edits(file: LaunchFile, edited: EditedFiles) -> dict[str, tuple[str, str]]:
    """Returns the texts of every file that is edited, and of the arguments (`ARGUMENTS`), before and after, by name."""
    before, changed = EditedFiles(file).texts, {}
    for name, text in edited.texts.items():
        old = before[name] if name in before else read_text(Path(name), "Edit it by hand")
        if text != old:
            changed[name] = old, text
    return changed


def diff_edits(edits: Mapping[str, tuple[str, str]]) -> list[str]:
    """Returns the lines of a unified diff. edits: see `list_edits`."""
    return [
        line
        for name, (old, new) in edits.items()
        for line in unified_diff(split_lines(old), split_lines(new), name, name, lineterm="")
    ]


def _parse_again(file: LaunchFile) -> LaunchFile:
    """Returns a launch file parsed from its text. Raises PlanError for one that breaks the syntax."""
    return parse_launch_text(file.text, file.where, file.suffix, file.folder, file.options)


def import_beside(file: LaunchFile, form: str, job: Job, before: Job | None = None) -> tuple[ImportedJob, Job]:
    """Returns a launch file, as keys and loaded, on the cluster of another job, and with what of that it leaves open.

    before: the file before it was edited, whose program the edits leave as it is; None: it is not edited yet, and may
        be on as many GPUs as its own degrees ask for, where those of the job do not do.
    """

    answers = [f"model={json.dumps(job.as_written['model'])}", f"batch.sequence={job.batch.sequence}"]
    answers += [f"batch.micro={job.batch.micro}"]
    cluster, release = [f"cluster={json.dumps(job.as_written['cluster'])}"], []
    if job.release is not None:
        release.append(f"framework.release={job.release}")
    starts = [[*cluster, *release], release] + ([cluster, []] if release else [])  # of another program than the job
    if before is not None:
        same = before.framework.name == job.framework.name
        starts = [[*cluster, *release, f"framework.name={job.framework.name}"] if same else cluster]
    tried = [[*start, *answers[:count]] for start in starts for count in range(4)]
    for number, answered in enumerate(tried, 1):
        try:
            read = read_job_of_file(file, answered, form)
            assert read.launch is not None
            return read.launch, load_job(read.data, base=job.folder)
        except PlanError:
            if number == len(tried):
                raise
    raise AssertionError("the last one is returned or raised")


def compare_edited(wanted: Job, back: Job, file: str, form: str) -> tuple[bool, str]:
    """Returns whether an edited launch file is forecast as the job that it is to be, and a sentence on it.

    wanted: the job. back: that of the edited file. form: name of its format.
    """

    steps = [forecast_step(job) for job in (wanted, back)]
    figures = [
        f"{step.step_time:.4g} s a step and {step.peak_device / GIB:.1f} GiB{'' if step.fits else ', does not fit'}"
        for step in steps
    ]
    pairs = [(step.step_time, step.peak_allocated) for step in steps]
    broken = "".join(f". {rule}" for rule in broken_rules(back) if rule.stops)
    if all(math.isclose(left, right, rel_tol=SAME) for left, right in zip(*pairs, strict=True)):
        return True, f"{file} with these edits is forecast as the job is: {figures[0]}{broken}"
    unsaid = compare_keys(flatten_for_export(wanted), flatten_for_export(back))
    keys = [f"{key} ({_word(mine)}; here {_word(theirs)})" for key, (mine, theirs) in unsaid.items()]
    reason = f": {find_format(form).program} cannot be told {', '.join(keys)}" if keys else ", and no key says why"
    return False, f"{file} with these edits is another job, {figures[1]}, not {figures[0]}{reason}{broken}"


def _word(value: object) -> str:
    return cut_middle(", ".join(map(str, value)) if isinstance(value, tuple) else str(value), 60)
