"""What figures of the hardware are worth: against closed forms, laws that hold for every job, and the plot."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.text import Text

from meshcast.experiments.explain.sensitivity import RANGE, Sensitivities, Sensitivity, change_figures, explain
from meshcast.experiments.render.matplotlib import tornado
from meshcast.experiments.render.matplotlib.sheet import save
from meshcast.experiments.render.terminal.explain import sensitivity_page
from meshcast.hardware.errors import PlanError
from meshcast.simulator import load_job, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.job.hardware_figures import hardware_figures
from meshcast.simulator.report.metrics import Z90

JOB: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 8, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}


def measure(job: dict[str, Any]) -> Sensitivities:
    """Returns the worth of every figure to a job."""
    loaded, shared = load_job(job), SharedWork()
    report = simulate(loaded, shared_work=shared)
    return Sensitivities(report, change_figures(loaded, report, shared), ())


answers = cache(lambda: measure(JOB))


def effects(job: dict[str, Any]) -> dict[str, Sensitivity]:
    return {effect.figure.name: effect for effect in measure(job).figures}


def test_better_hardware_never_makes_a_step_longer_and_saves_no_more_than_the_step() -> None:
    """A step in which all times shrink by one percent is one percent shorter; some of it depends on no hardware. The
    sustained rate scales the same kernels as the peaks."""
    step = answers().report.step_time
    for effect in answers().figures:
        assert effect.better_s <= step * (1 + 1e-9) <= effect.worse_s * (1 + 2e-9)
        assert effect.saved_s >= -1e-9 * step
    saved = sum(effect.saved_s for effect in answers().figures if effect.figure.name != "sustained_rate")
    assert 0.5 < saved / (0.01 * step) <= 1.01
    swings = [effect.swing_s for effect in answers().figures]
    assert swings == sorted(swings, reverse=True)
    (overhead,) = (effect for effect in answers().figures if effect.figure.name == "step_overhead")
    assert overhead.saved_s == pytest.approx(overhead.figure.value * (1 - 1 / 1.01), rel=1e-6)
    assert overhead.better_s < step < overhead.worse_s


def test_the_derivative_is_that_of_the_time_which_a_figure_determines() -> None:
    """One GPU without communication: GEMMs and attention by the peaks, the other kernels by the memory."""
    job = {**JOB, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 4}, "plan": {}}
    worth, parts = effects(job), simulate(load_job(job)).breakdown.parts
    assert {"scale_up_bandwidth", "network_bandwidth"}.isdisjoint(worth)
    by_peaks, by_memory = parts["gemm"] + parts["attention"], parts["memory_bound"] + parts["optimizer"]
    assert worth["peak_bf16"].saved_s == pytest.approx(0.01 * by_peaks, rel=0.25)
    assert worth["memory_bandwidth"].saved_s == pytest.approx(0.01 * by_memory, rel=0.6)
    both = worth["peak_bf16"].saved_s + worth["memory_bandwidth"].saved_s
    assert both == pytest.approx(0.01 * (by_peaks + by_memory), rel=0.05)


def test_a_changed_figure_changes_that_figure_alone() -> None:
    job = load_job(JOB)
    for figure in hardware_figures(job):
        changed = figure.change(job, 1 + RANGE)
        if figure.name == "sustained_rate":  # measured for the architecture; the change is a factor on it
            assert changed.framework.rates["kernel"] == pytest.approx(1 + RANGE)
            continue
        before, after = ({one.name: one.value for one in hardware_figures(of)} for of in (job, changed))
        better = figure.value / (1 + RANGE) if figure.unit == "s" else figure.value * (1 + RANGE)
        assert after.pop(figure.name) == pytest.approx(better)
        assert {name: value for name, value in before.items() if name != figure.name} == after


@pytest.mark.slow
def test_a_step_in_8_bits_depends_on_two_peaks() -> None:
    worth = effects({**JOB, "precision": "fp8-delayed"})
    assert worth["peak_fp8"].saved_s > worth["peak_bf16"].saved_s > 0 == worth["peak_fp32"].saved_s
    both = worth["peak_fp8"].saved_s + worth["peak_bf16"].saved_s
    assert worth["sustained_rate"].saved_s == pytest.approx(both, rel=0.05)


def test_host_memory_matters_to_what_is_offloaded() -> None:
    plan = {"mesh": {"dp": 8}, "schemes": [{"use": "data/zero-offload", "over": "dp"}]}
    worth = effects({**JOB, "cluster": "dgx-h100:1", "plan": plan})
    assert worth["host_memory"].saved_s > 0 and worth["host_link_bandwidth"].saved_s > 0
    assert "host_memory" not in {effect.figure.name for effect in answers().figures}


def test_contributions_add_up_to_the_variance_behind_the_interval() -> None:
    worth = Sensitivities(simulate({**JOB, "model": {"preset": "mixtral-8x7b", "layers": 4}}), (), ())
    report, shares = worth.report, list(worth.variance.values())
    assert sum(shares) == pytest.approx(1) and shares == sorted(shares, reverse=True)
    assert {"regime", "gemm", "tp"} <= set(worth.variance)
    assert worth.variance["regime"] == pytest.approx(report.residual.sigma**2 / report.sigma**2)
    middle, reach = report.step_time * math.exp(report.residual.bias), math.exp(Z90 * report.sigma)
    assert report.interval_90 == pytest.approx((middle / reach, middle * reach))
    page = "".join(str(block) for block in sensitivity_page(worth).renderables if isinstance(block, Text))  # type: ignore[attr-defined]
    assert f"steps of this regime {worth.variance['regime']:.0%}" in page


def test_a_kind_contributes_with_its_share_of_the_step() -> None:
    """Slower links make communication longer and its errors weigh more; the residual of the regime stays the same."""
    job = load_job(JOB)
    slow = next(one for one in hardware_figures(job) if one.name == "scale_up_bandwidth").change(job, 0.25)
    usual, slower = (simulate(one).sigmas for one in (job, slow))
    assert slower["tp"] > 1.5 * usual["tp"] and slower["gemm"] < usual["gemm"] and slower["regime"] == usual["regime"]


def test_nodes_of_several_kinds_are_refused() -> None:
    nodes = [{"node": "dgx-h100", "nodes": 1}, {"node": "dgx-a100", "nodes": 1}]
    with pytest.raises(PlanError, match="several kinds"):
        explain(load_job({**JOB, "cluster": {"groups": nodes}}))


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path: Path) -> None:
    save(lambda: tornado.tornado(explain(load_job(JOB))), tmp_path / "tornado.png")
    assert (tmp_path / "tornado.png").stat().st_size > 10_000
