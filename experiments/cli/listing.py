"""``meshcast list``, ``schema`` and ``init``: what a job can say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli import schedule as cli_schedule
from meshcast.experiments.cli.console import AsJson, answering, check_place, emit, emit_or_show, one_of, writing
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="gpus, nodes, clusters, models, schemes or frameworks; or schedule, with its NAME.",
            autocompletion=one_of("gpus", "nodes", "clusters", "models", "schemes", "frameworks", "schedule"),
        ),
    ] = "",
    name: cli_schedule.Name = None,
    p: cli_schedule.Devices = None,
    m: cli_schedule.Microbatches = None,
    v: cli_schedule.Chunks = None,
    as_json: AsJson = False,
) -> None:
    """List the names that a job can use, or show the order of one pipeline schedule step by step."""
    with answering(as_json):
        if kind == "schedule":
            cli_schedule.show_schedule(name, p, m, v, as_json)
            return
        from meshcast.experiments.render.terminal.listing import check_kind, list_rows, list_table

        check_kind(kind)
        for option, given in {"NAME": name, "--p": p, "--m": m, "--v": v}.items():
            if given is not None:
                raise PlanError(
                    option, f"list {kind} takes no such argument", "Leave it out, or write list schedule", given
                )
        rows = list_rows(kind)
        emit_or_show(as_json, rows, lambda: list_table(kind, rows))


def schema(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="job, sweep, cluster, model, framework, published or measurement.")
    ] = "job",
) -> None:
    """Print the JSON Schema of a job or of another file of meshcast."""
    with answering():
        from meshcast.experiments.schema import schema as made

        emit(made(kind))


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; - prints it.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a first job, with a comment on every key."""
    with answering():
        text = Path(__file__).with_name("first_job.yaml").read_text("utf-8")
        if str(file) == "-":
            typer.echo(text, nl=False)
            return
        check_place(file, "FILE")
        if file.exists() and not force:
            raise PlanError("FILE", "it exists already", "Name another file, or overwrite it with --force", str(file))
        with writing(file, "FILE"):
            write_file(file, text)
        say(f"wrote {file}; now: meshcast predict {file}")
