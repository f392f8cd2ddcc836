"""``meshcast import PROGRAM FILE``, ``meshcast export JOB --to PROGRAM``, and what `predict` says of a launch file."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshcast.experiments.cli.console import VIOLATED, check_place, emit, to_json, writing
from meshcast.hardware.errors import PlanError, cut_middle, escape_controls
from meshcast.hardware.load import read_yaml

if TYPE_CHECKING:
    from meshcast.simulator.formats.launch.imported_job import ImportedJob
    from meshcast.simulator.job.job import Job


def import_launch(
    form: str, file: Path, out: Path | None, cluster: str | None, model: str | None, gpus: int | None, as_json: bool
) -> None:
    """Prints or writes the job of a launch file."""
    from meshcast.simulator.formats.launch.convert import import_text
    from meshcast.simulator.formats.launch.detect import REMEDY, read_file
    from meshcast.simulator.formats.launch.render import render_job
    from meshcast.simulator.loading.load import load_job

    given = {"cluster": cluster, "model": model}
    options = {key: read_yaml(word, f"--{key}", PlanError).data for key, word in given.items() if word is not None}
    found = import_text(read_file(file, REMEDY), str(file), form, gpus=gpus, folder=file.parent, **options)
    load_job(found.job, base=file.parent)  # a job that would be refused is refused here
    if as_json:
        emit(found.to_dict())
    if out is not None or not as_json:
        in_json = out is not None and out.suffix.lower() == ".json"  # which has no place for comments
        _write(f"{to_json(found.job, indent=2)}\n" if in_json else render_job(found), out)


def export_launch(job: Path, program: str, out: Path | None, changes: Sequence[str]) -> None:
    """Prints or writes a job as a launch file."""
    from meshcast.simulator.formats.launch.convert import export_job
    from meshcast.simulator.loading.load import load_job

    found = export_job(load_job(job, changes), program, lambda data, folder: load_job(data, base=folder))
    _write(found.text, out)
    if found.unsaid:
        keys = ", ".join(found.unsaid)
        typer.echo(
            escape_controls(f"meshcast: {program} cannot be told {keys}; the header says what it runs"), err=True
        )


def edit_launch(job: Path, against: Path, changes: Sequence[str], write: bool) -> None:
    """Prints the edits of an existing launch file that make it a job, as a unified diff, and says whether the edited
    file is forecast as the job is; if not, the command ends with an exit code of its own.

    write: whether the file is written.
    """
    from meshcast.simulator.formats.launch.changed_settings import apply_setting_changes, list_changed_settings
    from meshcast.simulator.formats.launch.convert import EXPORTS
    from meshcast.simulator.formats.launch.detect import read_launch_file
    from meshcast.simulator.loading.load import load_job

    text, form = read_launch_file(against)
    if form not in EXPORTS:
        rule = "its settings cannot be compared: such files are read, not written"
        raise PlanError("--against", rule, f"Name a file of {', '.join(EXPORTS)}", str(against))
    wanted = load_job(job, changes)
    edited, (launch, back) = text, _import_beside(text, against, form, wanted, own_gpus=True)
    for _ in range(MOST_ROUNDS):
        listed = list_changed_settings(launch, edited, back, wanted)
        if not listed and edited != text:
            break
        edited = apply_setting_changes(edited, str(against), listed)
        try:
            launch, back = _import_beside(edited, against, form, wanted)
        except PlanError as error:
            raise PlanError(f"edited {error.where}", error.rule, error.remedy, error.value) from None
    for line in unified_diff(text.splitlines(), edited.splitlines(), str(against), str(against), lineterm=""):
        typer.echo(escape_controls(line))
    agrees, words = compare_edited(wanted, back, str(against), form)
    typer.echo(escape_controls(f"meshcast: {words}"), err=True)
    if not agrees:
        raise typer.Exit(VIOLATED)
    if edited == text:
        typer.echo(f"{against} says the same already")
    elif write:
        _replace(against, edited)


def _import_beside(text: str, file: Path, form: str, job: Job, own_gpus: bool = False) -> tuple[ImportedJob, Job]:
    """A launch file, as keys and loaded, on the cluster of another job, and with its model if it leaves it to code.

    own_gpus: whether it may be on as many GPUs as its own degrees ask for, where those of the job do not do.
    """
    from meshcast.simulator.formats.launch.convert import import_text
    from meshcast.simulator.loading.load import load_job

    cluster, model = job.as_written["cluster"], job.as_written["model"]
    tried = [(cluster, None), (cluster, model), *([(None, None), (None, model)] if own_gpus else [])]
    for number, options in enumerate(tried, 1):
        try:
            launch = import_text(text, str(file), form, *options, folder=job.folder)
            return launch, load_job(launch.job, base=job.folder)
        except PlanError:
            if number == len(tried):
                raise
    raise AssertionError("the last one is returned or raised")


MOST_ROUNDS = 3
"""Most rounds of edits: what a file leaves to its program, such as a global batch, may follow from what the first one
changes, and has to be stated then."""

SAME = 1e-6
"""Largest relative difference of figures that are the same."""


def compare_edited(wanted: Job, back: Job, file: str, form: str) -> tuple[bool, str]:
    """Whether an edited launch file is forecast as the job that it is to be, and a sentence on it.

    wanted: the job. back: that of the edited file. form: name of its format.
    """
    from meshcast.hardware.units import GIB
    from meshcast.simulator.forecast.step import forecast_step
    from meshcast.simulator.formats.launch.convert import FORMATS, compare_keys
    from meshcast.simulator.formats.launch.keys import flatten_for_export
    from meshcast.simulator.job.program_rules import broken_rules

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
    reason = f": {FORMATS[form].program} cannot be told {', '.join(keys)}" if keys else ", and no key says why"
    return False, f"{file} with these edits is another job, {figures[1]}, not {figures[0]}{reason}{broken}"


def _word(value: object) -> str:
    return cut_middle(", ".join(map(str, value)) if isinstance(value, tuple) else str(value), 60)


def _replace(file: Path, text: str) -> None:
    """Writes another content to a file at once, with the mode that it has.

    Raises PlanError for a link to a file in another folder: what it points to is not the file that was named.
    """
    target = file.resolve()
    if target.parent != file.parent.resolve():
        rule = "it is a link to a file in another folder, which is not written"
        raise PlanError("--write", rule, f"Name {target} itself", str(file))
    with writing(file, "--write"):
        beside = target.with_name(f".{target.name}.writing")
        try:
            beside.write_bytes(text.encode())
            shutil.copymode(target, beside)
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    typer.echo(f"wrote {file}", err=True)


def tell_launch(job: Path, changes: Sequence[str]) -> tuple[str, ...]:
    """Says on stderr what a launch file does not state, and what of it was not understood.

    Returns the settings of names that nothing knows.
    """
    from meshcast.simulator.loading.load import read_job

    found = read_job(job, changes).launch
    if found is None:
        return ()
    from meshcast.simulator.formats.launch.convert import FORMATS
    from meshcast.simulator.formats.launch.render import to_flow

    lines = [
        f"assumed {key} {cut_middle(to_flow(found.assumed_values[key]), 80)} "
        f"({why}; change it with --set {_field(key, found)}=...)"
        for key, why in found.assumed.items()
    ]
    lines += [f"not understood: {flag}: {why}" for flag, why in found.not_understood.items()]
    more = f"the job it makes: meshcast import {found.form} {job}"
    for line in (f"{job} is read as a launch file of {FORMATS[found.form].program}", *lines, more):
        typer.echo(escape_controls(f"meshcast: {line}"), err=True)
    return found.unrecognised


def _field(key: str, found: ImportedJob) -> str:
    """The field that changes an assumed key: that of the model as a whole, where it is a preset."""
    return "model" if key.startswith("model.") and isinstance(found.job["model"], str) else key


def show_unrecognised(settings: Sequence[str]) -> None:
    """Repeats below a forecast the settings that it leaves out because nothing knows their names."""
    if settings:
        typer.echo(escape_controls(f"unknown    {', '.join(settings)}: not in this forecast"))


def add_checkpoints(launch: ImportedJob | None, changes: Sequence[str]) -> list[str]:
    """The changes to a job, and the checkpoints of a launch file where no change states others."""
    if launch is None or not launch.checkpoints or any(one.startswith("run.checkpoints") for one in changes):
        return [*changes]
    return [*changes, f"run.checkpoints={to_json(launch.checkpoints)}"]


def _write(text: str, out: Path | None) -> None:
    """Prints a text, or writes it to a file."""
    if out is None:
        typer.echo(text, nl=False)
        return
    check_place(out, "--out")
    with writing(out, "--out"):
        out.write_bytes(text.encode())
    typer.echo(f"wrote {out}", err=True)
