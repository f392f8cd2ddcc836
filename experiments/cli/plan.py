"""``meshcast plan``: what published planners propose for a job, and the benchmark table of their forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from meshcast.experiments.cli.console import (
    AsJson,
    MemoryRisk,
    WidthOption,
    answering,
    choose_width,
    emit,
    plot_files,
    read_number,
    writing,
)
from meshcast.experiments.cli.launch import takes_launch_files, tell_launch


@takes_launch_files
def plan(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="A job file; of its plan only the number of micro-batches counts.")
    ],
    planners: Annotated[
        str,
        typer.Option("--with", metavar="NAMES", help="Planners, such as alpa,optcnn; all of docs/planners.md: all."),
    ] = "all",
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds",
            metavar="S",
            min=0.1,
            help="CPU time of a planner; three times as much of the optimum.",
        ),
    ] = 20.0,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of searches that draw random numbers.")
    ] = 10_000,
    optimum: Annotated[
        bool, typer.Option("--optimum/--no-optimum", help="Search the certified optimum as well, for the regret.")
    ] = True,
    memory_risk: MemoryRisk = "5%",
    any_program: Annotated[
        bool,
        typer.Option("--any-program", help="Keep plans, too, that the program of the job refuses or does not have."),
    ] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="FILE", help="Draw regret against CPU time (.png, .svg, .pdf).")
    ] = None,
    width: WidthOption = None,
    as_json: AsJson = False,
) -> None:
    """Ask published planners for plans of a job, and forecast each."""
    with answering(as_json):
        from meshcast.experiments.planning.benchmark.answer import to_answer
        from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum, find_optimum
        from meshcast.experiments.planning.benchmark.page import benchmark_table
        from meshcast.experiments.planning.benchmark.rows import choose_planners, rank_proposals
        from meshcast.experiments.planning.pricing.mixed import open_problem
        from meshcast.experiments.planning.problem import SearchBudget
        from meshcast.experiments.render.terminal.forecast import show
        from meshcast.experiments.search.options import check_risk
        from meshcast.hardware.errors import PlanError

        files, paper = plot_files(plot, ("plan",)) if plot is not None else {}, choose_width(width, plot)
        names = choose_planners(planners)
        tell_launch(job, ())
        risk = read_number(memory_risk)
        check_risk(risk, "--memory-risk", memory_risk)
        problem = open_problem(job, risk)
        budget = SearchBudget(seconds, steps)
        with _progress(len(names)) as track:
            best = find_optimum(problem, budget, any_program) if optimum or plot is not None else None
            rows = rank_proposals(problem, names, budget, best, track, any_program)
        for file in files.values():
            if not isinstance(best, CertifiedOptimum):
                raise best or PlanError("--plot", "there is no certified optimum", "Leave it out", plot)
            from meshcast.experiments.planning.benchmark.plot import draw

            with writing(file):
                file.parent.mkdir(exist_ok=True)
                draw(problem, rows, best, file, paper)
        if as_json:
            emit(to_answer(problem, rows, best))
        else:
            show(benchmark_table(rows, best))


@contextmanager
def _progress(planners: int) -> Iterator[Callable[[Sequence[str]], Iterable[str]]]:
    """A progress bar on a terminal, first of the search of the optimum; goes through names of planners, and shows which
    one plans."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("certified optimum", total=planners)

        def go_through(names: Sequence[str]) -> Iterator[str]:
            for number, name in enumerate(names):
                bar.update(task, description=name, completed=number)
                yield name
            bar.update(task, completed=planners)

        yield go_through
