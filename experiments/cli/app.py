"""The commands as typer's: their help, messages on command lines that are wrong, completions in shells. A command line
without fault is read by `plain`, sooner."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshcast.experiments.cli.commands import COMMANDS, find_options

if TYPE_CHECKING:
    from meshcast.experiments.cli.parameters import CommandParameter

USAGE_ERROR: type[Any] = typer.BadParameter.__mro__[1]
"""The error of a wrong command line; some releases of typer have a click of their own."""


UNUSED_IN_HELP = {"rich.markdown": "Markdown", "rich.traceback": "Traceback"}
"""Modules that typer imports to format help, by the name that it takes from each: for help that is written in Markdown,
which ours is not, and for tracebacks. They take a quarter of the time of ``--help``."""


def import_help_format() -> None:
    """Imports what formats help without what it does not use."""
    absent = {name: ModuleType(name) for name in UNUSED_IN_HELP if name not in sys.modules}
    for name, module in absent.items():
        vars(module)[UNUSED_IN_HELP[name]] = None
    sys.modules.update(absent)
    try:
        import typer.rich_utils  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]


class PlainUsage(TyperCommand):
    """A command whose line of usage names arguments as other programs do: ``JOB [NAME]``; releases of typer differ."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words of the line: options, then arguments in their order."""
        pieces = [self.options_metavar] if self.options_metavar else []
        for param in self.params:
            if param.param_type_name == "argument":
                name = (param.metavar or (param.name or "").upper()) + ("..." if param.nargs != 1 else "")
                pieces.append(name if param.required else f"[{name}]")
        return pieces

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help."""
        import_help_format()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the command line; of one that writes a field of the job as an option, the message says how to."""
        words = [*args]
        try:
            return list(super().parse_args(ctx, args))
        except USAGE_ERROR as error:
            from meshcast.hardware.errors import to_line

            error.message = to_line(error.message)
            if getattr(error, "option_name", None) in REPLACED_OPTIONS:
                error.message = f"{error.message.rstrip('.')}. It is called {REPLACED_OPTIONS[error.option_name]} now"
            elif any("--set" in param.opts for param in self.params) and (hint := _suggest_set(error, words)):
                error.message = f"{error.message.rstrip('.')}. {hint}"
            raise


REPLACED_OPTIONS = {"--unlike": "--heterogeneous"}
"""Options whose names were replaced by the field's terms, with these."""


def _suggest_set(error: Any, words: Sequence[str]) -> str:
    """How to change a field of the job, where options or arguments look like one; empty where they do not."""
    if (option := getattr(error, "option_name", None)) is not None:  # there is no such option
        name = str(option).lstrip("-")
        if name in ("cluster", "model", "framework", "gpus", "gpu", "nodes"):
            field = {"model": "model=llama3-70b", "framework": "framework=megatron-core"}.get(
                name, "cluster=dgx-h100:8"
            )
            return f"A field of the job is changed so: --set {field}"
        from meshcast.simulator.job.job import JobFile
        from meshcast.simulator.job.remedies import suggest_key

        meant = re.match(r"Did you mean (\w+\.\w+)", suggest_key(name, list(JobFile.model_fields)))
        return f"A field of the job is changed so: --set {meant[1]}=VALUE" if meant else ""
    at = [i for i, word in enumerate(words[:-2]) if word == "--set" and "=" not in words[i + 1]]
    return f"Write --set {words[at[0] + 1]}={words[at[0] + 2]}" if at else ""


COMPLETION_HELP = {
    "install_completion": "Install completion in this shell.",
    "show_completion": "Print completion for this shell.",
}
"""Help of typer's options, in a line each."""


class Commands(TyperGroup):
    """The commands of meshcast. The list of them knows names and first words; the parameters of one are read once it is
    asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the list of all commands."""
        for param in self.params:
            if param.name in COMPLETION_HELP:
                vars(param)["help"] = COMPLETION_HELP[param.name]
        import_help_format()
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that a command line names, with its parameters."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


@cache
def load_command(name: str) -> Any:
    """Returns a command with its parameters."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=PlainUsage, help=COMMANDS[name].help)(_make_callback(name))
    return typer.main.get_command(alone)


def _make_callback(name: str) -> Callable[..., None]:
    """Returns a function whose parameters are the options of a command, as typer reads them."""
    from meshcast.experiments.cli.parameters import list_parameters, run_command

    def run(**values: Any) -> None:
        run_command(name, values)

    parameters = [_describe_parameter(parameter) for parameter in list_parameters(find_options(name))]
    vars(run)["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _describe_parameter(parameter: CommandParameter) -> inspect.Parameter:
    """Returns a parameter of a function that typer reads."""
    flag, kind = parameter.flag, parameter.kind
    if parameter.is_list:
        kind = list[kind] if parameter.required else list[kind] | None  # type: ignore[valid-type]
    words: dict[str, Any] = {"metavar": flag.metavar, "help": flag.help, "min": flag.min, "max": flag.max}
    words |= {"show_default": flag.show_default, "rich_help_panel": flag.panel}
    if flag.words:
        words["autocompletion"] = _complete(flag.words)
    info = typer.Option(*flag.names, **words) if flag.names else typer.Argument(**words)
    default = inspect.Parameter.empty if parameter.required else parameter.default
    name, by_name = parameter.name, inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, by_name, default=default, annotation=Annotated[kind, info])


def _complete(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns the completion of a word in a shell: those of `words` that it begins."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


app = typer.Typer(
    name="meshcast",
    cls=Commands,
    help="Forecasts the step time and memory of LLM training on a GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from meshcast.experiments.render.terminal.say import say
        from meshcast.simulator.report.version import describe_version

        say(f"meshcast {describe_version()}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print version and commit, and exit.")
    ] = False,
) -> None:
    """Options of meshcast itself."""


def _name_only() -> None:
    """Stands for a command in the list of all."""


for _name, _entry in COMMANDS.items():
    app.command(_name, help=_entry.help, rich_help_panel=_entry.panel)(_name_only)
