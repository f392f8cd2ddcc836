"""The certified search over the fields that a planner leaves open, where its space is made of fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from meshcast.experiments.planning.clock import PATIENCE, OutOfTime, seconds_left
from meshcast.experiments.planning.planner import SpaceOptimum
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.plan_search import CountInterrupted, PlanSearch
from meshcast.experiments.search.frontier.workers import run_search
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_search
from meshcast.hardware.errors import PlanError


def search_space(
    problem: JobProblem, plan: Mapping[str, Any], micro: Any, known: float, where: Sequence[str] = ()
) -> SpaceOptimum | None:
    """Returns the shortest step of plans that fit; None if there is no search of them.

    plan: fields with a value, several, or ``auto``. micro: the same for sequences of a micro-batch of a rank.
    known: step of a plan of the space that is known, which may have a partition that no search tries [s].
    where: constraints of the search.
    """
    batch = {"global": problem.sequences, "micro": micro}
    stated = problem.job_of({"plan": dict(plan), "batch": batch})
    try:
        search = open_search(stated, limits=SearchOptions(where=tuple(where)).limits, top=1, base=problem.job.folder)
        proof = search_in_time(search, 1, seconds_left())
    except PlanError:
        return None
    step = min(known, search.best[0].forecast.step_time if search.best else known)
    return SpaceOptimum(step * (1 - proof.gap), "search", forecast=True)


def search_in_time(search: PlanSearch, workers: int, seconds: float) -> Certificate:
    """Runs a search, which after some CPU time ends with the best plan so far and the gap that is proven by then.

    seconds: CPU time of all its processes [s]. workers: number of processes.
    Raises OutOfTime if it knows no plan that fits at `PATIENCE` times as much, KeyboardInterrupt for Ctrl-C.
    """
    ended = False

    def watch(proof: Certificate) -> None:
        nonlocal ended
        known = not proof.counting and math.isfinite(proof.step)
        if not ended and proof.cpu > seconds * (1 if known else PATIENCE):
            ended = True
            raise KeyboardInterrupt  # ends the search, as Ctrl-C does

    try:
        proof = run_search(search, workers, watch)
    except CountInterrupted:
        if not ended:
            raise
        raise OutOfTime(f"its plans are not counted after {PATIENCE * seconds:g} s of CPU time") from None
    if not proof.complete and not ended:
        raise KeyboardInterrupt
    if not proof.complete and not search.best:
        raise OutOfTime(f"no plan that fits is known after {PATIENCE * seconds:g} s of CPU time")
    return proof
