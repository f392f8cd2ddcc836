"""The choice among published plans: groups, regret and rank correlation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.validation.published.choice import (
    choose_plans,
    forecast_choices,
    group_plans,
    held_out_distances,
    judge_group,
    rank_correlation,
    summarize_choices,
    upper_end,
)
from meshcast.validation.published.measured_range.survey import SurveyedRun, survey
from meshcast.validation.published.rows import PublishedRun, UnreadableLine
from tests.draws import drawn


def run(name: str, seconds: float, micro: int = 1, tp: int = 1, **spec: Any) -> PublishedRun:
    task = {"class": "dense", "stack": "megatron-core", "gpu": "h100-sxm", "gpus": 8, "mesh": {"tp": tp}}
    whole = {**task, "batch": {"micro": micro, "global": 64, "seq": 4096}, **spec}
    return PublishedRun.model_validate({"id": name, "spec": whole, "measured": {"step_time_s": seconds}})


def judge(runs: list[Any], forecasts: list[float | None]) -> list[dict[str, Any]]:
    """The groups of runs with these forecasts; None: the run was refused."""
    rows = []
    for published, forecast in zip(runs, forecasts, strict=True):
        known = forecast is not None and isinstance(published, PublishedRun)
        error = forecast / published.step_time - 1 if known else None
        rows.append({"error": error, "predicted": {"step_time_s": forecast} if known else None})
    return choose_plans(runs, rows)


def test_the_regret_of_the_shortest_forecast() -> None:
    runs = [run("a-1", 10.0), run("a-2", 12.0, micro=2), run("a-3", 11.0, tp=2)]
    (group,) = judge(runs, [3.0, 2.0, 2.5])
    assert (group["chosen"], group["best"], group["right"], group["plans"]) == ("a-2", "a-1", False, 3)
    assert group["regret"] == pytest.approx(0.2)
    assert group["random_regret"] == pytest.approx(0.1)
    assert group["rho"] == pytest.approx(-1)
    (group,) = judge(runs, [1.0, 3.0, 2.0])
    assert (group["right"], group["regret"], group["rho"]) == (True, 0, pytest.approx(1))


def test_other_tasks_are_other_groups() -> None:
    """Another release, another batch, another source; two plans are no group, refused runs no plans."""
    plans = [(1, 1), (2, 1), (1, 2)]
    runs = [run(f"a-{i}", 10.0 + i, *plan) for i, plan in enumerate(plans)]
    runs += [run(f"a-new-{i}", 5.0 + i, *plan, stack_version="2") for i, plan in enumerate(plans)]
    runs += [run(f"b-{i}", 10.0 + i, *plan) for i, plan in enumerate(plans[:2])]
    lost = [run("a-lost", 1.0, micro=4), UnreadableLine(reason="no JSON")]
    groups = judge([*runs, *lost], [10.0] * len(runs) + [None, None])
    assert [(group["source"], group["plans"]) for group in groups] == [("a", 3), ("a", 3)]
    summary = summarize_choices(groups)
    assert (summary["groups"], summary["plans"], list(summary["by_source"])) == (2, 6, ["a"])


def test_rounds_of_mlperf_are_other_tasks() -> None:
    """The code is that of the round, though v5.0 and v5.1 name the container of v4.1."""
    names = [f"mlperf-{round_}-{i}" for round_ in ("v41", "v50") for i in range(2)]
    runs = [run(name, 10.0 + i, micro=i + 1, stack="mlperf-nemo") for i, name in enumerate(names)]
    assert judge(runs, [10.0] * 4) == []
    assert len(judge([run.model_copy(update={"id": f"mlperf-v50-{i}"}) for i, run in enumerate(runs)], [10.0] * 4)) == 1


def test_a_plan_that_was_published_twice_counts_once() -> None:
    runs = [run("a-1", 10.0), run("a-2", 30.0), run("a-3", 12.0, micro=2), run("a-4", 11.0, tp=2)]
    (group,) = judge(runs, [1.0, 1.0, 3.0, 2.0])
    assert group["plans"] == 3 and group["regret"] == pytest.approx(20 / 11 - 1)


@given(values=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12))
def test_the_rank_correlation_is_that_of_ranks(values: list[tuple[int, int]]) -> None:
    first, other = zip(*values, strict=True)
    rho = rank_correlation(first, other)
    if len(set(first)) == 1 or len(set(other)) == 1:
        assert rho is None
        return
    assert rho is not None and -1 - 1e-12 <= rho <= 1 + 1e-12
    assert rank_correlation(np.exp(first).tolist(), other) == pytest.approx(rho), "any rising function keeps ranks"
    assert rank_correlation([-value for value in first], other) == pytest.approx(-rho)
    if len(set(first)) == len(first) and len(set(other)) == len(other):
        places = [sorted(side).index(value) for side in (first, other) for value in side]
        gaps = [a - b for a, b in zip(places[: len(first)], places[len(first) :], strict=True)]
        n = len(first)
        assert rho == pytest.approx(1 - 6 * sum(gap * gap for gap in gaps) / (n * (n * n - 1)))


MODEL = {
    "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "head_dim": 64, "ffn": 4096, "vocab": 32000,
    "seq": 4096, "gated": False, "norm": "layernorm", "positions": "learned", "tied": True,
    "attention": "flash", "qk_layernorm": False, "mtp": 0,
}  # fmt: skip


def whole_row(name: str, seconds: float, tp: int = 1, pp: int = 1, **spec: Any) -> dict[str, Any]:
    """A run that can be forecast."""
    return {
        "id": name,
        "spec": {
            "class": "dense", "stack": "megatron-core", "gpu": "h100-sxm", "gpus": 8, "precision": "bf16",
            "model": MODEL, "mesh": {"dp": 8 // (tp * pp), "tp": tp, "pp": pp, "cp": 1, "vpp": 1},
            "sharding": "none", "recompute": {"kind": "none"}, "schedule": "1f1b", "cuda_graphs": False,
            "batch": {"micro": 1, "global": 64, "seq": 4096}, **spec,
        },
        "measured": {"step_time_s": seconds},
    }  # fmt: skip


def surveyed(row: dict[str, Any]) -> SurveyedRun:
    answer = survey(PublishedRun.model_validate(row))
    assert answer is not None
    return answer


def test_the_runs_of_a_group_do_not_count_as_measured() -> None:
    own = [surveyed(whole_row(f"lab-{pp}", 1.0, pp=pp)) for pp in (1, 2, 4)]
    other = surveyed(whole_row("other-1", 1.0, pp=2, batch={"micro": 1, "global": 128, "seq": 4096}))
    alone = held_out_distances(own, own)
    assert all(distance.nearest is None and "schedule" in distance.outside for distance in alone)
    beside = held_out_distances(own, [*own, other])
    assert ["schedule" in distance.outside for distance in beside] == [True, False, False]
    assert [distance.measured for distance in beside] == [False, True, True]
    ends = [upper_end(run, distance) / run.step_time for run, distance in zip(own, beside, strict=True)]
    assert ends[0] > ends[1] and upper_end(own[0], alone[0]) == upper_end(own[0], beside[0])


def test_a_robust_choice_is_of_the_smallest_upper_end() -> None:
    """Of two plans that are forecast nearly alike it takes the one whose schedule was run elsewhere."""
    rows = [whole_row("lab-1", 1.0, pp=2), whole_row("lab-2", 1.2, pp=4), whole_row("lab-3", 1.1)]
    runs = [PublishedRun.model_validate(row) for row in rows]
    seen = surveyed(whole_row("other-1", 1.0, pp=2, batch={"micro": 1, "global": 128, "seq": 4096}))
    times = {"lab-1": 1.01, "lab-2": 1.3, "lab-3": 1.0}
    answers = []
    for run, row in zip(runs, rows, strict=True):
        forecast = replace(surveyed(row), step_time=times[run.id])
        error = forecast.step_time / (run.step_time or 1) - 1
        answers.append({"error": error, "predicted": {"step_time_s": forecast.step_time}, "surveyed": forecast})
    (group,) = group_plans(runs, answers)
    judged = judge_group(group, [seen, *group.surveyed])
    assert (judged["chosen"], judged["right"], judged["regret"]) == ("lab-3", False, pytest.approx(0.1))
    assert (judged["robust_chosen"], judged["robust_right"], judged["robust_regret"]) == ("lab-1", True, 0)
    assert judged["schedules_not_run"] == 1
    summary = summarize_choices([judged])
    assert summary["robust_regret"] == 0 and summary["robust_right"] == 1 and summary["regret"] == judged["regret"]


def test_what_cannot_be_forecast_has_no_row_of_a_choice() -> None:
    refused = PublishedRun.model_validate(whole_row("a-1", 1.0) | {"spec": {"class": "other", "stack": "none"}})
    untimed = PublishedRun.model_validate({**whole_row("a-2", 1.0), "measured": {}})
    rows = list(forecast_choices([refused, untimed, UnreadableLine(reason="no JSON")], 1))
    assert rows == [{"error": None}] * 3


def validate(tmp_path: Path, rows: list[dict[str, Any]], *options: str, what: str = "choice") -> Any:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return CliRunner().invoke(app, ["validate", what, "--data", str(path), "--jobs", "1", *options])


def answer_choice(tmp_path: Path, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only group of some runs, and the summary."""
    done = validate(tmp_path, rows, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    (group,) = answer["groups"]
    return group, answer["summary"]


def test_the_command(tmp_path: Path) -> None:
    rows = [whole_row(f"lab-{tp}", 1.0 + tp, tp=tp) for tp in (1, 2, 4)]
    group, summary = answer_choice(tmp_path, rows)
    assert (group["chosen"], group["regret"], group["rho"]) == ("lab-1", 0, pytest.approx(1))
    assert (group["robust_chosen"], group["robust_regret"]) == ("lab-1", 0)
    assert (group["search"]["chosen"], group["search"]["agrees"], group["search"]["reason"]) == ("lab-1", True, None)
    assert summary["searches"]["agree"] == summary["searches"]["searched"] == 1
    page = validate(tmp_path, rows)
    words = " ".join(page.output.split())
    assert page.exit_code == 0 and "lab-1" in words and "100% right" in words and "robust %" in words
    assert "choose the shortest forecast that fits in 1 of 1 groups" in words
    assert "mean regret 0.0 % (random" in validate(tmp_path, rows, what="published").output
    assert CliRunner().invoke(app, ["validate", "choice", "--plot", "x.png"]).exit_code != 0
    empty = validate(tmp_path, [])
    assert empty.exit_code == 0 and "nothing to choose from" in empty.output


FULL = {"recompute": {"kind": "full"}}
CHUNKS = {"schedule": "interleaved", "mesh": {"dp": 4, "tp": 1, "pp": 2, "cp": 1, "vpp": 2}}
GROUPS = {
    "recomputation": [whole_row("a-1", 1.0), whole_row("a-2", 1.1, tp=2, **FULL), whole_row("a-3", 1.2, pp=2)],
    "one value": [whole_row(f"a-{pp}", 1.0 + pp, pp=pp, **FULL) for pp in (1, 2, 4)],
    "fsdp": [whole_row(f"a-{tp}", 1.0, tp=tp, sharding="fsdp-full") for tp in (1, 2, 4)],
    "mixed": [
        *(whole_row("a-1", 1.0, pp=2, **CHUNKS), whole_row("a-2", 1.0, pp=2)),
        *(whole_row(f"a-{sharding}", 1.0, tp=2, sharding=sharding) for sharding in ("fsdp-full", "zero1")),
    ],
    "layers": [whole_row(f"a-{n}", 1.0, pp=2, recompute={"kind": "full", "layers": n}) for n in (1, 2, 3)],
    "modules": [
        whole_row(f"a-{tp}", 1.0, tp=tp, recompute={"kind": "selective", "modules": ["mlp"]}) for tp in (1, 2, 4)
    ],
}


@pytest.mark.parametrize("name", drawn(GROUPS, keep=("recomputation", "mixed", "modules")))
def test_a_search_of_published_plans_chooses_what_the_forecasts_choose(tmp_path: Path, name: str) -> None:
    group, _ = answer_choice(tmp_path, GROUPS[name])
    assert group["search"]["reason"] is None and group["search"]["defect"] is None
    assert group["search"]["agrees"] and group["search"]["chosen"] == group["chosen"]


def test_a_group_that_is_no_search_says_why(tmp_path: Path) -> None:
    rows = [whole_row(f"a-{tp}", 1.0, tp=tp, overlap={"ep": True}, compile=tp == 2) for tp in (1, 2, 4)]
    group, summary = answer_choice(tmp_path, rows)
    assert group["search"]["kind"] == "differ in settings beside the plan" and not group["search"]["agrees"]
    assert group["search"]["reason"].startswith("the plans differ in framework.set.compile")
    counts = dict.fromkeys(("searched", "agree", "defects", "shortest_does_not_fit"), 0)
    assert summary["searches"] | {"reasons": None} == {"groups": 1, **counts, "reasons": None}
    words = " ".join(validate(tmp_path, rows).output.split())
    assert "1 group is no search: of 1 the plans differ in settings beside the plan" in words


def test_a_run_of_another_model_is_another_task(tmp_path: Path) -> None:
    rows = [whole_row(f"a-{tp}", 1.0, tp=tp) for tp in (1, 2, 4)]
    rows.append(whole_row("a-3", 1.0, pp=4, pipeline_split="ends-as-layers", model={**MODEL, "layers": 10}))
    group, _ = answer_choice(tmp_path, rows)
    assert (group["plans"], group["search"]["kind"]) == (3, None)


def test_a_plan_that_does_not_fit_is_not_chosen_by_a_search(tmp_path: Path) -> None:
    """The fastest forecast needs more memory than a GPU has."""
    wide = {**MODEL, "hidden": 16384, "heads": 128, "kv_heads": 128, "head_dim": 128, "ffn": 65536}
    group, summary = answer_choice(tmp_path, [whole_row(f"a-{tp}", 1.0, tp=tp, model=wide) for tp in (1, 2, 8)])
    assert not group["search"]["fits"] and group["search"]["agrees"] and group["search"]["chosen"] == "a-8"
    assert summary["searches"]["shortest_does_not_fit"] == 1


def test_an_interrupted_search_of_groups_says_how_many_runs_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(group: object) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr("meshcast.experiments.search.published_groups.search_group", interrupt)
    done = validate(tmp_path, [whole_row(f"lab-{tp}", 1.0 + tp, tp=tp) for tp in (1, 2, 4)])
    assert done.exit_code == 130 and "interrupted, 3 runs are not answered" in done.output
