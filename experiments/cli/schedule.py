"""``meshcast list schedule`` and ``meshcast export``: orders as a table or a CSV file for torch; jobs for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli.console import answering, check_place, emit, writing
from meshcast.experiments.cli.launch import edit_launch, export_launch, takes_launch_files
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError, nearest

EXPORTS = ("schedule",)
"""Kinds of things that `meshcast export` writes."""

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="schedule: its name, or a CSV file written by torch.")]
Devices = Annotated[int | None, typer.Option("--p", metavar="N", min=1, help="schedule: devices of the pipeline.")]
Microbatches = Annotated[int | None, typer.Option("--m", metavar="N", min=1, help="schedule: micro-batches.")]
Chunks = Annotated[int | None, typer.Option("--v", metavar="N", min=1, help="schedule: chunks a device.")]


def show_schedule(name: str | None, p: int | None, m: int | None, v: int | None, as_json: bool) -> None:
    """Prints the table of devices and slots of one schedule."""
    from meshcast.experiments.render.terminal import schedules as pages
    from meshcast.experiments.render.terminal.forecast import show

    if name is None:
        raise PlanError("NAME", "the name of a schedule is missing", "Write meshcast list schedule 1f1b --p 4 --m 8")
    run = pages.play_to_show(name, p, m, v)
    if as_json:
        emit(pages.answer(name, run))
    else:
        show(pages.page(name, run))


@takes_launch_files
def export(
    kind: Annotated[str, typer.Argument(metavar="JOB", help="A job file; or the word schedule, with its NAME.")],
    name: Name = None,
    p: Devices = None,
    m: Microbatches = None,
    v: Chunks = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The file; printed if not given.")] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="megatron|torchtitan|deepspeed|nemo", help="JOB: the program to write it for."),
    ] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="JOB: change a field, e.g. plan.tp=4.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", metavar="FILE", help="JOB: print the edits of this launch file that make it the job."
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="With --against: write the edited launch file.")] = False,
) -> None:
    """Write a job as a launch file, or a schedule as a CSV file."""
    with answering():
        if against is not None:
            if to is not None or out is not None or kind in EXPORTS:
                raise PlanError("--against", "it takes a JOB alone", "Write meshcast export job.yaml --against run.sh")
            edit_launch(Path(kind), against, change or (), write)
            return
        if write:
            raise PlanError("--write", "only a launch file that exists is edited", "Add --against run.sh")
        if to is not None:
            if kind in EXPORTS or (name, p, m, v) != (None,) * 4:
                raise PlanError("--to", "it is for a job", "Write meshcast export job.yaml --to megatron", to)
            export_launch(Path(kind), to, out, change or ())
            return
        if kind not in EXPORTS and Path(kind).is_file():
            raise PlanError("--to", "the program is missing", f"Write meshcast export {kind} --to megatron")
        if kind not in EXPORTS:
            raise PlanError("KIND", "there is no export of this kind", nearest(kind, EXPORTS), kind)
        if name is None:
            raise PlanError(
                "NAME", "the name of a schedule is missing", "Write meshcast export schedule 1f1b --p 4 --m 8"
            )
        if out is not None:
            check_place(out, "--out")
        from meshcast.experiments.render.terminal.schedules import export_csv

        text = export_csv(name, p, m, v)
        if out is None:
            typer.echo(text, nl=False)
            return
        with writing(out, "--out"):
            write_file(out, text)
        say(f"wrote {out}: read it with _load_csv, or name it as the path of pipeline/from-file", err=True)
