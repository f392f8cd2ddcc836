"""``meshcast plan``: what published planners propose for a job, and the benchmark table of their forecasts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from meshcast.experiments.cli.console import (
    AsJson,
    WidthOption,
    emit_or_show,
    plan_figures,
    writing_figure,
)
from meshcast.experiments.cli.launch import LaunchFileOptions, tell_launch
from meshcast.experiments.options import argument, option
from meshcast.experiments.search.options import AnyProgram, MemoryRisk, usual_risk
from meshcast.hardware.errors import PlanError
from meshcast.hardware.schemas import Field

if TYPE_CHECKING:
    from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum
    from meshcast.experiments.planning.benchmark.rows import BenchmarkRow
    from meshcast.experiments.planning.pricing.job import JobProblem
    from meshcast.experiments.render.matplotlib.style import Width


class PlanOptions(LaunchFileOptions):
    """Options of ``meshcast plan``."""

    job: Annotated[Path, argument("JOB", "A job file; of its plan only the number of micro-batches counts.")]
    planners: Annotated[
        str, option("--with", "Planners, such as alpa,optcnn; all of docs/planners.md: all.", "NAMES")
    ] = "all"
    seconds: Annotated[
        float, option("--seconds", "CPU time of a planner; three times as much of the optimum.", "S", min=0.1)
    ] = 20.0
    steps: Annotated[int, option("--steps", "Steps of searches that draw random numbers.", "N", min=1)] = 10_000
    optimum: Annotated[
        bool, option("--optimum/--no-optimum", "Search the certified optimum as well, for the regret.")
    ] = True
    memory_risk: MemoryRisk = Field(default_factory=usual_risk)
    any_program: AnyProgram = False
    plot: Annotated[str | None, option("--plot", "Draw regret against CPU time (.png, .svg, .pdf).", "FILE")] = None
    width: WidthOption = None
    as_json: AsJson = False


def plan(options: PlanOptions) -> None:
    """Asks published planners for plans of a job, and forecasts each."""
    from meshcast.experiments.planning.benchmark.answer import to_answer
    from meshcast.experiments.planning.benchmark.optimum import find_optimum
    from meshcast.experiments.planning.benchmark.page import benchmark_table
    from meshcast.experiments.planning.benchmark.rows import choose_planners, rank_proposals
    from meshcast.experiments.planning.pricing.mixed import open_problem
    from meshcast.experiments.planning.problem import SearchBudget

    files, paper = plan_figures(options.plot, options.width, ("plan",))
    names = choose_planners(options.planners)
    tell_launch(options.job, ())
    problem = open_problem(options.job, options.memory_risk)
    budget, any_program = SearchBudget(options.seconds, options.steps), options.any_program
    with _progress(len(names)) as track:
        best = find_optimum(problem, budget, any_program) if options.optimum or options.plot is not None else None
        rows = rank_proposals(problem, names, budget, best, track, any_program)
    for file in files.values():
        _draw(file, problem, rows, best, paper)
    emit_or_show(options.as_json, lambda: to_answer(problem, rows, best), lambda: benchmark_table(rows, best))


def _draw(
    file: Path,
    problem: JobProblem,
    rows: Sequence[BenchmarkRow],
    best: CertifiedOptimum | PlanError | None,
    width: Width,
) -> None:
    """Draws regret against CPU time. Raises PlanError where there is no optimum."""
    from meshcast.experiments.planning.benchmark.plot import draw

    if isinstance(best, PlanError):
        raise best
    assert best is not None  # it is searched for a plot
    with writing_figure(file):
        draw(problem, rows, best, file, width)


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
