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
from tests.experiments.search.spaces import TINY, every_point

MORE = {**TINY, "plan": {"tp": [1, 2, 4], "pp": [1, 2], "zero": [0, 1], "recompute": ["none", "full"]}}
SIZES = {
    **TINY,
    "cluster": ["dgx-h100:1", "dgx-h100:2", "dgx-a100:1"],
    "plan": {"tp": [1, 2], "pp": [1, 2], "zero": [0, 1]},
}


@cache
def forecast_all(job: str) -> list[tuple[int, StepAndMemory]]:
    """GPUs and forecast of every plan of a job that fits."""
    clusters = open_search(json.loads(job)).clusters
    found = [(one.use.gpus, forecast) for one in clusters for _, forecast in every_point(one.space)]
    return [(gpus, forecast) for gpus, forecast in found if forecast is not None and forecast.fits]


def fitting(job: dict[str, Any]) -> list[tuple[int, StepAndMemory]]:
    return forecast_all(json.dumps(job))


def front_of(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one is at least as good as in both."""
    return sorted({a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points)})


def test_the_front_is_that_of_brute_force() -> None:
    found = open_search(MORE, objectives=("time", "memory"))
    certificate = found.run()
    points = [(one.step_time, one.peak_device) for _, one in fitting(MORE)]
    front = [(one.forecast.step_time, one.forecast.peak_device) for one in found.best]
    assert len(front) > 2 and np.array(front) == pytest.approx(np.array(front_of(points)), rel=1e-12)
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    cut = certificate.invalid + certificate.memory_bound + certificate.time_bound
    assert cut + certificate.exact == certificate.plans


def test_a_front_within_a_gap_is_no_further_from_any_plan() -> None:
    found = open_search(MORE, within=0.1, objectives=("time", "memory"))
    certificate = found.run()
    front = np.array([one.values for one in found.best])
    for _, one in fitting(MORE):
        better = 1 - np.array([one.step_time, one.peak_device]) / front
        assert better.max(axis=1).min() <= certificate.gap + 1e-12
    assert 0 < certificate.gap <= 0.1


def test_the_plan_with_the_least_memory_is_found() -> None:
    found = open_search(MORE, objectives=("memory",))
    certificate = found.run()
    assert found.best[0].forecast.peak_device == min(one.peak_device for _, one in fitting(MORE))
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    assert certificate.incumbent == found.best[0].forecast.peak_device
    assert certificate.step == found.best[0].forecast.step_time


@pytest.mark.slow
def test_the_plan_with_the_least_energy_is_found() -> None:
    """On clusters of several sizes and kinds, against the energy of every plan; bounds are below all of them."""
    found = open_search(SIZES, top=3, objectives=("energy",))
    certificate = found.run()
    joules = []
    for cluster in found.clusters:
        for _, forecast in every_point(cluster.space):
            if forecast is not None and forecast.fits:
                joules.append(forecast.joules)
                assert 0 < cluster.use.energy.bound(forecast.step_time) <= forecast.joules
    assert [one.forecast.joules for one in found.best] == pytest.approx(sorted(joules)[:3], rel=1e-12)
    assert certificate.complete and certificate.gap == 0 and certificate.exact < certificate.plans
    assert certificate.incumbent == found.best[0].forecast.joules


@pytest.mark.parametrize("objective", ["time", "tokens", "cost"])
@pytest.mark.slow
def test_clusters_are_compared(objective: str) -> None:
    found = open_search(SIZES, top=1, objectives=(objective,))
    certificate = found.run()
    plans = fitting(SIZES)
    best = min(plans, key=lambda one: one[1].step_time * (1 if objective == "time" else one[0]))
    assert found.best[0].forecast == replace(best[1], joules=0.0) and certificate.gap == 0
    assert found.best[0].changes["cluster"] == ("dgx-h100:2" if objective == "time" else "dgx-h100:1")
    assert certificate.fields["cluster"] == SIZES["cluster"]
    assert certificate.plans == sum(one.plans for one in found.clusters)


def test_the_front_of_time_and_cost_has_plans_of_both_sizes() -> None:
    result = meshcast.search(SIZES, objective=["cost", "time"], workers=1)
    assert {one.changes["cluster"] for one in result.best} == {"dgx-h100:1", "dgx-h100:2"}
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
            fitting = cluster.groups._fit(opened) if opened is not None else None
            assert cluster.groups.least_memory(group) > 0
            assert fitting is None or cluster.groups.least_memory(group) <= fitting.nbytes.min()


@pytest.mark.slow
def test_a_front_that_is_interrupted_early_has_a_gap() -> None:
    def stop(found: Any) -> None:
        if found.exact:
            raise KeyboardInterrupt

    plan = {"tp": [1, 8, 16, 32], "pp": [1, 2], "recompute": ["none", "full"]}
    job = {**MORE, "cluster": "dgx-h100:4", "batch": {"global": 64, "micro": [1, 2], "sequence": 2048}, "plan": plan}
    found = open_search(job, objectives=("time", "memory")).run(stop)
    assert not found.complete and found.exact == 1 and found.opened < found.groups
    assert 0 < found.gap < 0.9


@pytest.mark.parametrize("objectives", [("time", "memory"), ("time",)])
@pytest.mark.slow
def test_processes_find_what_one_finds(monkeypatch: pytest.MonkeyPatch, objectives: tuple[str, ...]) -> None:
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)
    alone, shared = (open_search(MORE, objectives=objectives) for _ in range(2))
    one, several = alone.run(), run_on_workers(shared, 3, lambda _: None)
    assert [plan.values for plan in alone.best] == [plan.values for plan in shared.best]
    assert several.complete and several.gap == 0 and several.plans == one.plans
    assert several.exact == len(several.ratios) == len(shared.forecasts)
    cut = several.invalid + several.memory_bound + several.time_bound
    assert cut + several.exact == several.plans
    assert several.step == shared.best[0].forecast.step_time == one.step


def test_an_interrupted_search_on_processes_says_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)
    monkeypatch.setattr(workers._Link, "EVERY", 0.0)

    def stop(found: Any) -> None:
        if found.exact:
            raise KeyboardInterrupt

    made = open_search(MORE)
    found = run_on_workers(made, 2, stop)
    assert not found.complete and found.exact == len(made.forecasts) >= 1
    best = min(one.step_time for _, one in fitting(MORE))
    assert min(found.open_bound, found.incumbent) <= best
    assert found.open > 0 and found.decided + found.open == found.plans


def test_processes_hear_an_interruption_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)
    monkeypatch.setattr(Search, "_enter", lambda self, groups: time.sleep(100))
    began = time.monotonic()
    found = run_on_workers(open_search(MORE), 2, lambda certificate: interrupt() if not certificate.counting else None)
    assert time.monotonic() - began < 50
    assert found.gap == 1 and found.open == found.plans and not found.complete


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


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_error_on_a_process_is_the_error_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "PLANS_OF_A_PROCESS", 10)

    def fail(self: Any, *_: Any) -> None:
        raise PlanError("here", "a rule", "A remedy")

    monkeypatch.setattr(Search, "_forecast", fail)
    with pytest.raises(PlanError, match=r"here: a rule\. A remedy"):
        run_on_workers(open_search(TINY), 2, lambda _: None)


def test_shares_of_processes_hold_every_group_once() -> None:
    made = open_search(MORE)
    made.count()
    shares = share_groups(made, 2)
    assert len(shares) == 2 and sum(map(len, shares)) == made.certificate.groups
    assert not {group.tp for _, group in shares[0]} & {group.tp for _, group in shares[1]}


def test_found_plans_decide_which_bounds_are_of_interest() -> None:
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "speed"}, "objective is 'speed': an objective is one of time, tokens, cost, energy, memory"),
        ({"objective": "tokens,cost"}, "both rank plans alike"),
        ({"objective": "time,time"}, "both objectives are the same"),
        ({"objective": "time,cost,memory"}, "one objective, or two for their Pareto front"),
        ({"objective": 3}, "it is a word, or a list of two"),
        ({"objective": "memory", "robust": True}, "with --robust intervals of the step rank the plans"),
        ({"workers": 0}, "workers is 0: it is a number of processes"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        meshcast.search(TINY, **options)


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("auto", "a search compares clusters that the job lists"),
        ([], "cluster.*the list is empty"),
        (["dgx-h100:1", "auto"], "a search compares clusters that the job lists"),
        (["dgx-h100:1", "dgx-h100:1"], "the list has this cluster twice"),
        (["dgx-h100:1", "dgx-h10:1"], "dgx-h10"),
        (["dgx-h100:2", {"node": "dgx-h100", "nodes": 2}], "'nodes': 2.: .* twice: dgx-h100:2 is the same. Leave one"),
        ([{"node": "dgx-h100", "nodes": 1, "gpus": 8}, "dgx-h100:1"], "cluster is 'dgx-h100:1': .* is the same"),
    ],
)
def test_wrong_lists_of_clusters_are_refused(cluster: Any, words: str) -> None:
    with pytest.raises(Exception, match=words):
        meshcast.search({**TINY, "cluster": cluster})


def test_the_page_shows_the_front(tmp_path: Path) -> None:
    job, plot, rows = tmp_path / "job.yaml", tmp_path / "front.png", tmp_path / "plans.parquet"
    job.write_text(yaml.safe_dump({**SIZES, "run": {"tokens": 1e9, "price_per_gpu_hour": 2.0}}))
    options = "--objective", "cost,time", "--plot", plot, "--out", rows
    shown = run("search", job, *options).stdout
    proof = "no plan of the space that fits with 95 % is better in both than every plan of the front"
    for words in ("cost", proof, "dgx-h100:2"):
        assert words in " ".join(shown.split())
    assert plot.exists() and rows.exists()
    about = json.loads(pq.read_schema(rows).metadata[b"meshcast"])
    assert about["job"]["cluster"] == SIZES["cluster"] == about["certificate"]["space"]["fields"]["cluster"]
    answer = json.loads(run("search", job, "--objective", "memory", "--top", "2", "--json").stdout)
    assert answer["front"] is None and answer["certificate"]["open_bound_s"] is None
    for objective in ("tokens", "cost"):
        cheapest = run("search", job, "--objective", objective, "--top", "2").stdout
        assert "GPU-s" in cheapest and "dgx-h100:1" in cheapest
    assert meshcast.search(SIZES, objective="cost", top=1).best[0].changes["cluster"] == "dgx-h100:1"
    least = run("search", job, "--objective", "memory", "--top", "3").stdout
    assert "more memory, and time" in least and "needs less memory in the model" in least
    wrong = run("search", job, "--objective", "speed")
    assert wrong.exit_code == 2 and "--objective is 'speed'" in wrong.stderr
