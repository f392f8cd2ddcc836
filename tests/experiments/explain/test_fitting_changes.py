"""Changes that make a plan fit do so, are the fastest of those tried, and are written as ``--set`` reads them."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.explain import sensitivity
from meshcast.experiments.explain.fitting_changes import (
    NO_CHANGES,
    SHOWN,
    FittingChange,
    MemoryChanges,
    fitting_changes,
)
from meshcast.experiments.render.terminal.forecast import list_memory_changes, render
from meshcast.hardware.units import GIB
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.step import StepAndMemory
from tests.draws import drawn
from tests.experiments.cli.samples import run

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-70b", "layers": 40},
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "micro": 2, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}
LARGE: dict[str, Any] = {**JOB, "model": "llama3-70b", "cluster": "dgx-h100:8", "batch": {**JOB["batch"], "global": 64}}
CHUNKS = {"plan": {"tp": 4, "pp": 4, "chunks": 5, "recompute": "full"}, "batch": {"global": 256, "micro": 16}}

changes_of_job = cache(lambda: fitting_changes(simulate(JOB)))


@pytest.mark.parametrize(
    ("changes", "number"),
    drawn(
        [
            ({}, SHOWN),
            ({"model": {"preset": "llama3-405b", "layers": 32}, "plan": {"tp": 8}, "cluster": "dgx-h100:1"}, 0),
            ({"model": "llama3-8b", "plan": {"tp": 8}}, 0),
            (LARGE, SHOWN),
            (LARGE | CHUNKS, SHOWN),
            (LARGE | {"model": "mixtral-8x7b", "plan": {"pp": 2}, "cluster": "dgx-h100:4"}, SHOWN),
        ],
        keep=lambda case: "batch" not in case[0],
    ),
)
def test_every_change_makes_the_plan_fit(changes: dict[str, Any], number: int, tmp_path: Path) -> None:
    job = {**JOB, **changes}
    report = simulate(job)
    fitting, lever = fitting_changes(report) if changes else changes_of_job()
    assert len(fitting) == number and report.fits == (job["model"] == "llama3-8b")
    assert (lever is None) == report.fits
    assert all(lever is not None and lever.saved >= one.saved > 0 for one in fitting if len(one.changes) == 1)
    steps = [change.forecast.step_time for change in fitting]
    assert steps == sorted(steps)
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    for change in fitting:
        words = shlex.split(str(change))
        changed = simulate(load_job(path, [word for word in words if word != "--set"]))
        assert changed.fit.verdict == "fits" and changed.step_time == change.forecast.step_time
        assert changed.peak_device == change.forecast.peak_device
        assert report.fit.held - changed.fit.held == change.saved
        assert changed.job.batch.total == report.job.batch.total


@pytest.mark.slow
def test_no_single_change_of_the_fields_tried_is_faster() -> None:
    best = changes_of_job().fitting[0]
    plans = [{"recompute": "selective"}, {"recompute": "full"}, {"zero": 2}, {"zero": 3}, {"fsdp": True}]
    plans += [{"tp": 8}, {"pp": 4}, {"pp": 8}, {"cp": 2}, {"offload": ["optimizer"]}]
    for plan in plans:
        report = simulate({**JOB, "plan": {**JOB["plan"], **plan}})
        assert not report.fits or report.step_time >= best.forecast.step_time


@pytest.mark.parametrize("recompute", ["operators", ["mlp"]])
def test_plans_that_recompute_by_operator_or_module_have_changes(recompute: str | list[str]) -> None:
    job: dict[str, Any] = {"model": {"preset": "llama3-8b", "layers": 16}, "cluster": "dgx-h100:1"}
    job["batch"] = {"global": 8, "micro": 1, "sequence": 65536}
    report = simulate({**job, "plan": {"fsdp": True, "recompute": recompute}})
    assert not report.fits and len(fitting_changes(report).fitting) == SHOWN


@pytest.mark.slow
def test_pairs_are_tried_where_few_single_changes_fit() -> None:
    job = {"model": "llama3-405b", "cluster": "dgx-h100:16", "batch": {"global": 128, "sequence": 8192}}
    fitting = fitting_changes(simulate({**job, "plan": {"tp": 8, "pp": 8, "partition": "ends-as-layers"}})).fitting
    assert any(len(one.changes) == 2 for one in fitting) and len({frozenset(one.changes) for one in fitting}) == SHOWN


def test_smaller_micro_batches_that_divide_the_stated_one_are_tried() -> None:
    job = {"model": {"preset": "llama3-8b", "layers": 4}, "cluster": "dgx-h100:1", "plan": {"zero": 1}}
    report = simulate({**job, "batch": {"global": 288, "micro": 36, "sequence": 8192}})
    fitting = fitting_changes(report).fitting
    sizes = {change.changes["batch.micro"] for change in fitting if "batch.micro" in change.changes}
    assert not report.fits and sizes and all(size < 36 and 36 % size == 0 for size in sizes)


def test_long_plans_have_none() -> None:
    report = simulate({**JOB, "plan": simulate(JOB).to_dict()["job"]["plan"]})
    assert not report.fits and fitting_changes(report) == NO_CHANGES


def test_more_tensor_parallel_ranks_bring_sequence_parallelism() -> None:
    plan = {"tp": 2, "pp": 2, "chunks": 4, "sequence_parallel": False}
    lever = fitting_changes(simulate({**JOB, "model": {"preset": "llama3-70b", "layers": 32}, "plan": plan})).lever
    assert lever is not None and lever.changes == {"plan.tp": 8, "plan.sequence_parallel": True}


def test_commands_show_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`predict` in both forms of its answer, beside unstated fields; `why` and `run` at their beginning."""
    changes = changes_of_job()  # once for all
    monkeypatch.setattr("meshcast.experiments.explain.fitting_changes.fitting_changes", lambda _: changes)
    for name in ("hardware_figures", "assumed_fields"):
        every = getattr(sensitivity, name)
        monkeypatch.setattr(sensitivity, name, lambda *given, every=every: every(*given)[:2])
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump({**JOB, "run": {"steps": 100}}))
    answer = json.loads(run("predict", path, "--json", "--verbose").stdout)
    assert len(answer["fitting_changes"]) == SHOWN and answer["largest_lever"] == changes.lever.to_dict()
    assert answer["unstated"]["precision.compute"] == "bf16" and "plan.tp" not in answer["unstated"]
    page = run("predict", path, "--verbose").stdout
    assert "fits with" in page and f"lever      {changes.lever}: -" in page and "precision.moments: fp32" in page
    plain = json.loads(run("predict", path, "--json", "--set", "plan.tp=8").stdout)
    assert plain["status"] == "fits" and "fitting_changes" not in plain and "unstated" not in plain
    why = run("why", path).stdout.splitlines()
    assert why[1].startswith("It does not fit") and why[2].startswith("lever      --set plan.")
    assert why[3].startswith("fits with  --set ")
    lines = run("run", path, "--set", "run.seeds=1").stdout.splitlines()
    assert re.match(r"does not fit, with .* it does: [\d.,]+ GiB more than the 79.19 GiB of a GPU", lines[1])


def test_a_change_that_fills_a_gpu_is_not_read_as_too_large() -> None:
    change = FittingChange({"plan.zero": 2}, StepAndMemory(1.0, GIB * 79.0, GIB * 80.0, GIB * 79.5, 1.006), GIB)
    (grid,) = list_memory_changes(MemoryChanges([change], None), GIB * 80.0)
    assert "80 of 80 GiB" in render(grid) and "all" not in render(grid)
