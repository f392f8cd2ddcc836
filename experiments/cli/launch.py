"""``meshcast import PROGRAM FILE``, ``meshcast export JOB --to PROGRAM``, and what `predict` says of a launch file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from meshcast.experiments.cli.console import check_place, emit, to_json, writing
from meshcast.hardware.errors import PlanError, cut_middle, escape_controls
from meshcast.hardware.load import read_yaml

if TYPE_CHECKING:
    from meshcast.simulator.formats.launch.imported_job import ImportedJob


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


def print_changed_settings(job: Path, against: Path, changes: Sequence[str]) -> None:
    """Prints the settings of an existing launch file that a job changes."""
    from meshcast.simulator.formats.launch.changed_settings import list_changed_settings
    from meshcast.simulator.formats.launch.convert import EXPORTS, import_text
    from meshcast.simulator.formats.launch.detect import read_launch_file
    from meshcast.simulator.loading.load import load_job

    text, form = read_launch_file(against)
    if form not in EXPORTS:
        rule = "its settings cannot be compared: such files are read, not written"
        raise PlanError("--against", rule, f"Name a file of {', '.join(EXPORTS)}", str(against))
    after = load_job(job, changes)
    written = after.as_written
    try:
        found = import_text(text, str(against), form, written["cluster"], folder=after.folder)
    except PlanError:  # the file leaves the model to code
        found = import_text(text, str(against), form, written["cluster"], written["model"], folder=after.folder)
    before = load_job(found.job, base=after.folder)
    listed = list_changed_settings(found, text, before, after)
    for one in listed:
        typer.echo(escape_controls(str(one)))
    if not listed:
        typer.echo(f"{against} says the same already")


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
