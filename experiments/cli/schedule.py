"""``meshcast list schedule`` and ``meshcast export``: orders as a table or a CSV file for torch; jobs for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from meshcast.experiments.cli.console import check_place, emit_or_show, writing
from meshcast.experiments.cli.launch import LaunchFileOptions, edit_launch, export_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.schemas import model_validator

EXPORTS = ("schedule",)
"""Kinds of things that `meshcast export` writes."""

Name = Annotated[str | None, argument("NAME", "schedule: its name, or a CSV file written by torch.")]
Devices = Annotated[int | None, option("--p", "schedule: devices of the pipeline.", "N", min=1)]
Microbatches = Annotated[int | None, option("--m", "schedule: micro-batches.", "N", min=1)]
Chunks = Annotated[int | None, option("--v", "schedule: chunks a device.", "N", min=1)]


def show_schedule(name: str | None, p: int | None, m: int | None, v: int | None, as_json: bool) -> None:
    """Prints the table of devices and slots of one schedule."""
    from meshcast.experiments.render.terminal import schedules as pages

    if name is None:
        raise PlanError("NAME", "the name of a schedule is missing", "Write meshcast list schedule 1f1b --p 4 --m 8")
    run = pages.play_to_show(name, p, m, v)
    emit_or_show(as_json, lambda: pages.answer(name, run), lambda: pages.page(name, run))


class ExportOptions(LaunchFileOptions):
    """Options of ``meshcast export``."""

    kind: Annotated[str, argument("JOB", "A job file; or the word schedule, with its NAME.")]
    name: Name = None
    p: Devices = None
    m: Microbatches = None
    v: Chunks = None
    out: Annotated[Path | None, option("--out", "The file; printed if not given.", "FILE")] = None
    to: Annotated[
        str | None, option("--to", "JOB: the program to write it for.", "megatron|torchtitan|deepspeed|nemo")
    ] = None
    change: Annotated[tuple[str, ...], option("--set", "JOB: change a field, e.g. plan.tp=4.", "FIELD=VALUE")] = ()
    against: Annotated[
        Path | None, option("--against", "JOB: print the edits of this launch file that make it the job.", "FILE")
    ] = None
    write: Annotated[bool, option("--write", "With --against: write the edited launch file.")] = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        is_job = self.kind not in EXPORTS
        if self.against is not None:
            if self.to is not None or self.out is not None or not is_job:
                raise PlanError("--against", "it takes a JOB alone", "Write meshcast export job.yaml --against run.sh")
        elif self.write:
            raise PlanError("--write", "only a launch file that exists is edited", "Add --against run.sh")
        elif self.to is not None:
            if not is_job or (self.name, self.p, self.m, self.v) != (None,) * 4:
                raise PlanError("--to", "it is for a job", "Write meshcast export job.yaml --to megatron", self.to)
        elif is_job and Path(self.kind).is_file():
            raise PlanError("--to", "the program is missing", f"Write meshcast export {self.kind} --to megatron")
        elif is_job:
            raise PlanError("KIND", "there is no export of this kind", nearest(self.kind, EXPORTS), self.kind)
        elif self.name is None:
            remedy = "Write meshcast export schedule 1f1b --p 4 --m 8"
            raise PlanError("NAME", "the name of a schedule is missing", remedy)
        return self


def export(options: ExportOptions) -> None:
    """Writes a job as a launch file, the edits of one that make it the job, or a schedule as a CSV file."""
    if options.against is not None:
        edit_launch(Path(options.kind), options.against, options.change, options.write)
    elif options.to is not None:
        export_launch(Path(options.kind), options.to, options.out, options.change)
    else:
        _export_schedule(options)


def _export_schedule(options: ExportOptions) -> None:
    """Prints or writes a schedule as a CSV file."""
    from meshcast.experiments.render.terminal.schedules import export_csv

    if options.out is not None:
        check_place(options.out, "--out")
    assert options.name is not None
    text = export_csv(options.name, options.p, options.m, options.v)
    if options.out is None:
        print(text, end="", flush=True)
        return
    with writing(options.out, "--out"):
        write_file(options.out, text)
    say(f"wrote {options.out}: read it with _load_csv, or name it as the path of pipeline/from-file", err=True)
