"""``meshcast run``: a whole training run with failures, checkpoints and stragglers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.best_plan import load_with_plan
from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    check_place,
    emit_or_show,
    plan_figures,
    track,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions, add_checkpoints, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.render.terminal.say import say

if TYPE_CHECKING:
    from meshcast.simulator import Report
    from meshcast.simulator.runs.answer import RunAnswer
    from meshcast.simulator.runs.inputs import RunPlan

NAMES = ("run", "curves")
"""Figures of a folder of plots: where the time goes, and curves of goodput."""


class RunOptions(LaunchFileOptions):
    """Options of ``meshcast run``."""

    job: Annotated[Path, argument("JOB", "A job file (YAML or JSON), or a launch file.")]
    change: Annotated[
        tuple[str, ...], option("--set", "Change a field of the job, e.g. run.days=54.", "FIELD=VALUE")
    ] = ()
    curves: Annotated[
        bool, option("--curves", "Goodput against checkpoint interval, failure rate and scale; what hardware is worth.")
    ] = False
    workers: Annotated[
        int | None, option("--workers", "Number of processes; one per core if not given.", "N", min=1)
    ] = None
    out: Annotated[
        Path | None, option("--out", "Parquet file, one row per run; the same command resumes it.", "FILE")
    ] = None
    restart: Annotated[bool, option("--restart", "Discard the runs of an earlier command at --out.")] = False
    plot: Annotated[
        str | None, option("--plot", "Draw where the time goes, or with FOLDER/ the curves, too.", "PATH")
    ] = None
    width: WidthOption = None
    as_json: AsJson = False


def run(options: RunOptions) -> None:
    """Simulates a training run, and shows its days, what it costs and where its time goes."""
    from meshcast.experiments.render.terminal.run import page
    from meshcast.experiments.runs.curves import draw_curves
    from meshcast.simulator.job.locate import locate_errors
    from meshcast.simulator.runs.inputs import make_run

    files, paper = plan_figures(options.plot, options.width, NAMES)
    if options.out is not None:
        check_place(options.out, "--out")
    report, changes = _forecast(options.job, options.change)
    with locate_errors(*report.job.origin):
        planned = make_run(report)
        answer = _simulate(planned, options, changes)
    curves = None
    if options.curves or "curves" in files:
        curves = draw_curves(planned, options.workers, lambda tasks: iter(track(tasks, "curves")))
    for name, path in files.items():
        from meshcast.experiments.render.matplotlib import runs as plots
        from meshcast.experiments.render.matplotlib.sheet import save

        with writing_figure(path):
            if name == "run":
                save(partial(plots.stacked_bar, answer), path, paper)
            elif curves is not None:
                save(partial(plots.run_curves, answer, curves), path, paper)
    emit_or_show(
        options.as_json,
        lambda: answer.to_dict() | (curves.to_dict() if curves else {}),
        lambda: page(answer, curves, options.out),
    )


def _forecast(path: Path, changes: Sequence[str]) -> tuple[Report, list[str]]:
    """Forecasts a step of the run; returns it and the changes of the job, checkpoints of a launch file included."""
    from meshcast.experiments.search.space.fields import split_run_fields
    from meshcast.experiments.search.space.run_choices import refuse_open_run
    from meshcast.simulator import simulate
    from meshcast.simulator.job.locate import locate_errors
    from meshcast.simulator.loading.load import read_job

    tell_launch(path, changes)
    read = read_job(path, changes)
    with locate_errors(*read.origin):
        refuse_open_run(split_run_fields(read.data)[1], "one run is simulated, with one value of every key")
    changes = add_checkpoints(read.launch, changes)
    return simulate(load_with_plan(path, tuple(changes))), changes


def _simulate(plan: RunPlan, options: RunOptions, changes: Sequence[str]) -> RunAnswer:
    """Simulates all runs with a progress bar; with `out` into a file. An interruption says how to go on."""
    from meshcast.experiments.render.terminal.sweep import ProgressBar
    from meshcast.experiments.runs.seeds import simulate_runs, store_runs
    from meshcast.experiments.sweeps.output import parts_folder
    from meshcast.simulator.runs.answer import RunAnswer

    watch, out = ProgressBar("runs"), options.out
    with ExitStack() as after:
        after.callback(watch.bar.stop)
        if out is None:
            return RunAnswer(plan, simulate_runs(plan, options.workers, watch, watch.show))
        written, folder = {**plan.job.as_written, "changes": [*changes]}, options.job.parent
        try:
            rows = store_runs(plan, written, folder, out, options.workers, options.restart, watch, watch.show)
            return RunAnswer(plan, rows)
        except KeyboardInterrupt:
            kept = f"{watch.done:,} of {plan.seeds:,} runs are stored in {parts_folder(out)}"
            say(f"meshcast: interrupted, {kept}; the same command resumes it", err=True)
            raise
