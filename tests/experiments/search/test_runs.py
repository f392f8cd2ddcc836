"""Searches by the length or the price of simulated runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

import meshcast
from meshcast.experiments.runs.seeds import RunSimulator
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.objectives import NEAR
from meshcast.experiments.search.frontier.plan_runs import differ, student_90
from meshcast.experiments.search.frontier.plan_search import ForecastPlan
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.run_choices import INTERVALS, RunChoices, list_changes
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import RunPlan, make_run
from meshcast.simulator.runs.training import SimulatedRun, simulate_run
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY

COMPONENTS = {"node": {"per": "node", "mtbf_hours": 3}, "job": {"per": "job", "mtbf_hours": 1, "loses": "nothing"}}
RUN: dict[str, Any] = {
    "steps": 5_000,
    "seeds": 2,
    "price_per_gpu_hour": 2,
    "failures": {"rates": "none", "components": COMPONENTS},
    "checkpoints": {"kind": ["sharded", "asynchronous"], "every_s": [30.0, 300.0]},
    "recovery": {"repair_hours": 1, "spares": [0, 2]},
}
JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 1, "sequence": 2048},
    "plan": {"tp": [1, 8], "zero": [0, 1]},
    "run": RUN,
}
OPEN = ["run.checkpoints.kind", "run.checkpoints.every_s", "run.recovery.spares"]


@cache
def simulate_all() -> list[tuple[str, float, float, float]]:
    """Days, price and memory of every plan with every choice, by its fields as text."""
    found, search = [], open_search(JOB, objectives=("days",))
    (cluster,) = search.clusters
    assert cluster.runs is not None and len(cluster.runs.choices) == 8
    for group in cluster.space.groups():
        for pipeline in cluster.space.pipelines(group):
            for step in cluster.space.choices(group, pipeline):
                for choice in cluster.runs.choices:
                    job = choice.apply(cluster.space.job_of(group, pipeline, step))
                    plan = make_run(simulate(load_job(job)))
                    answer = RunAnswer(plan, [simulate_run(plan.setting, plan.seed, k) for k in range(plan.seeds)])
                    changes = cluster.space.changes(group, pipeline, step) | choice.changes
                    cost = answer.mean(answer.cost_of)
                    assert cost is not None and choice.least.seconds(plan.report.step_time) <= answer.seconds
                    found.append((str(changes), answer.days, cost, plan.report.peak_device))
    return found


def names(plans: Sequence[ForecastPlan]) -> list[str]:
    return [str(one.changes) for one in plans]


@pytest.mark.parametrize(("objective", "column"), [("days", 1), ("run-cost", 2)])
def test_the_best_plans_are_those_of_brute_force(objective: str, column: int) -> None:
    made = open_search(JOB, top=4, objectives=(objective,))
    found = made.run()
    every = sorted(simulate_all(), key=lambda row: row[column])
    near = [row for row in every[:4] if row[column] <= every[0][column] * (1 + NEAR)]
    assert [one.values[0] for one in made.best[: len(near)]] == pytest.approx([row[column] for row in near], rel=1e-12)
    assert names(made.best[: len(near)]) == [row[0] for row in near]
    runs = found.runs
    assert runs is not None and found.complete and found.gap == 0.0 and runs.simulated < len(every)
    assert runs.simulated + runs.waiting == 8 * found.exact and (runs.seeds, runs.choices) == (2, 8)
    assert found.incumbent == made.best[0].values[0] and found.step == made.best[0].forecast.step_time
    assert found.invalid + found.memory_bound + found.time_bound + found.exact == found.plans


FRONTS = [(("days", "memory"), (1, 3)), pytest.param(("run-cost", "days"), (2, 1), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("objectives", "columns"), FRONTS)
def test_the_front_is_that_of_brute_force(objectives: tuple[str, ...], columns: tuple[int, int]) -> None:
    made = open_search(JOB, objectives=objectives)
    found = made.run()
    points = {(row[columns[0]], row[columns[1]]) for row in simulate_all()}
    front = sorted(a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points))
    assert [one for plan in made.best for one in plan.values] == pytest.approx([x for point in front for x in point])
    assert found.complete and found.gap == 0.0


def test_the_bound_of_a_plan_is_that_of_its_best_choice() -> None:
    (cluster,) = open_search(JOB, objectives=("days",)).clusters
    assert isinstance(cluster.runs, RunChoices)
    one = [cluster.runs.only(choice).bound_days(0.2) for choice in cluster.runs.choices]
    assert cluster.runs.bound_days(0.2) == min(one) < max(one)


def answer_of(tmp_path: Path, workers: int, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The answer and the rows of a search, without their times."""
    path, out = tmp_path / "job.yaml", tmp_path / f"rows-{workers}.parquet"
    path.write_text(yaml.safe_dump({**JOB, **options}), "utf-8")
    words = ["search", path, "--objective", "days", "--top", "3", "--out", out, "--json", "--workers", workers]
    answer = json.loads(run(*words, "--jobs-to", tmp_path / "jobs").stdout)
    del answer["certificate"]["cpu_s"]
    return answer, pq.read_table(out).to_pylist()


def test_one_process_finds_what_two_find(tmp_path: Path) -> None:
    answer, rows = answer_of(tmp_path, 1)
    assert (answer, rows) == answer_of(tmp_path, 2)
    best = answer["best"][0]
    assert best["run"]["days"] == min(row["run_days"] for row in rows if row["run_days"] is not None)
    assert not best["run"]["told_apart"] and best["run"]["cost"] > 0 and 0 < best["run"]["goodput"] < 1
    assert best["run"]["checkpoint_every_s"] == pytest.approx(best["plan"]["run.checkpoints.every_s"], rel=0.01)
    assert answer["certificate"]["space"]["fields"]["run.recovery.spares"] == [0, 2]
    certificate = answer["certificate"]["runs"]
    assert certificate["runs"] == 2 * certificate["simulated"]
    assert rows[0]["checkpoint_every_s"] == best["run"]["checkpoint_every_s"]
    assert [rows[0][field] for field in OPEN] == [best["plan"][field] for field in OPEN]
    job = yaml.safe_load((tmp_path / "jobs" / "job-1.yaml").read_text("utf-8"))
    again = json.loads(run("run", tmp_path / "jobs" / "job-1.yaml", "--json", "--workers", 1).stdout)
    assert job["run"]["checkpoints"]["kind"] == best["plan"]["run.checkpoints.kind"]
    assert (again["days"], again["cost"]) == pytest.approx((best["run"]["days"], best["run"]["cost"]), rel=1e-12)


def test_the_page_shows_runs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB), "utf-8")
    text = run("search", path, "--objective", "days", "--top", "3", "--workers", 1).stdout
    for words in ("9 of 10 runs", "goodput", "every_s", "simulated", "has shorter runs", "2 runs each"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
def test_the_notebook_takes_the_same_objectives() -> None:
    run_alone = {**RUN, "checkpoints": {"every_s": "auto"}, "recovery": {}}
    result = meshcast.search({**JOB, "plan": {"tp": 4}, "run": run_alone}, objective="run-cost", workers=1)
    assert result.certificate.plans == 1 and len(result.best) == len(INTERVALS) and "days" in repr(result)
    frame = result.to_frame()
    assert frame["run_cost"].is_monotonic_increasing and frame["run.checkpoints.every_s"].nunique() == len(INTERVALS)
    assert not result.is_apart(result.best[0])


class _Interrupted(RunSimulator):
    """Is interrupted at its third plan."""

    def run(self, plan: RunPlan) -> list[SimulatedRun]:
        self.cpu += 1
        if self.cpu > 2:
            raise KeyboardInterrupt
        return super().run(plan)


def test_an_interruption_keeps_what_was_simulated() -> None:
    made = open_search(JOB, objectives=("days",))
    made.simulator = _Interrupted()
    found = made.run()
    assert found.runs is not None and not found.complete and found.runs.simulated == 2 == len(made.best)
    assert 0 < found.gap < 1 and found.open_bound <= min(row[1] for row in simulate_all())
    assert found.runs.waiting == 8 * found.exact - 2


def test_choices_that_make_no_difference_are_one() -> None:
    run_keys = {**RUN, "checkpoints": {}, "recovery": {}}
    job, base = {**JOB, "plan": {}, "run": run_keys}, Path(".")
    given = {"run.checkpoints.kind": ["none", "sharded", "in-memory"], "run.checkpoints.every_s": [60, 900]}
    found = list_changes(job, given, base)
    assert [one["run.checkpoints.every_s"] for one in found] == [None, 60, 900, 60, 900]
    automatic = list_changes(job, {"run.checkpoints.kind": "auto", "run.checkpoints.every_s": "auto"}, base)
    assert len(automatic) == 2 * len(INTERVALS) + 2
    elastic = {"run.recovery.elastic": ["none", "templates"], "run.recovery.most_lost_replicas": [1, 2]}
    assert len(list_changes(job, elastic, base)) == 3


def test_choices_that_a_plan_does_not_admit_are_left_out() -> None:
    job = {**JOB, "plan": {"zero": [0, 1]}, "run": {**RUN, "checkpoints": {"kind": ["sharded", "just-in-time"]}}}
    found = open_search(job, objectives=("days",))
    runs = found.run().runs
    assert runs is not None and runs.invalid > 0 and runs.simulated > 0
    job["plan"], job["run"] = {"zero": [1]}, {**RUN, "checkpoints": "just-in-time"}
    with pytest.raises(PlanError, match="second copy"):
        open_search(job, objectives=("days",)).run()


def test_more_runs_tell_plans_apart() -> None:
    assert differ([1.0, 2.0, 3.0], [1.1, 2.1, 3.1]) and not differ([1.0, 2.0, 3.0], [1.4, 1.8, 3.0])
    assert not differ([1.0], [2.0]) and not differ([1.0, 2.0], [1.0, 2.0])
    known = {1: 6.314, 2: 2.920, 3: 2.353, 7: 1.895, 31: 1.696}
    assert [student_90(one) for one in known] == pytest.approx([*known.values()], rel=0.01)


def search_by_days(**changes: Any) -> Search:
    return open_search({**JOB, "run": {**RUN, **changes}}, objectives=("days", "run-cost"))


@pytest.mark.parametrize(
    ("changes", "where", "words"),
    [
        ({"steps": None}, "run", "State run.tokens or run.steps"),
        ({"days": 3}, "run.days", "it ends a run whatever it has reached"),
        ({"price_per_gpu_hour": None}, "run.price_per_gpu_hour", "needs a price"),
        ({"checkpoints": {"kind": []}}, "run.checkpoints.kind", "there are no values"),
        ({"checkpoints": {"kind": ["auto", "full"]}}, "run.checkpoints.kind", "Leave auto out"),
        ({"checkpoints": {"copies": "auto"}}, "run.checkpoints.copies", "Write a list of values"),
        ({"checkpoints": {"kind": ["raid"]}}, "run.checkpoints.kind", "asynchronous"),
        ({"checkpoints": {"kind": "in-memory", "copies": [3]}}, "run.checkpoints.copies", "as many nodes"),
        ({"checkpoints": {"write_gb_per_s": "auto"}}, "run.checkpoints.write_gb_per_s", "does not vary"),
    ],
)
def test_mistakes_are_explained(changes: dict[str, Any], where: str, words: str) -> None:
    with pytest.raises(MeshcastError) as caught:
        search_by_days(**changes)
    assert where in caught.value.where and words in str(caught.value)


def test_open_fields_of_runs_need_an_objective_of_runs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**JOB, "plan": {"tp": 4}}), "utf-8")
    for command, words in (
        ("search", "compares steps"),
        ("predict", "compares steps"),
        ("run", "one run is simulated"),
    ):
        result = run(command, path)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
        assert (
            words in result.stderr and "--objective days" in result.stderr and "run.checkpoints.kind" in result.stderr
        )


def test_a_search_of_heterogeneous_plans_has_no_runs() -> None:
    with pytest.raises(PlanError, match="an objective of runs"):
        meshcast.search(TINY, objective="days", heterogeneous=True)


def test_choices_whose_runs_do_not_end_are_left_out() -> None:
    """Those that are seen before, and those that are given up; if none ends, the search says why."""
    keys = {**RUN, "checkpoints": {"kind": "sharded", "every_s": [30.0, 1e7]}, "recovery": {}, "most_events": 2000}
    job = {**JOB, "plan": {"tp": 1}, "run": {**keys, "steps": 100_000}}
    search = open_search(job, objectives=("days",))
    search.run()
    (best,) = search.best
    assert best.changes["run.checkpoints.every_s"] == 30.0 and search.certificate.runs.invalid == 1
    for changes, words in (({"most_events": 20}, "given up"), ({"checkpoints": {"every_s": [1e7]}}, "never ends")):
        with pytest.raises(PlanError, match=words):
            open_search({**job, "run": {**job["run"], **changes}}, objectives=("days",)).run()
