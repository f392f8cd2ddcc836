"""``meshcast predict``: the forecast of one job, or of many."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from meshcast.experiments.cli import explain as cli_explain
from meshcast.experiments.cli import search as cli_search
from meshcast.experiments.cli import selfcheck as cli_selfcheck
from meshcast.experiments.cli import traces
from meshcast.experiments.cli import validate as cli_validate
from meshcast.experiments.cli.console import (
    TOO_LARGE,
    AsJson,
    Changes,
    WidthOption,
    answering,
    check_place,
    choose_width,
    emit,
    plot_files,
    to_json,
    track,
    unwritable,
    writing,
)
from meshcast.experiments.cli.launch import (
    bound_launch,
    describe_launch,
    show_approximations,
    show_open_questions,
    takes_launch_files,
    tell_launch,
)
from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import replacing
from meshcast.hardware.errors import OutOfMemory, PlanError, nearest

if TYPE_CHECKING:
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.engine.play import Engine


@takes_launch_files
def predict(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")] = None,
    change: Changes = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot",
            metavar="PATH",
            help="Draw the timeline (.png, .svg or .pdf), or all figures into FOLDER/.",
        ),
    ] = None,
    trace: traces.Trace = None,
    snapshot: traces.Snapshot = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 3 if the plan does not fit in memory.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every field that the job does not state, with what is assumed.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="matrices|sweep|simpy|shared",
            help="How to play the step. All agree, except `shared`, which also models contention on links.",
        ),
    ] = "matrices",
    verify: cli_selfcheck.Verify = False,
    every_round: Annotated[
        bool, typer.Option("--every-round", help="Play every round of micro-batches, also those that provably repeat.")
    ] = False,
    calibration: cli_validate.Calibration = None,
    width: WidthOption = None,
    jobs: Annotated[
        Path | None,
        typer.Option("--jobs", metavar="FILE", help="Forecast many jobs, one JSON object per line."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File for the answers of --jobs; stdout if not given.")
    ] = None,
) -> None:
    """Forecast one step: how long it takes, where the time goes, and whether it fits in memory."""
    with answering(as_json):
        from meshcast.simulator.costs.calibration.calibration import Calibration

        known = Calibration.from_folder(cli_validate.check_calibration_folder(calibration))
        if jobs is not None:
            if (job, plot, trace, snapshot) != (None,) * 4 or verbose or verify:
                rule = "it cannot be combined with JOB, --plot, --trace, --snapshot, --verbose or --verify"
                raise PlanError("--jobs", rule, "Leave them out")
            if forecast_all(jobs, out, change or (), engine_of(engine), not every_round, known) and strict:
                raise typer.Exit(TOO_LARGE)
            return
        if job is not None and out is not None:
            rule = "it is the file of the answers to many jobs"
            raise PlanError("--out", rule, f"Write meshcast predict {job} --json > {out}, or --jobs FILE", str(out))
        if job is None:
            raise PlanError("predict", "it takes a JOB, or --jobs FILE with --out FILE", "See meshcast predict --help")
        files, paper = plot_files(plot) if plot is not None else {}, choose_width(width, plot)
        if trace is not None:
            traces.check_trace(trace, job)
        if snapshot is not None:
            traces.check_snapshot(snapshot, job)
        from meshcast.simulator import load_job, simulate

        cli_selfcheck.check_verify(verify, engine_of(engine))  # a wrong name is refused before a search
        imported = tell_launch(job, change or ())
        found = cli_search.find_plan(job, tuple(change or ()), known, strict)
        wanted = load_job(job, change or ()) if found is None else load_job(found.best[0].job, base=job.parent)
        wanted, bounded = bound_launch(imported, wanted)
        report = simulate(wanted, engine=engine_of(engine), skip=not every_round, calibration=known)
        report.track = partial(track, label="steps with noise")
        played, replays = cli_selfcheck.verify_forecast(report, verify)
        draw(played, files, paper)
        traces.write_files(played, trace, snapshot)
        more = cli_explain.find_more(report, verbose, replays)
        if as_json:
            emit(
                report.to_dict()
                | (cli_search.describe_search(found) if found else {})
                | more.to_dict()
                | describe_launch(imported, bounded)
            )
        else:
            from meshcast.experiments.render.terminal.forecast import page, show

            if found is not None:
                cli_search.show_search(found)
            show_open_questions(imported)
            show(page(report, list(files.values()), trace, snapshot, *more))
            show_approximations(imported, bounded)
        if found is not None:
            cli_search.end_search(found)
        cli_selfcheck.end_verify(replays)
        if strict and not report.fits:
            misfit = OutOfMemory(str(job), f"the plan needs {report.missing}", "See the memory of its stages")
            say(f"meshcast: {misfit}", err=True)
            raise typer.Exit(TOO_LARGE)


def engine_of(name: str) -> Engine:
    """The engine of this name."""
    from meshcast.simulator.engine.play import ENGINES

    if name not in ENGINES:
        raise PlanError("--engine", "there is no engine of this name", nearest(name, ENGINES), name)
    return cast("Engine", name)


def forecast_all(
    jobs: Path, out: Path | None, changes: Sequence[str], engine: Engine, skip: bool, calibration: Calibration
) -> bool:
    """Writes the answers to `jobs` to `out` or stdout; returns whether a plan does not fit."""
    from meshcast.experiments.sweeps.jobs import forecast_lines, progress, read_jobs

    if jobs.is_dir() or not jobs.exists():
        rule = "it is a folder" if jobs.is_dir() else "no such file"
        raise PlanError(str(jobs), rule, "Name a file with one JSON object per line")
    if Path(os.path.realpath(jobs)).is_fifo():  # a pipe of a shell has no name of its own
        rule = "it is a named pipe, which waits for a writer without end"
        raise PlanError(str(jobs), rule, f"Write cat {jobs} | meshcast predict --jobs /dev/stdin")
    if out is not None:
        check_place(out, "--out")
        if out.exists() and out.samefile(jobs):
            raise unwritable(out, "it is the file of the jobs", "--out")
    misfit, asked, answered, objects = False, 0, 0, 0

    def count_objects(lines: Iterator[str]) -> Iterator[str]:
        nonlocal objects
        for line in lines:
            objects += line.lstrip().startswith("{")
            yield line

    with jobs.open(encoding="utf-8-sig", errors="replace") as lines, _answers(out) as write:
        wanted = progress(count_objects(read_jobs(lines, str(jobs))), jobs, out is not None and jobs.is_file())
        for answer in forecast_lines(wanted, str(jobs), jobs.parent, changes, engine, skip, calibration):
            misfit |= answer.get("status") == "does-not-fit"
            asked, answered = asked + 1, answered + ("error" not in answer)
            write(to_json(answer) + "\n")
        if asked and not objects:
            rule = f"{asked:,} lines, 0 answered: none of them is a JSON object"
            remedy = f"Write one job a line; the job of one file is for meshcast predict {jobs}"
            raise PlanError(str(jobs), rule, remedy)
    if answered < asked:
        say(f"meshcast: {jobs}: {asked:,} lines, {answered:,} answered", err=True)
    return misfit


@contextmanager
def _answers(out: Path | None) -> Iterator[Callable[[str], object]]:
    """Writes answers to stdout as they come, or to a file once all are there; its errors name it."""
    if out is None:
        yield sys.stdout.write
        return
    try:
        with writing(out, "--out"), replacing(out) as file:
            yield lambda text: file.write(text.encode())
    except KeyboardInterrupt:
        say(f"meshcast: interrupted; {out} is as it was before", err=True)
        raise


def draw(report: Any, files: dict[str, Path], width: Width = "page") -> None:
    """Draws the figures into their files; makes the folder if needed."""
    if not files:
        return
    from meshcast.experiments.render.matplotlib import breakdown, memory, timeline

    figures = {"timeline": timeline.draw, "memory": memory.draw, "breakdown": breakdown.draw}
    for name, path in files.items():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            figures[name](report, path, width)
