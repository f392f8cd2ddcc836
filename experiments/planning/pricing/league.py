"""The league table: what named planners propose for one job, and what the engine says to it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.planning.planner import Planner, Proposal, find_planner, planner_names
from experiments.planning.pricing.job import JobProblem
from experiments.planning.problem import SearchBudget
from hardware.errors import PlanError
from simulator.forecast.step import StepAndMemory


@dataclass(frozen=True)
class LeagueRow:
    """The proposal of one planner.

    name: of the planner. cpu_s: CPU time of its plan, pricing included [s].
    proposal, forecast: its plan, and the engine's step of it; None where the planner refused the job.
    refused: why.
    """

    name: str
    cpu_s: float
    proposal: Proposal | None = None
    forecast: StepAndMemory | None = None
    refused: PlanError | None = None

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Fitting plans first, the fastest first of all; refusals last."""
        step = self.forecast.step_time if self.forecast else math.inf
        return self.forecast is None, not (self.forecast and self.forecast.fits), step


def planners_of_jobs() -> list[str]:
    """The planners that propose plans of jobs."""
    return [name for name in planner_names() if "ours" in find_planner(name).modes]


def choose_planners(given: str) -> list[str]:
    """The planners of a list with commas; ``all``: those that propose plans of jobs.

    Raises PlanError for a name without a planner, and for planners of profiles alone.
    """
    names = planners_of_jobs() if given == "all" else [name.strip() for name in given.split(",")]
    for name in names:
        if "ours" not in find_planner(name).modes:
            remedy = f"Choose some of {', '.join(planners_of_jobs())}"
            raise PlanError("--with", "it solves profiles of its paper, not jobs", remedy, name)
    return names


def rank_proposals(problem: JobProblem, names: Sequence[str], budget: SearchBudget) -> list[LeagueRow]:
    """The proposals of planners, best first."""
    return sorted(_propose(problem, names, budget), key=lambda row: row.rank)


def _propose(problem: JobProblem, names: Sequence[str], budget: SearchBudget) -> Iterator[LeagueRow]:
    for name in names:
        begin = time.process_time()
        planner: Planner = find_planner(name)()
        try:
            proposal = planner.plan(problem, budget)
        except PlanError as error:
            yield LeagueRow(name, time.process_time() - begin, refused=error)
            continue
        cpu = time.process_time() - begin
        yield LeagueRow(name, cpu, proposal, problem.forecast(proposal.plan))


def to_answer(problem: JobProblem, rows: Sequence[LeagueRow]) -> dict[str, Any]:
    """The league table as plain data: for every planner its job, its own objective and the forecast."""
    return {"plans": [_row_answer(problem, row) for row in rows]}


def _row_answer(problem: JobProblem, row: LeagueRow) -> dict[str, Any]:
    found: dict[str, Any] = {"planner": row.name, "cpu_s": row.cpu_s}
    if row.proposal is None or row.forecast is None:
        return found | {"refused": row.refused.to_dict() if row.refused else None}
    proof = row.proposal.proof
    return found | {
        "objective_s": row.proposal.value if find_planner(row.name).unit == "s" else None,
        "visited": row.proposal.visited,
        "proven_gap": proof.gap if proof and math.isfinite(proof.gap) else None,
        "step_time_s": row.forecast.step_time,
        "peak_device_gib": row.forecast.peak_device / 2**30,
        "status": "fits" if row.forecast.fits else "does-not-fit",
        "job": problem.job_of(row.proposal.plan),
    }
