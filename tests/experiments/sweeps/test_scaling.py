"""Scaling curves."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.render.matplotlib import scaling
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.render.terminal.scaling import page
from meshcast.experiments.sweeps.scaling import (
    MATRIX,
    Curve,
    curve_rows,
    forecast_curve,
    parse_counts,
    resize_cluster,
    scale_job,
)
from meshcast.experiments.views.breakdown import group_shares
from meshcast.experiments.views.scaling import make_scaling_curve
from meshcast.hardware import load_cluster
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from tests.draws import drawn

JOB: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1024, "seq": 512},
    "cluster": "dgx-h100:2",
    "batch": {"global": 64, "micro": 1},
    "plan": {"tp": 2},
}
EXPERTS = {
    **JOB,
    "model": {**JOB["model"], "moe": {"experts": 8, "top_k": 2, "expert_ffn": 256}},
    "plan": {"tp": 2, "ep": 4},
}


def test_a_point_is_the_forecast_of_the_job_with_that_many_gpus() -> None:
    for kind, batches in (("weak", (32, 64, 256)), ("strong", (64, 64, 64))):
        found = forecast_curve(JOB, (8, 16, 64), kind)  # type: ignore[arg-type]
        for point, batch in zip(found.points, batches, strict=True):
            alone = {**JOB, "cluster": f"dgx-h100:{point.gpus // 8}", "batch": {"global": batch, "micro": 1}}
            assert point.report is not None
            assert point.report.step_time == pytest.approx(simulate(alone).step_time, rel=1e-12)
            assert point.tokens_per_s == pytest.approx(batch * 512 / point.report.step_time)


def test_efficiency_is_one_at_the_smallest_and_falls_under_strong_scaling() -> None:
    found = forecast_curve(JOB, (128, 8, 32), "strong")
    efficiencies = [found.efficiency(point) for point in found.points]
    assert [point.gpus for point in found.points] == [8, 32, 128]
    assert efficiencies[0] == 1 and efficiencies[0] > efficiencies[1] > efficiencies[2] > 0


def test_experts_copies_grow_with_the_axis() -> None:
    job = load_job(EXPERTS)
    assert job.plan.views == {"experts": {"edp": 4, "ep": 4, "etp": 1}}
    scaled = scale_job(job, 64, "weak", "dp")
    assert scaled["plan"]["views"] == {"experts": {"edp": 16, "ep": 4, "etp": 1}}
    assert scaled["plan"]["mesh"] == {"pp": 1, "dp": 32, "tp": 2} and scaled["batch"]["global"] == 256


def test_another_axis_may_grow() -> None:
    found = forecast_curve(JOB, (16, 32), "strong", "tp")
    assert [point.report.job.plan.mesh["tp"] for point in found.points if point.report] == [2, 4]


def test_an_indivisible_size_is_a_point_with_its_error() -> None:
    found = forecast_curve(JOB, (8, 12, 16), "weak")
    assert [row["status"] for row in curve_rows(found)] == ["fits", "fits", "fits"]
    found = forecast_curve(JOB, (1, 16), "weak")
    rows = curve_rows(found)
    assert [row["status"] for row in rows] == ["invalid", "fits"]
    assert rows[0]["error"]["where"] == "plan.mesh.dp" and "0.5" in rows[0]["error"]["rule"]
    assert [point.gpus for point in found.known] == [16]


def test_the_bottleneck_is_the_largest_cost() -> None:
    found = forecast_curve(JOB, (8, 128), "strong")
    for point in found.known:
        assert point.report is not None
        costs = point.report.costs
        assert point.bottleneck in (MATRIX, max(costs, key=lambda name: costs[name]))
    assert len(make_scaling_curve(found).changes) == (found.points[0].bottleneck != found.points[1].bottleneck)


@pytest.mark.parametrize(
    "spec",
    [
        "dgx-h100:4",
        "selene",
        {"node": "dgx-a100", "nodes": 4},
        {"gpu": "h100-sxm", "gpus": 32, "gpus_per_node": 8, "inter": {"kind": "infiniband", "gbps_per_gpu": 400}},
        {"gpu": "gb200", "gpus": 144},
    ],
)
def test_a_cluster_keeps_its_nodes(spec: Any) -> None:
    cluster = load_cluster(spec)
    for gpus in (8, 16, 20, 512):
        other = resize_cluster(cluster, gpus)
        assert (other.gpus, other.node, other.fabric) == (gpus, cluster.node, cluster.fabric)
        assert (other.nodes - 1) * other.gpus_per_node < gpus <= other.nodes * other.gpus_per_node


def test_counts() -> None:
    assert parse_counts("8,16, 24") == [8, 16, 24]
    assert parse_counts("8..64") == [8, 16, 32, 64]
    assert parse_counts("3..20,7") == [3, 6, 12, 7]


def test_a_view_without_axes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"plan.views.experts is \{\}: must have at least 1"):
        long = load_job(EXPERTS).to_dict()
        forecast_curve({**long, "plan": {**long["plan"], "views": {"experts": {}}}}, (8,), "weak")


def test_figure_and_page(tmp_path: Path) -> None:
    for points in drawn([(1, 16), (8, 16, 64), (16,), (1,)], keep=4):
        found = forecast_curve(JOB, points, "weak")
        files = [tmp_path / f"{i}.svg" for i in range(2)]
        for file in files:
            save(lambda curve=found: scaling.scaling(curve), file)
        assert files[0].read_bytes() == files[1].read_bytes()
        assert page(found)
    shares = group_shares(simulate(JOB))
    assert sum(shares) == pytest.approx(1) and min(shares) >= 0
    assert isinstance(found, Curve)


def test_command(tmp_path: Path) -> None:
    file, plot = tmp_path / "job.json", tmp_path / "curve.png"
    file.write_text(json.dumps(JOB), "utf-8")
    words = ["scale", str(file), "--gpus", "8..32"]
    result = CliRunner().invoke(app, [*words, "--json", "--plot", str(plot)])
    assert result.exit_code == 0 and plot.read_bytes().startswith(b"\x89PNG")
    answer = json.loads(result.stdout)
    assert (answer["kind"], answer["axis"]) == ("weak", "dp")
    assert [point["gpus"] for point in answer["points"]] == [8, 16, 32]
    assert "Weak scaling" in CliRunner().invoke(app, words).stdout


def test_points_of_a_training_have_its_days_and_cost() -> None:
    run = {"tokens": 1e12, "price_per_gpu_hour": 2.0}
    found = forecast_curve({**JOB, "run": run}, (8, 16), "weak")
    for row in curve_rows(found):
        assert row["days"] == pytest.approx(1e12 / row["tokens_per_s"] / 86_400)
        assert row["cost"] == pytest.approx(row["days"] * 24 * row["gpus"] * 2)
    (alone, _) = curve_rows(forecast_curve({**JOB, "run": {"tokens": 1e12}}, (8, 16), "weak"))
    assert "cost" not in alone and "days" in alone and "days" not in curve_rows(forecast_curve(JOB, (8,), "weak"))[0]


def test_several_jobs_are_scaled_on_one_axis(tmp_path: Path) -> None:
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file, plan in zip(files, ({"tp": 4}, {"tp": 8}), strict=True):
        file.write_text(json.dumps({**JOB, "plan": plan, "run": {"tokens": 1e12}}), "utf-8")
    words = ["scale", *map(str, files), "--gpus", "8,16", "--json", "--plot", str(tmp_path / "both.svg")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and (tmp_path / "both.svg").exists()
    answers = json.loads(result.stdout)["jobs"]
    assert [answer["label"] for answer in answers] == ["tp 4", "tp 8"]
    for file, answer in zip(files, answers, strict=True):
        assert answer["points"] == json.loads(json.dumps(curve_rows(forecast_curve(file, (8, 16), "weak"))))
