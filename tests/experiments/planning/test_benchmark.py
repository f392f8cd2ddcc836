"""`meshcast plan`: the benchmark table of planners of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.planning.benchmark.optimum import CertifiedOptimum, explain_faster, find_optimum
from meshcast.experiments.planning.benchmark.rows import planners_of_jobs
from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.pricing.mixed import open_problem
from meshcast.experiments.planning.problem import SearchBudget
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from tests.experiments.cli.samples import run
from tools.pages.benchmark import COLUMNS, TABLE, format_table

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


def plan(*words: Any) -> str:
    """Returns what `meshcast plan` prints."""
    ended = run("plan", *words)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def test_the_answer_has_jobs_with_their_forecasts_best_first(job: Path) -> None:
    shown = plan(job, "--with", "optcnn,alpa,gspmd", "--json", "--no-optimum")
    rows = json.loads(shown)["rows"]
    assert {row["planner"] for row in rows} == {"optcnn", "alpa", "gspmd"}
    times = [row["step_time_s"] for row in rows]
    assert times == sorted(times)
    for row in rows:
        report = simulate(row["plan"])
        assert report.step_time == pytest.approx(row["step_time_s"])
        assert row["interval_90_s"] == pytest.approx([*report.interval_90])
        assert row["executable"] is True and row["evaluations"] > 0 and row["cpu_s"] >= 0
        assert row["regret"] is None and row["regret_restricted"] >= 0
    assert next(row for row in rows if row["planner"] == "optcnn")["proven_gap"] == 0


def test_plans_that_the_program_does_not_run_are_not_executable(job: Path) -> None:
    stated = {**JOB, "framework": "torchtitan", "plan": {"tp": 2, "fsdp": True}}
    job.write_text(yaml.safe_dump(stated), "utf-8")
    options = ("--with", "optcnn", "--json", "--no-optimum")
    (row,) = json.loads(plan(job, *options))["rows"]
    assert row["executable"].startswith("torchtitan has no tensor scheme annotated")
    (row,) = json.loads(plan(job, *options, "--any-program"))["rows"]
    assert row["executable"] is True


@pytest.mark.slow
def test_no_planner_beats_the_certified_optimum_or_that_of_its_own_space(job: Path, tmp_path: Path) -> None:
    """A small version of the tables of docs/planners.md: every planner of jobs."""
    plot = tmp_path / "benchmark.png"
    shown = plan(job, "--with", "all", "--json", "--plot", plot, "--steps", 200, "--seconds", 5)
    answer = json.loads(shown)
    optimum, rows = answer["certificate"], {row["planner"]: row for row in answer["rows"]}
    assert sorted(rows) == planners_of_jobs()
    assert optimum["gap"] <= 0.01 and optimum["plans"] > 100 and optimum["plan"]
    fitting = {name: row for name, row in rows.items() if row["executable"] is True}
    assert len(fitting) > 20
    for name, row in fitting.items():
        assert row["regret"] == pytest.approx(row["step_time_s"] / optimum["step_time_s"] - 1)
        assert row["regret"] >= -optimum["gap"] - 1e-9 and not row["outside"], name
        assert row["regret_restricted"] is None or row["regret_restricted"] >= -1e-6, name
    unknown = {name for name, row in fitting.items() if row["regret_restricted"] is None}
    assert unknown <= {"metis"}
    assert plot.stat().st_size > 10_000


@pytest.mark.slow
def test_a_plan_that_is_faster_is_outside_of_the_space_or_a_defect(job: Path) -> None:
    problem = open_problem(job)
    optimum = find_optimum(problem, SearchBudget())
    assert isinstance(optimum, CertifiedOptimum)
    early = find_optimum(problem, SearchBudget(seconds=0.05))
    assert isinstance(early, CertifiedOptimum) and early.gap >= optimum.gap
    assert early.shortest <= optimum.step_time * (1 + 1e-9) and optimum.shortest <= early.step_time * (1 + 1e-9)
    inside = {"plan": {"tp": 2, "dp": 4, "recompute": "none"}, "batch": {"global": 64, "micro": 4}}
    assert explain_faster(problem, inside, optimum.step_time, optimum) == []
    with pytest.raises(PlanError, match="none should take less"):
        explain_faster(problem, inside, optimum.step_time / 2, optimum)
    table = problem.operators({"x": 8})
    best = eliminate(table)
    assert best is not None
    annotated = problem.annotate(table, best.assignment, {"x": 8})
    assert explain_faster(problem, annotated, optimum.step_time / 2, optimum)


def test_the_table_is_whole_and_shows_refusals_with_their_reason(job: Path) -> None:
    cluster, batch = {"node": "dgx-h100", "nodes": 1, "gpus": 6}, {"global": 48, "micro": 4}
    job.write_text(yaml.safe_dump({**JOB, "cluster": cluster, "batch": batch}), "utf-8")
    shown = plan(job, "--with", "alpa,hypar", "--no-optimum")
    words = " ".join(shown.split())
    assert "refused" in words and "no power of two" in words and "…" not in shown, "nothing is cut"
    assert "own regret objective s priced CPU s" in words and "own regret: against the best plan" in words


def test_the_jobs_of_the_benchmark_are_accepted() -> None:
    files = sorted((Path(__file__).resolve().parents[3] / "examples" / "benchmark").glob("*.yaml"))
    assert len(files) == 4
    for file in files:
        assert open_problem(file).gpus in (24, 64, 1024)


@pytest.mark.slow
def test_the_page_of_planners_has_a_row_for_every_planner(job: Path) -> None:
    # The optimum that is proven within a second has the same row.
    done = json.loads(plan(job, "--with", "optcnn,hypar,dapple", "--json", "--seconds", 1))
    lines = format_table(done).splitlines()
    assert len(lines) == 3 + len(done["rows"])
    assert {line.count("|") for line in lines} == {len(COLUMNS) + 1}
    assert lines[2].startswith("| certified optimum | ")
    for line, row in zip(lines[3:], done["rows"], strict=True):
        assert f"| `{row['planner']}` | " in line and (row["regret"] is None or f"{100 * row['regret']:.1f} %" in line)


def test_the_page_of_planners_has_a_table_for_every_job_of_the_benchmark() -> None:
    root = Path(__file__).parents[3]
    jobs = [match[1] for match in TABLE.finditer((root / "docs/planners.md").read_text("utf-8"))]
    assert sorted(jobs) == sorted(str(path.relative_to(root)) for path in root.glob("examples/benchmark/*.yaml"))
