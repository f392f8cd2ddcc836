"""What figures of the hardware are worth: against closed forms, laws that hold for every job, and the plot."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities, change_figures, explain
from meshcast.experiments.render.matplotlib import tornado
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.render.terminal.explain import sensitivity_page
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.hardware_figures import hardware_figures
from meshcast.simulator.report.metrics import Z90

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}


def found_by_name(job: dict[str, Any]) -> dict[str, Any]:
    loaded, shared = load_job(job), SharedWork()
    found = change_figures(loaded, simulate(loaded, shared_work=shared), shared)
    return {one.figure.name: one for one in found}


@pytest.fixture(scope="module")
def answers() -> Any:
    """The worth of every figure to `JOB`."""
    return explain(load_job(JOB))


@pytest.mark.slow
def test_better_hardware_never_makes_a_step_longer_and_saves_no_more_than_the_step(answers: Any) -> None:
    step = answers.report.step_time
    for one in answers.figures:
        assert one.better_s <= step * (1 + 1e-9) <= one.worse_s * (1 + 2e-9)
        assert one.saved_s >= -1e-9 * step
    # A step in which all times shrink by one percent is one percent shorter; some of it depends on no hardware.
    # The sustained rate scales the same kernels as the peaks.
    saved = sum(one.saved_s for one in answers.figures if one.figure.name != "sustained_rate")
    assert 0.5 < saved / (0.01 * step) <= 1.01
    swings = [one.swing_s for one in answers.figures]
    assert swings == sorted(swings, reverse=True)


def test_the_derivative_is_that_of_the_time_which_a_figure_determines() -> None:
    """One GPU without communication: GEMMs and attention by the peaks, the other kernels by the memory."""
    job = {"model": "llama3-8b", "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 4}, "plan": {}}
    found = found_by_name(job)
    assert {"scale_up_bandwidth", "network_bandwidth"}.isdisjoint(found)
    parts = simulate(load_job(job)).breakdown.parts
    by_peaks, by_memory = parts["gemm"] + parts["attention"], parts["memory_bound"] + parts["optimizer"]
    assert found["peak_bf16"].saved_s == pytest.approx(0.01 * by_peaks, rel=0.25)
    assert found["memory_bandwidth"].saved_s == pytest.approx(0.01 * by_memory, rel=0.6)
    both = found["peak_bf16"].saved_s + found["memory_bandwidth"].saved_s
    assert both == pytest.approx(0.01 * (by_peaks + by_memory), rel=0.05)


def test_a_changed_figure_changes_that_figure_alone() -> None:
    job = load_job(JOB)
    for figure in hardware_figures(job):
        changed = figure.change(job, 1 + RANGE)
        if figure.name == "sustained_rate":  # measured for the architecture; the change is a factor on it
            assert changed.framework.rates["kernel"] == pytest.approx(1 + RANGE)
            continue
        (again,) = (one for one in hardware_figures(changed) if one.name == figure.name)
        better = figure.value / (1 + RANGE) if figure.unit == "s" else figure.value * (1 + RANGE)
        assert again.value == pytest.approx(better)
        others = [
            {one.name: one.value for one in hardware_figures(of) if one.name != figure.name} for of in (job, changed)
        ]
        assert others[0] == others[1]


@pytest.mark.slow
def test_a_step_in_8_bits_depends_on_two_peaks() -> None:
    job = {**JOB, "precision": "fp8-delayed"}
    found = found_by_name(job)
    assert found["peak_fp8"].saved_s > found["peak_bf16"].saved_s > 0 == found["peak_fp32"].saved_s
    both = found["peak_fp8"].saved_s + found["peak_bf16"].saved_s
    assert found["sustained_rate"].saved_s == pytest.approx(both, rel=0.05)


def test_the_time_of_the_host_saves_its_share(answers: Any) -> None:
    (one,) = (one for one in answers.figures if one.figure.name == "step_overhead")
    assert one.saved_s == pytest.approx(one.figure.value * (1 - 1 / 1.01), rel=1e-6)
    assert one.better_s < answers.report.step_time < one.worse_s


def test_host_memory_matters_to_what_is_offloaded(answers: Any) -> None:
    plan = {
        "mesh": {"dp": 8},
        "schemes": [{"use": "data/zero-offload", "over": "dp"}],
    }
    found = found_by_name({**JOB, "model": "llama3-8b", "cluster": "dgx-h100:1", "plan": plan})
    assert found["host_memory"].saved_s > 0 and found["host_link_bandwidth"].saved_s > 0
    assert "host_memory" not in {one.figure.name for one in answers.figures}


def test_contributions_add_up_to_the_variance_behind_the_interval() -> None:
    found = Sensitivities(simulate({**JOB, "model": "mixtral-8x7b"}), (), ())
    report, shares = found.report, list(found.variance.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert {"regime", "gemm", "tp"} <= set(found.variance)
    assert found.variance["regime"] == pytest.approx(report.residual.sigma**2 / report.sigma**2)
    middle, reach = report.step_time * math.exp(report.residual.bias), math.exp(Z90 * report.sigma)
    assert report.interval_90 == pytest.approx((middle / reach, middle * reach))
    page = "".join(str(block) for block in sensitivity_page(found).renderables if isinstance(block, Text))  # type: ignore[attr-defined]
    assert f"steps of this regime {found.variance['regime']:.0%}" in page


def test_a_kind_contributes_with_its_share_of_the_step() -> None:
    """Slower links make communication longer and its errors weigh more; the residual of the regime stays the same."""
    job = load_job(JOB)
    slow = next(one for one in hardware_figures(job) if one.name == "scale_up_bandwidth").change(job, 0.25)
    usual, slower = (simulate(one).sigmas for one in (job, slow))
    assert slower["tp"] > 1.5 * usual["tp"]
    assert slower["gemm"] < usual["gemm"]
    assert slower["regime"] == usual["regime"]


def test_nodes_of_several_kinds_are_refused() -> None:
    nodes = [{"node": "dgx-h100", "nodes": 1}, {"node": "dgx-a100", "nodes": 1}]
    with pytest.raises(PlanError, match="several kinds"):
        explain(load_job({**JOB, "cluster": {"groups": nodes}}))


@pytest.mark.slow
def test_the_plot_is_drawn(answers: Any, tmp_path: Path) -> None:
    save(lambda: tornado.tornado(answers), tmp_path / "tornado.png")
    assert (tmp_path / "tornado.png").stat().st_size > 10_000
