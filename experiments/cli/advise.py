"""``meshcast advise``: what to change in a job or a launch file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import AsJson, Changes, check_place, check_suffix, emit_or_show, track, writing
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError


class AdviseOptions(LaunchFileOptions):
    """Options of ``meshcast advise``."""

    job: Annotated[Path, argument("JOB", "A job file (YAML or JSON), or a launch file.")]
    change: Changes = ()
    keep: Annotated[
        tuple[str, ...], option("--keep", "A field that stays as it is, e.g. plan.tp; repeatable.", "FIELD")
    ] = ()
    write: Annotated[
        Path | None,
        option("--write", "Write the file with the best changes, and read it back.", "FILE", panel="Output"),
    ] = None
    as_json: AsJson = False


def advise(options: AdviseOptions) -> None:
    """Tries every change of a single field, and the best of them together; shows what each is worth."""
    from meshcast.experiments.advice.adviser import advise_on
    from meshcast.experiments.advice.page import page
    from meshcast.experiments.advice.patched_file import write_patched

    if options.write is not None:
        _check_write(options.job, options.write)
    tell_launch(options.job, options.change)
    job = load_with_plan(options.job, options.change)
    advice = advise_on(
        job, options.job, options.change, keep=options.keep, watch=lambda changes: track(changes, "forecasting")
    )
    written: list[Path] = []
    if options.write is not None and advice.best is not None:
        with writing(options.write, "--write"):
            written = write_patched(advice, options.write)
    emit_or_show(options.as_json, lambda: advice.to_dict(str(written[0]) if written else None), lambda: page(advice))
    if not options.as_json and advice.patch is not None:
        for line in advice.patch.diff:
            say(line)
    _tell_written(options, written, advice.patch.edited.files.file.options.arguments if advice.patch else ())


def _check_write(job: Path, out: Path) -> None:
    """Refuses a file that cannot be written, or is that of the job, or has a name that promises something else."""
    check_place(out, "--write")
    if out.exists() and job.exists() and out.samefile(job):
        rule = "it is the file that is advised on, which stays as it is"
        raise PlanError("--write", rule, f"Name another one: {job.with_suffix(f'.new{job.suffix}')}", str(out))
    check_suffix(out, [job.suffix], f"what is made of {job}", "--write")


def _tell_written(options: AdviseOptions, written: Sequence[Path], arguments: Sequence[str]) -> None:
    """Says what was written, and with which arguments it is started."""
    if options.write is not None and not written:
        say("meshcast: nothing is written: no change is worth it", err=True)
    if written:
        say(f"wrote {', '.join(map(str, written))}", err=True)
        if shlex.join(arguments) != shlex.join(shlex.split(options.args or "")):
            say(f"meshcast: the arguments are others: give --args {shlex.quote(shlex.join(arguments))}", err=True)
