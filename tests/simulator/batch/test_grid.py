"""Forecasts in batch against those of single plans, for drawn models, frameworks and plans."""

from __future__ import annotations

import random
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest

from meshcast.hardware.errors import MeshcastError
from meshcast.simulator import SharedWork, load_job
from meshcast.simulator.batch import blocks, forecaster, passes, tables
from meshcast.simulator.batch import grid as grids
from meshcast.simulator.batch.families import Refused
from meshcast.simulator.batch.forecaster import BatchForecaster
from meshcast.simulator.batch.grid import Answered, forecast_jobs
from meshcast.simulator.batch.loops import arrays, busy, matrices, order, peaks, play
from meshcast.simulator.batch.loops.compiled import HAS_COMPILER
from meshcast.simulator.batch.plain import is_plain
from meshcast.simulator.batch.played import LoopForecast
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step, play_job, summarise_step
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.report.figures import row_of
from meshcast.simulator.report.report import Report
from tests.draws import drawn

MODELS = "gpt2-124m", "llama3-8b", "gpt-neox-20b", "llama2-13b", "opt-6.7b"
FRAMEWORKS = "megatron-core", "megatron-lm-2021", "torchtitan", "deepspeed", "nanotron", "colossalai", "gpt-neox"
SEEDS = range(98)


def draw_job(draw: random.Random, framework: str) -> dict[str, Any]:
    """Draws a job, many of which are plain."""
    job = {"model": draw.choice(MODELS), "cluster": draw.choice(("dgx-h100:2", "dgx-a100:2"))}
    degrees = {"tp": draw.choice((1, 2, 4)), "pp": draw.choice((1, 2, 4)), "chunks": draw.choice((1, 1, 2, 3))}
    plan = {**degrees, "zero": draw.choice((0, 1, 1, 2, 3)), "recompute": draw.choice(("none", "selective", "full"))}
    plan["sequence_parallel"] = draw.random() < 0.5
    if draw.random() < 0.3:
        plan["schedule"] = draw.choice(("gpipe", "breadth-first", "dapple"))
    if draw.random() < 0.2:
        plan["cp"] = 2
    batch = {"global": 96, "micro": draw.choice((1, 2, 3)), "sequence": draw.choice((512, 1024))}
    return {**job, "framework": framework, "plan": plan, "batch": batch}


def draw_plain_plan(seed: int) -> Plan:
    """Draws a plan that breaks no rule and is plain."""
    draw = random.Random(seed)
    for _ in range(30):
        with suppress(MeshcastError):
            plan = resolve_plan(load_job(draw_job(draw, FRAMEWORKS[seed % len(FRAMEWORKS)])))
            if is_plain(plan):
                return plan
    raise AssertionError("no plan is plain")


def assert_equal(mine: StepAndMemory, single: StepAndMemory) -> None:
    """Step times are equal to 1e-9, memory to the byte."""
    assert mine.step_time == pytest.approx(single.step_time, rel=1e-9)
    for name in ("peak_allocated", "peak_device", "held"):
        assert getattr(mine, name) == pytest.approx(getattr(single, name), abs=0.6, rel=0)
    assert mine.room == pytest.approx(single.room, rel=1e-12)


def assert_same_rows(mine: Report, single: Report) -> None:
    """Figures of rows are equal but for rounding, which single forecasts have of 1e-12 s in every action, and
    everything in words is the same."""
    assert isinstance(mine.play, LoopForecast)
    near = partial(pytest.approx, rel=1e-9, abs=1e-9 * single.step_time)
    assert row_of(mine) == {name: value if value is None else near(value) for name, value in row_of(single).items()}
    assert mine.breakdown.hidden == near(single.breakdown.hidden)
    assert (mine.limits, mine.fit.verdict) == (single.limits, single.fit.verdict)
    assert "singly" not in vars(mine.play)


@pytest.mark.parametrize("seed", drawn(SEEDS, lambda seed: seed < 14))
def test_plain_plans_have_the_rows_and_the_memory_of_single_forecasts(seed: int) -> None:
    plan, forecaster, shared = draw_plain_plan(seed), BatchForecaster(), SharedWork()
    single = Report(*play_job(plan, shared))
    assert_same_rows(forecaster.report(plan, plain=True), single)
    assert_equal(forecaster.answer(plan, plain=True), summarise_step(single))


def test_what_loops_do_not_find_is_that_of_the_single_forecast() -> None:
    plan = draw_plain_plan(0)
    mine, single = BatchForecaster().report(plan, plain=True), Report(*play_job(plan, SharedWork()))
    assert mine.assumed == single.assumed
    others = [device for device in range(plan.shape.p) if device != mine.device]
    assert [mine.play.breakdown(d) for d in others] == [single.play.breakdown(d) for d in others]
    assert mine.play.memory(0)[0] == pytest.approx(single.play.memory(0)[0])


def small_grid(optimizer: str = "adam", **more: Any) -> list[dict[str, Any]]:
    """Returns plans of one job: pipeline devices, micro-batches, chunks and degrees."""
    axes = product((1, 2, 4), (1, 2, 3), (1, 2, 5), (1, 2), (0, 1))
    batch = {"global": 48, "sequence": 512}
    return [
        {
            "model": "gpt2-124m",
            "cluster": "dgx-a100:2",
            "batch": {**batch, "micro": micro},
            "optimizer": optimizer,
            "plan": {"pp": pp, "chunks": chunks, "tp": tp, "zero": zero, **more},
        }
        for pp, micro, chunks, tp, zero in axes
    ]


@pytest.mark.parametrize(
    "more", [{}, {"recompute": "full", "sequence_parallel": True}, {"zero": 3}, {"optimizer": "muon"}]
)
def test_grids_have_the_answers_and_the_refusals_of_single_forecasts(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "HAS_COMPILER", True)
    jobs, shared = random.Random(0).sample(small_grid(**more), 32), SharedWork()
    refused = 0
    for job, mine in zip(jobs, forecast_jobs(jobs), strict=True):
        try:
            single = forecast_step(load_job(job), shared)
        except MeshcastError as error:
            assert isinstance(mine, Refused)
            assert str(mine.error) == str(error)
            refused += 1
            continue
        assert isinstance(mine, Answered)
        assert_equal(mine.figures, single)
    assert 4 < refused < len(jobs) - 4


@pytest.mark.parametrize("wrong", [{"tp": [2]}, {"cp": {}}, {"schedule": ["gpipe"], "chunks": 1}, {"tp": True}])
def test_values_of_a_wrong_kind_are_refused_as_in_single_forecasts(wrong: dict[str, Any]) -> None:
    (right,) = random.Random(0).sample(small_grid(), 1)
    jobs = [right, {**right, "plan": {"pp": 2, "tp": 1}}, {**right, "plan": {"pp": 2, **wrong}}]
    mine = [*forecast_jobs(jobs)][-1]
    with pytest.raises(MeshcastError) as single:
        load_job(jobs[-1])
    assert isinstance(mine, Refused) and str(mine.error) == str(single.value)


def test_most_plans_of_a_grid_are_derived_and_played_by_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, played = [], []
    load, find = load_job, BatchForecaster._find_parts
    monkeypatch.setattr(grids, "HAS_COMPILER", True)
    monkeypatch.setattr(
        "meshcast.simulator.batch.families.load_job", lambda *job, **base: loaded.append(job) or load(*job, **base)
    )
    monkeypatch.setattr(BatchForecaster, "_find_parts", lambda self, plan: played.append(plan) or find(self, plan))
    jobs = small_grid()
    answered = [answer for answer in forecast_jobs(jobs) if isinstance(answer, Answered)]
    assert len(played) == len(answered)
    assert 0 < len(loaded) < len(jobs) / 2


NOT_PLAIN = [
    {"pp": 2, "fsdp": True},
    {"zero": 3, "offload": ["optimizer"]},
    {"pp": 2, "schedule": "zb-auto"},
    {"pp": 2, "schedule": "pipedream"},
    {"recompute": "full", "recompute_layers": 1},
    {"offload": ["activations"]},
]


@pytest.mark.parametrize("plan", NOT_PLAIN)
def test_other_plans_are_forecast_singly(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "HAS_COMPILER", True)
    job = {"model": "gpt2-124m", "cluster": "dgx-a100:1", "batch": {"global": 16, "micro": 1}, "plan": plan}
    resolved = resolve_plan(load_job(job))
    assert not is_plain(resolved) or BatchForecaster().play(resolved) is None  # its stages show it
    (answer,) = forecast_jobs([job])
    assert isinstance(answer, Answered)
    assert answer.figures == forecast_step(load_job(job))


@pytest.mark.skipif(not HAS_COMPILER, reason="needs numba")
def test_compiled_loops_do_what_plain_python_does() -> None:
    plan = resolve_plan(load_job(small_grid()[-1] | {"plan": {"pp": 4, "chunks": 3, "tp": 2, "zero": 1}}))
    compiled = BatchForecaster().report(plan, plain=True)
    with pytest.MonkeyPatch.context() as patch:
        for module in (arrays, matrices, order, play, busy, peaks, blocks, passes, forecaster, tables):
            for name, loop in vars(module).items():
                if hasattr(loop, "py_func"):
                    patch.setattr(module, name, loop.py_func)
        interpreted = BatchForecaster().report(plan, plain=True)
    assert isinstance(compiled.play, LoopForecast) and isinstance(interpreted.play, LoopForecast)
    assert row_of(compiled) == row_of(interpreted)
