"""Sharded weights that stay gathered, and gradients that stay unreduced, through the micro-batches of a step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.ir.ops import BYTES
from meshcast.validation.contract.played import Played, play_job
from meshcast.validation.contract.step_dataflow import step_problems
from tests.draws import drawn_grid
from tests.simulator.engine.engines import check_alike, play_by_engines
from tests.simulator.schemes.small_jobs import job_on
from tests.simulator.schemes.small_jobs import moved as sizes_moved
from tests.strategies import PRICES, examples

MODEL = {"layers": 8, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32, "tied": False}
FORWARD_FIRST = ("gpipe", "breadth-first")
"""Schedules in which all forward passes of a stage precede its backward passes."""


def job(schedule: str = "1f1b", m: int = 4, pp: int = 2, chunks: int = 1, **options: Any) -> dict[str, Any]:
    """A small model on stages of four ranks with sharded weights."""
    pipeline = {"use": f"pipeline/{schedule}", "over": "pp", **({"chunks": chunks} if chunks > 1 else {})}
    fsdp = {"use": "data/fsdp", "over": "dp", **options}
    return job_on({"pp": pp, "dp": 4}, pipeline, fsdp, samples=4 * m, model=MODEL, framework={"name": "torchtitan"})


def moved(played: Played, operation: str, device: int = 0) -> int:
    """Bytes of all collectives of one kind among the ranks of a stage."""
    return sum(sizes_moved(played, operation, device))


def whole(played: Played, device: int, dtype: str) -> int:
    """Bytes of the whole parameters of a device in a format."""
    return sum(param.size for param in played.list_held(device)) * BYTES[dtype]


@pytest.mark.parametrize(("m", "schedule"), drawn_grid([4, 6, 9], ["1f1b", "zb-h1", *FORWARD_FIRST]))
def test_under_a_pipeline_weights_move_once_per_step(schedule: str, m: int) -> None:
    played = play_job(job(schedule, m))
    gathers = 2 if schedule in FORWARD_FIRST else 1
    for device in range(2):
        weights, gradients = (
            whole(played, device, getattr(played.plan.job.framework, of)) for of in ("weights", "gradients")
        )
        assert moved(played, "all_gather", device) == gathers * weights
        assert moved(played, "reduce_scatter", device) == gradients
    assert step_problems(played) == []


@pytest.mark.parametrize("schedule", FORWARD_FIRST)
def test_weights_that_are_not_freed_are_gathered_once(schedule: str) -> None:
    freed, kept = (play_job(job(schedule, reshard=reshard)) for reshard in (True, False))
    assert moved(freed, "all_gather") == 2 * moved(kept, "all_gather")


def test_few_micro_batches_of_1f1b_are_all_in_flight_before_the_first_backward_pass() -> None:
    played = play_job(job("1f1b", 2))
    gathered = [moved(played, "all_gather", device) for device in range(2)]
    weights = [whole(played, device, played.plan.job.framework.weights) for device in range(2)]
    assert gathered == [2 * weights[0], weights[1]]


def test_one_micro_batch_gathers_once() -> None:
    """Its weights stay whole from its forward to its backward pass."""
    played = play_job(job("gpipe", 1))
    assert moved(played, "all_gather") == whole(played, 0, played.plan.job.framework.weights)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("breadth-first", 2)])
def test_whole_weights_and_gradients_live_as_long_as_they_are_used(schedule: str, chunks: int) -> None:
    """Breadth-first holds one chunk's at a time; other schedules all of them."""
    played = play_job(job(schedule, 4, chunks=chunks))
    stages = [played.stage_ops(stage) for stage in range(0, played.plan.shape.stages, 2)]
    for category, of in (("parameters", "whole_weights"), ("gradients", "whole_gradients")):
        sizes = [getattr(stage, of) for stage in stages]
        held = max(sizes) if schedule == "breadth-first" else sum(sizes)
        assert played.category_peak(0, category) == held
    assert [peak.left for peak in played.peaks] == [0, 0]


def test_exposed_communication_of_breadth_first_does_not_grow_with_the_micro_batches() -> None:
    def exposed(m: int, **options: Any) -> float:
        wide = job("breadth-first", m, chunks=2, **options)
        wide["model"] = {**MODEL, "hidden": 4096, "heads": 32, "seq": 1024}
        return float(simulate(wide).parts["dp"])

    assert exposed(16) == pytest.approx(exposed(4), rel=0.05)
    assert exposed(16, across_microbatches=False) > 2 * exposed(4, across_microbatches=False)


@examples(40)
@given(
    schedule=st.sampled_from(["1f1b", "zb-h1", "gpipe", "breadth-first", "interleaved-1f1b", "dualpipe-v", "zb-v"]),
    m=st.sampled_from([4, 8, 10]),
    unit=st.integers(1, 3),
    reshard=st.booleans(),
    launch=st.sampled_from([0.0, 1e-5]),
    price=PRICES,
)
def test_engines_agree(schedule: str, m: int, unit: int, reshard: bool, launch: float, price: Any) -> None:
    chunks = 2 if schedule in ("breadth-first", "interleaved-1f1b") else 1
    plan = job(schedule, m, 2, chunks, unit=unit, reshard=reshard)
    plan["framework"]["set"] = {"launch_s": launch}
    check_alike(play_by_engines(plan, price))


def test_hybrid_sharding_sums_the_shards_of_replicas_once_per_step() -> None:
    plan = job(replicate="replicas")
    plan["plan"]["mesh"] = {"pp": 2, "replicas": 2, "dp": 2}
    played = play_job(plan)
    gradients = whole(played, 0, played.plan.job.framework.gradients)
    assert moved(played, "reduce_scatter") == gradients and moved(played, "all_reduce") == gradients // 2
    assert step_problems(played) == []
