"""What a forecast takes is told from the plan alone: as many actions as are built, and a refusal that helps."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import SharedWork, load_job, simulate
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.plan import size
from meshcast.simulator.plan.size import accepting_any_size, count_passes, measure_size
from meshcast.simulator.program import flatten as flattening
from meshcast.simulator.report import trace

SHARED = SharedWork()
PLAIN = ("1f1b", "gpipe", "breadth-first", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "slimpipe", "pipedream")
"""Schedules whose actions are counted one for one."""
PAIRED = ("dualpipe", "dualpipe-v", "chimera", "bpipe")
"""Schedules that split some backward passes, or move activations."""


def draw_job(draw: random.Random, schedule: str, **more: Any) -> dict[str, Any]:
    pp = draw.choice([2, 4])
    chunks = {"chunks": 2} if schedule in ("interleaved-1f1b", "breadth-first") else {}
    return {
        "model": {"layers": 16, "hidden": 64, "heads": 8, "seq": 512, "vocab": 128},
        "cluster": "dgx-h100:1",
        "batch": {"global": 8 // pp * 16 * draw.randint(1, 3), "micro": 1},
        "plan": {"pp": pp, "tp": 1, "schedule": schedule, **chunks},
        **more,
    }


def count_built(job: dict[str, Any]) -> tuple[int, int]:
    """The actions of a job's timetable: as its plan tells, and as they are built."""
    plan = resolve_plan(load_job(job), SHARED)
    prices = [costs.estimate for costs in SHARED.device_costs(plan)]
    return count_passes(plan), len(build_program(plan, prices, SHARED)[1].timetable.slot)


@pytest.mark.parametrize("schedule", (*PLAIN, *PAIRED))
def test_as_many_actions_as_are_built(schedule: str) -> None:
    told, built = count_built(draw_job(random.Random(schedule), schedule))
    assert told == built if schedule in PLAIN else built / 2 <= told <= 2 * built


@pytest.mark.parametrize(("schedule", "least"), [("1f1b", 1), ("zb-auto", 15), ("dualpipe", 20)])
def test_orders_that_are_planned_and_pairs_take_longer(schedule: str, least: float) -> None:
    """Of the same micro-batches through as many stages and layers."""
    jobs = [resolve_plan(load_job(draw_job(random.Random(1), name))) for name in ("1f1b", schedule)]
    plain, job = map(measure_size, jobs)
    (of_stage,) = {16 / plan.shape.p * plan.shape.m for plan in jobs}
    assert job.layers == plain.layers == of_stage and job.seconds / job.passes >= least * plain.each[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "slimpipe"])
def test_what_a_refusal_proposes_is_accepted_and_takes_a_quarter(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "MAX_BYTES", 1_000 * size.PASS_BYTES)
    job = draw_job(random.Random(3), schedule)
    job["batch"]["global"] = 1_600
    with pytest.raises(PlanError, match=r"batch.global is 1600: .* passes, a forecast of some .* --yes") as refused:
        forecast_step(job, SHARED)
    fits = int(re.match(r"([\d,]+) would", refused.value.remedy)[1].replace(",", ""))  # type: ignore[index]
    smaller = {**job, "batch": {"global": fits, "micro": 1}}
    assert forecast_step(smaller, SHARED).step_time > 0
    plan = resolve_plan(load_job(smaller))
    assert measure_size(plan).excess <= 0.25 or plan.shape.m == 2 * plan.shape.p, "or a single round"
    with accepting_any_size():
        assert forecast_step(job, SHARED).step_time > forecast_step(smaller, SHARED).step_time


def test_noise_and_ops_beyond_the_limits_are_played_if_any_size_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"layers": 2, "hidden": 64, "heads": 8, "seq": 512, "vocab": 128}
    job = {"model": model, "cluster": "dgx-h100:1"}
    noisy = {**job, "noise": {"jitter": 0.1, "steps": 9_999}, "batch": {"global": 800_000, "micro": 1}}
    with accepting_any_size():
        assert resolve_plan(load_job(noisy)).shape.m == 100_000
    monkeypatch.setattr(flattening, "MAX_OPS", 10)
    with pytest.raises(PlanError, match=r"op by op up to 10 ops.*--yes"):
        simulate(job, engine="sweep")
    monkeypatch.setattr(trace, "MAX_OPS", 10)
    with pytest.raises(PlanError, match=r"written as a trace up to 10 ops.*--yes"):
        trace.write_trace(simulate(job), "trace.json")
    with accepting_any_size():
        assert simulate(job, engine="sweep").step_time == pytest.approx(simulate(job).step_time)
