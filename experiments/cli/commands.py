"""The commands by name, each in a module of its own that is imported when the command is run or its help is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperGroup

from meshcast.experiments.cli.console import PlainUsage, answering
from meshcast.experiments.cli.launch import LAUNCH_FILES, LaunchFileOptions
from meshcast.experiments.options import OUTPUT, Flag, Options

FORECAST = "Forecast"
PLAN = "Choose a plan"
EXPLAIN = "Explain and draw"
VALIDATE = "Check and measure"
FILES = "Files and names"


class CommandEntry(NamedTuple):
    """A command in the list of all.

    Attributes:
        function: its module in this room and its function.
        help: what it does.
        panel: the heading under which it is listed.
    """

    function: str
    help: str
    panel: str


COMMANDS = {
    "predict": CommandEntry(
        "predict.predict",
        "Forecast one step: how long it takes, where the time goes, and whether it fits in memory.",
        FORECAST,
    ),
    "run": CommandEntry("run.run", "Simulate a training run: failures, checkpoints, days and money.", FORECAST),
    "sweep": CommandEntry(
        "sweep.sweep",
        "Forecast a job at every point of a grid. The same command resumes an interrupted sweep.",
        FORECAST,
    ),
    "merge": CommandEntry("sweep.merge", "Join the shards of a sweep into the file of the whole sweep.", FORECAST),
    "scale": CommandEntry("sweep.scale", "Forecast a job on growing numbers of GPUs: the scaling curve.", FORECAST),
    "search": CommandEntry(
        "search.search",
        "Find the best plan that fits in memory, by default that with the shortest step, and prove that no other one "
        "is better in the model.",
        PLAN,
    ),
    "plan": CommandEntry("plan.plan", "Ask published planners for plans of a job, and forecast each.", PLAN),
    "compare": CommandEntry("explain.compare", "Compare two forecasts, field by field and part by part.", EXPLAIN),
    "why": CommandEntry(
        "explain.why",
        "Explain a forecast: its critical path, and what better hardware and each assumed field are worth.",
        EXPLAIN,
    ),
    "collectives": CommandEntry(
        "collectives.collectives", "Print the collectives of a job or cluster as nccl-tests does.", EXPLAIN
    ),
    "plot": CommandEntry(
        "plot.plot", "Draw a sweep as a heatmap, schedules on one axis of time, or a figure of a job.", EXPLAIN
    ),
    "report": CommandEntry("report.report", "Write one HTML file on a forecast, a sweep or a search.", EXPLAIN),
    "check": CommandEntry(
        "selfcheck.check",
        "Replay a job on SimPy and rank by rank; without JOB check this installation: drawn jobs, completeness of "
        "data.",
        VALIDATE,
    ),
    "validate": CommandEntry(
        "validate.validate",
        "Compare forecasts with what is known: schedules, published runs, measured kernels, collectives, steps, "
        "traces.",
        VALIDATE,
    ),
    "measure": CommandEntry(
        "measure.measure",
        "Measure real torch work of a job on this machine, and write it together with its blind forecast.",
        VALIDATE,
    ),
    "calibrate": CommandEntry(
        "calibrate.calibrate",
        "Fit coefficients of GPUs or links to tables or a campaign, or measure this machine, and write them as YAML.",
        VALIDATE,
    ),
    "init": CommandEntry("listing.init", "Write a first job, with a comment on every key.", FILES),
    "import": CommandEntry("imports.import_", "Convert launch files and measurements of other programs.", FILES),
    "export": CommandEntry("schedule.export", "Write a job as a launch file, or a schedule as a CSV file.", FILES),
    "list": CommandEntry(
        "listing.list_",
        "List the names that a job can use, or show the order of one pipeline schedule step by step.",
        FILES,
    ),
    "schema": CommandEntry("listing.schema", "Print the JSON Schema of a job or of another file of meshcast.", FILES),
}


class Commands(TyperGroup):
    """The commands of meshcast. The list of them knows names and first words; the parameters of one are read once it is
    asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that a command line names, with its parameters."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


PANELS = (None, "Ranking", "Space", OUTPUT, LAUNCH_FILES)
"""Headings of options in the help of a command, in their order; None: that of those without one."""


def find_options(name: str) -> type[Options]:
    """Returns the model of the options of a command."""
    (parameter,) = inspect.signature(_find_function(name), eval_str=True).parameters.values()
    model: type[Options] = parameter.annotation
    return model


@cache
def load_command(name: str) -> Any:
    """Returns a command with its parameters."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=PlainUsage, help=COMMANDS[name].help)(_make_callback(name))
    return typer.main.get_command(alone)


def _find_function(name: str) -> Callable[[Any], None]:
    """Imports the function of a command."""
    module, function = COMMANDS[name].function.split(".")
    run: Callable[[Any], None] = getattr(import_module(f"meshcast.experiments.cli.{module}"), function)
    return run


def _make_callback(name: str) -> Callable[..., None]:
    """Returns a function whose parameters are the options of a command, as typer reads them."""
    function, model = _find_function(name), find_options(name)

    def run(**values: Any) -> None:
        with answering(bool(values.get("as_json"))):
            options = model.read(values, of_command=True)
            with options.apply() if isinstance(options, LaunchFileOptions) else nullcontext():
                function(options)

    parameters = [_make_parameter(field, model.model_fields[field], flag) for field, flag in _sort_flags(model)]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _sort_flags(model: type[Options]) -> list[tuple[str, Flag]]:
    """Returns the fields of a model and how they are written: by their headings, then its own before those of its
    bases."""
    flags = model.flags()
    order = [name for base in model.__mro__ for name in vars(base).get("__annotations__", ()) if name in flags]
    return [
        (name, flags[name]) for name in sorted(dict.fromkeys(order), key=lambda name: PANELS.index(flags[name].panel))
    ]


def _make_parameter(name: str, field: FieldInfo, flag: Flag) -> inspect.Parameter:
    """Returns a field as a parameter of a function that typer reads."""
    is_list = get_origin(field.annotation) is tuple and flag.written is None
    kind = flag.reads or (get_args(field.annotation)[0] if is_list else field.annotation)
    default = inspect.Parameter.empty if field.is_required() else flag.written or (None if is_list else field.default)
    if is_list:
        kind = list[kind] if field.is_required() else list[kind] | None  # type: ignore[valid-type]
    words: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "min": flag.min, "max": flag.max}
    words |= {"show_default": flag.show_default, "rich_help_panel": flag.panel}
    if flag.words:
        words["autocompletion"] = _complete(flag.words)
    info = typer.Option(*flag.names, **words) if flag.names else typer.Argument(**words)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _complete(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns the completion of a word in a shell: those of `words` that it begins."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]
