"""Rooflines of a step: against hand counts, and relations that hold for every kernel and every link."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.experiments.views.communication import communication_matrix
from meshcast.experiments.views.roofline import StepRoofline, link_rates, step_roofline
from meshcast.simulator import load_job, simulate
from meshcast.simulator.program.block import SUMS

JOB: dict[str, Any] = {
    "model": "llama3-8b",
    "cluster": "dgx-h100:2",
    "batch": {"global": 32, "micro": 1, "sequence": 8192},
    "plan": {"tp": 4, "pp": 2},
}


@pytest.fixture(scope="module")
def report() -> Any:
    return simulate(load_job(JOB))


@pytest.fixture(scope="module")
def found(report: Any) -> StepRoofline:
    return step_roofline(report)


def test_a_gemm_by_hand(found: StepRoofline) -> None:
    """The gate and up projections of a rank: 8192 tokens x 4096 x (2 x 14336 / 4), bf16, in 16 layers of 16 batches."""
    (up,) = [one for one in found.kernels if one.name == "up" and one.phase == "F"]
    m, n, k = 8192, 2 * 14336 // 4, 4096
    assert (up.flops, up.nbytes) == (2 * m * n * k, 2 * (m * k + k * n + m * n))
    assert up.count == 16 * 32 / 2  # 16 layers a stage, 32 samples over 2 data-parallel ranks
    assert up.intensity == pytest.approx(2 * m * n * k / (2 * (m * k + k * n + m * n)))
    assert up.roof == found.peaks["bf16"] == 989e12
    assert up.attained == pytest.approx(up.flops / up.seconds)


def test_no_kernel_is_above_its_roof_and_times_add_up(report: Any, found: StepRoofline) -> None:
    for one in found.kernels:
        assert 0 < one.share_of_roof <= 1 + 1e-9, one
    for part in ("gemm", "attention", "memory_bound"):
        own = sum(one.total_seconds for one in found.kernels if one.kind == part)
        assert own == pytest.approx(report.parts[part], rel=1e-6), part
    assert found.flops == pytest.approx(report.sums[report.device, :, SUMS.index("flops")].sum())


def test_messages_of_the_pipeline_are_the_network_point(report: Any, found: StepRoofline) -> None:
    """A rank sends 16 micro-batches of 8192 x 4096 / 4 activations in two bytes, to the next stage or back."""
    (point,) = [one for one in found.network if one.axis == "pp"]
    assert (point.tier, point.nbytes) == ("network", 16 * 8192 * 4096 // 4 * 2)
    assert point.link_rate == 50e9
    assert point.intensity == pytest.approx(found.flops / point.nbytes)
    assert point.busy_share == pytest.approx(point.nbytes / 50e9 / report.step_time)


def test_bytes_on_links_are_those_of_the_matrix(report: Any, found: StepRoofline) -> None:
    """Apart from all-reduces by a switch, which here are of four bytes."""
    matrix = communication_matrix(report).by_axis
    own = report.play.plan.ranks.of_device(found.device)
    for axis in ("tp", "pp", "dp"):
        sent = sum(one.nbytes for one in found.network if one.axis == axis)
        assert sent == pytest.approx(matrix[axis][own].sum() / len(own), rel=1e-6, abs=100), axis


def test_no_link_is_faster_than_it_is() -> None:
    """All-reduces by NVLS too, whose links carry less than the buffers that are exchanged."""
    job = {**JOB, "plan": {"tp": 8, "zero": 0, "sequence_parallel": False}}
    report = simulate(load_job(job))
    found = step_roofline(report)
    assert {one.tier for one in found.network} == {"scale-up", "network"}
    for one in found.network:
        assert 0 < one.attained_rate <= one.link_rate * (1 + 1e-9), one
        assert one.attained <= one.peak
        assert one.busy_share <= 1


def test_links_that_nobody_uses_are_left_out() -> None:
    alone = simulate(load_job({"model": "gpt2", "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 4}}))
    found = step_roofline(alone)
    assert (found.links, found.network) == ({}, ())
    assert set(link_rates(load_job(JOB).cluster)) == {"scale-up", "network"}
