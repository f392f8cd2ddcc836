"""``meshcast plot``: sweeps as heatmaps, pipeline schedules on one axis of time, and figures of forecasts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshcast.experiments.cli.console import WidthOption, answering, choose_width, plot_files
from meshcast.experiments.cli.launch import takes_launch_files
from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.errors import PlanError, nearest
from meshcast.hardware.units import read_digits

if TYPE_CHECKING:
    from rich.console import RenderableType

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


@takes_launch_files
def plot(
    what: Annotated[
        str, typer.Argument(metavar="RESULTS|KIND", help=f"The Parquet file of a sweep, or one of {', '.join(KINDS)}.")
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="KIND: jobs; of schedules also their names, a number of chunks behind a colon: interleaved-1f1b:2.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FILE", help="File, .png, .svg or .pdf; KIND.png or heatmap.png if not given."),
    ] = None,
    x: Annotated[str | None, typer.Option("--x", metavar="FIELD", help="Sweep: varied field on the x axis.")] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="FIELD", help="Sweep: varied field on the y axis.")] = None,
    value: Annotated[
        str | None,
        typer.Option("--value", metavar="COLUMN", help=f"Sweep: column to show, {VALUE} if not given."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="The title of a sweep or of schedules.")] = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="X,Y", help="Sweep: explain why the cell of two values is blank.")
    ] = None,
    p: Annotated[int | None, typer.Option("--p", metavar="N", min=1, help="Schedules: devices.")] = None,
    m: Annotated[int | None, typer.Option("--m", metavar="N", min=1, help="Schedules: micro-batches.")] = None,
    v: Annotated[int | None, typer.Option("--v", metavar="N", min=1, help="Schedules: chunks a device.")] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", metavar="|".join(GROUPINGS), help="Communication: what a row is."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Jobs: change a field, e.g. plan.tp=4."),
    ] = None,
    width: WidthOption = None,
) -> None:
    """Draw a sweep as a heatmap, schedules on one axis of time, or a figure of a job."""
    with answering():
        given = {
            "--x": x, "--y": y, "--value": value, "--title": title, "--why": why, "--p": p, "--m": m, "--v": v,
            "--by": by, "--set": change or None,
        }  # fmt: skip
        paper = choose_width(width, what)
        if what not in KINDS:
            if names or (Path(what).name == what and not Path(what).suffix and not Path(what).exists()):
                known = [*KINDS, "a Parquet file"]
                raise PlanError("KIND", "there is no plot of this kind", nearest(what, known), what)
            _refuse_others(given, SWEPT, "a sweep")
            _plot_sweep(Path(what), out, (x, y, value or VALUE), title, why, paper)
            return
        if not names:
            example = "1f1b zb-h1 --p 8 --m 16" if what == "schedules" else "job.yaml"
            raise PlanError("NAME", "the plot has no subject", f"Write meshcast plot {what} {example}")
        (file,) = plot_files(out or f"{what}.png", (what,), "--out").values()
        page = None
        if what == "schedules":
            _refuse_others(given, ("--p", "--m", "--v", "--set", "--title"), "schedules")
            page = _plot_schedules(names, (p, m, v), change or (), title, file, paper)
        else:
            _refuse_others(given, ("--set", "--by") if what == "communication" else ("--set",), f"plot {what}")
            if by is not None and by not in GROUPINGS:
                raise PlanError("--by", "there is no grouping of this name", nearest(by, GROUPINGS), by)
            _plot_jobs(what, names, change or (), by, file, paper)
        say(f"wrote {file}")
        if page is not None:
            from meshcast.experiments.render.terminal.forecast import show

            show(page)


def _refuse_others(given: dict[str, Any], taken: Sequence[str], subject: str) -> None:
    """Raises PlanError for an option that is not for this plot."""
    for option, one in given.items():
        if one is not None and option not in taken:
            raise PlanError(option, f"{subject} takes no such option", "Leave it out", str(one))


def _plot_sweep(
    results: Path, out: str | None, axes: tuple[str | None, str | None, str], title: str | None, why: str | None,
    width: Width,
) -> None:  # fmt: skip
    """Draws the results of a sweep as a heatmap, or explains a blank cell."""
    from meshcast.experiments.render.matplotlib import heatmap
    from meshcast.experiments.sweeps import selection
    from meshcast.experiments.views.heatmap import explain_cell, group_cells

    files = plot_files(out or "heatmap.png", ("heatmap",), "--out") if out is not None or why is None else {}
    rows = selection.read_rows(results)
    x, y = selection.choose_axes(rows, axes[0], axes[1])
    cells = group_cells(rows, x, y, axes[2])
    if why is not None:
        for line in explain_cell(cells, *selection.parse_cell(why, rows, x, y)):
            say(line)
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
        heatmap.draw(rows, x, y, axes[2], title or results.stem, [f"{len(rows):,} plans"], file, width)
        say(f"wrote {file}")
    if files and why is None and any(cell.best is None for cell in cells.values()):
        say("--why X,Y has the reasons of a blank cell in full")


def _plot_schedules(
    names: Sequence[str], numbers: tuple[int | None, int | None, int | None], changes: Sequence[str],
    title: str | None, file: Path, width: Width,
) -> RenderableType:  # fmt: skip
    """Draws schedules by name, played in slots, or those of jobs, and returns a table of their figures.

    numbers: devices, micro-batches, chunks.
    """
    from meshcast.experiments.render.matplotlib import schedules
    from meshcast.experiments.render.terminal.schedules import tabulate_shown

    files = [Path(name).suffix in (".yaml", ".yml", ".json") or Path(name).suffix in (".toml", ".sh") for name in names]
    if any(files) and not all(files):
        other = names[files.index(False)]
        rule = "schedules by name are drawn in slots and jobs in seconds, which have no common axis"
        raise PlanError("NAME", rule, "Name schedules only, or jobs only", other)
    if all(files):
        if numbers != (None,) * 3:
            raise PlanError("--p, --m, --v", "jobs have their own", "Leave them out, or change the jobs with --set")
        from meshcast.simulator import simulate

        jobs = _load_jobs(names, changes)
        shown = [schedules.show_report(Path(name).stem, simulate(job)) for name, job in zip(names, jobs, strict=True)]
        words = title or f"Steps of {len(shown)} jobs" if len(shown) > 1 else title or f"A step of {shown[0].name}"
    else:
        from meshcast.experiments.render.terminal.schedules import play_to_show

        if changes:
            raise PlanError("--set", "it is for jobs", "Leave it out", changes[0])
        p, m, v = numbers
        shown = []
        for name in names:
            plain, own = _split_chunks(name)
            shown.append(schedules.show_replay(plain, play_to_show(plain, p, m, own or v)))
        words = title or "Pipeline schedules"
        if title is None and p is not None and m is not None:
            words += f" of {p} devices and {m} micro-batches"
    file.parent.mkdir(parents=True, exist_ok=True)
    schedules.draw(shown, words, not all(files), file, width)
    return tabulate_shown(shown)


def _split_chunks(name: str) -> tuple[str, int | None]:
    """Name of a schedule, and the chunks a device behind a colon."""
    plain, colon, chunks = name.partition(":")
    if not colon:
        return name, None
    if not (count := read_digits(chunks)):
        raise PlanError("NAME", "behind a colon stands a number of chunks", "Write interleaved-1f1b:2", name)
    return plain, count


def _load_jobs(names: Sequence[str], changes: Sequence[str]) -> list[Any]:
    from meshcast.experiments.cli.launch import tell_launch
    from meshcast.simulator import load_job

    for name in names:
        tell_launch(Path(name), changes)
    return [load_job(Path(name), changes) for name in names]


def _plot_jobs(
    kind: str, names: Sequence[str], changes: Sequence[str], by: str | None, file: Path, width: Width
) -> None:
    if len(names) > 1 and kind != "breakdown":
        raise PlanError("NAME", f"plot {kind} is of one job", "Draw one after the other", names[1])
    jobs = _load_jobs(names, changes)
    if kind == "tornado":
        from meshcast.experiments.explain.sensitivity import explain
        from meshcast.experiments.render.matplotlib import tornado

        sensitivities = explain(jobs[0])
        file.parent.mkdir(parents=True, exist_ok=True)
        tornado.draw(sensitivities, file, width)
        return
    from meshcast.simulator import simulate

    reports = [simulate(job) for job in jobs]
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "breakdown":
        from meshcast.experiments.render.matplotlib import breakdown

        named = [(Path(name).stem, report) for name, report in zip(names, reports, strict=True)]
        breakdown.draw(named if len(named) > 1 else reports[0], file, width)
    elif kind == "communication":
        from meshcast.experiments.render.matplotlib import communication

        communication.draw(reports[0], file, width, by)  # type: ignore[arg-type]
    else:
        from importlib import import_module

        import_module(f"meshcast.experiments.render.matplotlib.{kind.replace('-', '_')}").draw(reports[0], file, width)
