"""`meshcast plan`: the league table of planners of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from experiments.cli.app import app
from simulator import simulate

JOB = {
    "model": {"preset": "gpt3-5b", "layers": 2},
    "cluster": "dgx-h100:1",
    "batch": {"global": 64, "micro": 4},
    "plan": {"tp": 2},
}


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB), "utf-8")
    return tmp_path / "job.yaml"


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, words)])


def test_the_answer_has_jobs_with_their_forecasts_best_first(job: Path) -> None:
    done = run(job, "--with", "optcnn,alpa,gspmd", "--json", "--no-optimum")
    assert done.exit_code == 0, done.output
    plans = json.loads(done.stdout)["plans"]
    assert {one["planner"] for one in plans} == {"optcnn", "alpa", "gspmd"}
    times = [one["step_time_s"] for one in plans]
    assert times == sorted(times)
    for one in plans:
        assert simulate(one["job"]).step_time == pytest.approx(one["step_time_s"])
        assert one["status"] == "fits" and one["cpu_s"] >= 0
    assert next(one for one in plans if one["planner"] == "optcnn")["proven_gap"] == 0


def test_no_proposal_inside_the_space_is_faster_than_the_certified_optimum(job: Path, tmp_path: Path) -> None:
    done = run(job, "--with", "alpa,gspmd", "--json", "--plot", tmp_path / "league.png")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    optimum, plans = answer["optimum"], {one["planner"]: one for one in answer["plans"]}
    assert optimum["gap"] == 0 and optimum["plans"] > 100 and optimum["plan"]
    for one in plans.values():
        assert one["regret"] == pytest.approx(one["step_time_s"] / optimum["step_time_s"] - 1)
    assert min(one["regret"] for one in plans.values()) >= 0
    assert (tmp_path / "league.png").stat().st_size > 10_000


def test_the_table_shows_refusals_with_their_reason(job: Path) -> None:
    job.write_text(yaml.safe_dump({**JOB, "model": {"preset": "mixtral-8x7b", "layers": 2}}), "utf-8")
    done = run(job, "--with", "alpa,optcnn", "--no-optimum")
    assert done.exit_code == 0, done.output
    assert "refused" in done.stdout and "without experts" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("given", "words"), [("piper", "not jobs"), ("alpas", "alpa"), ("optcnn,tarnawski-dp", "not jobs")]
)
def test_planners_of_profiles_and_unknown_ones_are_refused(job: Path, given: str, words: str) -> None:
    done = run(job, "--with", given)
    assert done.exit_code == 2 and words in done.output
