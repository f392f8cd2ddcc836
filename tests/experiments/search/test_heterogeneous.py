"""Searches of plans whose stages, or whose replicas, have different degrees: bounds, and the best of all plans."""

from __future__ import annotations

import json
import random
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from meshcast import search
from meshcast.experiments.cli.app import app
from meshcast.experiments.search.frontier.plan_search import ROUNDING
from meshcast.experiments.search.heterogeneous.block_search import HeterogeneousSearch
from meshcast.experiments.search.heterogeneous.open_fields import HeterogeneousFields
from meshcast.experiments.search.heterogeneous.plan_blocks import ReplicaBlock, share_bound
from meshcast.experiments.search.output.page import page
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn

MODEL = {"layers": 6, "hidden": 1024, "heads": 16, "vocab": 50257, "seq": 1024}
MIXED = {"groups": [{"node": "dgx-a100", "nodes": 1}, {"node": "dgx-h100", "nodes": 1}]}

JOBS: dict[str, dict[str, Any]] = {
    "dense": {"model": {"preset": "llama3-8b", "layers": 8}, "cluster": MIXED, "batch": {"global": 64}},
    "tied": {"model": {**MODEL, "tied": True}, "cluster": MIXED, "batch": {"global": 48}},
    "experts": {"model": {"preset": "mixtral-8x7b", "layers": 4}, "cluster": MIXED, "batch": {"global": 64}},
    "one kind": {"model": {"preset": "opt-6.7b", "layers": 9}, "cluster": "dgx-a100:2", "batch": {"global": 32}},
    "unfused": {
        "model": {"preset": "llama3-8b", "layers": 6},
        "cluster": MIXED,
        "batch": {"global": 32, "sequence": 2048},
        "framework": "torchtitan",
    },
}


def open_small(job: dict[str, Any], **options: Any) -> HeterogeneousSearch:
    fields = HeterogeneousFields(job, Path("."), options.pop("memory_margin", 0.0))
    return HeterogeneousSearch(fields, 0.0, options.pop("top", 1), **options)


def forecast(search: HeterogeneousSearch, job: dict[str, Any]) -> StepAndMemory | None:
    try:
        return forecast_step(load_job(job), search.shared)
    except MeshcastError:
        return None


@pytest.mark.parametrize("draws", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", drawn(JOBS, keep=("dense", "one kind")))
@pytest.mark.slow
def test_no_bound_of_a_heterogeneous_plan_is_above_its_forecast(name: str, draws: int) -> None:
    rng, wanted = random.Random(name), open_small({**JOBS[name], "plan": "auto"})
    ratios = list[tuple[float, float]]()
    while len(ratios) < draws:
        block = rng.choice(wanted.blocks)
        bounds = block.bound()
        for row in rng.sample(range(block.size), min(3, block.size)):
            found = forecast(wanted, block.job(row))
            assert bounds.valid[row] or found is None, block.changes(row)
            if found is None:
                continue
            assert bounds.nbytes[row] <= found.peak_device * (1 + ROUNDING), block.changes(row)
            if not bounds.fits[row]:
                assert not found.fits, block.changes(row)
                continue
            assert bounds.seconds[row] <= found.step_time * (1 + ROUNDING), block.changes(row)
            ratios.append((bounds.seconds[row] / found.step_time, bounds.nbytes[row] / found.peak_device))
        block.forget()
    # Bounds that cut nothing would hold as well.
    assert max(time for time, _ in ratios) > 0.8 and max(memory for _, memory in ratios) > 0.7


def test_sums_of_gradients_among_replicas_count_in_the_bound() -> None:
    """Two replicas of eight GPUs without a pipeline sum all gradients of a rank between two nodes."""
    plan = {"tp": [4, 8], "pp": [1, 2], "dp": 1}
    framework = {"name": "megatron-core", "set": {"launch_s": 0.0}}  # else the host bounds such small passes
    job = {**JOBS["one kind"], "batch": {"global": 4, "micro": 1}, "plan": plan, "framework": framework}
    wanted = open_small(job)
    (block,) = (one for one in wanted.blocks if isinstance(one, ReplicaBlock))
    bounds, counted = block.bound(), block.rates
    block.rates = (0.0, 0.0)
    without = block.bound()
    assert len(counted) == 2 and min(counted) > 0.0
    for row in range(block.size):
        found = forecast(wanted, block.job(row))
        assert found is not None
        assert 1.3 * without.seconds[row] < bounds.seconds[row] <= found.step_time * (1 + ROUNDING)


SMALL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stages on one kind": (
        {"model": MODEL, "cluster": {"node": "dgx-h100", "nodes": 1}, "batch": {"global": 8, "micro": 4}},
        {"tp": [2, 4], "recompute": ["none", "full"]},
    ),
    "replicas on two nodes": (
        {"model": MODEL, "cluster": "dgx-a100:2", "batch": {"global": 16, "micro": 8}},
        {"tp": [4, 8]},
    ),
    "two kinds": ({"model": MODEL, "cluster": MIXED, "batch": {"global": 24, "micro": [4, 8]}}, {"tp": [4, 8]}),
    "two kinds, two schedules": (
        {"model": MODEL, "cluster": MIXED, "batch": {"global": 16, "micro": 4}},
        {"tp": [4, 8], "schedule": ["1f1b", "zb-h1"], "zero": [0, 1]},
    ),
    "experts on two kinds": (
        {"model": {"preset": "mixtral-8x7b", "layers": 3}, "cluster": MIXED, "batch": {"global": 16, "micro": 8}},
        {"tp": [2, 4], "ep": [1, 4], "dp": [2, 4]},
    ),
}


@pytest.mark.parametrize("name", drawn(SMALL, keep=("replicas on two nodes",)))
def test_a_search_of_heterogeneous_plans_finds_what_brute_force_finds(name: str) -> None:
    job, plan = SMALL[name]
    wanted = open_small({**job, "plan": plan}, top=3)
    rows = [block.job(row) for block in wanted.blocks for row in range(block.size)]
    assert len(rows) == wanted.certificate.plans
    assert len({json.dumps(one, sort_keys=True) for one in rows}) == len(rows)
    every = [forecast(wanted, one) for one in rows]
    steps = sorted(one.step_time for one in every if one is not None and one.fits)
    certificate = wanted.run()
    assert certificate.complete and certificate.gap == 0.0
    best = [one.forecast.step_time for one in wanted.best]
    near = [one for one in steps[:3] if one < steps[0] * 1.05]
    assert best[: len(near)] == pytest.approx(near, rel=1e-12)
    cut = certificate.invalid + certificate.memory_bound + certificate.time_bound
    assert cut + certificate.exact == certificate.plans
    assert certificate.exact < certificate.plans


@pytest.mark.slow
def test_equal_stages_are_among_the_heterogeneous_ones() -> None:
    """The best plan of stages that are alike, of an ordinary search, is not better than the best different one."""
    base = {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 32}}
    ordinary = search(
        {**base, "plan": {"tp": "auto", "pp": "auto"}, "batch": {"global": 32, "micro": 1}}, top=1, workers=1
    )
    heterogeneous = search({**base, "plan": {}}, heterogeneous=True, top=1)
    assert heterogeneous.best[0].report.step_time <= ordinary.best[0].report.step_time * (1 + 1e-12)


@pytest.mark.slow
def test_a_stated_degree_restricts_the_stages() -> None:
    found = search(
        {"model": MODEL, "cluster": MIXED, "batch": {"global": 32}, "plan": {"tp": 4, "pp": [2, 3]}}, heterogeneous=True
    )
    for one in found.best:
        stages = one.job["plan"].get("stages", ())
        assert all(stage["tp"] == 4 for stage in stages) and len(stages) in (0, 2, 3)
        assert one.report.job.cluster.gpus == 16


def test_divisions_of_the_layers_are_distinct() -> None:
    wanted = open_small(
        {"model": MODEL, "cluster": "dgx-h100:1", "batch": {"global": 8, "micro": 1}, "plan": {"tp": 2}}
    )
    lists = [
        [stage["layers"] for stage in block.job(row)["plan"]["stages"]]
        for block in wanted.blocks
        for row in range(block.size)
        if "stages" in block.job(row)["plan"]
    ]
    assert [1, 1, 2, 2] in lists and [2, 2, 1, 1] in lists and [1, 2, 2, 1] in lists
    assert len({tuple(one) for one in lists}) == len(lists)
    assert all(sum(one) == 6 for one in lists)


@pytest.mark.parametrize(
    ("changes", "options", "where"),
    [
        ({"plan": {"cp": 2}}, {}, "plan.cp"),
        ({"plan": {"schedule": "interleaved-1f1b"}}, {}, "plan.schedule"),
        ({"plan": {"zero": 3}}, {}, "plan.zero"),
        ({"plan": {"dp_scheme": "mics"}}, {}, "plan.dp_scheme"),
        ({"plan": {"unit": 2}}, {}, "plan.unit"),
        ({"plan": {"reshard": False}}, {}, "plan.reshard"),
        ({"plan": {"stages": [{"tp": 8}]}}, {}, "plan.stages"),
        ({"batch": {"micro": 1}}, {}, "batch.global"),
        ({"plan": {"tp": 5}}, {}, "plan"),
        ({}, {"where": ["plan.tp < 4"]}, "where"),
        ({}, {"runs": 1}, "runs"),
        ({}, {"objective": "time,memory"}, "objective"),
    ],
)
def test_what_a_search_of_heterogeneous_plans_refuses(
    changes: dict[str, Any], options: dict[str, Any], where: str
) -> None:
    job = {"model": MODEL, "cluster": MIXED, "batch": {"global": 32}, "plan": "auto", **changes}
    with pytest.raises(PlanError) as caught:
        search(job, heterogeneous=True, **options)
    assert caught.value.where == where


@pytest.mark.parametrize("plan", ["auto", {}])
def test_an_ordinary_search_of_two_kinds_tells_of_heterogeneous(plan: Any) -> None:
    with pytest.raises(PlanError, match="Add --heterogeneous"):
        search({"model": MODEL, "cluster": MIXED, "batch": {"global": 32}, "plan": plan})


@pytest.mark.parametrize("option", [["--where", "plan.tp < 4"], ["--near-measured"], ["--robust"]])
def test_the_command_names_options_that_it_refuses(option: list[str], tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"model": MODEL, "cluster": MIXED, "batch": {"global": 32}, "plan": {}}))
    answer = CliRunner().invoke(app, ["search", str(job), "--heterogeneous", *option])
    assert answer.exit_code == 2 and f"{option[0]}: a search of heterogeneous plans" in answer.output


def test_the_page_states_every_field_once() -> None:
    job = {"model": MODEL, "cluster": MIXED, "batch": {"global": 8, "micro": 8}, "plan": {"tp": 8}}
    for top in (1, 3):
        console = Console(width=200, record=True, file=StringIO())
        console.print(page(search(job, heterogeneous=True, top=top)))
        text = console.export_text()
        assert text.count("schedule 1f1b") == 1 and text.count("zero 1") == 1
        assert text.count("tp 8") >= top and ("plan 1 " in text) and ("plan 2 " in text) == (top > 1)


def test_a_search_that_is_interrupted_before_its_first_forecast_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HeterogeneousSearch, "_enter", interrupt)
    job = {"model": MODEL, "cluster": MIXED, "batch": {"global": 8, "micro": 8}, "plan": {}}
    found = search(job, heterogeneous=True)
    console = Console(width=200, record=True, file=StringIO())
    console.print(page(found))
    assert not found.certificate.complete and found.certificate.gap == 1.0
    assert found.certificate.open == found.certificate.plans and "were not decided" in console.export_text(clear=False)
    assert "No plan was forecast before the interruption." in console.export_text()


def test_shares_of_replicas_end_at_once_in_the_bound() -> None:
    fixed, each = np.array([[1.0], [2.0]]), np.array([[1.0], [3.0]])
    # T = 1 + x = 2 + 3 (40 - x)
    assert share_bound(fixed, each, np.ones((2, 1)), 40) == pytest.approx([1 + 121 / 4])
