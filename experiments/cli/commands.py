"""The commands by name, each in a module of its own that is imported when the command is run or its help is read."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from meshcast.experiments.options import Options

VIOLATED, WRONG, TOO_LARGE, INTERRUPTED = 1, 2, 3, 130
"""Exit codes."""

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
        "Forecast one step: its time, where it goes, its memory.\n\nAlso of many jobs, one a line.",
        FORECAST,
    ),
    "run": CommandEntry("run.run", "Simulate a training run: failures, checkpoints, days and money.", FORECAST),
    "sweep": CommandEntry(
        "sweep.sweep",
        "Forecast a job at every point of a grid. Run again, it goes on.",
        FORECAST,
    ),
    "merge": CommandEntry("sweep.merge", "Join the shards of a sweep into the file of the whole sweep.", FORECAST),
    "scale": CommandEntry("sweep.scale", "Forecast jobs on growing numbers of GPUs: scaling curves.", FORECAST),
    "search": CommandEntry(
        "search.search",
        "Find the best plan that fits in memory, and prove that it is.\n\nBy default that with the shortest step; no "
        "other one is better in the model.",
        PLAN,
    ),
    "size": CommandEntry(
        "size.size",
        "Find the smallest cluster for a deadline or a budget.\n\nOf each kind of node, with days, money and energy.",
        PLAN,
    ),
    "advise": CommandEntry(
        "advise.advise",
        "Say what to change in a plan, one field at a time and together.\n\nOf a launch file in the words of its "
        "program, with the edits.",
        PLAN,
    ),
    "explore": CommandEntry("explore.explore", "Change a job on a local page, and see at once what follows.", PLAN),
    "plan": CommandEntry("plan.plan", "Ask published planners for plans of a job, and forecast each.", PLAN),
    "compare": CommandEntry("explain.compare", "Compare forecasts, field by field and part by part.", EXPLAIN),
    "why": CommandEntry(
        "explain.why",
        "Explain a forecast by its critical path.\n\nAlso by what better hardware and each assumed field are worth.",
        EXPLAIN,
    ),
    "explain": CommandEntry(
        "explain_run.explain",
        "Say why a run is slower than its forecast.\n\nFrom its log, traces, nccl-tests or samples of GPUs, each cause "
        "with its evidence.",
        EXPLAIN,
    ),
    "collectives": CommandEntry(
        "collectives.collectives", "Print the collectives of a job or cluster as nccl-tests does.", EXPLAIN
    ),
    "plot": CommandEntry(
        "plot.plot",
        "Draw figures of a job, a sweep or schedules.\n\nA sweep as a heatmap, schedules on one axis of time.",
        EXPLAIN,
    ),
    "report": CommandEntry("report.report", "Write one HTML file on a forecast, a sweep or a search.", EXPLAIN),
    "check": CommandEntry(
        "selfcheck.check",
        "Replay a job on SimPy and rank by rank.\n\nWithout JOB check this installation: drawn jobs, whole data.",
        VALIDATE,
    ),
    "validate": CommandEntry(
        "validate.validate",
        "Compare forecasts with what is known.\n\nSchedules, published runs, measured kernels and collectives, steps.",
        VALIDATE,
    ),
    "measure": CommandEntry(
        "measure.measure",
        "Measure real torch work of a job on this machine.\n\nIts forecast, made before, is written with it.",
        VALIDATE,
    ),
    "calibrate": CommandEntry(
        "calibrate.calibrate",
        "Fit coefficients of GPUs or links, and write them as YAML.\n\nThey are fitted to tables, to a campaign, or to "
        "what is measured on this machine.",
        VALIDATE,
    ),
    "learn": CommandEntry(
        "learn.learn",
        "Move coefficients by as much as your measurements say.\n\nOnly where rows that were held back are forecast "
        "better.",
        VALIDATE,
    ),
    "init": CommandEntry("listing.init", "Write a first job, with a comment on every key.", FILES),
    "import": CommandEntry("imports.import_", "Convert launch files and measurements of other programs.", FILES),
    "export": CommandEntry("schedule.export", "Write a job as a launch file, or a schedule as a CSV file.", FILES),
    "list": CommandEntry(
        "listing.list_",
        "List the names that a job can use.\n\nOr show the order of one pipeline schedule step by step.",
        FILES,
    ),
    "schema": CommandEntry("listing.schema", "Print the JSON Schema of a job or of another file of meshcast.", FILES),
}


def find_options(name: str) -> type[Options]:
    """Returns the model of the options of a command."""
    (parameter,) = inspect.signature(find_function(name), eval_str=True).parameters.values()
    model: type[Options] = parameter.annotation
    return model


@cache
def find_function(name: str) -> Callable[[Any], None]:
    """Imports the function of a command."""
    module, function = COMMANDS[name].function.split(".")
    run: Callable[[Any], None] = getattr(import_module(f"meshcast.experiments.cli.{module}"), function)
    return run
