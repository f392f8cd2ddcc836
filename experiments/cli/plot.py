"""``meshcast plot``: sweeps as heatmaps, pipeline schedules on one axis of time, and figures of forecasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.console import WidthOption, choose_width, emit_or_show, plot_files, track
from meshcast.experiments.cli.launch import LaunchFileOptions
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.units import read_digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from meshcast.experiments.render.matplotlib.schedules import ShownSchedule
    from meshcast.simulator import Job

OF_JOBS = {
    "timeline": "every pass of the step and its communication, stage by stage",
    "breakdown": "where the time of the step goes; of several jobs beside each other",
    "memory": "every stage at its peak, and the fullest one through the step",
    "stage-memory": "the memory of all stages through the step",
    "roofline": "kernels below the roofs of their GPU, communication below those of the links",
    "communication": "the bytes that ranks, nodes or stages send each other",
    "tornado": "the step with better and worse hardware, and with other values of assumed fields",
}
"""Kinds of plots of a job, with what they show."""
KINDS = ("schedules", *OF_JOBS)
GROUPINGS = ("rank", "node", "stage")
SWEPT = ("--x", "--y", "--value", "--title", "--why")
"""Options of heatmaps."""

VALUE = "tokens_per_s_per_gpu"


class PlotOptions(LaunchFileOptions):
    """Options of ``meshcast plot``."""

    what: Annotated[str, argument("RESULTS|KIND", f"The Parquet file of a sweep, or one of {', '.join(KINDS)}.")]
    names: Annotated[
        tuple[str, ...],
        argument(
            "[NAME]...",
            "KIND: jobs; of schedules also their names, a number of chunks behind a colon: interleaved-1f1b:2.",
        ),
    ] = ()
    out: Annotated[
        str | None, option("--out", "File, .png, .svg or .pdf; KIND.png or heatmap.png if not given.", "FILE")
    ] = None
    x: Annotated[str | None, option("--x", "Sweep: varied field on the x axis.", "FIELD")] = None
    y: Annotated[str | None, option("--y", "Sweep: varied field on the y axis.", "FIELD")] = None
    value: Annotated[str | None, option("--value", f"Sweep: column to show, {VALUE} if not given.", "COLUMN")] = None
    title: Annotated[str | None, option("--title", "The title of a sweep or of schedules.")] = None
    why: Annotated[str | None, option("--why", "Sweep: explain why the cell of two values is blank.", "X,Y")] = None
    p: Annotated[int | None, option("--p", "Schedules: devices.", "N", min=1)] = None
    m: Annotated[int | None, option("--m", "Schedules: micro-batches.", "N", min=1)] = None
    v: Annotated[int | None, option("--v", "Schedules: chunks a device.", "N", min=1)] = None
    by: Annotated[str | None, option("--by", "Communication: what a row is.", "|".join(GROUPINGS))] = None
    change: Annotated[tuple[str, ...], option("--set", "Jobs: change a field, e.g. plan.tp=4.", "FIELD=VALUE")] = ()
    width: WidthOption = None


def plot(options: PlotOptions) -> None:
    """Draws a sweep as a heatmap, schedules on one axis of time, or a figure of a job."""
    kind, width = options.what, choose_width(options.width, options.what)
    if kind not in KINDS:
        _plot_sweep(options, width)
        return
    if not options.names:
        example = "1f1b zb-h1 --p 8 --m 16" if kind == "schedules" else "job.yaml"
        raise PlanError("NAME", "the plot has no subject", f"Write meshcast plot {kind} {example}")
    (file,) = plot_files(options.out or f"{kind}.png", (kind,), "--out").values()
    if kind == "schedules":
        _refuse_others(options, ("--p", "--m", "--v", "--set", "--title"), "schedules")
        table = _plot_schedules(options, file, width)
        say(f"wrote {file}")
        emit_or_show(False, None, lambda: table)
        return
    _refuse_others(options, ("--set", "--by") if kind == "communication" else ("--set",), f"plot {kind}")
    if options.by is not None and options.by not in GROUPINGS:
        raise PlanError("--by", "there is no grouping of this name", nearest(options.by, GROUPINGS), options.by)
    if len(options.names) > 1 and kind != "breakdown":
        raise PlanError("NAME", f"plot {kind} is of one job", "Draw one after the other", options.names[1])
    _plot_jobs(options, file, width)
    say(f"wrote {file}")


def _refuse_others(options: PlotOptions, taken: Sequence[str], subject: str) -> None:
    """Raises PlanError for an option that is not for this plot."""
    options.refuse_others((*SWEPT, "--p", "--m", "--v", "--by", "--set"), taken, subject, "Leave it out")


def _plot_sweep(options: PlotOptions, width: Width) -> None:
    """Draws the results of a sweep as a heatmap, or explains a blank cell."""
    results, why = Path(options.what), options.why
    if options.names or (results.name == options.what and not results.suffix and not results.exists()):
        known = [*KINDS, "a Parquet file"]
        raise PlanError("KIND", "there is no plot of this kind", nearest(options.what, known), options.what)
    _refuse_others(options, SWEPT, "a sweep")
    from meshcast.experiments.render.matplotlib.heatmap import heatmap
    from meshcast.experiments.render.matplotlib.sheet import save
    from meshcast.experiments.sweeps import selection
    from meshcast.experiments.views.heatmap import explain_cell, group_cells

    is_drawn, value = options.out is not None or why is None, options.value or VALUE
    files = plot_files(options.out or "heatmap.png", ("heatmap",), "--out") if is_drawn else {}
    rows = selection.read_rows(results)
    x, y = selection.choose_axes(rows, options.x, options.y)
    cells = group_cells(rows, x, y, value)
    if why is not None:
        for line in explain_cell(cells, *selection.parse_cell(why, rows, x, y)):
            say(line)
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        title = options.title or results.stem
        save(partial(heatmap, cells, x, y, value, title, [f"{len(rows):,} plans"]), file, width)
        say(f"wrote {file}")
    if files and why is None and any(cell.best is None for cell in cells.values()):
        say("--why X,Y has the reasons of a blank cell in full")


def _plot_schedules(options: PlotOptions, file: Path, width: Width) -> RenderableType:
    """Draws schedules by name, played in slots, or those of jobs, and returns a table of their figures."""
    from meshcast.experiments.render.matplotlib.schedules import schedules
    from meshcast.experiments.render.matplotlib.sheet import save
    from meshcast.experiments.render.terminal.schedules import tabulate_shown

    are_jobs = [Path(name).suffix in (".yaml", ".yml", ".json", ".toml", ".sh") for name in options.names]
    if any(are_jobs) and not all(are_jobs):
        other = options.names[are_jobs.index(False)]
        rule = "schedules by name are drawn in slots and jobs in seconds, which have no common axis"
        raise PlanError("NAME", rule, "Name schedules only, or jobs only", other)
    if all(are_jobs):
        shown = _steps_of_jobs(options)
        title = f"Steps of {len(shown)} jobs" if len(shown) > 1 else f"A step of {shown[0].name}"
    else:
        shown = _played_schedules(options)
        numbers = options.p is not None and options.m is not None
        title = "Pipeline schedules" + (f" of {options.p} devices and {options.m} micro-batches" if numbers else "")
    file.parent.mkdir(parents=True, exist_ok=True)
    save(partial(schedules, shown, options.title or title, not all(are_jobs)), file, width)
    return tabulate_shown(shown)


def _steps_of_jobs(options: PlotOptions) -> list[ShownSchedule]:
    """Returns the schedules of forecast jobs, in seconds."""
    from meshcast.experiments.render.matplotlib import schedules
    from meshcast.simulator import simulate

    if (options.p, options.m, options.v) != (None,) * 3:
        raise PlanError("--p, --m, --v", "jobs have their own", "Leave them out, or change the jobs with --set")
    jobs = _load_jobs(options)
    return [
        schedules.show_report(Path(name).stem, simulate(job)) for name, job in zip(options.names, jobs, strict=True)
    ]


def _played_schedules(options: PlotOptions) -> list[ShownSchedule]:
    """Returns schedules by name, played in slots."""
    from meshcast.experiments.render.matplotlib import schedules
    from meshcast.experiments.render.terminal.schedules import play_to_show

    if options.change:
        raise PlanError("--set", "it is for jobs", "Leave it out", options.change[0])
    named = [_split_chunks(name) for name in options.names]
    return [
        schedules.show_replay(name, play_to_show(name, options.p, options.m, chunks or options.v))
        for name, chunks in named
    ]


def _split_chunks(name: str) -> tuple[str, int | None]:
    """Name of a schedule, and the chunks a device behind a colon."""
    plain, colon, chunks = name.partition(":")
    if not colon:
        return name, None
    if not (count := read_digits(chunks)):
        raise PlanError("NAME", "behind a colon stands a number of chunks", "Write interleaved-1f1b:2", name)
    return plain, count


def _load_jobs(options: PlotOptions) -> list[Job]:
    from meshcast.experiments.cli.best_plan import load_with_plan
    from meshcast.experiments.cli.launch import tell_launch

    for name in options.names:
        tell_launch(Path(name), options.change)
    return [load_with_plan(Path(name), options.change) for name in options.names]


def _plot_jobs(options: PlotOptions, file: Path, width: Width) -> None:
    """Draws a figure of a job; of several the breakdowns beside each other."""
    from meshcast.experiments.render.matplotlib.sheet import save

    jobs = _load_jobs(options)
    make = _explain(jobs[0]) if options.what == "tornado" else _forecast(options, jobs)
    file.parent.mkdir(parents=True, exist_ok=True)
    save(make, file, width)


def _explain(job: Job) -> Callable[[], Figure]:
    """Returns what draws the tornado of a job."""
    from meshcast.experiments.explain.sensitivity import explain
    from meshcast.experiments.render.matplotlib.tornado import tornado

    return partial(tornado, explain(job, lambda steps: track(steps, "forecasting")))


def _forecast(options: PlotOptions, jobs: Sequence[Job]) -> Callable[[], Figure]:
    """Returns what draws a figure of the forecasts of jobs."""
    from meshcast.simulator import simulate

    kind, reports = options.what, [simulate(job) for job in jobs]
    report = reports[0]
    if kind == "breakdown":
        from meshcast.experiments.render.matplotlib.breakdown import breakdown
        from meshcast.simulator.job.differences import label_jobs

        return partial(breakdown, [*zip(label_jobs(jobs), reports, strict=True)])
    if kind == "communication":
        from meshcast.experiments.render.matplotlib.communication import CLEAR, communication
        from meshcast.experiments.views.communication import choose_grouping, communication_matrix

        grouping = options.by or choose_grouping(report.job.cluster, CLEAR)
        return partial(communication, report, communication_matrix(report, grouping))  # type: ignore[arg-type]
    if kind == "roofline":
        from meshcast.experiments.render.matplotlib.roofline import roofline
        from meshcast.experiments.views.roofline import step_roofline

        return partial(roofline, report, step_roofline(report))
    name = kind.replace("-", "_")
    return partial(getattr(import_module(f"meshcast.experiments.render.matplotlib.{name}"), name), report)
