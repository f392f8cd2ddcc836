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
from meshcast.experiments.search.frontier.objectives import NEAR
from meshcast.experiments.search.frontier.plan_runs import differ, student_90
from meshcast.experiments.search.frontier.plan_search import ForecastPlan
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.run_choices import INTERVALS, RunChoices, list_changes
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.inputs import RunPlan, make_run
from meshcast.simulator.runs.training import SimulatedRun, simulate_run
from tests.draws import drawn
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import RUN, RUNS, interrupt, is_accounted, points_of

OPEN = ["run.checkpoints.kind", "run.checkpoints.every_s", "run.recovery.spares"]


@cache
def simulate_all() -> list[tuple[str, float, float, float]]:
    """Days, price and memory of every plan with every choice, by its fields as text."""
    rows, (cluster,) = [], open_search(RUNS, objectives=("days",)).clusters
    assert cluster.runs is not None and len(cluster.runs.choices) == 8
    for point in points_of(cluster.space):
        for choice in cluster.runs.choices:
            plan = make_run(simulate(load_job(choice.apply(cluster.space.job_of(*point)))))
            answer = RunAnswer(plan, [simulate_run(plan.setting, plan.seed, k) for k in range(plan.seeds)])
            cost = answer.mean(answer.cost_of)
            assert cost is not None and choice.least.seconds(plan.report.step_time) <= answer.seconds
            changes = str(cluster.space.changes(*point) | choice.changes)
            rows.append((changes, answer.days, cost, plan.report.peak_device))
    return rows


def names(plans: Sequence[ForecastPlan]) -> list[str]:
    return [str(plan.changes) for plan in plans]


@pytest.mark.parametrize(("objective", "column"), [("days", 1), ("run-cost", 2)])
def test_the_best_plans_are_those_of_brute_force(objective: str, column: int) -> None:
    search = open_search(RUNS, top=4, objectives=(objective,))
    certificate = search.run()
    every = sorted(simulate_all(), key=lambda row: row[column])
    near = [row for row in every[:4] if row[column] <= every[0][column] * (1 + NEAR)]
    best = search.best[: len(near)]
    assert [plan.values[0] for plan in best] == pytest.approx([row[column] for row in near], rel=1e-12)
    assert names(best) == [row[0] for row in near]
    runs = certificate.runs
    assert runs is not None and certificate.complete and certificate.gap == 0.0 and runs.simulated < len(every)
    assert runs.simulated + runs.waiting == 8 * certificate.exact and (runs.seeds, runs.choices) == (2, 8)
    assert certificate.incumbent == search.best[0].values[0] and is_accounted(certificate)
    assert certificate.step == search.best[0].forecast.step_time


@pytest.mark.parametrize(
    ("objectives", "columns"), drawn([(("days", "memory"), (1, 3)), (("run-cost", "days"), (2, 1))], keep=2)
)
def test_the_front_is_that_of_brute_force(objectives: tuple[str, ...], columns: tuple[int, int]) -> None:
    search = open_search(RUNS, objectives=objectives)
    certificate = search.run()
    points = {(row[columns[0]], row[columns[1]]) for row in simulate_all()}
    front = sorted(a for a in points if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in points))
    values = [value for plan in search.best for value in plan.values]
    assert values == pytest.approx([value for point in front for value in point])
    assert certificate.complete and certificate.gap == 0.0


def test_the_bound_of_a_plan_is_that_of_its_best_choice() -> None:
    (cluster,) = open_search(RUNS, objectives=("days",)).clusters
    assert isinstance(cluster.runs, RunChoices)
    bounds = [cluster.runs.only(choice).bound_days(0.2) for choice in cluster.runs.choices]
    assert cluster.runs.bound_days(0.2) == min(bounds) < max(bounds)


def search_by_days(folder: Path, workers: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the answer of the command and the rows that it writes, without their times."""
    (path := folder / "job.yaml").write_text(yaml.safe_dump(RUNS), "utf-8")
    out = folder / f"rows-{workers}.parquet"
    words = ["search", path, "--objective", "days", "--top", "3", "--out", out, "--json", "--workers", workers]
    answer = json.loads(run(*words, "--jobs-to", folder / "jobs").stdout)
    del answer["certificate"]["cpu_s"]
    return answer, pq.read_table(out).to_pylist()


def test_one_process_finds_what_two_find(tmp_path: Path) -> None:
    answer, rows = search_by_days(tmp_path, 1)
    assert (answer, rows) == search_by_days(tmp_path, 2)
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
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(RUNS), "utf-8")
    text = run("search", path, "--objective", "days", "--top", "3", "--workers", 1).stdout
    for words in ("9 of 10 runs", "goodput", "every_s", "simulated", "has shorter runs", "2 runs each"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.slow
def test_the_notebook_takes_the_same_objectives() -> None:
    run_alone = {**RUN, "checkpoints": {"every_s": "auto"}, "recovery": {}}
    result = meshcast.search({**RUNS, "plan": {"tp": 4}, "run": run_alone}, objective="run-cost", workers=1)
    assert result.certificate.plans == 1 and len(result.best) == len(INTERVALS) and "days" in repr(result)
    frame = result.to_frame()
    assert frame["run_cost"].is_monotonic_increasing and frame["run.checkpoints.every_s"].nunique() == len(INTERVALS)
    assert not result.is_apart(result.best[0])


class _Interrupted(RunSimulator):
    """Is interrupted at its third plan."""

    def run(self, plan: RunPlan) -> list[SimulatedRun]:
        self.cpu += 1
        return interrupt() if self.cpu > 2 else super().run(plan)


def test_an_interruption_keeps_what_was_simulated() -> None:
    search = open_search(RUNS, objectives=("days",))
    search.simulator = _Interrupted()
    certificate = search.run()
    runs = certificate.runs
    assert runs is not None and not certificate.complete and runs.simulated == 2 == len(search.best)
    assert 0 < certificate.gap < 1 and certificate.open_bound <= min(row[1] for row in simulate_all())
    assert runs.waiting == 8 * certificate.exact - 2


def test_choices_that_make_no_difference_are_one() -> None:
    job = {**RUNS, "plan": {}, "run": {**RUN, "checkpoints": {}, "recovery": {}}}

    def changes(**fields: Any) -> list[dict[str, Any]]:
        return list_changes(
            job, {f"run.{name.replace('__', '.')}": values for name, values in fields.items()}, Path(".")
        )

    listed = changes(checkpoints__kind=["none", "sharded", "in-memory"], checkpoints__every_s=[60, 900])
    assert [choice["run.checkpoints.every_s"] for choice in listed] == [None, 60, 900, 60, 900]
    assert len(changes(checkpoints__kind="auto", checkpoints__every_s="auto")) == 2 * len(INTERVALS) + 2
    assert len(changes(recovery__elastic=["none", "templates"], recovery__most_lost_replicas=[1, 2])) == 3


def test_choices_that_a_plan_does_not_admit_are_left_out() -> None:
    """tests/refusals has what a search says that has no other."""
    job = {**RUNS, "plan": {"zero": [0, 1]}, "run": {**RUN, "checkpoints": {"kind": ["sharded", "just-in-time"]}}}
    runs = open_search(job, objectives=("days",)).run().runs
    assert runs is not None and runs.invalid > 0 and runs.simulated > 0


def test_more_runs_tell_plans_apart() -> None:
    assert differ([1.0, 2.0, 3.0], [1.1, 2.1, 3.1]) and not differ([1.0, 2.0, 3.0], [1.4, 1.8, 3.0])
    assert not differ([1.0], [2.0]) and not differ([1.0, 2.0], [1.0, 2.0])
    known = {1: 6.314, 2: 2.920, 3: 2.353, 7: 1.895, 31: 1.696}
    assert [student_90(degrees) for degrees in known] == pytest.approx([*known.values()], rel=0.01)


def test_choices_whose_runs_do_not_end_are_left_out() -> None:
    """Those that are seen before, and those that are given up; if none ends, the search says why."""
    keys = {**RUN, "checkpoints": {"kind": "sharded", "every_s": [30.0, 1e7]}, "recovery": {}, "most_events": 2000}
    job = {**RUNS, "plan": {"tp": 1}, "run": {**keys, "steps": 100_000}}
    search = open_search(job, objectives=("days",))
    search.run()
    (best,) = search.best
    assert best.changes["run.checkpoints.every_s"] == 30.0 and search.certificate.runs.invalid == 1
    for changes, words in (({"most_events": 20}, "given up"), ({"checkpoints": {"every_s": [1e7]}}, "never ends")):
        with pytest.raises(PlanError, match=words):
            open_search({**job, "run": {**job["run"], **changes}}, objectives=("days",)).run()


@pytest.mark.parametrize(
    ("command", "words"), [("search", "compares steps"), ("predict", "compares steps"), ("run", "one run is simulated")]
)
def test_open_fields_of_runs_need_an_objective_of_runs(command: str, words: str, tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump({**RUNS, "plan": {"tp": 4}}), "utf-8")
    result = run(command, path)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert all(part in result.stderr for part in (words, "--objective days", "run.checkpoints.kind"))
