"""Two forecasts part by part: every difference of the jobs is named, and the parts add up to that of the steps."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.experiments.explain.comparison import compare
from meshcast.experiments.explain.edited_launch import compare_edited
from meshcast.simulator import load_job, simulate
from meshcast.simulator.job.differences import label_jobs

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 8, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}


def test_the_parts_add_up_to_the_difference_of_the_steps() -> None:
    found = compare(load_job(JOB), load_job({**JOB, "plan": {"tp": 2, "pp": 2, "recompute": "full"}}))
    first, second = found.reports
    difference = second.step_time - first.step_time
    assert sum(other - one for one, other in found.parts.values()) == pytest.approx(difference)
    changed = {change.field: change.values for change in found.changes}
    assert changed["plan.mesh.tp"] == (4, 2) and changed["plan.mesh.dp"] == (2, 4)
    assert changed["plan.schemes.memory/recompute-full"] == (None, "used")
    assert not any(field.startswith(("model", "cluster", "batch")) for field in changed)
    answer = found.to_dict()
    assert answer["step_time_s"] == [first.step_time, second.step_time]
    for one, other in zip(*(r.to_dict()["memory"]["stages"] for r in (first, second)), strict=True):
        assert set(one["by"]) | set(other["by"]) >= set(answer["memory_gib"])


def test_equal_jobs_differ_in_nothing() -> None:
    found = compare(load_job(JOB), load_job(JOB))
    assert not found.changes and all(one == other for one, other in found.parts.values())
    assert found.sentence() == "Both steps take equally long."


def test_the_sentence_names_the_largest_difference() -> None:
    slow = {**JOB, "framework": {"name": "megatron-core", "set": {"step_overhead_s": 5.0}}}
    sentence = compare(load_job(JOB), load_job(slow)).sentence()
    assert "more time than the first" in sentence and "host" in sentence and "+4,965.0 ms" in sentence


def test_labels_are_the_fewest_values_that_tell_jobs_apart() -> None:
    def label(*changes: list[str]) -> list[str]:
        return label_jobs([load_job(JOB, stated) for stated in changes])

    assert label([], ["plan.tp=2"], ["plan.tp=8"]) == ["tp 4", "tp 2", "tp 8"]  # dp follows
    assert label([], ["cluster=dgx-b200:2", "plan.tp=2"]) == ["dgx-h100:2", "dgx-b200:2"]
    zero = label([], ["plan.tp=2"], ["plan.tp=2", "plan.zero=3"])
    assert zero == ["tp 4, zero-1", "tp 2, zero-1", "tp 2, zero-3"]
    assert label([], []) == ["the same job (1)", "the same job (2)"]
    assert label([], ["plan.tp=2"], []) == ["tp 4 (1)", "tp 2", "tp 4 (2)"]


def test_figures_of_many_jobs_are_those_of_their_forecasts() -> None:
    run = {"tokens": 1e12, "price_per_gpu_hour": 2.0}
    jobs = [load_job({**JOB, "run": run, "plan": {"tp": tp}}) for tp in (8, 4, 2)]
    compared = compare(*jobs)
    answer, reports = compared.to_dict(), [simulate(job) for job in jobs]
    assert answer["labels"] == ["tp 8", "tp 4", "tp 2"]
    assert answer["cost"] == [report.cost for report in reports] and answer["days"] == [r.days for r in reports]
    for job, report in enumerate(reports):
        assert sum(seconds[job] for seconds in answer["breakdown_s"].values()) == pytest.approx(report.step_time)
    assert "C (tp 2) has the shortest step" in answer["sentence"] and "than A (tp 8)" in answer["sentence"]
    assert "cost" not in compare(jobs[0], load_job(JOB)).to_dict()  # which one of them alone has


@pytest.mark.parametrize(("model", "fits"), [("llama3-8b", True), ("llama3-70b", False)])
def test_an_edited_file_is_the_job_if_it_is_forecast_as_it(model: str, fits: bool) -> None:
    job, other = (load_job({**JOB, "model": model, "plan": {"tp": tp, "pp": 2}}) for tp in (4, 8))
    (same, words), (differs, _) = (compare_edited(job, back, "train.sh", "megatron") for back in (job, other))
    assert same and not differs and ("does not fit" in words) is not fits
