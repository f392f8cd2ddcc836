"""``meshcast report``: a forecast, a sweep or a search as one HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli.console import Changes, answering, check_place, track, unwritable, writing
from meshcast.experiments.cli.launch import takes_launch_files, tell_launch
from meshcast.experiments.render.terminal.say import say
from meshcast.hardware.documents.output_file import write_file
from meshcast.hardware.errors import PlanError


@takes_launch_files
def report(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="JOB|RESULTS",
            help="A job or a launch file; an answer of predict or search --json; rows of sweep or search --out.",
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The page, .html; report.html if not given.")
    ] = Path("report.html"),
    change: Changes = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity/--no-sensitivity", help="Show what each figure of the hardware is worth.")
    ] = True,
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
) -> None:
    """Write one HTML file on a forecast, a sweep or a search."""
    with answering():
        if out.suffix.lower() not in (".html", ".htm"):
            raise PlanError("--out", "the report is written as .html", f"Write {out.stem or 'report'}.html", str(out))
        check_place(out, "--out")
        from meshcast.experiments.render.bokeh.library import check_library
        from meshcast.experiments.render.bokeh.load import load_plans

        check_library()
        if out.exists() and source.exists() and out.samefile(source):
            raise unwritable(out, "it is the file of the input", "--out")
        plans = load_plans(source)
        if plans is not None:
            if change:
                raise PlanError(
                    "--set", "plans that were forecast do not change", "Name a job, or leave it out", change[0]
                )
            from meshcast.experiments.render.bokeh.results_report import report_results

            page = report_results(plans, title)
        else:
            page = _report_job(source, tuple(change or ()), sensitivity, title)
        with writing(out, "--out"):
            write_file(out, page)
        say(f"wrote {out}", err=True)


def _report_job(source: Path, changes: tuple[str, ...], sensitivity: bool, title: str | None) -> str:
    """The page of a job, of a launch file, or of the answer of a forecast."""
    from meshcast.experiments.render.bokeh.job_report import report_job
    from meshcast.experiments.render.bokeh.load import check_step_time, load_answer, load_answered_job
    from meshcast.simulator import load_job, simulate

    answer = load_answer(source)
    if answer is None:
        tell_launch(source, changes)
        job = load_job(source, changes)
    else:
        job = load_answered_job(source, answer, changes)
    found = simulate(job)
    found.track = partial(track, label="steps with noise")
    if answer is not None and not changes:
        check_step_time(source, answer, found.step_time)
    return report_job(job, found, sensitivity, track, title)
