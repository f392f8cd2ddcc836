"""A search of a job that names its framework proposes what the program runs, by the rules that jobs are checked by."""

from __future__ import annotations

import random
from typing import Any

import pytest

import meshcast
from meshcast.experiments.search.search_job import open_search, search
from meshcast.experiments.search.space.limits import LimitedSpace
from meshcast.experiments.search.space.program_points import keep_own_values
from meshcast.experiments.search.space.space import facts_of_point
from meshcast.hardware.errors import MeshcastError
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.job.plan_keys import PLAN_KEYS
from meshcast.simulator.job.program_rules import broken_rules, facts_of_job, find_rules, shared_facts
from meshcast.simulator.loading.load import load_job
from tests.experiments.search import spaces

OPEN = {"cluster": "dgx-h100:2", "batch": {"global": 64, "sequence": 8192}, "plan": "auto"}
TINY: dict[str, Any] = {
    **spaces.TINY,
    "model": {"preset": "llama3-8b", "layers": 4, "kv_heads": 2},
    "framework": "torchtitan",
    "batch": {"global": 8, "micro": 1, "sequence": 2048},
    "plan": {"tp": [1, 2, 4], "pp": [1, 2], "zero": "auto"},
}


@pytest.mark.parametrize(
    ("program", "model"),
    [
        ("megatron-core", "mixtral-8x7b"),
        ("torchtitan", "qwen3-30b-a3b"),
        ("deepspeed", "llama3-8b"),
        ("hf-trainer", "qwen2.5-3b"),
    ],
)
def test_points_have_the_facts_of_their_jobs(program: str, model: str) -> None:
    space = open_search(OPEN | {"framework": program, "model": model}).space
    draw, groups, seen = random.Random(7), space.groups(), set()
    for group in draw.sample(groups, 40):
        pipelines = space.pipelines(group)
        for pipeline in draw.sample(pipelines, min(3, len(pipelines))):
            step = draw.choice(space.steps(group, *pipeline.place))
            try:
                job = load_job(space.job_of(group, pipeline, step))
            except MeshcastError:
                continue
            runs = not broken_rules(job)
            assert {**shared_facts(job), **facts_of_point(space, group, pipeline, step)} == facts_of_job(job)
            assert runs == (step in space.choices(group, pipeline))
            seen.add(runs)
    assert seen == {True, False}


def test_the_best_plan_is_the_best_that_the_program_runs() -> None:
    result, space, steps, refused = search(TINY, top=1000), open_search(TINY, limits=None).space, list[float](), 0
    for group in space.groups():
        for pipeline in space.pipelines(group):
            for step in space.steps(group, *pipeline.place):
                job = space.job_of(group, pipeline, step)
                try:
                    refused += (broken := bool(broken_rules(load_job(job))))
                    steps += [] if broken else [forecast_step(job).step_time]
                except MeshcastError:
                    continue
    assert result.certificate.complete and result.certificate.gap == 0
    assert result.certificate.incumbent == pytest.approx(min(steps), rel=1e-12)
    assert result.certificate.excluded["program"] >= refused > 0
    assert all(not broken_rules(load_job(plan.job)) for plan in result.best)
    assert {plan.changes["plan.tp"] for plan in result.best} <= {1, 2}, "4 ranks do not divide 2 key/value heads"
    assert all(plan.changes.get("plan.fsdp") or plan.changes["plan.zero"] == 0 for plan in result.best)


def test_any_program_and_an_unnamed_framework_lift_the_restriction() -> None:
    job = {**TINY, "plan": {"tp": [1, 4], "fsdp": True}}
    whole = meshcast.search(job, top=1000, any_program=True, objective="memory")
    assert whole.certificate.excluded["program"] == 0 and whole.best[0].changes["plan.tp"] == 4
    for framework in ({}, {"name": "torchtitan", "rules": False}):
        free = open_search(job | {"framework": framework})
        free.count()
        assert free.certificate.excluded["program"] == 0


def test_an_open_plan_has_the_context_parallelism_of_its_program() -> None:
    space = open_search(OPEN | {"framework": "megatron-core", "model": "llama3-8b"}).space
    assert isinstance(space, LimitedSpace) and space.values["sequence"] == ("megatron-cp",)
    assert space.values["schedule"] == ("1f1b", "interleaved-1f1b")
    assert space.values["data"] == ("ddp", "zero-1", "zero-2", "fsdp")


def test_words_that_only_a_program_has_are_tried_for_it() -> None:
    """Recomputation by operator is tried for torchtitan, which has none of modules, and not for Megatron-Core."""
    tried = {
        name: keep_own_values("recompute", PLAN_KEYS["recompute"].auto, rules)
        for name in ("torchtitan", "megatron-core")
        if (rules := find_rules(name)) is not None
    }
    assert tried == {"torchtitan": ("none", "full", "operators"), "megatron-core": ("none", "selective", "full")}
