"""A search of a job that states a plan, whose fields are opened by changes, begins near that plan; a search that takes
long to bound its groups begins near plans that need little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.frontier.near_plans import ENOUGH
from meshcast.experiments.search.frontier.workers import run_on_workers
from meshcast.experiments.search.search_job import open_search
from tests.experiments.search.spaces import TINY

STATED = {**TINY, "batch": {**TINY["batch"], "micro": 2}, "plan": {"tp": 2, "zero": 1}}
CHANGES = ("plan.tp=[1, 2, 4]", "plan.pp=[1, 2, 4]", "plan.zero=auto", "batch.micro=[1, 2]")


@pytest.fixture
def search(tmp_path: Path) -> Search:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(STATED), "utf-8")
    return open_search(tmp_path / "job.yaml", changes=CHANGES)


def account_for(certificate: Certificate) -> int:
    """The plans that a certificate decides on, or leaves open."""
    return certificate.decided + certificate.open


def interrupt(certificate: Certificate) -> None:
    """Ends a search once its plans are counted."""
    if not certificate.counting:
        raise KeyboardInterrupt


def test_a_plan_that_the_search_does_not_have_has_neighbours(tmp_path: Path) -> None:
    """A search recomputes no list of modules by itself."""
    plan = {"tp": 2, "zero": 1, "recompute": ["mlp"]}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**STATED, "plan": plan}), "utf-8")
    search = open_search(tmp_path / "job.yaml", changes=(*CHANGES, "plan.recompute=auto"))
    run_on_workers(search, 1, interrupt)
    assert len(search.best) == ENOUGH


def test_it_has_plans_when_it_is_interrupted_at_once(search: Search) -> None:
    certificate = run_on_workers(search, 1, interrupt)
    plans = [plan.changes for plan in search.best]
    assert not certificate.complete and len(plans) == certificate.exact == ENOUGH
    assert any(plan.items() >= {"plan.tp": 2, "plan.pp": 1, "plan.zero": 1, "batch.micro": 2}.items() for plan in plans)
    assert account_for(certificate) == certificate.plans
    assert certificate.step == min(plan.forecast.step_time for plan in search.best)


@pytest.mark.parametrize("workers", [1, 2])
def test_it_finds_what_one_without_a_plan_finds(search: Search, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshcast.experiments.search.frontier.workers.PLANS_OF_A_PROCESS", 1)
    certificate = run_on_workers(search, workers, lambda _: None)
    without = open_search(STATED | {"plan": {"tp": [1, 2, 4], "pp": [1, 2, 4], "zero": "auto"}, "batch": TINY["batch"]})
    assert search.start is not None and without.start is None
    run_on_workers(without, 1, lambda _: None)
    assert [plan.values for plan in search.best] == [plan.values for plan in without.best]
    assert account_for(certificate) == certificate.plans == without.certificate.plans
    assert len({str(plan.changes) for plan in search.forecasts}) == len(search.forecasts) == certificate.exact


def test_a_large_space_begins_with_plans_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted before any group is bounded it has plans; to the end it proves what another search does."""
    job = {**TINY, "plan": "auto"}
    without = open_search(job)
    run_on_workers(without, 1, lambda _: None)
    monkeypatch.setattr("meshcast.experiments.search.frontier.clusters.MANY_UNITS", 0)
    interrupted, whole = open_search(job), open_search(job)
    certificate = run_on_workers(interrupted, 1, interrupt)
    assert interrupted.best and not certificate.complete and account_for(certificate) == certificate.plans
    assert certificate.opened == 0 and certificate.incumbent < float("inf")
    certificate = run_on_workers(whole, 1, lambda _: None)
    assert whole.best[0].values == without.best[0].values and certificate.plans == without.certificate.plans
    assert account_for(certificate) == certificate.plans
