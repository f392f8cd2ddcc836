"""``meshcast plan``: what published planners propose for a job, and the league table of their forecasts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.console import AsJson, answering, emit

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.planning.pricing.league import CertifiedOptimum, LeagueRow
    from hardware.errors import PlanError


def plan(
    job: Annotated[
        Path, typer.Argument(metavar="JOB", help="A job file; of its plan only the number of micro-batches counts.")
    ],
    planners: Annotated[
        str,
        typer.Option("--with", metavar="NAMES", help="Planners, such as alpa,optcnn; all of docs/planners.md: all."),
    ] = "all",
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.1, help="Limit of an integer program.")
    ] = 60.0,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Steps of searches that draw random numbers.")
    ] = 10_000,
    optimum: Annotated[
        bool, typer.Option("--optimum/--no-optimum", help="Search the certified optimum as well, for the regret.")
    ] = True,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw regret against CPU time (.png, .svg).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Ask published planners for plans of a job, and forecast each."""
    with answering(as_json):
        from experiments.pages.forecast import show
        from experiments.planning.pricing.league import (
            CertifiedOptimum,
            choose_planners,
            find_optimum,
            rank_proposals,
            to_answer,
        )
        from experiments.planning.pricing.mixed import open_problem
        from experiments.planning.problem import SearchBudget
        from hardware.errors import PlanError

        names = choose_planners(planners)
        problem = open_problem(job)
        best = find_optimum(problem) if optimum or plot is not None else None
        rows = rank_proposals(problem, names, SearchBudget(seconds, steps), _with_progress)
        if plot is not None:
            if not isinstance(best, CertifiedOptimum):
                raise best or PlanError("--plot", "there is no certified optimum", "Leave it out", str(plot))
            from experiments.planning.pricing.plot import draw

            draw(problem, rows, best, plot)
        if as_json:
            emit(to_answer(problem, rows, best))
        else:
            show(_league_table(rows, best))


def _with_progress(names: Sequence[str]) -> Iterable[str]:
    """The names of planners, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(names, "planners", console=console, transient=True, disable=not console.is_terminal)


def _league_table(rows: list[LeagueRow], optimum: CertifiedOptimum | PlanError | None) -> Table:
    """A row for every planner: forecast, memory, regret, its own objective, what it has proven, CPU time."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from experiments.planning.planner import find_planner
    from experiments.planning.pricing.league import CertifiedOptimum, regret
    from hardware.errors import PlanError, escape_controls

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("planner")
    for head in ("step s", "GiB", "regret", "objective s", "proven within", "CPU s"):
        table.add_column(head, justify="right")
    if isinstance(optimum, CertifiedOptimum):
        ends = f"{optimum.gap:.2%}", f"{optimum.cpu_s:.1f}"
        table.add_row("search", f"{optimum.step_time:.4g}", "", "0.0%", "", *ends, end_section=True)
    for row in rows:
        if row.proposal is None or row.forecast is None:
            table.add_row(row.name, Text("refused"), "", "", "", "", f"{row.cpu_s:.1f}")
            continue
        proof = row.proposal.proof
        memory = f"{row.forecast.peak_device / 2**30:.1f}" + ("" if row.forecast.fits else " too large")
        objective = "-" if find_planner(row.name).unit != "s" else f"{row.proposal.value:.4g}"
        proven = f"{proof.gap:.2%}" if proof else "-"
        lost = f"{value:.1%}" if (value := regret(row, optimum)) is not None else "-"
        cells = (f"{row.forecast.step_time:.4g}", memory, lost, objective, proven)
        table.add_row(row.name, *cells, f"{row.cpu_s:.1f}")
    refused = [escape_controls(f"{row.name}: {row.refused}") for row in rows if row.refused]
    refused += [escape_controls(f"search: {optimum}")] if isinstance(optimum, PlanError) else []
    if refused:
        table.caption = Text("\n".join(refused))
        table.caption_justify = "left"
    return table
