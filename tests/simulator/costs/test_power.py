"""Power of kernels and steps, its overhead, and the fit of its coefficients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from meshcast.hardware.load import catalog, load
from meshcast.simulator import simulate
from meshcast.simulator.bounds.least_energy import least_energy
from meshcast.simulator.costs.power import overhead, power_model
from meshcast.simulator.ir.ops import Gemm, Memory
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.report.report import Report
from tests.draws import drawn
from tools.data.power import PowerRow, fit, forecast_power, read_rows

H200 = load("gpus", "h200-sxm")
JOB = {
    "model": "llama3-8b", "cluster": "dgx-h100:2", "batch": {"global": 32, "micro": 1, "sequence": 4096},
    "plan": {"tp": 2, "pp": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def report() -> Report:
    return simulate({**JOB, "run": {"tokens": 1e12, "carbon_kg_per_kwh": 0.4}})


def test_a_kernel_adds_a_busy_part_and_a_part_in_proportion_to_its_work() -> None:
    model = replace(power_model(H200), busy=0.2, gemm=0.5, memory=0.3)
    work = Gemm(8192, 8192, 8192)
    fastest = work.flops / float(H200.peak["bf16"])
    assert model.kernel_joules(work, 2 * fastest) / (2 * fastest) == pytest.approx((0.2 + 0.5 / 2) * 700)
    copy = Memory("add", 2**30, 2**30)
    seconds = 4 * 2**31 / float(H200.memory_bandwidth)
    assert model.kernel_joules(copy, seconds) / seconds == pytest.approx((0.2 + 0.3 / 4) * 700)
    assert model.kernel_joules(None, 1.0) == model.kernel_joules(work, 0.0) == 0.0


@pytest.mark.parametrize("name", catalog("gpus"))
def test_every_gpu_has_a_power_model_that_names_what_was_not_measured(name: str) -> None:
    model = power_model(load("gpus", name))
    assert 0 < model.idle_watts < model.limit
    assert any("not measured" in text for text in model.assumed) == (name not in ("h100-sxm", "h200-sxm"))


def test_the_power_of_a_step_is_between_idle_and_the_limit_and_its_energy_adds_up(report: Report) -> None:
    energy, model = report.energy, power_model(load("gpus", "h100-sxm"))
    assert model.idle_watts < energy.gpu_watts < 700
    assert energy.beside == 350 and energy.pue == 1.2
    assert energy.kwh == pytest.approx(16 * (energy.gpu_watts + 350) * 1.2 * report.step_time / 3.6e6)
    steps = 1e12 / (32 * 4096)
    assert report.energy_mwh == pytest.approx(energy.kwh * steps / 1000)
    assert report.co2_t == pytest.approx(report.energy_mwh * 0.4)
    low, high = report.step_kwh_90
    assert low < energy.kwh < high and high / low > report.interval_90[1] / report.interval_90[0]


def test_stated_overheads_are_not_assumed(report: Report) -> None:
    stated = simulate({**JOB, "run": {"pue": 1.0, "node_watts_per_gpu": 0.0}})
    assert stated.energy.kwh == pytest.approx(16 * stated.energy.gpu_watts * stated.step_time / 3.6e6)
    assert len(report.energy.assumed) == len(stated.energy.assumed) + 2
    assert stated.energy_mwh is None and stated.co2_t is None
    assert overhead(H200, None, 1.0).assumed == overhead(H200, None, None).assumed[:1]


def test_electricity_changes_no_forecast(report: Report) -> None:
    plain = simulate(JOB).to_dict()
    answer = report.to_dict()
    for key in ("step_time_s", "interval_90_s", "breakdown_s", "memory", "mfu"):
        assert answer[key] == plain[key]


def test_waiting_and_smaller_kernels_draw_less_power() -> None:
    full, bubbles = (
        simulate({**JOB, "batch": {"global": n, "micro": 1, "sequence": 4096}, "plan": {"tp": 2, "pp": 4}})
        for n in (256, 8)
    )
    assert bubbles.energy.gpu_watts < 0.8 * full.energy.gpu_watts
    assert bubbles.energy.kwh / bubbles.tokens > full.energy.kwh / full.tokens


@pytest.mark.parametrize("plan", [{"tp": 8}, {"fsdp": True}, {"pp": 4, "recompute": "full"}])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_step_needs_less_than_the_least_energy(plan: dict[str, object], precision: str) -> None:
    report = simulate({**JOB, "plan": plan, "precision": precision})
    least = least_energy(load_job({**JOB, "precision": precision}))
    joules = report.energy.kwh * 3.6e6
    assert 0.5 * joules < least.bound(report.step_time) <= joules


def test_idle_gpus_draw_as_much_each_however_many_there_are() -> None:
    """Those of unlike groups, too."""
    model = {"preset": "llama3-8b"}
    groups = [{"node": name, "nodes": 1} for name in ("dgx-a100", "dgx-h100")]
    watts = [
        least_energy(load_job({"model": model, "cluster": cluster, "batch": {"global": 64}})).watts
        for cluster in ("dgx-a100:1", "dgx-a100:4", "dgx-h100:1", {"groups": groups})
    ]
    assert watts[1] == pytest.approx(4 * watts[0]) and watts[3] == pytest.approx(watts[0] + watts[2])


def test_no_golden_like_job_executes_fewer_flops_than_the_bound_counts() -> None:
    for model in ("gpt3-175b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-7b"):
        report = simulate({"model": model, "cluster": "dgx-h100:32", "plan": {"tp": 8}, "batch": {"global": 64}})
        assert report.hfu >= report.mfu["causal"] * (1 - 1e-9)


def test_the_fit_finds_the_coefficients_of_made_rows_also_beside_steps_at_the_limit() -> None:
    shapes = [(0.8, 0.2, 0.1), (0.95, 0.3, 0.14), (0.6, 0.25, 0.05), (1.0, 0.6, 0.1)]
    rows = [PowerRow("made", "x", busy, tensor, 0.14 + 0.2 * memory, 0.0) for busy, tensor, memory in shapes]
    rows = [row._replace(power=forecast_power(row, 0.45, 0.7)) for row in rows]
    assert max(row.power for row in rows) == 1.0
    assert fit(rows) == pytest.approx((0.45, 0.7), abs=1e-6)


def test_the_shipped_coefficients_are_those_of_the_fit() -> None:
    rows = read_rows()
    assert len(rows) == 16 and {row.gpu for row in rows} == {"h100-sxm", "h200-sxm"}
    (busy, tensor), error = fit(rows), _error_without(rows)
    for gpu in ("h100-sxm", "h200-sxm"):
        model = power_model(load("gpus", gpu))
        assert (model.busy, model.gemm, model.attention) == pytest.approx((busy, tensor, tensor), abs=2e-3)
        assert error == pytest.approx(model.sigma, abs=5e-3)


@pytest.mark.parametrize(("of", "on"), drawn([("h200-sxm", "h100-sxm"), ("h100-sxm", "h200-sxm")], keep=2))
def test_steps_on_one_gpu_say_what_those_on_the_other_one_draw(of: str, on: str) -> None:
    rows = read_rows()
    found = fit([row for row in rows if row.gpu == of])
    errors = [forecast_power(row, *found) / min(row.power, 1.0) - 1 for row in rows if row.gpu == on]
    assert max(map(abs, errors)) < 0.06


def _error_without(rows: list[PowerRow]) -> float:
    """Root mean square error of the steps below the limit, each by a fit without it."""
    squares = []
    for number, row in enumerate(rows):
        if row.power < 0.98:
            own = fit([*rows[:number], *rows[number + 1 :]])
            squares.append((forecast_power(row, *own) / row.power - 1) ** 2)
    return math.sqrt(sum(squares) / len(squares))
