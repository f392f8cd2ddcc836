"""A search of a job that states a plan, whose fields are opened by changes, begins near that plan; a search that takes
long to bound its groups begins near plans that need little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.near_plans import ENOUGH
from meshcast.experiments.search.frontier.workers import run_on_workers
from meshcast.experiments.search.search_job import open_search
from tests.experiments.search.spaces import TINY, interrupt_if, is_accounted

CHANGES = ("plan.tp=[1, 2, 4]", "plan.pp=[1, 2]", "plan.zero=[0, 1]", "batch.micro=[1, 2]")
AT_ONCE = interrupt_if(lambda certificate: not certificate.counting)
"""Ends a search once its plans are counted."""


def open_stated(folder: Path, *changes: str, **plan: Any) -> Search:
    job = {**TINY, "batch": {**TINY["batch"], "micro": 2}, "plan": {"tp": 2, "zero": 1, **plan}}
    (folder / "job.yaml").write_text(yaml.safe_dump(job), "utf-8")
    return open_search(folder / "job.yaml", changes=(*CHANGES, *changes))


def test_a_plan_that_the_search_does_not_have_has_neighbours(tmp_path: Path) -> None:
    """A search recomputes no list of modules by itself."""
    search = open_stated(tmp_path, "plan.recompute=auto", recompute=["mlp"])
    run_on_workers(search, 1, AT_ONCE)
    assert len(search.best) == ENOUGH


def test_it_has_plans_when_it_is_interrupted_at_once(tmp_path: Path) -> None:
    search = open_stated(tmp_path)
    certificate = run_on_workers(search, 1, AT_ONCE)
    plans = [plan.changes for plan in search.best]
    assert not certificate.complete and len(plans) == certificate.exact == ENOUGH and is_accounted(certificate)
    assert any(plan.items() >= {"plan.tp": 2, "plan.pp": 1, "plan.zero": 1, "batch.micro": 2}.items() for plan in plans)
    assert certificate.step == min(plan.forecast.step_time for plan in search.best)


def test_plans_near_the_start_have_the_energy_that_is_searched_for(tmp_path: Path) -> None:
    """With an energy of 0 they would be better than all others."""
    open_stated(tmp_path)
    search = open_search(tmp_path / "job.yaml", changes=CHANGES, objectives=("energy",))
    certificate = run_on_workers(search, 1, AT_ONCE)
    assert search.best and certificate.incumbent == min(plan.forecast.joules for plan in search.best) > 0.0


@pytest.mark.parametrize("workers", [1, 2])
def test_it_finds_what_one_without_a_plan_finds(tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.experiments.search.frontier.workers.PLANS_OF_A_PROCESS", 1)
    search = open_stated(tmp_path)
    certificate = run_on_workers(search, workers, lambda _: None)
    without = open_search({**TINY, "plan": {"tp": [1, 2, 4], "pp": [1, 2], "zero": [0, 1]}})
    without.run()
    assert search.start is not None and without.start is None
    best = [plan.values for plan in without.best]  # plans near the start may be slower than what is kept otherwise
    assert [plan.values for plan in search.best[: len(best)]] == best
    assert is_accounted(certificate) and certificate.plans == without.certificate.plans
    assert len({str(plan.changes) for plan in search.forecasts}) == len(search.forecasts) == certificate.exact


def test_a_large_space_begins_with_plans_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before any group is bounded it has plans; to the end it proves what another search does."""
    without = open_search(TINY)
    without.run()
    monkeypatch.setattr("meshcast.experiments.search.frontier.clusters.MANY_UNITS", 0)
    interrupted, whole = open_search(TINY), open_search(TINY)
    certificate = run_on_workers(interrupted, 1, AT_ONCE)
    assert interrupted.best and not certificate.complete and is_accounted(certificate)
    assert certificate.opened == 0 and certificate.incumbent < float("inf")
    certificate = run_on_workers(whole, 1, lambda _: None)
    assert whole.best[0].values == without.best[0].values and certificate.plans == without.certificate.plans
    assert is_accounted(certificate)
