"""``meshcast predict``: the forecast of one job, or of many."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self, cast

from meshcast.experiments.cli import traces
from meshcast.experiments.cli.best_plan import describe_search, end_search, find_plan, show_search
from meshcast.experiments.cli.commands import TOO_LARGE
from meshcast.experiments.cli.console import (
    AsJson,
    Changes,
    WidthOption,
    check_place,
    emit,
    plan_figures,
    to_json,
    track,
    unwritable,
    writing,
    writing_figure,
)
from meshcast.experiments.cli.explain import find_more
from meshcast.experiments.cli.launch import (
    LaunchFileOptions,
    bound_launch,
    describe_launch,
    show_approximations,
    show_open_questions,
    tell_launch,
)
from meshcast.experiments.cli.measured_files import Calibrations, check_calibration_folder, tell_calibration
from meshcast.experiments.cli.selfcheck import Verify, check_verify, end_verify, verify_forecast
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.matplotlib.style import Width
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import replacing
from meshcast.hardware.errors import OutOfMemory, PlanError, nearest
from meshcast.hardware.schemas import field_validator, model_validator

if TYPE_CHECKING:
    from meshcast.experiments.explain.bounded_approximations import BoundedApproximation
    from meshcast.experiments.search.certificate.result import SearchResult
    from meshcast.simulator import Report
    from meshcast.simulator.costs.calibration.calibration import Calibration
    from meshcast.simulator.engine.play import Engine
    from meshcast.simulator.formats.launch.imported_job import ImportedJob


class PredictOptions(LaunchFileOptions):
    """Options of ``meshcast predict``."""

    job: Annotated[Path | None, argument("JOB", "A job file (YAML or JSON), or a launch file.")] = None
    change: Changes = ()
    as_json: AsJson = False
    plot: Annotated[
        str | None, option("--plot", "Draw the timeline (.png, .svg or .pdf), or all figures into FOLDER/.", "PATH")
    ] = None
    trace: traces.Trace = None
    snapshot: traces.Snapshot = None
    strict: Annotated[bool, option("--strict", "Exit with code 3 if the plan does not fit in memory.")] = False
    verbose: Annotated[
        bool, option("--verbose", "List every field that the job does not state, with what is assumed.")
    ] = False
    engine: Annotated[
        str,
        option(
            "--engine",
            "How to play the step: the first three agree to 1e-9; `shared` is SimPy with contention on links.",
            "matrices|sweep|simpy|shared",
        ),
    ] = "matrices"
    verify: Verify = False
    every_round: Annotated[
        bool, option("--every-round", "Play every round of micro-batches, also those that provably repeat.")
    ] = False
    calibration: Calibrations = None
    width: WidthOption = None
    jobs: Annotated[Path | None, option("--jobs", "Forecast many jobs, one JSON object per line.", "FILE")] = None
    out: Annotated[Path | None, option("--out", "File for the answers of --jobs; stdout if not given.", "FILE")] = None
    brief: Annotated[bool, option("--brief", "Answer --jobs by step time and memory alone, sooner.")] = False

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, name: str) -> str:
        from meshcast.simulator.engine.play import ENGINES

        if name not in ENGINES:
            raise PlanError("--engine", "there is no engine of this name", nearest(name, ENGINES), name)
        return name

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.jobs is not None:
            if (self.job, self.plot, self.trace, self.snapshot) != (None,) * 4 or self.verbose or self.verify:
                rule = "it cannot be combined with JOB, --plot, --trace, --snapshot, --verbose or --verify"
                raise PlanError("--jobs", rule, "Leave them out")
            if self.brief and (self.engine != "matrices" or self.every_round):
                raise PlanError("--brief", "the default engine answers it", "Leave out --engine and --every-round")
        elif self.brief:
            raise PlanError("--brief", "it shortens the answers to many jobs", "Leave it out, or give --jobs FILE")
        elif self.job is None:
            raise PlanError("predict", "it takes a JOB, or --jobs FILE with --out FILE", "See meshcast predict --help")
        elif self.out is not None:
            remedy = f"Write meshcast predict {self.job} --json > {self.out}, or --jobs FILE"
            raise PlanError("--out", "it is the file of the answers to many jobs", remedy, str(self.out))
        check_verify(self.verify, self.engine)
        return self


def predict(options: PredictOptions) -> None:
    """Forecasts one job and shows, draws and writes what is asked for; or answers a file of many."""
    from meshcast.simulator.costs.calibration.calibration import Calibration

    calibration = Calibration.from_folder(check_calibration_folder(options.calibration))
    if options.jobs is not None:
        if forecast_all(options.jobs, options, calibration) and options.strict:
            sys.exit(TOO_LARGE)
        return
    assert options.job is not None
    files, paper = plan_figures(options.plot, options.width)
    traces.check_paths(options.trace, options.snapshot, options.job)
    imported = tell_launch(options.job, options.change)
    result = find_plan(options.job, options.change, calibration, options.strict)
    report, bounded = _forecast(options, result, imported, calibration)
    played, replays = verify_forecast(report, options.verify)
    draw(played, files, paper)
    traces.write_files(played, options.trace, options.snapshot)
    more, calibrated = find_more(report, options.verbose, replays), tell_calibration(options.calibration)
    if options.as_json:
        searched = describe_search(result) if result else {}
        used = {"calibration": calibrated} if calibrated else {}
        emit(report.to_dict() | searched | more.to_dict() | describe_launch(imported, bounded) | used)
    else:
        from meshcast.experiments.render.terminal.forecast import page, show

        if result is not None:
            show_search(result)
        show_open_questions(imported)
        show(page(report, list(files.values()), options.trace, options.snapshot, *more))
        show_approximations(imported, bounded)
        for sentence in calibrated:
            say(f"calibrated {sentence}")
    if result is not None:
        end_search(result)
    end_verify(replays)
    if options.strict and not report.fits:
        misfit = OutOfMemory(str(options.job), f"the plan needs {report.missing}", "See the memory of its stages")
        say(f"meshcast: {misfit}", err=True)
        sys.exit(TOO_LARGE)


def _forecast(
    options: PredictOptions, result: SearchResult | None, imported: ImportedJob | None, calibration: Calibration
) -> tuple[Report, list[BoundedApproximation]]:
    """Forecasts the job of a command.

    result: the search for its plan; None: no field is open. imported: the job as a launch file; None: it is a job file.
    """
    from meshcast.simulator import load_job, simulate

    assert options.job is not None
    if result is None:
        job = load_job(options.job, options.change)
    else:
        job = load_job(result.best[0].job, base=options.job.parent)
    job, bounded = bound_launch(imported, job)
    engine = cast("Engine", options.engine)
    report = simulate(job, engine=engine, skip=not options.every_round, calibration=calibration)
    report.track = partial(track, label="steps with noise")
    return report, bounded


def forecast_all(jobs: Path, options: PredictOptions, calibration: Calibration) -> bool:
    """Writes the answers to a file of jobs to `out` or stdout; returns whether a plan does not fit."""
    from meshcast.experiments.sweeps.jobs import forecast_lines, progress, read_jobs

    if jobs.is_dir() or not jobs.exists():
        rule = "it is a folder" if jobs.is_dir() else "no such file"
        raise PlanError(str(jobs), rule, "Name a file with one JSON object per line")
    if Path(os.path.realpath(jobs)).is_fifo():  # a pipe of a shell has no name of its own
        rule = "it is a named pipe, which waits for a writer without end"
        raise PlanError(str(jobs), rule, f"Write cat {jobs} | meshcast predict --jobs /dev/stdin")
    out, engine, skip = options.out, cast("Engine", options.engine), not options.every_round
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
        for answer in forecast_lines(
            wanted, str(jobs), jobs.parent, options.change, engine, skip, calibration, options.brief
        ):
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


def draw(report: Report, files: dict[str, Path], width: Width = "page") -> None:
    """Draws the figures into their files; makes the folder if needed."""
    if not files:
        return
    from meshcast.experiments.render.matplotlib.breakdown import breakdown
    from meshcast.experiments.render.matplotlib.memory import memory
    from meshcast.experiments.render.matplotlib.sheet import save
    from meshcast.experiments.render.matplotlib.timeline import timeline

    figures = {
        "timeline": partial(timeline, report),
        "memory": partial(memory, report),
        "breakdown": partial(breakdown, [("", report)]),
    }
    for name, path in files.items():
        with writing_figure(path):
            save(figures[name], path, width)
