"""``meshcast report``: a forecast, a sweep or a search as one HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import Changes, check_place, track, unwritable, writing
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError


class ReportOptions(LaunchFileOptions):
    """Options of ``meshcast report``."""

    source: Annotated[
        Path,
        argument(
            "JOB|RESULTS",
            "A job or a launch file; an answer of predict or search --json; rows of sweep or search --out.",
        ),
    ]
    out: Annotated[Path, option("--out", "The page, .html; report.html if not given.", "FILE")] = Path("report.html")
    change: Changes = ()
    sensitivity: Annotated[
        bool, option("--sensitivity/--no-sensitivity", "Show what each figure of the hardware is worth.")
    ] = True
    title: Annotated[str | None, option("--title", "Title of the page.")] = None


def report(options: ReportOptions) -> None:
    """Writes one HTML file on a forecast, a sweep or a search."""
    if options.out.suffix.lower() not in (".html", ".htm"):
        remedy = f"Write {options.out.stem or 'report'}.html"
        raise PlanError("--out", "the report is written as .html", remedy, str(options.out))
    check_place(options.out, "--out")
    from meshcast.experiments.render.bokeh.library import check_library
    from meshcast.experiments.render.bokeh.load import load_plans

    check_library()
    if options.out.exists() and options.source.exists() and options.out.samefile(options.source):
        raise unwritable(options.out, "it is the file of the input", "--out")
    plans = load_plans(options.source)
    if plans is not None:
        if options.change:
            rule = "plans that were forecast do not change"
            raise PlanError("--set", rule, "Name a job, or leave it out", options.change[0])
        from meshcast.experiments.render.bokeh.results_report import report_results

        page = report_results(plans, options.title)
    else:
        page = _report_job(options.source, options.change, options.sensitivity, options.title)
    with writing(options.out, "--out"):
        write_file(options.out, page)
    say(f"wrote {options.out}", err=True)


def _report_job(source: Path, changes: tuple[str, ...], sensitivity: bool, title: str | None) -> str:
    """Returns the page of a job, of a launch file, or of the answer of a forecast."""
    from meshcast.experiments.render.bokeh.job_report import report_job
    from meshcast.experiments.render.bokeh.load import check_step_time, load_answer, load_answered_job
    from meshcast.simulator import SharedWork, simulate

    answer = load_answer(source)
    if answer is None:
        tell_launch(source, changes)
        job = load_with_plan(source, changes)
    else:
        job = load_answered_job(source, answer, changes)
    shared = SharedWork(related=True)
    forecast = simulate(job, shared_work=shared)
    forecast.track = partial(track, label="steps with noise")
    if answer is not None and not changes:
        check_step_time(source, answer, forecast.step_time)
    return report_job(job, forecast, sensitivity, track, title, shared)
