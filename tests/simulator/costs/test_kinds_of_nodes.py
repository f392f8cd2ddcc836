"""Clusters of several kinds of nodes: a stage that lies on one kind runs at its figures."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.simulator import simulate
from tests.jobs import on_gpus


def job(
    groups: list[dict[str, Any]] | str, mesh: dict[str, int] | None = None, schedule: str = "1f1b"
) -> dict[str, Any]:
    mesh = mesh or {"pp": 2, "dp": 2, "tp": 8}
    cluster: Any = groups if isinstance(groups, str) else {"groups": groups}
    return {
        "model": {"preset": "llama3-8b", "layers": 4},
        "cluster": cluster,
        "framework": {"set": {"step_overhead_s": 0.0}},
        "batch": {"global": 16, "micro": 1, "sequence": 4096},
        "plan": on_gpus(32, mesh, f"pipeline/{schedule} over pp", "data/ddp over dp", "tensor/megatron-sp over tp")[
            "plan"
        ],
    }


def mixed(*names: str) -> list[dict[str, Any]]:
    return [{"node": name, "nodes": 2} for name in names]


def busy(report: Any, device: int) -> float:
    """Seconds of kernels of one device."""
    return float(report.play.program.sums[device, :4, 0].sum())


def test_each_stage_runs_at_the_figures_of_its_nodes() -> None:
    both = simulate(job(mixed("dgx-h100", "dgx-a100")))
    fast, slow = simulate(job("dgx-h100:4")), simulate(job("dgx-a100:4"))
    assert busy(both, 0) == pytest.approx(busy(fast, 0), rel=1e-12)
    assert busy(both, 1) == pytest.approx(busy(slow, 1), rel=1e-12)
    assert fast.step_time < both.step_time < slow.step_time * 1.001
    turned = simulate(job(mixed("dgx-a100", "dgx-h100")))
    assert busy(turned, 0) == pytest.approx(busy(slow, 0), rel=1e-12)
    assert busy(turned, 1) == pytest.approx(busy(fast, 1), rel=1e-12)


def test_two_groups_of_one_kind_are_one() -> None:
    alone, twice = simulate(job("dgx-h100:4")), simulate(job(mixed("dgx-h100", "dgx-h100")))
    assert twice.step_time == alone.step_time and twice.play.peaks[0].total == alone.play.peaks[0].total


def test_a_stage_on_several_kinds_is_as_slow_as_the_slowest() -> None:
    """Where the replicas of a stage lie on both kinds, no stage has a kind of its own."""
    across = simulate(job(mixed("dgx-h100", "dgx-a100"), {"dp": 2, "pp": 2, "tp": 8}))
    slow = simulate(job("dgx-a100:4", {"dp": 2, "pp": 2, "tp": 8}))
    for device in (0, 1):
        assert busy(across, device) >= busy(slow, device) * (1 - 1e-9)
    assert len(set(map(id, across.play.plan.ranks.clusters))) == 1


def test_messages_between_kinds_are_those_of_the_slower_network() -> None:
    both = simulate(job(mixed("dgx-h100", "dgx-a100")))
    slow = simulate(job("dgx-a100:4"))
    sends = [max(send.seconds for _, send in report.play.program.sent) for report in (both, slow)]
    assert sends[0] == pytest.approx(sends[1], rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_all_engines_agree_on_several_kinds(schedule: str) -> None:
    config = job(mixed("dgx-h100", "dgx-a100"), schedule=schedule)
    found = {simulate(config, engine=engine).step_time for engine in ("matrices", "sweep", "simpy")}  # type: ignore[arg-type]
    assert max(found) == pytest.approx(min(found), rel=1e-9)


def test_each_stage_must_fit_into_its_own_gpus() -> None:
    report = simulate(job(mixed("dgx-h100", "dgx-a100")))
    capacities = report.usable
    assert report.capacity > max(capacities) and len(capacities) == 2
    assert report.fits == (max(report.excess) <= 0)
    for device, excess in enumerate(report.excess):
        framework = report.job.framework.memory
        allocated, context = report.play.peaks[device].total, framework.context_gib * 2**30
        need = min(allocated * framework.reserved_share + context, capacities[device])
        assert excess == pytest.approx(max(allocated + context, need) - capacities[device])
