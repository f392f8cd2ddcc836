"""The certified optimum of a job, which no planner may beat: the best plan of a search with all fields open."""

from __future__ import annotations

import math
from typing import Any

from meshcast.experiments.planning.clock import OutOfTime
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_in_time
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.plan_search import ROUNDING, PlanSearch
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_heterogeneous, open_search
from meshcast.experiments.search.space.membership import list_outside
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.workers import count_cores
from meshcast.simulator.loading.load import load_job

WITHIN = 0.01
"""Gap at which the search of the optimum may end: regrets are known as well as that."""

SHARE = 3.0
"""CPU time of the search of the optimum, in those of a planner."""


@dataclass(frozen=True)
class CertifiedOptimum:
    """The best plan of `meshcast search` with all fields of a plan open, on the cluster and batch of a job.

    step_time: of the plan; infinite if none fits [s].
    gap: how much faster another plan of the space can be at most.
    plans: of the space.
    cpu_s: CPU time of the search [s].
    plan: values of the fields that were open.
    heterogeneous: whether stages and replicas of different degrees were searched.
    done: the search that has run; None for a search of heterogeneous plans.
    """

    step_time: float
    gap: float
    plans: int
    cpu_s: float
    plan: dict[str, Any]
    heterogeneous: bool = False
    done: Search | None = None

    @property
    def shortest(self) -> float:
        """No plan of the space has a shorter step [s]."""
        return self.step_time * (1 - self.gap)

    def to_dict(self) -> dict[str, Any]:
        """Returns the certificate in the answer of ``plan --json``."""
        names = ("gap", "plans", "cpu_s", "plan", "heterogeneous")
        step = self.step_time if math.isfinite(self.step_time) else None
        return {"step_time_s": step, **{name: getattr(self, name) for name in names}}


def find_optimum(problem: JobProblem, budget: SearchBudget, any_program: bool = False) -> CertifiedOptimum | PlanError:
    """Returns the certified optimum of a job, or why there is none.

    budget: of a planner; in `SHARE` times its CPU time the gap is as small as it can be proven.
    any_program: see `experiments.search.search_job.search`.
    """
    stated = {**problem.job_of({"plan": {}, "batch": {"global": problem.sequences}}), "plan": "auto"}
    folder, risk = problem.job.folder, problem.memory_risk
    try:
        search: PlanSearch
        if len(problem.job.cluster.kinds) > 1:
            search = open_heterogeneous(
                stated, WITHIN, 1, ("time",), SearchOptions(memory_risk=risk).limits, base=folder
            )
        else:
            limits = SearchOptions(any_program=any_program, memory_risk=risk).limits
            search = open_search(stated, within=WITHIN, top=1, limits=limits, base=folder)
        proof = search_in_time(search, count_cores(), SHARE * budget.seconds)
    except OutOfTime as error:
        return PlanError("certified optimum", str(error), "Give it more time with --seconds")
    except PlanError as error:
        return error
    changes = search.best[0].changes if search.best else None
    step = proof.step if changes is not None else math.inf
    done = search if isinstance(search, Search) else None
    return CertifiedOptimum(step, proof.gap, proof.plans, proof.cpu, dict(changes or {}), done is None, done)


def explain_faster(problem: JobProblem, plan: dict[str, Any], step: float, optimum: CertifiedOptimum) -> list[str]:
    """Returns the fields of a plan, faster than the certified optimum, that are outside of the space; empty if it is
    not faster.

    plan: as a planner proposes it. step: of its forecast [s].
    Raises PlanError if the space holds the plan: nothing is proven then, a defect of meshcast.
    """
    if step >= optimum.shortest * (1 - ROUNDING):
        return []
    if optimum.done is None:
        return ["plan"]
    job = load_job(problem.job_of(plan), base=problem.job.folder)
    if job.cluster.gpus != problem.gpus:
        return ["cluster.gpus"]
    outside = list_outside(optimum.done.space, read_short_form(job, optimum.done.space.named))
    if not outside:
        rule = f"a plan of the space takes {step:.6g} s, and none should take less than {optimum.shortest:.6g} s"
        raise PlanError(f"problem {problem.name}", rule, "Please report it with the job: nothing is proven", plan)
    return [place.field for place in outside]
