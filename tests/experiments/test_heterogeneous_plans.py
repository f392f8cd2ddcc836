"""Commands and plots on plans whose stages and replicas differ: names that a person understands, or one refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshcast.experiments.explain.assumed_fields import assumed_fields, forecast_alternatives
from meshcast.experiments.pages import forecast
from meshcast.experiments.plots import memory, timeline
from meshcast.experiments.sweeps.run import load_sweep, run
from meshcast.experiments.sweeps.scaling import forecast_curve
from meshcast.hardware.errors import PlanError
from meshcast.simulator import Report, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.formatting import describe_value
from meshcast.simulator.report.trace import write_trace
from meshcast.validation.kernels.measure import measure
from meshcast.validation.reference.supported import check_distributed
from meshcast.validation.selfcheck.run import check_job
from tests.experiments.sweeps.test_sweep import Lazy
from tests.simulator.plan.test_asymmetric import MIXED, REPLICAS, job

STAGES = {"stages": [{"tp": 8, "layers": 3}, {"tp": 4, "dp": 2, "layers": 5}]}
SHARES = {**REPLICAS, "replicas": [{"dp": 1, "microbatches": 3}, {"dp": 3, "microbatches": 7}]}
SIDES = [{"microbatches": 3, "stages": [{"tp": 4}, {"tp": 4}]}, {"microbatches": 5, "stages": [{"dp": 4, "tp": 2}]}]
JOBS = {
    "stages": job(STAGES, {"global": 16, "microbatches": 4}, cluster=MIXED),
    "shares": job(SHARES, {"global": 24}, cluster=MIXED),
    "replicas": job({"replicas": SIDES}, {"global": 32, "micro": 4}, cluster=MIXED),
}
NAMES = {
    "stages": ["stage 0", "stage 1"],
    "shares": ["replica 0, stage 0", "replica 0, stage 1", "replicas 1 to 3, stage 0", "replicas 1 to 3, stage 1"],
    "replicas": ["replica 0, stage 0", "replica 0, stage 1", "replica 1"],
}
RANKS = {
    "stages": ["tp 8 on a100-sxm-80", "dp 2 x tp 4 on h100-sxm"],
    "shares": ["tp 2 on a100-sxm-80"] * 2 + ["dp 3 x tp 2 on a100-sxm-80 and h100-sxm"] * 2,
    "replicas": ["tp 4 on a100-sxm-80"] * 2 + ["dp 4 x tp 2 on h100-sxm"],
}
MICROBATCHES = {
    "stages": "4 micro-batches of 4;",
    "shares": "3 micro-batches of 1 in replica 0, 7 in replicas 1 to 3;",
    "replicas": "3 micro-batches of 4 in replica 0, 5 in replica 1;",
}


@pytest.fixture(scope="module", params=JOBS)
def named(request: Any) -> tuple[str, Report]:
    return request.param, simulate(JOBS[request.param])


def test_the_answer_names_stages_and_their_ranks(named: tuple[str, Report]) -> None:
    name, report = named
    stages = report.to_dict()["memory"]["stages"]
    assert [stage["name"] for stage in stages] == NAMES[name]
    assert [stage["ranks"] for stage in stages] == RANKS[name]


def test_the_page_names_stages_and_micro_batches(named: tuple[str, Report]) -> None:
    name, report = named
    text = forecast.render(forecast.page(report))
    assert max(map(len, text.splitlines())) <= forecast.WIDTH
    for words in (*map(": ".join, zip(NAMES[name], RANKS[name], strict=True)), MICROBATCHES[name]):
        assert words in " ".join(text.split())
    assert f"{NAMES[name][report.device]}, the slowest" in text


def test_plots_name_stages(named: tuple[str, Report], tmp_path: Path) -> None:
    name, report = named
    shown = NAMES[name] if report.play.plan.pipelines else ["stage 0", "stage 1"]
    for figure in (timeline.timeline(report), memory.memory(report)):
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == shown
    labels = {text.get_text() for text in timeline.timeline(report).axes[0].texts}
    most = max(one.shape.m for one in report.play.plan.every_pipeline)
    assert {str(number) for number in range(most)} <= labels


def test_the_trace_names_replicas_and_their_own_stages(named: tuple[str, Report], tmp_path: Path) -> None:
    name, report = named
    write_trace(report, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    plan = report.play.plan
    for device, words in enumerate(processes):
        assert words.startswith(NAMES[name][device] if plan.pipelines else f"stage {device}")
        assert words.endswith(f"{RANKS[name][device]})")
    counts = {
        device: one.shape
        for device in range(plan.ranks.devices)
        for one in [plan.every_pipeline[plan.ranks.pipeline_of(device)[0]]]
    }
    actions = [event for event in events if event.get("cat") == "gpu_user_annotation" and event["name"] != "O"]
    for device, shape in counts.items():
        own = [event["args"] for event in actions if event["pid"] == device]
        assert {one["microbatch"] for one in own} == set(range(shape.m))
        assert {one["stage"] for one in own} == {plan.ranks.pipeline_of(device)[1]}
        assert all(("replica" in one) == bool(plan.pipelines) for one in own)
    sends = {event["name"] for event in events if event["ph"] == "s"}
    assert {f"{stage}F0" for shape in counts.values() for stage in range(shape.stages - 1)} <= sends


def test_assumed_fields_have_alternatives(named: tuple[str, Report]) -> None:
    """As `meshcast why` tries them; a cluster of several kinds of nodes it refuses by itself."""
    _, report = named
    fields = [field for field in assumed_fields(report) if field.name == "precision.gradients"]
    (effect,) = (forecast_alternatives(field, report, SharedWork()) for field in fields)
    assert effect.alternatives and effect.memory_effect_gib > 0


def test_relations_of_any_job_hold(named: tuple[str, Report]) -> None:
    name, _ = named
    described = {**JOBS[name], "framework": "megatron-core"}
    if name == "shares":  # the order of the axes of a mesh has a meaning
        described["plan"] = {"pp": 2, "dp": 4, "tp": 2, "replicas": SHARES["replicas"]}
    assert [what for _, what, _ in check_job(described, SharedWork()) if what] == []


# ------------------------------------------------------------------------------------------------------ sweeps


def test_sweeps_vary_stages_replicas_and_micro_batches(tmp_path: Path) -> None:
    first, second = {"plan": STAGES, "batch.microbatches": 8}, {"plan.replicas": SHARES["replicas"]}
    text = {
        "job": job(REPLICAS, {"global": 24}, cluster=MIXED),
        "list": [first | {"batch.global": 16}, second, {"plan.share": "by-speed"}, {}],
    }
    (tmp_path / "listed.json").write_text(json.dumps(text))
    found = run(load_sweep(tmp_path / "listed.json"), tmp_path / "listed.parquet", Lazy())
    assert found["status"]["fits"] == 4
    stages = [STAGES["stages"], [{"tp": 8}, {"tp": 2, "dp": 4}]]
    vary = {"plan.stages": stages, "batch.microbatches": [2, 4]}
    (tmp_path / "grid.json").write_text(json.dumps({"job": JOBS["stages"], "vary": vary}))
    found = run(load_sweep(tmp_path / "grid.json"), tmp_path / "grid.parquet", Lazy())
    assert found["status"]["fits"] == 4
    assert {describe_value(row["plan.stages"]) for row in found["best"]} == {
        "tp 8, layers 3 | tp 4, dp 2, layers 5",
        "tp 8 | tp 2, dp 4",
    }


def test_values_in_words() -> None:
    assert describe_value("[4, 8]") == "[4, 8]" and describe_value("even") == "even" and describe_value(3) == "3"
    nested = [{"microbatches": 3, "stages": [{"tp": 4}, {"tp": 4, "dp": 2}]}]
    assert describe_value(json.dumps(nested)) == "microbatches 3, stages (tp 4 | tp 4, dp 2)"
    assert describe_value("[{not json") == "[{not json"


# --------------------------------------------------------------------------------------------------- refusals


def test_what_needs_equal_ranks_refuses(named: tuple[str, Report], tmp_path: Path) -> None:
    name, report = named
    with pytest.raises(PlanError, match="the reference trainer needs a plan whose stages and replicas are alike"):
        check_distributed(report.play.plan)
    with pytest.raises(PlanError, match="a measurement of kernels needs a plan whose stages"):
        measure(JOBS[name], "cpu", tmp_path / "out.json")
    with pytest.raises(PlanError, match="scaling needs a plan whose stages and replicas are alike"):
        forecast_curve(JOBS[name], [16, 32], "weak")
