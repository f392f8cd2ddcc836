"""``meshcast plan``: what published planners propose for a job, and the league table of their forecasts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.cli.console import AsJson, answering, emit

if TYPE_CHECKING:
    from rich.table import Table

    from experiments.planning.pricing.league import LeagueRow


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
    as_json: AsJson = False,
) -> None:
    """Ask published planners for plans of a job, and forecast each."""
    with answering(as_json):
        from experiments.pages.forecast import show
        from experiments.planning.pricing.league import choose_planners, rank_proposals, to_answer
        from experiments.planning.pricing.mixed import open_problem
        from experiments.planning.problem import SearchBudget

        names = choose_planners(planners)
        problem = open_problem(job)
        rows = rank_proposals(problem, names, SearchBudget(seconds, steps))
        if as_json:
            emit(to_answer(problem, rows))
        else:
            show(_league_table(rows))


def _league_table(rows: list[LeagueRow]) -> Table:
    """A row for every planner: forecast, memory, its own objective, what it has proven, CPU time."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from experiments.planning.planner import find_planner
    from hardware.errors import escape_controls

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("planner")
    for head in ("step s", "GiB", "objective s", "proven within", "CPU s"):
        table.add_column(head, justify="right")
    for row in rows:
        if row.proposal is None or row.forecast is None:
            table.add_row(row.name, Text("refused"), "", "", "", f"{row.cpu_s:.1f}")
            continue
        proof = row.proposal.proof
        memory = f"{row.forecast.peak_device / 2**30:.1f}" + ("" if row.forecast.fits else " too large")
        objective = "-" if find_planner(row.name).unit != "s" else f"{row.proposal.value:.4g}"
        proven = f"{proof.gap:.2%}" if proof else "-"
        cells = (f"{row.forecast.step_time:.4g}", memory, objective, proven, f"{row.cpu_s:.1f}")
        table.add_row(row.name, *cells)
    if refused := [escape_controls(f"{row.name}: {row.refused}") for row in rows if row.refused]:
        table.caption = Text("\n".join(refused))
        table.caption_justify = "left"
    return table
