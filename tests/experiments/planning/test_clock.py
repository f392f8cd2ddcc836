"""The CPU time of planners: each ends when it is over, with the best plan so far or refused."""

from __future__ import annotations

import math
from functools import cache

import pytest

from meshcast.experiments.planning.benchmark.optimum import find_optimum
from meshcast.experiments.planning.benchmark.rows import planners_of_jobs
from meshcast.experiments.planning.clock import OutOfTime, check_time, is_over, limiting_time, seconds_left
from meshcast.experiments.planning.cores import ilp
from meshcast.experiments.planning.planner import find_planner
from meshcast.experiments.planning.pricing import space_search
from meshcast.experiments.planning.pricing.job import JobProblem
from meshcast.experiments.planning.pricing.space_search import search_in_time
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.experiments.search.search_job import open_search
from meshcast.hardware.errors import PlanError
from tests.draws import drawn

JOB = {
    "model": {"preset": "gpt2-124m", "layers": 1},
    "cluster": {"node": "dgx-h100", "nodes": 1, "gpus": 4},
    "batch": {"global": 8, "micro": 2},
    "plan": {"tp": 2},
}

AT_ONCE = {"gspmd", "mesh-tensorflow", "partir"}
"""Planners that complete one plan from the layouts of a few tensors, once the table is priced."""

problem = cache(lambda: JobProblem(JOB))


@pytest.mark.parametrize("name", drawn(planners_of_jobs(), keep=2))
def test_no_planner_goes_on_when_its_time_is_over(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where all prices are known, so that the search alone takes time."""
    planner = find_planner(name)()
    monkeypatch.setattr(ilp, "seconds_left", lambda: 0.2)  # a solver looks at a clock of its own
    try:
        whole = planner.plan(problem(), SearchBudget(steps=200))
    except (OutOfTime, PlanError):
        pytest.skip("it has no plan of this job")
    try:
        cut = planner.plan(problem(), SearchBudget(seconds=0.0, steps=200))
    except (OutOfTime, PlanError):
        return
    assert cut.visited < whole.visited or name in AT_ONCE


def test_the_search_of_the_optimum_ends_with_its_time() -> None:
    refused = find_optimum(JobProblem(JOB), SearchBudget(seconds=0.0))
    assert isinstance(refused, PlanError) and "0 s of CPU time" in refused.rule and "--seconds" in refused.remedy


def test_a_search_out_of_time_has_a_plan_and_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Ctrl-C is no end of its time."""
    search = open_search({**JOB, "plan": {"tp": "auto", "recompute": "auto"}}, top=1)
    monkeypatch.setattr(space_search, "PATIENCE", math.inf)
    proof = search_in_time(search, 1, 1e-9)
    assert not proof.complete and search.best and 0 < proof.gap < 1
    monkeypatch.setattr(space_search, "run_search", lambda *_: proof)
    with pytest.raises(KeyboardInterrupt):
        search_in_time(search, 1, 1e9)


def test_a_limit_within_another_ends_no_later() -> None:
    with limiting_time(1e-9), limiting_time(1e9):
        assert is_over() and seconds_left() == 0
        with pytest.raises(OutOfTime, match="2e"):
            check_time()
    assert seconds_left() == math.inf
