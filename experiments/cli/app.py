"""The command line: ``meshcast predict``, ``sweep``, ``list``, ``validate`` and the rest.

Answers go to stdout, messages to stderr. Exit codes: 0 answered, 2 a mistake of the user (told in one message), 3 under
``--strict`` a plan that does not fit, 130 interrupted. Whatever is heavy is imported inside the commands.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from experiments.cli import measure as cli_measure
from experiments.cli import schedule as cli_schedule
from experiments.cli import validate as cli_validate
from experiments.cli.console import (
    INTERRUPTED,
    TOO_LARGE,
    AsJson,
    answering,
    check_place,
    emit,
    figure_files,
    unwritable,
)
from hardware.errors import OutOfMemory, PlanError, nearest

if TYPE_CHECKING:
    from simulator.costs.calibration.calibration import Calibration
    from simulator.engine.play import Engine

TRACES = (".json", ".json.gz")

app = typer.Typer(
    name="meshcast",
    help="Forecasts the step time and memory of LLM training on a GPU cluster before anyone rents it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The ``meshcast`` command."""
    # Nothing here multiplies matrices: the threads that numpy would start for that cost more than all it does for us.
    for library in ("OPENBLAS", "OMP", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    gc.set_threshold(50_000)  # a forecast leaves little to collect, and looking for it took a twentieth of the time
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  closed by whoever started us
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that knows no block characters gets question marks
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"meshcast {version('meshcast')}")
        except PackageNotFoundError:
            typer.echo("meshcast 0+unknown")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of meshcast itself."""


# ------------------------------------------------------------------------------------------- predict


@app.command()
def predict(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field first, e.g. plan.tp=4.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None,
        typer.Option(
            "--plot", metavar="PATH", help="Draw the timeline into a .png or .svg file, or all figures into a FOLDER/."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write what ran when into a .json or .json.gz, for ui.perfetto.dev."
        ),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when the plan does not fit in memory.")] = False,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="{matrices|sweep|simpy|shared}",
            help="How the step is played: all give one answer, but in `shared` traffic on one link slows each other.",
        ),
    ] = "matrices",
    every_round: Annotated[
        bool, typer.Option("--every-round", help="Play every round, also those that are proven to repeat.")
    ] = False,
    calibration: cli_validate.Calibration = None,
    jobs: Annotated[
        Path | None,
        typer.Option("--jobs", metavar="FILE", help="Forecast many jobs, one JSON object a line; answers likewise."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the answers of --jobs into a file.")
    ] = None,
) -> None:
    """Forecast one training step: how long it takes, where the time goes, and whether it fits in memory."""
    with answering(as_json):
        from simulator.costs.calibration.calibration import Calibration

        known = Calibration.from_folder(cli_validate.folder(calibration))
        if jobs is not None:
            if job is not None or plot is not None or trace is not None:
                raise PlanError("--jobs", "many jobs are forecast without JOB, --plot and --trace", "Leave them out")
            if forecast_all(jobs, out, change or (), engine_of(engine), not every_round, known) and strict:
                raise typer.Exit(TOO_LARGE)
            return
        if job is None or out is not None:
            raise PlanError("predict", "it takes a JOB, or --jobs FILE with --out FILE", "See meshcast predict --help")
        files = figure_files(plot) if plot is not None else {}
        if trace is not None:
            check_trace(trace, job)
        from simulator import load_job, simulate

        wanted = load_job(job, change or ())
        report = simulate(wanted, engine=engine_of(engine), skip=not every_round, calibration=known)
        draw(report, files)
        if trace is not None:
            from simulator.report.trace import write_trace

            try:
                write_trace(report, trace)
            except OSError as error:
                raise unwritable(trace, error.strerror or str(error), "--trace") from None
        if as_json:
            emit(report.to_dict())
        else:
            from experiments.pages.forecast import page, show

            show(page(report, list(files.values()), str(trace) if trace else None))
        if strict and not report.fits:
            missing = max(report.excess) / 2**30
            told = OutOfMemory(
                str(job), f"the plan needs {missing:.1f} GiB more than a GPU has", "See the memory of its stages"
            )
            typer.echo(f"meshcast: {told}", err=True)
            raise typer.Exit(TOO_LARGE)


def engine_of(name: str) -> Engine:
    """The engine of this name."""
    from simulator.engine.play import ENGINES

    if name not in ENGINES:
        raise PlanError("--engine", "no such engine", nearest(name, ENGINES), name)
    return cast("Engine", name)


def forecast_all(
    jobs: Path, out: Path | None, changes: Sequence[str], engine: Engine, skip: bool, calibration: Calibration
) -> bool:
    """Answers every line of `jobs` into `out` (kept when interrupted) or to stdout; whether some plan does not fit."""
    from experiments.sweeps.jobs import forecast_lines, progress

    if jobs.is_dir() or not jobs.exists():
        rule = "it is a folder" if jobs.is_dir() else "no such file"
        raise PlanError(str(jobs), rule, "Name a file with one JSON object a line")
    if out is not None:
        check_place(out, "--out")
        if out.exists() and out.samefile(jobs):
            raise unwritable(out, "it is the file of the jobs", "--out")
    misfit = False
    with jobs.open(encoding="utf-8-sig", errors="replace") as lines, ExitStack() as stack:
        target = stack.enter_context(out.open("w", encoding="utf-8", buffering=1)) if out is not None else sys.stdout
        wanted = progress(lines, jobs, out is not None and jobs.is_file())
        for told in forecast_lines(wanted, str(jobs), jobs.parent, changes, engine, skip, calibration):
            misfit |= told.get("status") == "does-not-fit"
            target.write(json.dumps(told) + "\n")
    return misfit


def draw(report: Any, files: dict[str, Path]) -> None:
    """Draws figures into their files, and makes their folder."""
    if not files:
        return
    from experiments.plots import breakdown, memory, timeline

    figures = {"timeline": timeline.draw, "memory": memory.draw, "breakdown": breakdown.draw}
    for name, path in files.items():
        try:
            path.parent.mkdir(exist_ok=True)
            figures[name](report, path)
        except OSError as error:
            raise unwritable(path, error.strerror or str(error)) from None


def check_trace(path: Path, job: Path) -> None:
    """Refuses before the work what cannot be written after it."""
    if not path.name.lower().endswith(TRACES):
        remedy = f"Write {path.stem or 'trace'}.json.gz"
        raise PlanError("--trace", "a trace is written as .json or .json.gz", remedy, str(path))
    check_place(path, "--trace")
    if path.exists() and job.exists() and path.samefile(job):
        raise unwritable(path, "it is the job", "--trace")


# --------------------------------------------------------------------------------------------- sweep


@app.command()
def sweep(
    path: Annotated[Path, typer.Argument(metavar="SWEEP", help="A sweep file, YAML or JSON.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Write one row a point into a Parquet file.")],
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", min=1, help="Processes; one for each core if not given.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard what an earlier sweep has left at --out.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Forecast a job at every point of a grid. Interrupted, the same command goes on where it stopped."""
    with answering(as_json):
        from experiments.pages import sweep as sweeping
        from experiments.pages.forecast import show

        read, told = sweeping.sweep(path, out, workers, restart)
        if as_json:
            emit(told)
        else:
            show(sweeping.page(read, told))


# ---------------------------------------------------------------------------------------------- list


@app.command("list")
def list_(
    kind: Annotated[str, typer.Argument(metavar="{gpus|nodes|clusters|models|schemes|frameworks|schedule}")],
    name: cli_schedule.Name = None,
    p: cli_schedule.Devices = None,
    m: cli_schedule.Microbatches = None,
    v: cli_schedule.Chunks = None,
    as_json: AsJson = False,
) -> None:
    """List what a job can name; or the order of one pipeline schedule, step by step."""
    with answering(as_json):
        if kind == "schedule":
            cli_schedule.show_schedule(name, p, m, v, as_json)
            return
        for option, given in {"NAME": name, "--p": p, "--m": m, "--v": v}.items():
            if given is not None:
                raise PlanError(option, f"{kind} are listed as a whole", "Leave it out, or list schedule", given)
        from experiments.pages.forecast import show
        from experiments.pages.listing import listing, table

        rows = listing(kind)
        if as_json:
            emit(rows)
        else:
            show(table(kind, rows))


# ---------------------------------------------------------------------------------------------- plot


@app.command()
def plot(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="The Parquet file of a finished sweep.")],
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="The .png or .svg to draw.")] = None,
    x: Annotated[str | None, typer.Option("--x", metavar="FIELD", help="The varied field across.")] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="FIELD", help="The varied field down.")] = None,
    value: Annotated[
        str, typer.Option("--value", metavar="COLUMN", help="What a cell shows, of its best plan that fits.")
    ] = "tokens_per_s_per_gpu",
    title: Annotated[str | None, typer.Option("--title", help="The title; the file's name if not given.")] = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="X,Y", help="Tell why the cell of these two values is blank.")
    ] = None,
) -> None:
    """Draw a sweep as a heatmap over two of its fields, or tell why a cell of it is blank."""
    with answering():
        from experiments.plots import heatmap
        from experiments.sweeps import selection

        if out is None and why is None:
            raise PlanError("plot", "it takes --out FILE, --why X,Y or both", "See meshcast plot --help")
        files = figure_files(out, ("heatmap",), "--out") if out is not None else {}
        rows = selection.read_rows(results)
        x, y = selection.choose_axes(rows, x, y)
        cells = heatmap.cells(rows, x, y, value)
        if why is not None:
            for line in heatmap.reasons(cells, *selection.parse_cell(why, rows, x, y)):
                typer.echo(line)
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
            heatmap.draw(rows, x, y, value, title or results.stem, [f"{len(rows):,} plans"], file)


# -------------------------------------------------------------------------------------- schema, init


@app.command()
def schema(
    kind: Annotated[str, typer.Argument(metavar="[job|sweep|cluster|model|framework|published|measurement]")] = "job",
) -> None:
    """Print the JSON Schema of a job, or of one of its parts, for editors and programs."""
    with answering():
        from experiments.schema import schema as made

        emit(made(kind))


@app.command()
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="Where to; - prints it.")] = Path("job.yaml"),
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
) -> None:
    """Write a first job, with a comment on every key."""
    with answering():
        text = Path(__file__).with_name("first_job.yaml").read_text("utf-8")
        if str(file) == "-":
            typer.echo(text, nl=False)
            return
        check_place(file, "FILE")
        if file.exists() and not force:
            raise PlanError(
                "FILE", "it is there already", "Name another file, or write over it with --force", str(file)
            )
        file.write_text(text, "utf-8")
        typer.echo(f"wrote {file}; now: meshcast predict {file}")


# --------------------------------------------------------------------------------------------- scale


@app.command()
def scale(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")],
    gpus: Annotated[str, typer.Option("--gpus", metavar="COUNTS", help="8,16,24 or 8..4096 for all doublings of 8.")],
    strong: Annotated[
        bool, typer.Option("--strong/--weak", help="Keep the global batch, or the batch of every GPU.")
    ] = False,
    over: Annotated[
        str | None, typer.Option("--over", metavar="AXIS", help="The axis that grows; the data scheme's if not given.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="PATH", help="Draw the curve into a .png or .svg file.")
    ] = None,
) -> None:
    """Forecast one job on ever more GPUs: the scaling curve, and where its bottleneck changes."""
    with answering(as_json):
        from experiments.sweeps.scaling import curve_rows, forecast_curve, parse_counts

        files = figure_files(plot, ("scaling",)) if plot is not None else {}
        found = forecast_curve(job, parse_counts(gpus), "strong" if strong else "weak", over)
        for place in files.values():
            from experiments.plots import scaling

            place.parent.mkdir(parents=True, exist_ok=True)
            scaling.draw(found, place)
        if as_json:
            emit({"kind": found.kind, "axis": found.axis, "points": curve_rows(found)})
        else:
            from experiments.pages.forecast import show
            from experiments.pages.scaling import page

            show(page(found))


# ------------------------------------------------------------- validate, calibrate, measure, import

app.command()(cli_validate.validate)
app.command()(cli_validate.calibrate)
app.command()(cli_measure.measure)
app.command("import")(cli_measure.import_)
app.command()(cli_schedule.export)


if __name__ == "__main__":
    main()
