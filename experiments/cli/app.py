"""The command line: ``meshcast predict``, ``sweep``, ``list``, ``validate`` and the rest.

Answers go to stdout, messages to stderr. Exit codes: 0 answered; 1 a check failed; 2 invalid input,
explained in one message; 3 a plan that does not fit, under ``--strict``; 130 interrupted. Heavy modules are imported
inside the commands.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from meshcast.experiments.cli import collectives as cli_collectives
from meshcast.experiments.cli import explain as cli_explain
from meshcast.experiments.cli import measure as cli_measure
from meshcast.experiments.cli import plan as cli_plan
from meshcast.experiments.cli import plot as cli_plot
from meshcast.experiments.cli import report as cli_report
from meshcast.experiments.cli import run as cli_run
from meshcast.experiments.cli import schedule as cli_schedule
from meshcast.experiments.cli import search as cli_search
from meshcast.experiments.cli import selfcheck as cli_selfcheck
from meshcast.experiments.cli import traces
from meshcast.experiments.cli import validate as cli_validate
from meshcast.experiments.cli.console import (
    INTERRUPTED,
    TOO_LARGE,
    WRONG,
    AsJson,
    Changes,
    PlainUsage,
    WidthOption,
    answering,
    check_place,
    choose_width,
    emit,
    emit_or_show,
    one_of,
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
from meshcast.hardware.documents.input_file import DESCRIPTION, Unreadable, read_text
from meshcast.hardware.documents.output_file import replacing, write_file
from meshcast.hardware.errors import OutOfMemory, PlanError, nearest

if TYPE_CHECKING:
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.engine.play import Engine

app = typer.Typer(
    name="meshcast",
    help="Forecasts the step time and memory of LLM training on a GPU cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The ``meshcast`` command."""
    # meshcast multiplies no matrices, and starting numpy's BLAS threads would take longer than a forecast.
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"  # figures are files; one that a notebook or a file names may not be there
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  the caller may have closed it
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # terminals without block characters print question marks
            stream.reconfigure(errors="replace")
    try:
        _check_matplotlib_settings()
        _keep_command(sys.argv[1:])
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except OSError as error:  # errors of files have become messages; what is left is of what is printed
        _end_without_output(error)


def _check_matplotlib_settings() -> None:
    """Refuses a file matplotlibrc in this folder that is no text: no plot uses its settings, but matplotlib reads it as
    it is imported, waits for a pipe, and ends at bytes that are no text."""
    settings = Path("matplotlibrc")
    if not os.path.exists(settings) or settings.is_dir():
        return
    try:
        read_text(settings, DESCRIPTION)
    except Unreadable as error:
        remedy = "Rename it or run from another folder: matplotlib reads it for every plot"
        say(f"meshcast: {PlanError(str(settings), error.rule, remedy)}", err=True)
        sys.exit(WRONG)


def _end_without_output(error: OSError) -> NoReturn:
    """Ends a command whose output cannot be written, as on a full disk; where the reader of a pipe is gone, quietly."""
    with suppress(OSError):  # stderr may be the same file
        if error.errno != errno.EPIPE:
            say(f"meshcast: standard output: it cannot be written ({error.strerror}). Send it elsewhere", err=True)
            sys.stderr.flush()
    for stream in (1, 2):  # or the interpreter would write the rest at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    sys.exit(WRONG)


def _keep_command(arguments: Sequence[str]) -> None:
    """Leaves out the commands that are not run, for typer would read the parameters of all of them first."""
    own = [one for one in app.registered_commands if arguments and _name(one) == arguments[0]]
    app.registered_commands = own or app.registered_commands


def _name(command: typer.models.CommandInfo) -> str:
    """The name of a command: that of its function if none was given."""
    assert command.callback is not None
    return command.name or command.callback.__name__


def _version(wanted: bool) -> None:
    if wanted:
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


# ------------------------------------------------------------------------------------------- predict


@app.command()
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
    from meshcast.experiments.render.matplotlib.breakdown import breakdown
    from meshcast.experiments.render.matplotlib.memory import memory
    from meshcast.experiments.render.matplotlib.sheet import save
    from meshcast.experiments.render.matplotlib.timeline import timeline

    figures = {
        "timeline": lambda: timeline(report),
        "memory": lambda: memory(report),
        "breakdown": lambda: breakdown([("", report)]),
    }
    for name, path in files.items():
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            save(figures[name], path, width)


# --------------------------------------------------------------------------------------------- sweep


@app.command()
def sweep(
    path: Annotated[Path | None, typer.Argument(metavar="SWEEP", help="A sweep file, YAML or JSON.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Parquet file, one row per point.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Number of processes; one per core if not given."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", metavar="dask://HOST:PORT", help="Run on the workers of this Dask scheduler instead."),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="K/N", help="Forecast part K of N, counted from 0; `merge` joins the parts."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the results of an earlier sweep at --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast a job at every point of a grid. The same command resumes an interrupted sweep."""
    with answering(as_json):
        if path is None or out is None:
            missing, name = ("SWEEP", "sweep.yaml") if path is None else ("--out", str(path))
            raise PlanError("sweep", f"{missing} is missing", f"Write meshcast sweep {name} --out rows.parquet")
        from meshcast.experiments.render.terminal import sweep as pages

        fields, answer = pages.run_sweep(path, out, workers, on, shard, restart)
        emit_or_show(as_json, answer, lambda: pages.page(fields, answer))


@app.command()
def merge(
    parts: Annotated[list[Path], typer.Argument(metavar="PARTS", help="The Parquet files of all shards of a sweep.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Parquet file, one row per point.")],
    as_json: AsJson = False,
) -> None:
    """Join the shards of a sweep into the file of the whole sweep."""
    with answering(as_json):
        from meshcast.experiments.render.terminal import sweep as pages

        fields, answer = pages.run_merge(parts, out)
        emit_or_show(as_json, answer, lambda: pages.page(fields, answer))


# ---------------------------------------------------------------------------------------------- list


@app.command("list")
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


# -------------------------------------------------------------------------------------- schema, init


@app.command()
def schema(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="job, sweep, cluster, model, framework, published or measurement.")
    ] = "job",
) -> None:
    """Print the JSON Schema of a job or of another file of meshcast."""
    with answering():
        from meshcast.experiments.schema import schema as made

        emit(made(kind))


@app.command()
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


# --------------------------------------------------------------------------------------------- scale


@app.command()
@takes_launch_files
def scale(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")],
    gpus: Annotated[
        str, typer.Option("--gpus", metavar="COUNTS", help="8,16,24, or 8..4096 for all doublings from 8.")
    ],
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch (strong), or the batch of each GPU (weak).")
    ] = False,
    over: Annotated[
        str | None,
        typer.Option("--over", metavar="AXIS", help="Mesh axis that grows; that of the data scheme if not given."),
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw the scaling curve (.png, .svg or .pdf)."),
    ] = None,
    width: WidthOption = None,
) -> None:
    """Forecast a job on growing numbers of GPUs: the scaling curve."""
    with answering(as_json):
        from meshcast.experiments.sweeps.scaling import curve_rows, forecast_curve, parse_counts

        files, paper = plot_files(plot, ("scaling",)) if plot is not None else {}, choose_width(width, plot)
        found = forecast_curve(job, parse_counts(gpus), "strong" if strong else "weak", over)
        for place in files.values():
            from meshcast.experiments.render.matplotlib.scaling import scaling
            from meshcast.experiments.render.matplotlib.sheet import save

            place.parent.mkdir(parents=True, exist_ok=True)
            save(lambda: scaling(found), place, paper)
        if as_json:
            emit({"kind": found.kind, "axis": found.axis, "points": curve_rows(found)})
        else:
            from meshcast.experiments.render.terminal.forecast import show
            from meshcast.experiments.render.terminal.scaling import page

            show(page(found))


# ------------------------------------------- plot, compare, why, validate, calibrate, measure, import

app.command()(takes_launch_files(cli_explain.compare))
app.command()(takes_launch_files(cli_explain.why))
app.command()(takes_launch_files(cli_collectives.collectives))
app.command()(takes_launch_files(cli_plan.plan))
app.command()(takes_launch_files(cli_plot.plot))
app.command()(takes_launch_files(cli_report.report))
app.command()(takes_launch_files(cli_run.run))
app.command()(takes_launch_files(cli_search.search))
app.command()(takes_launch_files(cli_selfcheck.check))
app.command()(cli_validate.validate)
app.command()(cli_validate.calibrate)
app.command()(cli_measure.measure)
app.command("import")(takes_launch_files(cli_measure.import_))
app.command()(takes_launch_files(cli_schedule.export))

for _command in app.registered_commands:
    _command.cls = PlainUsage


if __name__ == "__main__":
    main()
