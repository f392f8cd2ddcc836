"""Partitions by memory, and recomputation that adapts to it, against all partitions of small models."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.report.report import Report
from tests.draws import drawn

SHARED = SharedWork()
MODEL = {"layers": 8, "hidden": 1024, "heads": 8, "vocab": 8192, "seq": 1024, "positions": "rope", "tied": False}


def job(
    partition: Any = "even", pp: int = 3, micro: int = 4, recompute: dict[str, Any] | None = None, **more: Any
) -> Any:
    schemes = [{"use": "pipeline/1f1b", "over": "pp"}, *([recompute] if recompute else [])]
    plan = {"mesh": {"pp": pp}, "schemes": schemes, "partition": partition, **more}
    batch = {"global": 8 * micro, "micro": micro}
    return {"model": MODEL, "cluster": {"gpu": "h100-sxm", "gpus": pp}, "batch": batch, "plan": plan}


def fullest(report: Report) -> float:
    return max(peak.total for peak in report.play.peaks)


def lists(layers: int, stages: int) -> list[list[int]]:
    every = product(range(layers + 1), repeat=stages)
    return [list(counts) for counts in every if sum(counts) == layers and min(counts[1:-1], default=1) >= 1]


@pytest.mark.parametrize("micro", drawn([1, 8], keep=(8,)))
def test_no_partition_has_a_lower_peak_than_that_by_memory(micro: int) -> None:
    least = fullest(simulate(job("by-memory", micro=micro)))
    for partition in drawn(lists(8, 3), keep=4):
        assert least <= fullest(simulate(job(partition, micro=micro), shared_work=SHARED)) * (1 + 1e-9)


def test_a_partition_by_memory_gives_the_first_stages_fewer_layers() -> None:
    """They hold activations of more micro-batches; a step takes longer than with equal stages."""
    found, even = simulate(job("by-memory", pp=4, micro=8)), simulate(job(pp=4, micro=8))
    layers = found.play.plan.layers
    assert sum(layers) == 8 and layers[0] < layers[2] and fullest(found) < 0.9 * fullest(even)
    assert found.step_time > even.step_time


def test_a_partition_by_memory_of_a_model_that_does_not_divide() -> None:
    layers = simulate(job("by-memory", pp=5)).play.plan.layers
    assert sum(layers) == 8 and len(layers) == 5


ADAPTIVE = {"use": "memory/adapipe"}


def recomputed(report: Report) -> list[int]:
    """Layers that every stage recomputes."""
    plan = report.play.plan
    return [plan.on(device).schemes[-1].options.layers for device in range(plan.shape.p)]


def test_nothing_is_recomputed_where_all_fits() -> None:
    found = simulate(job(recompute=ADAPTIVE))
    assert recomputed(found) == [0, 0, 0]
    assert found.play.plan.layers == simulate(job("by-cost")).play.plan.layers
    assert found.step_time == pytest.approx(simulate(job("by-cost")).step_time)


def test_all_is_recomputed_where_nothing_fits() -> None:
    found = simulate(job(micro=8192, recompute=ADAPTIVE))
    assert recomputed(found) == list(found.play.plan.layers)


def test_first_stages_recompute_and_the_step_is_shorter_than_with_full_recompute() -> None:
    sizes = {"micro": 352, "pp": 4}
    plain, full = (simulate(job(recompute=one, **sizes)) for one in (None, {"use": "memory/recompute-full"}))
    found = simulate(job(recompute=ADAPTIVE, **sizes))
    memory = float(found.play.plan.ranks.clusters[0].gpu.memory)
    assert fullest(plain) > memory >= fullest(found) > fullest(full)
    counts = recomputed(found)
    assert counts[0] > counts[-1] == 0
    assert plain.step_time < found.step_time < full.step_time


@pytest.mark.parametrize("partition", [[5, 3], "ends-as-layers"], ids=str)
def test_layers_that_a_plan_states_stay(partition: Any) -> None:
    """Adaptive recomputation alone, as with the even partition that the paper compares with."""
    sizes = {"pp": 2, "micro": 352}
    found, plain = (simulate(job(partition, recompute=one, **sizes)) for one in (ADAPTIVE, None))
    assert found.play.plan.layers == plain.play.plan.layers
    assert recomputed(found)[0] > 0 and fullest(found) <= float(found.play.plan.ranks.clusters[0].gpu.memory)


@pytest.mark.parametrize("micro", drawn([352, 448], keep=2))
def test_no_layers_and_recomputation_of_two_stages_that_fit_are_faster(micro: int) -> None:
    """Every partition with the fewest recomputed layers that fit, which is what the dynamic programme weighs."""
    chosen = simulate(job(pp=2, micro=micro, recompute=ADAPTIVE))
    memory, shared = float(chosen.play.plan.ranks.clusters[0].gpu.memory), SharedWork()
    assert fullest(chosen) <= memory
    every = [(n, *counts) for n in range(2, 7) for counts in product(range(n + 1), range(9 - n))]
    for first, *counts in drawn(every, keep=8):
        stages = [
            {"mesh": {}, "layers": n, "schemes": [{"use": "memory/adapipe", "layers": r}]}
            for n, r in zip((first, 8 - first), counts, strict=True)
        ]
        other = simulate({**job(pp=2, micro=micro), "plan": {"schedule": "1f1b", "stages": stages}}, shared_work=shared)
        assert fullest(other) > memory or chosen.step_time <= other.step_time * 1.02


@pytest.mark.parametrize(
    ("units", "scheme"),
    [
        ([["layer"], ["layer"]], {"use": "memory/recompute-full", "layers": 2}),
        ([["norm", "act"]] * 3, {"use": "memory/recompute-selective", "modules": ["norm", "act"], "layers": 3}),
        ([["attention"]] * 4, {"use": "memory/recompute-selective", "modules": ["attention"], "layers": 4}),
        ([], None),
    ],
)
def test_stated_units_are_recomputed_as_by_their_own_schemes(
    units: list[list[str]], scheme: dict[str, Any] | None
) -> None:
    stated = simulate(job(recompute={**ADAPTIVE, "units": units}, pp=2))
    other = simulate(job(recompute=scheme, pp=2))
    assert stated.step_time == pytest.approx(other.step_time, rel=1e-12)
    assert fullest(stated) == pytest.approx(fullest(other), rel=1e-12)


def test_more_units_take_more_time_and_less_memory() -> None:
    """A layer that recomputes nothing, one its norms and activation, one its attention, too, and one all of it."""
    units = [[["layer"], ["attention", "act", "norm"], ["act", "norm"], []][count:] for count in (3, 2, 1, 0)]
    reports = [simulate(job(recompute={**ADAPTIVE, "units": stated}, pp=2)) for stated in units]
    times, peaks = [report.step_time for report in reports], [fullest(report) for report in reports]
    assert times == sorted(times) and peaks == sorted(peaks, reverse=True)
    assert len({*times}) == len({*peaks}) == 4
