"""The commands by name, each in a module of its own that is imported when the command is run or its help is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from meshcast.experiments.cli.console import PlainUsage

COMMANDS = {
    "predict": (
        "predict.predict",
        "Forecast one step: how long it takes, where the time goes, and whether it fits in memory.",
    ),
    "sweep": ("sweep.sweep", "Forecast a job at every point of a grid. The same command resumes an interrupted sweep."),
    "merge": ("sweep.merge", "Join the shards of a sweep into the file of the whole sweep."),
    "list": (
        "listing.list_",
        "List the names that a job can use, or show the order of one pipeline schedule step by step.",
    ),
    "schema": ("listing.schema", "Print the JSON Schema of a job or of another file of meshcast."),
    "init": ("listing.init", "Write a first job, with a comment on every key."),
    "scale": ("sweep.scale", "Forecast a job on growing numbers of GPUs: the scaling curve."),
    "compare": ("explain.compare", "Compare two forecasts, field by field and part by part."),
    "why": (
        "explain.why",
        "Explain a forecast: its critical path, and what better hardware and each assumed field are worth.",
    ),
    "collectives": ("collectives.collectives", "Print the collectives of a job or cluster as nccl-tests does."),
    "plan": ("plan.plan", "Ask published planners for plans of a job, and forecast each."),
    "plot": ("plot.plot", "Draw a sweep as a heatmap, schedules on one axis of time, or a figure of a job."),
    "report": ("report.report", "Write one HTML file on a forecast, a sweep or a search."),
    "run": ("run.run", "Simulate a training run: failures, checkpoints, days and money."),
    "search": (
        "search.search",
        "Find the best plan that fits in memory, by default that with the shortest step, and prove that no other one "
        "is better in the model.",
    ),
    "check": (
        "selfcheck.check",
        "Replay a job on SimPy and rank by rank; without JOB check this installation: drawn jobs, completeness of "
        "data.",
    ),
    "validate": (
        "validate.validate",
        "Compare forecasts with what is known: schedules, published runs, measured kernels, collectives, steps, "
        "traces.",
    ),
    "calibrate": (
        "validate.calibrate",
        "Fit coefficients of GPUs or links to tables or a campaign, or measure this machine, and write them as YAML.",
    ),
    "measure": (
        "measure.measure",
        "Measure real torch work of a job on this machine, and write it together with its blind forecast.",
    ),
    "import": ("measure.import_", "Convert launch files and measurements of other programs."),
    "export": ("schedule.export", "Write a job as a launch file, or a schedule as a CSV file."),
}
"""Module and function of every command, and what it does."""


class Commands(TyperGroup):
    """The commands of meshcast. The list of them knows names and first words; the parameters of one are read once it is
    asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that a command line names, with its parameters."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)


def find_function(name: str) -> Callable[..., None]:
    """Imports the function of a command."""
    module, function = COMMANDS[name][0].split(".")
    command: Callable[..., None] = getattr(import_module(f"meshcast.experiments.cli.{module}"), function)
    return command


@cache
def load_command(name: str) -> Any:
    """Returns a command with its parameters."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=PlainUsage, help=COMMANDS[name][1])(find_function(name))
    return typer.main.get_command(alone)
