"""The benchmark table as plain data, which ``plan --json`` prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum
from meshcast.experiments.planning.benchmark.rows import BenchmarkRow
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.hardware.errors import PlanError
from meshcast.hardware.units import GIB

METHODS = {
    **dict.fromkeys(("elimination", "frontier tracking", "pruned elimination"), "elimination"),
    **dict.fromkeys(("integer program", "branch and bound"), "ILP"),
    **dict.fromkeys(("enumeration of its space", "simulation of every plan"), "enumeration"),
    "bound of the latency": "bound",
    "elimination, some conversions free": "bound",
    "dynamic programming without messages": "bound",
    "search": "search",
    "one plan": "one plan",
}


def name_method(method: str) -> str:
    """Returns a short word for the method of the optimum of a space; all others are dynamic programs."""
    return METHODS.get(method, "DP")


def to_answer(
    problem: JobProblem, rows: Sequence[BenchmarkRow], optimum: CertifiedOptimum | PlanError | None = None
) -> dict[str, Any]:
    """Returns the rows, best first, and the certified optimum."""
    answer: dict[str, Any] = {"rows": [_row_answer(problem, row) for row in rows]}
    if isinstance(optimum, PlanError):
        answer["certificate"] = {"refused": optimum.to_dict()}
    elif optimum is not None:
        answer["certificate"] = optimum.to_dict()
    return answer


def _row_answer(problem: JobProblem, row: BenchmarkRow) -> dict[str, Any]:
    answer: dict[str, Any] = {"planner": row.name, "mode": problem.mode, "cpu_s": row.cpu_s, "plan": None}
    if row.proposal is None:
        return answer | {"executable": str(row.refused), "refused": row.refused.to_dict() if row.refused else None}
    proof, report, space = row.proposal.proof, row.report, row.space
    reason = "" if row.fits else "it does not fit in memory"
    if report is None:
        reason = row.not_executable or str(row.refused)
    answer |= {
        "objective": row.proposal.value,
        "unit": find_planner(row.name).unit,
        "evaluations": row.proposal.visited,
        "proven_gap": proof.gap if proof and math.isfinite(proof.gap) else None,
        "executable": reason or True,
        "step_time_s": report.step_time if report else None,
        "interval_90_s": [*report.interval_90] if report else None,
        "peak_device_gib": report.peak_device / GIB if report else None,
        "regret": row.regret,
        "regret_restricted": row.own_regret,
        "space_optimum": space._asdict() if space else None,
        "outside": [*row.outside],
    }
    return answer | ({} if row.not_executable else {"plan": problem.job_of(row.proposal.plan)})
