"""Sweeps of points whose whole training is simulated."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.simulated_runs import COLUMNS, forecast_run, simulates_runs
from meshcast.simulator import load_job, simulate

FAILURES = {"rates": "none", "components": {"node": {"per": "node", "mtbf_hours": 8}}}
JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:4",
    "run": {
        "tokens": 2e10,
        "seeds": 2,
        "failures": FAILURES,
        "price_per_gpu_hour": 2,
        "recovery": {"repair_hours": 1, "detection_s": 10, "scheduling_s": 10, "warm_up_s": 10},
    },
}
VARY = {"run.checkpoints.every_s": [60, 6000], "run.recovery.spares": [0, 4], "plan.tp": [1, 2]}


def test_points_are_simulated_and_ranked_by_their_runs(tmp_path: Path) -> None:
    out = tmp_path / "runs.parquet"
    sweep = load_sweep({"job": JOB, "vary": VARY})
    summary = run(sweep, out, workers=1)
    rows = pd.read_parquet(out)
    assert {column.name for column in COLUMNS} <= {*rows.columns} and rows["goodput"].between(0, 1).all()
    best = summary["best"][0]
    assert (best["run.checkpoints.every_s"], best["run.recovery.spares"], best["plan.tp"]) == (60, 4, 1)
    ranked = [row["run_tokens_per_s"] for row in summary["best"]]
    assert ranked == sorted(ranked, reverse=True)
    job = {**JOB, "plan": {"tp": 1}}
    job["run"] = {**JOB["run"], "checkpoints": {"every_s": 60}, "recovery": {**JOB["run"]["recovery"], "spares": 4}}
    alone = forecast_run(simulate(load_job(job)))
    assert {name: best[name] for name in alone} == pytest.approx(alone)


def test_points_do_not_depend_on_workers(tmp_path: Path) -> None:
    files = [tmp_path / "one.parquet", tmp_path / "two.parquet"]
    for workers, out in enumerate(files, 1):
        run(load_sweep({"job": JOB, "vary": VARY}), out, workers=workers)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_mistake_in_one_point_costs_one_row(tmp_path: Path) -> None:
    vary = {"run.checkpoints.kind": ["sharded", "just-in-time"]}
    summary = run(load_sweep({"job": JOB, "vary": vary}), tmp_path / "runs.parquet", workers=1)
    assert summary["status"] == {"fits": 1, "tight": 0, "does-not-fit": 0, "invalid": 1}
    assert "second copy" in summary["invalid"][0]["reason"]


def test_a_point_whose_runs_do_not_end_costs_one_row(tmp_path: Path) -> None:
    """Such as is seen before, and such as is given up."""
    vary = {
        "run.checkpoints.every_s": [60, 1e6],
        "run.failures.mtbf_factor": [1, 0.02],
        "run.most_events": [10_000, 20],
    }
    summary = run(load_sweep({"job": JOB, "vary": vary}), tmp_path / "runs.parquet", workers=1)
    assert summary["status"] == {"fits": 3, "tight": 0, "does-not-fit": 0, "invalid": 5}
    rows = pd.read_parquet(tmp_path / "runs.parquet").set_index([*vary])
    assert "A checkpoint every" in rows.loc[(1e6, 0.02, 10_000), "reason"]
    assert "has not ended after 20 events" in rows.loc[(60, 1, 20), "reason"]


def test_other_sweeps_have_no_such_columns(tmp_path: Path) -> None:
    job = {**JOB, "run": {"tokens": 1e9}}
    assert not simulates_runs(job, ["plan.tp"]) and simulates_runs(job, ["run.checkpoints"])
    run(load_sweep({"job": job, "vary": {"plan.tp": [1, 2]}}), tmp_path / "steps.parquet", workers=1)
    assert "goodput" not in pd.read_parquet(tmp_path / "steps.parquet").columns


def test_a_run_ends_with_its_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise InterruptedError

    monkeypatch.setattr("meshcast.experiments.sweeps.simulated_runs.stop_if_asked", stop)
    with pytest.raises(InterruptedError):
        forecast_run(simulate(load_job(JOB)))
