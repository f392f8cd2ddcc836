"""`partition: by-cost` of stages of different degrees on heterogeneous GPUs, against every partition of a small
model."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest

from meshcast.simulator import Report, simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from tests.draws import drawn
from tests.simulator.plan.test_asymmetric import MIXED, MODEL, job

SHARED = SharedWork()
LAYERS = 8
PLANS = {
    "degrees": [{"tp": 8}, {"tp": 2, "dp": 2}, {"tp": 4}],
    "recompute": [{"tp": 8, "recompute": "full"}, {"tp": 4, "dp": 2}],
    "kinds": [{"tp": 4}, {"tp": 4}, {"tp": 4}, {"tp": 4}],
    "sequence": [{"cp": 2, "tp": 4, "sequence_parallel": False}, {"dp": 8}],
}
WIDE = {**MODEL, "hidden": 4096, "heads": 32, "vocab": 128000, "layers": LAYERS}


def forecast(stages: list[dict[str, Any]], **plan: Any) -> Report:
    one = job({"stages": stages, **plan}, {"global": 128, "microbatches": 16}, cluster=MIXED, model=WIDE)
    return simulate(one, shared_work=SHARED)


def slowest_stage(report: Report) -> float:
    """Seconds of the passes of a micro-batch on the stage where they take longest."""
    program = report.play.program
    seconds = [0.0] * program.devices
    for number, task in enumerate(program.tasks):
        if program.timetable.slots[number].kind in ("F", "BW"):
            seconds[program.device_of(number)] += float(task.sums[:, 0].sum())
    return max(seconds)


@cache
def every_partition(name: str) -> list[tuple[tuple[int, ...], Report]]:
    """The forecasts of all partitions with a layer on every stage inside the pipeline."""
    stages = PLANS[name]
    found = []
    for layers in product(range(LAYERS + 1), repeat=len(stages)):
        if sum(layers) == LAYERS and all(layers[1:-1]):
            given = [{**one, "layers": n} for one, n in zip(stages, layers, strict=True)]
            found.append((layers, forecast(given)))
    return found


@pytest.mark.parametrize("name", drawn(PLANS, keep=2))
@pytest.mark.slow
def test_by_cost_finds_the_partition_whose_slowest_stage_takes_least(name: str) -> None:
    chosen = forecast(PLANS[name], partition="by-cost")
    assert chosen.play.plan.layers in [layers for layers, _ in every_partition(name)]
    least = min(slowest_stage(report) for _, report in every_partition(name))
    assert slowest_stage(chosen) == pytest.approx(least, rel=0.01)


@pytest.mark.parametrize("name", drawn(PLANS, keep=("degrees",)))
def test_by_cost_finds_nearly_the_fastest_step(name: str) -> None:
    """The bubble of the pipeline, which by-cost does not weigh, is less than a tenth."""
    chosen = forecast(PLANS[name], partition="by-cost")
    steps = sorted(report.step_time for _, report in every_partition(name))
    assert chosen.step_time <= 1.03 * steps[0] < steps[len(steps) // 2] / 1.1


def test_a_faster_kind_of_node_gets_more_layers() -> None:
    layers = forecast(PLANS["kinds"], partition="by-cost").play.plan.layers
    assert sum(layers[:2]) < sum(layers[2:])
