"""Searches for other objectives than the step time, over several clusters, and on several processes."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

import meshcast
from meshcast.experiments.search.frontier import workers
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.objectives import ClusterUse, Incumbents
from meshcast.experiments.search.frontier.workers import run_on_workers, share_groups
from meshcast.experiments.search.search_job import open_search
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.step import StepAndMemory
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY, every_point, interrupt_if, is_accounted

ONE = {"global": 16, "micro": 1, "sequence": 2048}
MORE = {**TINY, "batch": ONE, "plan": {"tp": [1, 4], "pp": [1, 2], "zero": [0, 1], "recompute": ["none", "full"]}}
SIZES: dict[str, Any] = {
    **TINY,
    "batch": ONE,
    "cluster": ["dgx-h100:1", "dgx-h100:2", "dgx-a100:1"],
    "plan": {"tp": [1, 2], "zero": [0, 1]},
}


@cache
def _forecast_all(job: str) -> list[tuple[int, StepAndMemory]]:
    clusters = open_search(json.loads(job)).clusters
    points = [(cluster.use.gpus, step) for cluster in clusters for _, step in every_point(cluster.space)]
    return [(gpus, step) for gpus, step in points if step is not None and step.fits]


def fitting(job: dict[str, Any]) -> list[tuple[int, StepAndMemory]]:
    """Returns GPUs and forecast of every plan of a job that fits."""
    return _forecast_all(json.dumps(job))


def front_of(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points that no other one is at least as good as in both."""
    return sorted({a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)})


def test_the_front_is_that_of_brute_force() -> None:
    search = open_search(MORE, objectives=("time", "memory"))
    certificate = search.run()
    front = [(plan.forecast.step_time, plan.forecast.peak_device) for plan in search.best]
    expected = np.array(front_of([(step.step_time, step.peak_device) for _, step in fitting(MORE)]))
    assert len(front) > 2 and np.array(front) == pytest.approx(expected, rel=1e-12)
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    assert is_accounted(certificate)


def test_a_front_within_a_gap_is_no_further_from_any_plan() -> None:
    search = open_search(MORE, within=0.1, objectives=("time", "memory"))
    certificate = search.run()
    front = np.array([plan.values for plan in search.best])
    for _, step in fitting(MORE):
        better = 1 - np.array([step.step_time, step.peak_device]) / front
        assert better.max(axis=1).min() <= certificate.gap + 1e-12
    assert 0 < certificate.gap <= 0.1


def test_the_plan_with_the_least_memory_is_found() -> None:
    search = open_search(MORE, objectives=("memory",))
    certificate = search.run()
    assert search.best[0].forecast.peak_device == min(step.peak_device for _, step in fitting(MORE))
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    assert certificate.incumbent == search.best[0].forecast.peak_device
    assert certificate.step == search.best[0].forecast.step_time


def test_the_plan_with_the_least_energy_is_found() -> None:
    """On clusters of several sizes and kinds, against the energy of every plan; bounds are below all of them."""
    search = open_search(SIZES, top=3, objectives=("energy",))
    certificate = search.run()
    joules = list[float]()
    for cluster in search.clusters:
        for _, step in every_point(cluster.space):
            assert step is None or 0 < cluster.use.energy.bound(step.step_time) <= step.joules
            joules += [step.joules] if step is not None and step.fits else []
    assert [plan.forecast.joules for plan in search.best] == pytest.approx(sorted(joules)[:3], rel=1e-12)
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    assert certificate.incumbent == search.best[0].forecast.joules


@pytest.mark.parametrize("objective", ["time", "tokens", "cost"])
def test_clusters_are_compared(objective: str) -> None:
    search = open_search(SIZES, top=1, objectives=(objective,))
    certificate = search.run()
    _, best = min(fitting(SIZES), key=lambda plan: plan[1].step_time * (1 if objective == "time" else plan[0]))
    assert search.best[0].forecast == replace(best, joules=0.0) and certificate.gap == 0
    assert search.best[0].changes["cluster"] == ("dgx-h100:2" if objective == "time" else "dgx-h100:1")
    assert certificate.fields["cluster"] == SIZES["cluster"]
    assert certificate.plans == sum(cluster.plans for cluster in search.clusters)


def test_the_front_of_time_and_cost_has_plans_of_both_sizes() -> None:
    result = meshcast.search(SIZES, objective=["cost", "time"], workers=1)
    assert {plan.changes["cluster"] for plan in result.best} == {"dgx-h100:1", "dgx-h100:2"}
    answer = result.to_dict()
    assert answer["front"] == answer["best"] and answer["certificate"]["objectives"] == ["cost", "time"]
    assert answer["best"][0]["gpu_hours_per_step"] < answer["best"][-1]["gpu_hours_per_step"]


def test_the_number_of_gpus_is_limited_by_a_constraint() -> None:
    result = meshcast.search(SIZES, where=["gpus <= 8"], top=1)
    assert result.best[0].changes["cluster"] == "dgx-h100:1" and result.certificate.excluded["where"] > 0


def test_groups_have_a_bound_of_memory_before_they_are_opened() -> None:
    for job in (MORE, {**MORE, "model": {"preset": "mixtral-8x7b", "layers": 4}, "plan": {"ep": [1, 2], "pp": [1, 2]}}):
        (cluster,) = open_search(job).clusters
        for group in cluster.space.groups():
            opened, _ = cluster.groups.open(group)
            fits = cluster.groups._fit(opened) if opened is not None else None
            assert cluster.groups.least_memory(group) > 0
            assert fits is None or cluster.groups.least_memory(group) <= fits.nbytes.min()


@pytest.mark.slow
def test_a_front_that_is_interrupted_early_has_a_gap() -> None:
    plan = {"tp": [1, 8, 16, 32], "pp": [1, 2], "recompute": ["none", "full"]}
    job = {**MORE, "cluster": "dgx-h100:4", "batch": {"global": 64, "micro": [1, 2], "sequence": 2048}, "plan": plan}
    certificate = open_search(job, objectives=("time", "memory")).run(interrupt_if(lambda one: one.exact > 0))
    assert not certificate.complete and certificate.exact == 1 and certificate.opened < certificate.groups
    assert 0 < certificate.gap < 0.9


# ------------------------------------------------------------------------------------------- processes


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small spaces are searched by several processes, too."""
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)


@pytest.mark.slow
@pytest.mark.parametrize("objectives", [("time", "memory"), ("time",)])
def test_processes_find_what_one_finds(several: None, objectives: tuple[str, ...]) -> None:
    alone, shared = (open_search(MORE, objectives=objectives) for _ in range(2))
    one, found = alone.run(), run_on_workers(shared, 3, lambda _: None)
    assert [plan.values for plan in alone.best] == [plan.values for plan in shared.best]
    assert found.complete and found.gap == 0 and found.plans == one.plans and is_accounted(found)
    assert found.exact == len(found.ratios) == len(shared.forecasts)
    assert found.step == shared.best[0].forecast.step_time == one.step


def test_an_interrupted_search_on_processes_says_what_is_proven(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers._Link, "EVERY", 0.0)
    search = open_search(MORE)
    certificate = run_on_workers(search, 2, interrupt_if(lambda certificate: certificate.exact > 0))
    assert not certificate.complete and certificate.exact == len(search.forecasts) >= 1
    best = min(step.step_time for _, step in fitting(MORE))
    assert min(certificate.open_bound, certificate.incumbent) <= best
    assert certificate.open > 0 and is_accounted(certificate)


def test_processes_hear_an_interruption_at_once(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "_enter", lambda self, groups: time.sleep(100))
    began = time.monotonic()
    certificate = run_on_workers(open_search(MORE), 2, interrupt_if(lambda certificate: not certificate.counting))
    assert time.monotonic() - began < 50
    assert certificate.gap == 1 and certificate.open == certificate.plans and not certificate.complete


def test_an_interruption_lets_a_message_end() -> None:
    ours, theirs = Pipe()
    previous = signal.getsignal(signal.SIGINT)
    try:
        link = workers._Link(theirs)
        with pytest.raises(KeyboardInterrupt), link.hearing_interrupts(), link._passing_whole():
            os.kill(os.getpid(), signal.SIGINT)
            theirs.send("whole")
        os.kill(os.getpid(), signal.SIGINT)  # heard already
        assert ours.recv() == "whole"
    finally:
        signal.signal(signal.SIGINT, previous)


def test_an_error_on_a_process_is_the_error_of_the_search(several: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *_: Any) -> None:
        raise PlanError("here", "a rule", "A remedy")

    monkeypatch.setattr(Search, "_forecast", fail)
    with pytest.raises(PlanError, match=r"here: a rule\. A remedy"):
        run_on_workers(open_search(TINY), 2, lambda _: None)


def test_shares_of_processes_hold_every_group_once() -> None:
    search = open_search(MORE)
    search.count()
    shares = share_groups(search, 2)
    assert len(shares) == 2 and sum(map(len, shares)) == search.certificate.groups
    assert not {group.tp for _, group in shares[0]} & {group.tp for _, group in shares[1]}


def test_plans_so_far_decide_which_bounds_are_of_interest() -> None:
    one = Incumbents(("tokens",), top=2, within=0.1)
    assert one.limit == np.inf and one.bounds(2.0, 5.0, ClusterUse(8)) == (16.0,)
    one.add((16.0,))
    assert one.limit == pytest.approx(16 * 1.05 * 0.9)
    one.add((16.1,))
    assert one.limit == pytest.approx(16.1 * 0.9)
    two = Incumbents(("memory", "time"))
    assert two.bounds(2.0, 5.0, ClusterUse(8)) == (2.0, 5.0) and not two.by_memory
    assert not two.dominates([np.ones(1), np.ones(1)])[0] and two.gap(np.ones((1, 2))) == 1.0
    for values in ((2.0, 5.0), (3.0, 4.0), (3.0, 6.0)):
        two.add(values)
    assert two.is_kept((3.0, 4.0)) and not two.is_kept((3.0, 6.0)) and two.limit == np.inf
    assert two.dominates([*np.array([[1.9, 2.0, 2.5, 3.0], [9.0, 5.0, 4.9, 4.0]])]).tolist() == [0, 1, 0, 1]
    assert two.gap(np.array([[1.9, 9.0], [2.5, 4.9]])) == pytest.approx(0.05)


# ------------------------------------------------------------------------------------------- the command


def test_the_page_and_the_rows_hold_the_front(tmp_path: Path) -> None:
    job, plot, rows = tmp_path / "job.yaml", tmp_path / "front.png", tmp_path / "plans.parquet"
    job.write_text(yaml.safe_dump({**SIZES, "run": {"tokens": 1e9, "price_per_gpu_hour": 2.0}}))
    page = " ".join(run("search", job, "--objective", "cost,time", "--plot", plot, "--out", rows).stdout.split())
    proof = "no plan of the space that fits with 95 % is better in both than every plan of the front"
    assert all(words in page for words in ("cost", proof, "dgx-h100:2"))
    assert plot.exists()
    about = json.loads(pq.read_schema(rows).metadata[b"meshcast"])
    assert about["job"]["cluster"] == SIZES["cluster"] == about["certificate"]["space"]["fields"]["cluster"]


def test_pages_of_other_objectives(tmp_path: Path) -> None:
    (job := tmp_path / "job.yaml").write_text(
        yaml.safe_dump({**TINY, "batch": ONE, "plan": {"tp": [1, 2], "recompute": ["none", "full"]}})
    )
    answer = json.loads(run("search", job, "--objective", "memory", "--top", "2", "--json").stdout)
    assert answer["front"] is None and answer["certificate"]["open_bound_s"] is None
    assert "GPU-s" in run("search", job, "--objective", "tokens", "--top", "2").stdout
    least = run("search", job, "--objective", "memory", "--top", "3").stdout
    assert "more memory, and time" in least and "needs less memory in the model" in least
