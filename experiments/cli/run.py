"""``meshcast run``: a whole training run with failures, checkpoints and stragglers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    answering,
    check_place,
    choose_width,
    emit,
    plot_files,
    track,
    writing,
)
from meshcast.experiments.cli.launch import add_checkpoints, takes_launch_files, tell_launch
from meshcast.experiments.render.terminal.say import say

if TYPE_CHECKING:
    from meshcast.simulator.runs.answer import RunAnswer
    from meshcast.simulator.runs.inputs import RunPlan

NAMES = ("run", "curves")
"""Figures of a folder of plots: where the time goes, and curves of goodput."""


@takes_launch_files
def run(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job file, YAML or JSON.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the job, e.g. run.days=54."),
    ] = None,
    curves: Annotated[
        bool,
        typer.Option(
            "--curves", help="Goodput against checkpoint interval, failure rate and scale; what hardware is worth."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", min=1, help="Number of processes; one per core if not given."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Parquet file, one row per run; the same command resumes it."),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Discard the runs of an earlier command at --out.")
    ] = False,
    plot: Annotated[
        str | None,
        typer.Option("--plot", metavar="PATH", help="Draw where the time goes, or with FOLDER/ the curves, too."),
    ] = None,
    width: WidthOption = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a training run: failures, checkpoints, days and money."""
    with answering(as_json):
        files, paper = plot_files(plot, NAMES) if plot is not None else {}, choose_width(width, plot)
        curves = curves or "curves" in files
        if out is not None:
            check_place(out, "--out")
        from meshcast.experiments.render.terminal.forecast import show
        from meshcast.experiments.render.terminal.run import page
        from meshcast.experiments.search.space.fields import split_run_fields
        from meshcast.experiments.search.space.run_choices import refuse_open_run
        from meshcast.simulator import load_job, simulate
        from meshcast.simulator.job.locate import locate_errors
        from meshcast.simulator.loading.load import read_job
        from meshcast.simulator.runs.inputs import make_run

        tell_launch(job, change or ())
        read = read_job(job, change or ())
        with locate_errors(*read.origin):
            refuse_open_run(split_run_fields(read.data)[1], "one run is simulated, with one value of every key")
        change = add_checkpoints(read.launch, change or ())
        report = simulate(load_job(job, change))
        with locate_errors(*report.job.origin):
            planned = make_run(report)
            answer = _simulate(planned, job, change, workers, out, restart)
        drawn = None
        if curves:
            from meshcast.experiments.runs.curves import draw_curves

            drawn = draw_curves(planned, workers, lambda tasks: iter(track(tasks, "curves")))
        for name, path in files.items():
            from meshcast.experiments.render.matplotlib import runs as plots

            with writing(path):
                path.parent.mkdir(exist_ok=True)
                if name == NAMES[0]:
                    plots.draw(answer, path, paper)
                elif drawn is not None:
                    plots.draw_run_curves(answer, drawn, path, paper)
        if as_json:
            emit(answer.to_dict() | (drawn.to_dict() if drawn else {}))
        else:
            show(page(answer, drawn, out))


def _simulate(
    plan: RunPlan, job: Path, change: list[str], workers: int | None, out: Path | None, restart: bool
) -> RunAnswer:
    """Simulates all runs with a progress bar; with `out` into a file. An interruption says how to go on."""
    from meshcast.experiments.render.terminal.sweep import Watch
    from meshcast.experiments.runs.seeds import simulate_runs, store_runs
    from meshcast.experiments.sweeps.output import parts_folder
    from meshcast.simulator.runs.answer import RunAnswer

    watch = Watch("runs")
    with ExitStack() as after:
        after.callback(watch.bar.stop)
        if out is None:
            return RunAnswer(plan, simulate_runs(plan, workers, watch, watch.show))
        written = {**plan.job.as_written, "changes": [*change]}
        try:
            return RunAnswer(plan, store_runs(plan, written, job.parent, out, workers, restart, watch, watch.show))
        except KeyboardInterrupt:
            kept = f"{watch.done:,} of {plan.seeds:,} runs are stored in {parts_folder(out)}"
            say(f"meshcast: interrupted, {kept}; the same command resumes it", err=True)
            raise
