"""``meshcast predict`` of jobs with open fields: a search first, then the forecast of its best plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.space.fields import has_open_fields
from meshcast.simulator import simulate
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import TINY


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(TINY), "utf-8")
    return path


def test_the_best_plan_is_forecast_below_a_line_about_the_search(job: Path) -> None:
    result = run("predict", job)
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0 and words.startswith("search plan.tp ")
    assert "gap 0.00%, proven by" in words and "90% interval" in words


def test_the_answer_holds_the_search(job: Path, tmp_path: Path) -> None:
    answer = json.loads(run("predict", job, "--json").stdout)
    found = answer.pop("search")
    assert found["certificate"]["gap"] == 0 and found["certificate"]["incumbent_s"] == answer["step_time_s"]
    best = json.loads(run("search", job, "--json", "--top", "1", "--jobs-to", tmp_path / "best").stdout)["best"]
    assert best[0]["plan"] == found["plan"]
    assert answer == json.loads(json.dumps(simulate(tmp_path / "best" / "job-1.yaml").to_dict()))


def test_a_change_opens_a_field(job: Path) -> None:
    closed = {**TINY, "plan": {"tp": 2}, "batch": {"global": 16, "micro": 1, "sequence": 2048}}
    job.write_text(yaml.safe_dump(closed), "utf-8")
    assert "search" not in json.loads(run("predict", job, "--json").stdout)
    answer = json.loads(run("predict", job, "--json", "--set", "plan.tp=[1, 2]").stdout)
    assert {*answer["search"]["plan"]} == {"plan.tp"} and answer["search"]["certificate"]["space"]["plans"] == 2
    plan = "plan={auto: true, zero: 1, offload: [], partition: even, schedule: 1f1b}"
    small = ("--set", plan, "--set", "cluster={gpu: h100-sxm, gpus: 2}", "--set", "model.layers=2")
    whole = json.loads(run("predict", job, "--json", *small, "--set", "batch.global=2").stdout)
    assert {"plan.tp", "plan.recompute"} <= {*whole["search"]["plan"]}
    assert whole["search"]["certificate"]["gap"] == 0


@pytest.mark.parametrize("strict", [False, True])
def test_no_plan_fits(job: Path, strict: bool) -> None:
    result = run("predict", job, "--set", "model=llama3-70b", *(["--strict"] if strict else []))
    assert result.exit_code == (3 if strict else 2) and result.stdout == ""
    assert "no plan fits: of 32 plans" in result.stderr


def test_an_interrupted_search_answers_with_what_is_proven(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast = Search._forecast

    def stop_at_the_second(self: Search, *point: Any) -> Any:
        if self.certificate.exact == 1:
            raise KeyboardInterrupt
        return forecast(self, *point)

    monkeypatch.setattr(Search, "_forecast", stop_at_the_second)
    result = run("predict", job, "--json", "--set", "batch.global=64")
    answer = json.loads(result.stdout)
    assert result.exit_code == 130 and "interrupted" in result.stderr
    assert answer["search"]["certificate"]["complete"] is False and answer["status"] == "fits"


@pytest.mark.parametrize(
    ("job", "opened"),
    [
        ({"plan": "auto"}, True),
        ({"plan": {"tp": "auto"}}, True),
        ({"plan": {"tp": [1, 2]}}, True),
        ({"batch": {"micro": [1, 2]}}, True),
        ({"framework": {"set": {"overlap": {"tp": "auto"}}}}, True),
        ({"plan": {"partition": ["even", "ends-as-layers"]}}, True),
        ({"plan": {"offload": [[], ["optimizer"]]}}, True),
        ({"plan": {"partition": [16, 16]}}, False),
        ({"plan": {"offload": ["optimizer"]}}, False),
        ({"id": "auto"}, False),
        ({"model": "llama3-8b"}, False),
        ({"plan": {"tp": 2, "stages": [{"tp": 2}]}}, False),
    ],
)
def test_what_leaves_a_field_open(job: dict[str, Any], opened: bool) -> None:
    assert has_open_fields(job) == opened


COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("--set", "run.days=1"),
    "scale": ("--gpus", "8,16"),
    "compare": ("--set", "cluster=dgx-h100:2"),
    "why": (),
    "check": (),
    "collectives": (),
}
"""Commands that take a job, each with its further words."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_searches_once(job: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = command if command != "why" else "check"  # which takes a tenth of its time
    first, again = (run(words, job, *COMMANDS[words]) for words in (before, command))
    # `check` says how many seconds each of its checks took.
    pages = [re.sub(r"\d+\.\d(?= +holds)", "", result.stdout) for result in (first, again)]
    assert first.exit_code == again.exit_code == 0 and (pages[0] == pages[1] or before != command)
    assert "search plan.tp" in " ".join(first.stderr.split()) and "(remembered)" not in first.stderr
    assert again.stderr.count("gap 0.00%") == again.stderr.count("(remembered)") == 1 + (command == "compare")


def test_what_predict_found_is_remembered_for_a_job_of_the_same_content(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The plan of another batch, or of another file of the model, is searched anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(TINY["model"]), "utf-8")
    job.write_text(yaml.safe_dump({**TINY, "model": "model.yaml"}), "utf-8")
    step = json.loads(run("predict", job, "--json").stdout)["step_time_s"]
    seen = run("compare", job, "--set", "batch.global=32", "--json")
    assert seen.stderr.count("(remembered)") == 1 and json.loads(seen.stdout)["step_time_s"][0] == step
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**TINY["model"], "layers": 8}), "utf-8")
    assert "(remembered)" not in run("check", job).stderr
    for kept in (tmp_path / "meshcast" / "plans").iterdir():
        kept.write_text("[1]", "utf-8")
    assert run("check", job).exit_code == 0


def test_the_plan_of_a_command_is_that_of_predict(job: Path, tmp_path: Path) -> None:
    assert run("export", job, "--to", "megatron", "--out", tmp_path / "run.sh").exit_code == 0
    best = json.loads(run("predict", job, "--json").stdout)["search"]["plan"]
    assert f"--tensor-model-parallel-size {best['plan.tp']}" in (tmp_path / "run.sh").read_text("utf-8")
