"""The slowest of many GPUs: its expected pace, and what a job says of it."""

from __future__ import annotations

import random

import pytest

from meshcast.simulator.costs.stragglers import REFERENCE, SPREAD, expected_maximum, slowest_pace
from meshcast.simulator.forecast.simulate import simulate


@pytest.mark.parametrize(("count", "known"), [(2, 0.564), (8, 1.424), (100, 2.508), (1000, 3.241)])
def test_expected_maximum_of_normal_values(count: int, known: float) -> None:
    """Tabulated order statistics (Harter 1961); drawn values say the same."""
    assert expected_maximum(count) == pytest.approx(known, abs=0.03)
    draw = random.Random(count)
    drawn = [max(draw.gauss(0, 1) for _ in range(count)) for _ in range(2000 // count + 100)]
    assert sum(drawn) / len(drawn) == pytest.approx(known, abs=0.15)


def test_a_node_is_the_reference_and_one_gpu_waits_for_no_other() -> None:
    assert expected_maximum(1) == 0.0 and slowest_pace(REFERENCE) == 1.0
    paces = [slowest_pace(n) for n in (1, 2, 4, 8, 16, 64, 512, 4096, 100_000)]
    assert paces == sorted(paces) and len(set(paces)) == 9
    assert paces[-1] - paces[0] == pytest.approx(SPREAD * expected_maximum(100_000))


def test_a_large_job_takes_longer_by_the_pace_of_its_slowest_gpu() -> None:
    def job(nodes: int) -> dict[str, object]:
        batch = {"global": 8 * nodes, "micro": 1, "sequence": 4096}
        return {"model": "llama3-8b", "cluster": f"dgx-h100:{nodes}", "batch": batch, "plan": {"tp": 8}}

    small, large = simulate(job(1)), simulate(job(128))
    for part, pace in {"gemm": slowest_pace(1024), "attention": slowest_pace(1024), "memory_bound": 1.0}.items():
        assert large.parts[part] == pytest.approx(small.parts[part] * pace, rel=5e-3)
    assert any("the slowest of 1,024 GPUs takes 1.8% longer" in text for text in large.assumed)
    assert not any("the slowest of" in text for text in small.assumed)
    noisy = simulate({**job(128), "noise": {"jitter": 0.0}})
    assert noisy.parts["gemm"] == pytest.approx(small.parts["gemm"], rel=5e-3), "noise has a pace for every rank"


def test_a_single_gpu_is_faster_than_the_slowest_of_a_node() -> None:
    batch = {"global": 1, "micro": 1, "sequence": 4096}
    job = {"model": "llama3.2-1b", "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": batch}
    assert any("a GPU that waits for no other takes 1.4% less" in text for text in simulate(job).assumed)
