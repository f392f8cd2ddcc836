"""``meshcast list``, ``schema`` and ``init``: what a job can say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli import schedule as cli_schedule
from meshcast.experiments.cli.commands import COMMANDS, find_options
from meshcast.experiments.cli.console import AsJson, check_place, emit, emit_or_show, writing
from meshcast.experiments.options import Options, argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError

OF_COMMAND = "-options"
"""Behind the name of a command: the kind of schema of its options."""


class ListOptions(Options):
    """Options of ``meshcast list``."""

    kind: Annotated[
        str,
        argument(
            "KIND",
            "gpus, nodes, clusters, models, ids of models, schemes or frameworks; or schedule, with its NAME.",
            words=("gpus", "nodes", "clusters", "models", "ids", "schemes", "frameworks", "schedule"),
        ),
    ] = ""
    name: cli_schedule.Name = None
    p: cli_schedule.Devices = None
    m: cli_schedule.Microbatches = None
    v: cli_schedule.Chunks = None
    as_json: AsJson = False


def list_(options: ListOptions) -> None:
    """Lists the names that a job can use, or shows the order of one pipeline schedule step by step."""
    if options.kind == "schedule":
        cli_schedule.show_schedule(options.name, options.p, options.m, options.v, options.as_json)
        return
    from meshcast.experiments.render.terminal.listing import check_kind, list_rows, list_table

    check_kind(options.kind)
    numbers = {"NAME": options.name, "--p": options.p, "--m": options.m, "--v": options.v}
    for place, value in numbers.items():
        if value is not None:
            rule = f"list {options.kind} takes no such argument"
            raise PlanError(place, rule, "Leave it out, or write list schedule", value)
    rows = list_rows(options.kind)
    emit_or_show(options.as_json, rows, lambda: list_table(options.kind, rows))


class SchemaOptions(Options):
    """Options of ``meshcast schema``."""

    kind: Annotated[
        str,
        argument(
            "KIND",
            "job, sweep, cluster, model, framework, published or measurement; or of a command its options, such as "
            "search-options.",
        ),
    ] = "job"


def schema(options: SchemaOptions) -> None:
    """Prints the JSON Schema of a job or of another file of meshcast."""
    from meshcast.experiments.schema import options_schema
    from meshcast.experiments.schema import schema as make_schema

    command = options.kind.removesuffix(OF_COMMAND)
    of_command = command != options.kind and command in COMMANDS
    emit(options_schema(options.kind, find_options(command)) if of_command else make_schema(options.kind))


class InitOptions(Options):
    """Options of ``meshcast init``."""

    file: Annotated[
        Path, argument("FILE", "File to write; - prints it. In a folder of a plug-in: a file of its kind.")
    ] = Path("job.yaml")
    force: Annotated[bool, option("--force", "Overwrite an existing file.")] = False


def init(options: InitOptions) -> None:
    """Writes a first job, with a comment on every key, or a first file of a plug-in."""
    from meshcast.experiments.cli.templates import find_template

    template = find_template(options.file)
    text = template or Path(__file__).with_name("first_job.yaml").read_text("utf-8")
    if str(options.file) == "-":
        print(text, end="", flush=True)
        return
    if template is not None:
        options.file.parent.mkdir(parents=True, exist_ok=True)
    check_place(options.file, "FILE")
    if options.file.exists() and not options.force:
        remedy = "Name another file, or overwrite it with --force"
        raise PlanError("FILE", "it exists already", remedy, str(options.file))
    with writing(options.file, "FILE"):
        write_file(options.file, text)
    if template is None:
        then = f"predict {options.file}"
    else:
        kind = options.file.parent
        then = f"check --plugins {(kind.parent if kind.parent.name == 'schemes' else kind).parent}"
    say(f"wrote {options.file}; now: meshcast {then}")
