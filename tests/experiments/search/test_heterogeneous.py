"""Searches of plans whose stages, or whose replicas, have different degrees: bounds, and the best of all plans."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshcast import search
from meshcast.experiments.render.terminal.forecast import render
from meshcast.experiments.search.frontier.plan_search import ROUNDING
from meshcast.experiments.search.heterogeneous.block_search import HeterogeneousSearch
from meshcast.experiments.search.heterogeneous.open_fields import HeterogeneousFields
from meshcast.experiments.search.heterogeneous.plan_blocks import ReplicaBlock, share_bound
from meshcast.experiments.search.output.page import page
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.experiments.search.spaces import MIXED, interrupt, is_accounted
from tests.strategies import EVERY_EXAMPLE

ONE_NODE = {**MIXED, "cluster": "dgx-h100:1"}
LLAMA, MIXTRAL = ({"preset": name, "layers": layers} for name, layers in (("llama3-8b", 8), ("mixtral-8x7b", 4)))

JOBS: dict[str, dict[str, Any]] = {
    "dense": {**MIXED, "model": LLAMA, "batch": {"global": 64}},
    "tied": {**MIXED, "model": {**MIXED["model"], "tied": True}, "batch": {"global": 48}},
    "experts": {**MIXED, "model": MIXTRAL, "batch": {"global": 64}},
    "one kind": {"model": {"preset": "opt-6.7b", "layers": 9}, "cluster": "dgx-a100:2", "batch": {"global": 32}},
    "unfused": {
        **MIXED,
        "model": {**LLAMA, "layers": 6},
        "batch": {"global": 32, "sequence": 2048},
        "framework": "torchtitan",
    },
}


def open_plans(job: dict[str, Any], top: int = 1) -> HeterogeneousSearch:
    return HeterogeneousSearch(HeterogeneousFields(job, Path("."), 0.0), 0.0, top)


def forecast(search: HeterogeneousSearch, job: dict[str, Any]) -> StepAndMemory | None:
    try:
        return forecast_step(load_job(job), search.shared)
    except MeshcastError:
        return None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "unfused" else pytest.mark.slow) for name in JOBS]
)
def test_no_bound_of_a_heterogeneous_plan_is_above_its_forecast(name: str) -> None:
    """Bounds that cut nothing would hold as well."""
    rng, opened, ratios = random.Random(name), open_plans({**JOBS[name], "plan": "auto"}), list[tuple[float, float]]()
    while len(ratios) < (60 if EVERY_EXAMPLE else 20):
        block = rng.choice(opened.blocks)
        bounds = block.bound()
        for row in rng.sample(range(block.size), min(3, block.size)):
            step = forecast(opened, block.job(row))
            assert bounds.valid[row] or step is None, block.changes(row)
            if step is None:
                continue
            assert bounds.nbytes[row] <= step.peak_device * (1 + ROUNDING), block.changes(row)
            assert bounds.fits[row] or not step.fits, block.changes(row)
            if bounds.fits[row]:
                assert bounds.seconds[row] <= step.step_time * (1 + ROUNDING), block.changes(row)
                ratios.append((bounds.seconds[row] / step.step_time, bounds.nbytes[row] / step.peak_device))
        block.forget()
    assert max(time for time, _ in ratios) > 0.8 and max(memory for _, memory in ratios) > 0.7


def test_sums_of_gradients_among_replicas_count_in_the_bound() -> None:
    """Two replicas of eight GPUs without a pipeline sum all gradients of a rank between two nodes."""
    framework = {"name": "megatron-core", "set": {"launch_s": 0.0}}  # else the host bounds such small passes
    plan = {"tp": [4, 8], "pp": [1, 2], "dp": 1}
    opened = open_plans({**JOBS["one kind"], "batch": {"global": 4, "micro": 1}, "plan": plan, "framework": framework})
    (block,) = (block for block in opened.blocks if isinstance(block, ReplicaBlock))
    bounds, counted = block.bound(), block.rates
    block.rates = (0.0, 0.0)
    without = block.bound()
    assert len(counted) == 2 and min(counted) > 0.0
    for row in range(block.size):
        step = forecast(opened, block.job(row))
        assert step is not None
        assert 1.3 * without.seconds[row] < bounds.seconds[row] <= step.step_time * (1 + ROUNDING)


SMALL: dict[str, dict[str, Any]] = {
    "stages on one kind": {
        **ONE_NODE, "batch": {"global": 8, "micro": 4}, "plan": {"tp": [2, 4], "recompute": ["none", "full"]},
    },
    "replicas on two nodes": {
        **MIXED, "model": {**MIXED["model"], "layers": 4}, "cluster": "dgx-a100:2",
        "batch": {"global": 16, "micro": 8}, "plan": {"tp": [4, 8]},
    },
    "two kinds": {**MIXED, "batch": {"global": 24, "micro": [4, 8]}, "plan": {"tp": [4, 8]}},
    "two kinds, two schedules": {
        **MIXED, "batch": {"global": 16, "micro": 4},
        "plan": {"tp": [4, 8], "schedule": ["1f1b", "zb-h1"], "zero": [0, 1]},
    },
    "experts on two kinds": {
        **MIXED, "model": {**MIXTRAL, "layers": 3}, "batch": {"global": 16, "micro": 8},
        "plan": {"tp": [2, 4], "ep": [1, 4], "dp": [2, 4]},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", drawn(SMALL, keep=("replicas on two nodes",)))
def test_a_search_of_heterogeneous_plans_finds_what_brute_force_finds(name: str) -> None:
    opened = open_plans(SMALL[name], top=3)
    rows = [block.job(row) for block in opened.blocks for row in range(block.size)]
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows) == opened.certificate.plans
    every = [forecast(opened, row) for row in rows]
    steps = sorted(step.step_time for step in every if step is not None and step.fits)
    certificate = opened.run()
    near = [seconds for seconds in steps[:3] if seconds < steps[0] * 1.05]
    assert [plan.forecast.step_time for plan in opened.best][: len(near)] == pytest.approx(near, rel=1e-12)
    assert certificate.complete and certificate.gap == 0.0 and is_accounted(certificate)
    assert certificate.exact < certificate.plans


@pytest.mark.slow
def test_equal_stages_are_among_the_heterogeneous_ones() -> None:
    """The best plan of stages that are alike, of an ordinary search, is not better than the best different one."""
    alike = {**ONE_NODE, "plan": {"tp": "auto", "pp": "auto"}, "batch": {"global": 32, "micro": 1}}
    ordinary = search(alike, top=1, workers=1).best[0].report
    heterogeneous = search({**ONE_NODE, "plan": {}}, heterogeneous=True, top=1).best[0].report
    assert heterogeneous.step_time <= ordinary.step_time * (1 + 1e-12)


@pytest.mark.slow
def test_a_stated_degree_restricts_the_stages() -> None:
    for plan in search({**MIXED, "plan": {"tp": 4, "pp": [2, 3]}}, heterogeneous=True).best:
        stages = plan.job["plan"].get("stages", ())
        assert all(stage["tp"] == 4 for stage in stages) and len(stages) in (0, 2, 3)
        assert plan.report.job.cluster.gpus == 16


def test_divisions_of_the_layers_are_distinct() -> None:
    opened = open_plans({**ONE_NODE, "batch": {"global": 8, "micro": 1}, "plan": {"tp": 2}})
    plans = [block.job(row)["plan"] for block in opened.blocks for row in range(block.size)]
    lists = [tuple(stage["layers"] for stage in plan["stages"]) for plan in plans if "stages" in plan]
    assert {(1, 1, 2, 2), (2, 2, 1, 1), (1, 2, 2, 1)} <= {*lists}
    assert len({*lists}) == len(lists) and all(sum(layers) == 6 for layers in lists)


def test_the_page_states_every_field_once() -> None:
    job = {**MIXED, "batch": {"global": 8, "micro": 8}, "plan": {"tp": 8}}
    for top in (1, 3):
        text = render(page(search(job, heterogeneous=True, top=top)))
        assert text.count("schedule 1f1b") == 1 and text.count("zero 1") == 1
        assert text.count("tp 8") >= top and ("plan 1 " in text) and ("plan 2 " in text) == (top > 1)


def test_a_search_that_is_interrupted_before_its_first_forecast_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeterogeneousSearch, "_enter", interrupt)
    result = search({**MIXED, "batch": {"global": 8, "micro": 8}, "plan": {}}, heterogeneous=True)
    certificate, text = result.certificate, " ".join(render(page(result)).split())
    assert not certificate.complete and certificate.gap == 1.0 and certificate.open == certificate.plans
    assert "were not decided" in text and "No plan was forecast before the interruption." in text


def test_shares_of_replicas_end_at_once_in_the_bound() -> None:
    fixed, each = np.array([[1.0], [2.0]]), np.array([[1.0], [3.0]])
    # T = 1 + x = 2 + 3 (40 - x)
    assert share_bound(fixed, each, np.ones((2, 1)), 40) == pytest.approx([1 + 121 / 4])
