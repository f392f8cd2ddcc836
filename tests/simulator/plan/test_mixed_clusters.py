"""docs/mixed-clusters.md: the best plan of each kind of freedom on A100 beside H100 nodes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.simulate import simulate
from tests.draws import drawn
from tests.jobs import on_gpus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "mixed-clusters.md"
KINDS = ("uniform", "different layers", "different degrees", "different shares", "replicas with stages of their own")
SHARES: dict[str, Any] = {"partition": "by-cost", "share": "by-speed"}


def uniform(pp: int, dp: int, tp: int, *, outer: str = "pp", recompute: bool = False) -> dict[str, Any]:
    """A plan in long form. outer: the outermost axis, pp or dp."""
    sizes = {axis: {"pp": pp, "dp": dp}[axis] for axis in sorted(("pp", "dp"), reverse=outer == "pp")} | {"tp": tp}
    schemes = ["pipeline/1f1b over pp", "data/zero-1 over dp", "tensor/megatron-sp over tp"]
    plan: dict[str, Any] = on_gpus(1, sizes, *schemes, *["memory/recompute-full"] * recompute)["plan"]
    return plan


BEST: dict[int, list[tuple[dict[str, Any], dict[str, int]]]] = {
    1: [
        (uniform(2, 8, 1), {}),
        (uniform(2, 8, 1) | {"partition": "by-cost"}, {}),
        ({"partition": "by-cost", "stages": [{"tp": 2, "dp": 4}, {"tp": 1, "dp": 8}]}, {"microbatches": 8}),
        (uniform(1, 16, 1) | SHARES, {}),
        (SHARES | {"replicas": [{"stages": [{"tp": 4}, {"tp": 4}]}] * 2}, {"micro": 2}),
    ],
    2: [
        (uniform(1, 24, 1), {}),
        (uniform(3, 8, 1) | {"partition": "by-cost"}, {}),
        ({"partition": "by-cost", "stages": [{"tp": 1, "dp": 8}, {"tp": 2, "dp": 8}]}, {"microbatches": 12}),
        (uniform(1, 24, 1) | SHARES, {}),
        (SHARES | {"replicas": [{"stages": [{"tp": 4, "dp": 2}]}, {"stages": [{"tp": 4, "dp": 4}]}]}, {"micro": 8}),
    ],
}
"""By the number of DGX H100, the plans of the page with their batch."""


def forecast(plan: dict[str, Any], batch: dict[str, int], nodes: int, shared: SharedWork) -> float:
    """Seconds of a step; infinite where the plan does not fit."""
    cluster = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": nodes}]}
    job = {"model": "llama3-8b", "cluster": cluster, "batch": {"global": 32 * (nodes + 1), "sequence": 4096, **batch}}
    report = simulate({**job, "plan": plan}, shared_work=shared)
    return report.step_time if report.fits else float("inf")


@pytest.mark.parametrize("nodes", drawn(BEST, keep=2))
def test_the_page_states_the_steps_of_its_plans(nodes: int) -> None:
    rows = [line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| (?!best)", line)]
    stated = {row[0].strip(): float(row[2 * nodes]) for row in rows if len(row) == 5 and "---" not in row[0]}
    shared = SharedWork()
    found = {kind: forecast(*one, nodes, shared) for kind, one in zip(KINDS, BEST[nodes], strict=True)}
    assert found == pytest.approx(stated, abs=6e-4)
    # Different layers are plans with heterogeneous stages, and plans with different shares are heterogeneous replicas.
    assert found["different degrees"] <= found["different layers"] <= found["uniform"]
    assert found["different shares"] <= found["uniform"]


def draw_space(nodes: int) -> Iterator[tuple[str, dict[str, Any], dict[str, int]]]:
    """All plans of the page's space: kind, plan, batch."""
    degrees = (1, 2, 4, 8)
    for pp in (1, 2, 4) if nodes == 1 else (1, 3):
        for tp in degrees:
            dp = 8 * (nodes + 1) // tp // pp
            for micro in (1, 2):
                for outer in ("pp", "dp"):
                    for recompute in (False, True):
                        plan = uniform(pp, dp, tp, outer=outer, recompute=recompute)
                        yield "uniform", plan, {"micro": micro}
                        yield "different layers", plan | {"partition": "by-cost"}, {"micro": micro}
                        if dp > 1:
                            yield "different shares", plan | SHARES, {"micro": micro}
    for tp in degrees:
        for other in degrees:
            stages = [{"tp": tp, "dp": 8 // tp}, {"tp": other, "dp": 8 * nodes // other}]
            for microbatches in (6, 8, 12, 16, 24, 32, 48):
                plan = {"partition": "by-cost", "stages": stages}
                yield "different degrees", plan, {"microbatches": microbatches}
            for pp in (1, 2, 4):
                for micro in (1, 2, 4, 8):
                    sides = [
                        [{"tp": t, "dp": n // t // pp}] * pp for t, n in ((tp, 8), (other, 8 * nodes)) if n // t >= pp
                    ]
                    if len(sides) == 2:
                        plan = SHARES | {"replicas": [{"stages": stages} for stages in sides]}
                        yield "replicas with stages of their own", plan, {"micro": micro}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", BEST)
def test_no_plan_of_the_space_is_faster(nodes: int) -> None:
    shared, best = SharedWork(), dict[str, float]()
    for kind, plan, batch in draw_space(nodes):
        try:
            seconds = forecast(plan, batch, nodes, shared)
        except PlanError:
            continue  # degrees that do not divide the batch or the layers
        best[kind] = min(best.get(kind, seconds), seconds)
    stated = {kind: forecast(*one, nodes, shared) for kind, one in zip(KINDS, BEST[nodes], strict=True)}
    assert best == pytest.approx(stated, rel=1e-9)
