"""``meshcast report``: what it takes, what it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("bokeh", reason="bokeh is not installed (pip install 'meshcast[report]')")

from meshcast.experiments.cli.app import app
from meshcast.simulator import simulate

JOB: dict[str, Any] = {"model": "gpt2", "cluster": "dgx-h100:1", "batch": {"global": 16}, "plan": {"pp": 2}}

SCRIPT = """torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --num-layers 12 --hidden-size 768 \\
  --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 \\
  --global-batch-size 16 --vocab-size 50257 --bf16
"""


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(JOB))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "report.html"


def test_a_job(job: Path, out: Path) -> None:
    done = run(job, "--out", out, "--set", "plan.pp=4", "--no-sensitivity", "--title", "A < B")
    assert done.exit_code == 0, done.output
    page = out.read_text("utf-8")
    assert "<h1>A &lt; B</h1>" in page and "pp 4" in page and "made with --no-sensitivity" in page


@pytest.mark.slow
def test_a_job_with_sensitivities(job: Path, out: Path) -> None:
    assert run(job, "--out", out).exit_code == 0
    assert "figure of the hardware" in out.read_text("utf-8")


@pytest.mark.slow
def test_a_launch_file(tmp_path: Path, out: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    done = run(script, "--out", out, "--no-sensitivity", "--set", "cluster=dgx-h100:1")
    assert done.exit_code == 0, done.output
    assert "launch file" in done.output and out.stat().st_size > 1e6


def test_the_answer_of_a_forecast(tmp_path: Path, out: Path) -> None:
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps(simulate(JOB).to_dict()))
    assert run(answer, "--out", out, "--no-sensitivity").exit_code == 0
    answer.write_text(json.dumps(simulate(JOB).to_dict() | {"step_time_s": 1.0}))
    done = run(answer, "--out", out, "--no-sensitivity")
    assert done.exit_code == 2 and "its step takes 1.0 s" in done.output and "name the job file" in done.output
    answer.write_text(json.dumps(simulate(JOB).to_dict() | {"job": "elsewhere.yaml"}))
    assert run(answer, "--out", out).exit_code == 2


def test_a_sweep_and_a_search(reference: Path, out: Path) -> None:
    assert run(reference, "--out", out).exit_code == 0
    assert 'id="parallel"' in out.read_text("utf-8")
    done = run(reference, "--out", out, "--set", "plan.tp=2")
    assert done.exit_code == 2 and "--set" in done.output


def test_without_the_library(job: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    done = run(job, "--out", out)
    assert done.exit_code == 2 and "pip install 'meshcast[report]'" in done.output
