"""Many runs: the same on one process or several, stored, resumed after an interruption."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.runs import seeds
from meshcast.experiments.runs.seeds import simulate_runs, store_runs
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.runs.answer import RunAnswer
from meshcast.simulator.runs.failures import FailingUnits
from meshcast.simulator.runs.inputs import RunPlan, make_run
from meshcast.simulator.runs.span import CheckpointTier

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "run": {"steps": 20_000, "seeds": 40, "failures": {"mtbf_factor": 1e-3}, "price_per_gpu_hour": 2},
}


@pytest.fixture(scope="module")
def plan() -> RunPlan:
    return make_run(simulate(load_job(JOB)))


def test_workers_change_nothing(plan: RunPlan, tmp_path: Path) -> None:
    alone = simulate_runs(plan, 1)
    assert simulate_runs(plan, 3) == alone and len(alone) == 40
    files = []
    for workers in (1, 3):
        out = tmp_path / f"{workers}.parquet"
        assert store_runs(plan, JOB, Path(), out, workers) == alone
        files.append(out.read_bytes())
    assert files[0] == files[1]


@pytest.fixture
def busy(plan: RunPlan) -> RunPlan:
    """Runs of some 500 events each."""
    setting = replace(plan.setting, sources=(FailingUnits("node", 1, 50.0, 1.0, 0, 2),), tiers=(CheckpointTier(1),))
    return replace(plan, setting=replace(setting, detection=1.0, restart=1.0), seeds=9)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_within_runs_is_told(busy: RunPlan, workers: int, monkeypatch) -> None:
    monkeypatch.setattr(seeds, "TOLD_EVERY", 0.001)
    monkeypatch.setattr("meshcast.simulator.runs.training.EVENTS_TOLD", 20)
    told: list[float] = []
    simulate_runs(busy, workers, tell=told.append)
    assert any(done != round(done) for done in told) and min(told) >= 0 and max(told) <= 40


def test_a_run_that_is_given_up_ends_all(busy: RunPlan) -> None:
    short = replace(busy, setting=replace(busy.setting, most_events=30))
    for workers in (1, 2):
        with pytest.raises(PlanError, match="after 30 events"):
            simulate_runs(short, workers)


class Interrupted(Exception):
    pass


def test_an_interrupted_command_goes_on_without_loss(plan: RunPlan, tmp_path: Path, monkeypatch) -> None:
    whole, cut = tmp_path / "whole.parquet", tmp_path / "cut.parquet"
    known = store_runs(plan, JOB, Path(), whole, 1)

    def stop(done: int, runs: int) -> None:
        if done >= 16:
            raise Interrupted

    with pytest.raises(Interrupted):
        store_runs(plan, JOB, Path(), cut, 1, watch=stop)
    assert not cut.exists() and len(list((tmp_path / "cut.parquet.parts").glob("0*.parquet"))) == 2
    simulated: list[int] = []
    simulate_seeds = seeds.simulate_seeds
    monkeypatch.setattr(
        seeds, "simulate_seeds", lambda task, tell: simulated.append(task.start) or simulate_seeds(task, tell)
    )
    assert store_runs(plan, JOB, Path(), cut, 1) == known
    assert simulated == [16, 24, 32] and cut.read_bytes() == whole.read_bytes()
    assert not (tmp_path / "cut.parquet.parts").exists()
    simulated.clear()
    assert store_runs(plan, JOB, Path(), cut, 1) == known and simulated == []


def test_runs_of_another_job_are_not_mixed(plan: RunPlan, tmp_path: Path) -> None:
    out = tmp_path / "runs.parquet"
    store_runs(plan, JOB, Path(), out, 1)
    other = {**JOB, "run": {**JOB["run"], "steps": 10_000}}
    with pytest.raises(PlanError, match="job"):
        store_runs(plan, other, Path(), out, 1)
    assert len(store_runs(plan, other, Path(), out, 1, restart=True)) == 40


def test_the_answer_is_that_of_the_runs(plan: RunPlan) -> None:
    runs = simulate_runs(plan, 1)
    answer = RunAnswer(plan, runs)
    found = answer.to_dict()
    assert sum(found["time_s"].values()) == pytest.approx(found["days"] * 86_400)
    assert found["goodput"] == found["time_s"]["productive"] / (found["days"] * 86_400)
    assert found["days_interval_90"][0] < found["days"] < found["days_interval_90"][1]
    assert found["cost"] == pytest.approx(found["days"] * 24 * 16 * 2)
    kwh = found["energy_mwh"] * 1000
    assert answer.plan.idle_watts < kwh * 3.6e6 / (found["days"] * 86_400) < answer.plan.busy_watts
    assert found["failures"].keys() <= {"gpu", "nic", "network", "host", "maintenance", "software"}


def test_intervals_hold_the_forecast_of_a_step(plan: RunPlan) -> None:
    """Days and cost vary by chance and by the step; a run that ends by time is as long as stated, and tokens vary."""
    runs = simulate_runs(plan, 1)
    found = RunAnswer(plan, runs).to_dict()
    low, high = found["days_interval_90"]
    chance, step = found["days_interval_90_simulated"], found["step_interval_90_s"]
    assert low < chance[0] < chance[1] < high and found["tokens_interval_90"] == [found["tokens"]] * 2
    assert high / found["days"] > 1 + 0.9 * (step[1] / found["step_time_s"] - 1)
    assert [end * 24 * 16 * 2 for end in (low, high)] == pytest.approx(found["cost_interval_90"])
    timed = replace(plan, setting=replace(plan.setting, steps=None, horizon=86_400.0))
    found = RunAnswer(timed, simulate_runs(timed, 1)).to_dict()
    assert found["days_interval_90"] == found["days_interval_90_simulated"]
    assert found["tokens_interval_90"][0] < found["tokens"] < found["tokens_interval_90"][1]


def test_stored_runs_are_told_chunk_by_chunk(plan: RunPlan, tmp_path: Path, monkeypatch) -> None:
    """Half of the runs each, where there may be two chunks; a simulator without processes gives the same runs."""
    monkeypatch.setattr(seeds, "MAX_CHUNKS", 2)
    told: list[tuple[int, int]] = []
    runs = store_runs(plan, JOB, Path(), tmp_path / "runs.parquet", 1, watch=lambda *done: told.append(done))
    assert told == [(0, 40), (20, 40), (40, 40)] and seeds.RunSimulator().run(plan) == runs


def test_numbers_of_runs_are_finite_and_not_negative() -> None:
    assert [seeds._is_count(cell) for cell in (0.0, 2.5, None, math.inf, -1.0)] == [True, True, False, False, False]
