"""The league table: what named planners propose for one job, and what the engine says to it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from experiments.planning.planner import Planner, Proposal, find_planner, planner_names
from experiments.planning.pricing.job import JobProblem
from experiments.planning.problem import SearchBudget
from experiments.search.find import search
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


class CertifiedOptimum(NamedTuple):
    """The best plan of `meshcast search` with all fields of a plan open, on the cluster and batch of a job.

    step_time: of the plan; infinite if none fits [s]. gap: how much faster another plan of the space can be at most.
    plans: of the space. cpu_s: CPU time of the search [s]. plan: values of the fields that were open.
    """

    step_time: float
    gap: float
    plans: int
    cpu_s: float
    plan: dict[str, Any]


def find_optimum(problem: JobProblem) -> CertifiedOptimum | PlanError:
    """The certified optimum of a job, or why there is no search of it."""
    stated = {**problem.job_of({"plan": {}, "batch": {"global": problem.sequences}}), "plan": "auto"}
    try:
        unlike = len(problem.job.cluster.kinds) > 1
        found = search(stated, top=1, unlike=unlike, base=problem.job.folder)
    except PlanError as error:
        return error
    best, proof = found.best[0] if found.best else None, found.certificate
    step, plan = (best.report.step_time, dict(best.changes)) if best else (math.inf, {})
    return CertifiedOptimum(step, proof.gap, proof.plans, proof.cpu, plan)


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


def rank_proposals(
    problem: JobProblem,
    names: Sequence[str],
    budget: SearchBudget,
    watch: Callable[[Sequence[str]], Iterable[str]] = lambda names: names,
) -> list[LeagueRow]:
    """The proposals of planners, best first. watch: goes through their names, for example with a progress bar."""
    return sorted(_propose(problem, watch(names), budget), key=lambda row: row.rank)


def _propose(problem: JobProblem, names: Iterable[str], budget: SearchBudget) -> Iterator[LeagueRow]:
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


def to_answer(
    problem: JobProblem, rows: Sequence[LeagueRow], optimum: CertifiedOptimum | PlanError | None = None
) -> dict[str, Any]:
    """The league table as plain data: for every planner its job, its own objective, the forecast, and its regret: how
    much slower than the certified optimum it is."""
    found: dict[str, Any] = {"plans": [_row_answer(problem, row, optimum) for row in rows]}
    if isinstance(optimum, PlanError):
        found["optimum"] = {"refused": optimum.to_dict()}
    elif optimum is not None:
        step = optimum.step_time if math.isfinite(optimum.step_time) else None
        found["optimum"] = {**optimum._asdict(), "step_time_s": step}
        del found["optimum"]["step_time"]
    return found


def regret(row: LeagueRow, optimum: CertifiedOptimum | PlanError | None) -> float | None:
    """How much slower a plan that fits is than the certified optimum, as a share of it; None where either is unknown.
    Negative: the plan lies outside of the space that was searched."""
    if row.forecast is None or not row.forecast.fits or not isinstance(optimum, CertifiedOptimum):
        return None
    return row.forecast.step_time / optimum.step_time - 1 if math.isfinite(optimum.step_time) else None


def _row_answer(problem: JobProblem, row: LeagueRow, optimum: CertifiedOptimum | PlanError | None) -> dict[str, Any]:
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
        "regret": regret(row, optimum),
        "job": problem.job_of(row.proposal.plan),
    }
