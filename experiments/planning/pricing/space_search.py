"""The certified search over the fields that a planner leaves open, where its space is one of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshcast.experiments.planning.planner import SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.search.find import search
from meshcast.hardware.errors import PlanError


def search_space(
    problem: JobProblem, plan: Mapping[str, Any], micro: Any, found: float, where: Sequence[str] = ()
) -> SpaceOptimum | None:
    """The shortest step of plans that fit; None if there is no search of them.

    plan: fields with a value, several, or ``auto``. micro: the same for sequences of a micro-batch of a rank.
    found: step of a plan of the space that is known, which may have a partition that no search tries [s].
    where: constraints of the search.
    """
    batch = {"global": problem.sequences, "micro": micro}
    try:
        done = search(
            problem.job_of({"plan": dict(plan), "batch": batch}), top=1, workers=1, where=where, base=problem.job.folder
        )
    except PlanError:
        return None
    step = min(found, done.best[0].report.step_time if done.best else found)
    return SpaceOptimum(step * (1 - done.certificate.gap), "search", forecast=True)
