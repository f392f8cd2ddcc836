"""The energy of a step adds up over what its GPUs do."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.costs.power import power_model
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.report.figures import FIGURES

JOB: dict[str, Any] = {
    "model": "gpt2", "cluster": "dgx-h100:1", "batch": {"global": 16},
    "framework": {"name": "megatron-core", "set": {"launch_s": 0, "step_overhead_s": 0}},
}  # fmt: skip


@pytest.mark.parametrize("plan", [{"tp": 2}, {"tp": 2, "pp": 4}])
def test_a_step_draws_what_its_ops_draw_one_by_one(plan: dict[str, Any]) -> None:
    """Kernels by their work, which here reaches no limit, collectives while they last, messages at both of their ends,
    and stages while they wait."""
    report = simulate(JOB | {"plan": plan})
    model, program, flat = power_model(report.job.cluster.gpu), report.play.program, report.play.step.flat
    messages, busy, joules = {n for n, _, _ in flat.sent}, 0.0, 0.0
    for n, (op, seconds, latency) in enumerate(zip(flat.ops, flat.seconds, flat.latency, strict=True)):
        lasting = (seconds + latency) * (2 if n in messages else 1)
        busy += lasting
        if op.stream == COMPUTE:
            joules += model.kernel_joules(op.work, seconds)
        else:
            joules += model.communication * model.limit * lasting
    if program.devices > 1:
        joules += model.waiting * model.limit * (program.devices * report.step_time - busy)
    added = report.energy.gpu_watts - model.idle_watts
    assert added * report.step_time * program.devices == pytest.approx(joules, rel=1e-9)


def test_the_power_of_the_cluster_through_the_step_is_its_energy() -> None:
    report = simulate(JOB)
    (kilowatts,) = re.findall(r"([\d.]+) kW of the whole cluster", FIGURES["gpu_power_w"].remark(report))
    assert float(kilowatts) * report.step_time / 3600 == pytest.approx(report.energy.kwh, rel=1e-2)


def test_a_run_of_no_stated_length_has_no_energy_whatever_is_known_of_its_price() -> None:
    report = simulate(JOB | {"run": {"price_per_gpu_hour": 2, "carbon_kg_per_kwh": 0.4}})
    assert (report.cost, report.energy_mwh, report.co2_t) == (None, None, None)
