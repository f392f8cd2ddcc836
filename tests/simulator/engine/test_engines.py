"""Three engines, one answer: SimPy, the longest-path sweep and the matrices, with and without skipping."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.forecast.step import play_forecast
from meshcast.simulator.ir.ops import HostLaunch
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.program.build import build
from meshcast.simulator.program.messages import StageMessages
from meshcast.simulator.program.timetable import timetable
from meshcast.simulator.scheduling.schedule import Action, PipelineShape, Schedule
from tests.contract.measure import side_ops_of
from tests.contract.played import PAID, Ideal, Played, play_job
from tests.simulator.engine.engines import (
    LAUNCH,
    WAYS,
    check_alike,
    check_reports,
    on_catalog,
    play_by_engines,
    simulate_by_engines,
)
from tests.strategies import PRICES, changed, examples, jobs, some

DRAWN = jobs(launch=LAUNCH, passes=80)


@examples(110)
@given(job=DRAWN)
def test_all_engines_give_the_same_report(job: dict[str, Any]) -> None:
    check_reports(job)


@pytest.mark.parametrize("node", [pytest.param("dgx-h100", marks=pytest.mark.slow), "dgx-a100"])
@examples(40)
@given(job=jobs(launch=LAUNCH, passes=80, formats=("bf16",)))
def test_all_engines_agree_on_clusters_of_the_catalog(node: str, job: dict[str, Any]) -> None:
    check_reports(on_catalog(job, node))


@examples(90)
@given(job=jobs(launch=(0.0, 1e-6, 1e-4), passes=80), price=PRICES)
def test_all_engines_agree_whatever_takes_longest(job: dict[str, Any], price: Ideal) -> None:
    """Communication, computation or the host by far the slowest; communication for nothing."""
    check_alike(play_by_engines(job, price))


class Split(Schedule):
    """1F1B whose weight gradients come `late` backward passes after the gradients of inputs."""

    name = "split"
    late = 0

    def order(self, shape: PipelineShape, device: int) -> list[Action]:
        warmup = min(shape.m, shape.p - 1 - device)
        order = [Action(device, "F", k) for k in range(warmup)]
        for k in range(shape.m + self.late):
            if warmup + k < shape.m:
                order.append(Action(device, "F", warmup + k))
            if k < shape.m:
                order.append(Action(device, "B", k))
            if k >= self.late:
                order.append(Action(device, "W", k - self.late))
        return order


@examples(40)
@given(
    job=jobs(("pipeline/1f1b",), recompute=False, launch=LAUNCH[:3], passes=80),
    late=st.integers(0, 3),
    price=st.builds(Ideal, links=st.sampled_from([1e5, 1e7, math.inf]), latency=st.sampled_from([0.0, 1e-4])),
)
def test_all_engines_agree_on_backward_passes_in_two_parts(job: dict[str, Any], late: int, price: Ideal) -> None:
    plan = resolve_plan(load_job(job), price=price)
    schedule = Split(plan.schedule.over, None, plan.mesh)
    schedule.late = late
    stages, updates = lower_stages(plan)
    framework, table = plan.job.framework, timetable(schedule, plan.shape)
    program = build(
        table, stages, price, StageMessages(plan.ranks.pipeline_axis), framework.overlap.pp, updates, framework.launch_s
    )
    ways = [play_forecast(plan, stages, program, engine=engine, skip=skip) for engine, skip in WAYS]
    assert all(peak.left == 0 for peak in ways[0].peaks)
    check_alike(ways)


# ----------------------------------------------------------------------------------------------- skipping

MODEL = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}


def job(plan: dict[str, Any], gpus: int, batch: int, **framework: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": batch},
        "plan": plan,
    }


PLANS = [{"pp": 4}, {"pp": 4, "tp": 2, "dp": 2}, {"pp": 2, "chunks": 2}, {"pp": 4, "tp": 2, "chunks": 2}]


@pytest.mark.parametrize(("plan", "overlap", "launch"), some([*product(PLANS, (True, False), (0.0, 2e-6, 1e-3))], 13))
def test_a_long_pipeline_is_skipped_and_stays_the_same(plan: dict[str, int], overlap: bool, launch: float) -> None:
    gpus = math.prod(plan.get(axis, 1) for axis in ("pp", "tp", "dp"))
    framework = {"overlap": {"dp": True, "pp": overlap}, "launch_s": launch}
    config = job(plan, gpus, 96 * plan.get("dp", 1), **framework)
    ways = [report.play for report in simulate_by_engines(config)]
    skipping, plain = ways[2].step, ways[3].step
    assert isinstance(skipping, ByMatrices) and isinstance(plain, ByMatrices)
    actions = len(skipping.program.timetable.actions)
    assert actions / 2 < skipping.play.skipped < actions
    assert plain.play.skipped == 0
    for device in range(skipping.program.devices):
        skipped, whole = (step.play.of_device(device) for step in (skipping, plain))
        assert skipped.entry == pytest.approx(whole.entry, rel=1e-9)
        assert skipped.sent == pytest.approx(whole.sent, rel=1e-9)
    check_alike(ways)


def test_a_send_that_waits_for_the_host_is_not_skipped_over() -> None:
    """The host advances less per round than the devices, and sends wait for it: the rounds differ."""
    model = {"layers": 4, "hidden": 8, "heads": 2, "head_dim": 2, "vocab": 2, "seq": 32, "ffn": 2, "gated": True}
    schemes = [
        {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 2},
        {"use": "memory/recompute-full", "layers": 1},
        {"use": "tensor/megatron-sp", "over": "tp"},
    ]
    framework = {"overlap": {"dp": False, "pp": False}, "regather": True, "attention": "unfused", "launch_s": 1e-3}
    config = {
        **job({"mesh": {"pp": 2, "tp": 2}, "schemes": schemes}, 4, 28, **framework),
        "model": {**model, "positions": "rope", "dropout": 0.1, "tied": False},
        "batch": {"global": 28, "micro": 2},
    }
    check_alike(play_by_engines(config, Ideal(links=1e6)))


# ----------------------------------------------------------------------------------------------- the host


def issued(played: Played, device: int) -> float:
    """Launches of the host of a device, of kernels, collectives and sends, but not of side ops of hooks; where the host
    waits for routers, of all that precedes sends and updates.
    """
    side_ops = {id(op) for chain in played.stages for op in side_ops_of((*chain.ahead, *chain.again, *chain.behind))}
    own = [op for _, op in played.instances(device) if id(op) not in side_ops]
    launched = sum(op.work.number for op in own if isinstance(op.work, HostLaunch))
    return launched or sum(op.issued for op in own)


@examples(40)
@given(job=jobs(launch=(1e-6, 1e-4, 5e-3)))
def test_a_slow_host_takes_its_time_for_every_op(job: dict[str, Any]) -> None:
    launch = job["framework"]["set"]["launch_s"]
    shared, engines = SharedWork(), ("simpy", "sweep", "matrices")
    for run in (play_job(job, engine=engine, shared=shared) for engine in engines):  # type: ignore[arg-type]
        counts = [issued(run, device) for device in range(run.plan.shape.p)]
        assert run.step.span >= max(counts) * launch * (1 - 1e-9)
        for device, count in enumerate(counts):
            own = [number for number, _ in run.instances(device)]
            launches = [number for number in own if isinstance(run.flat.ops[number].work, HostLaunch)]
            told = sum(run.flat.seconds[number] for number in launches) or sum(run.flat.issue[number] for number in own)
            assert told == pytest.approx(count * launch)
            assert max(run.times.begin[number] for number in own) >= count * launch * (1 - 1e-9)


def test_where_the_host_takes_longest_the_step_is_its_time() -> None:
    """One device without communication: the last kernel begins when it has been issued."""
    run = play_job(job({}, 1, 4, launch_s=1.0), PAID, engine="matrices")
    last = run.flat.seconds[-1]
    assert run.step.span == pytest.approx(issued(run, 0) * 1.0 + last)


@examples(12)
@given(job=jobs())
def test_a_slower_host_never_makes_a_step_shorter(job: dict[str, Any]) -> None:
    launches = (0.0, 1e-12, 1e-9, 1e-7, 1e-6, 1e-5, 1e-3)
    shared = SharedWork()
    spans = [simulate(changed(job, launch_s=launch), shared_work=shared).step_time for launch in launches]
    assert all(one <= other * (1 + 1e-12) for one, other in pairwise(spans))
    assert spans[1] == pytest.approx(spans[0], rel=1e-3), "a host that takes next to no time is as good as none"


def test_a_bucket_that_waits_for_a_message_without_a_kernel() -> None:
    """The gradients of biases behind a residual are complete when the gradient comes in: no kernel makes them."""
    job = {
        "model": {"layers": 6, "hidden": 1024, "heads": 16, "vocab": 160, "seq": 1024},
        "cluster": {"gpu": "a100-sxm-80", "gpus": 64},
        "framework": {"name": "megatron-core", "set": {"bucket": {"elements": 1.0, "elements_per_rank": 0.0}}},
        "batch": {"global": 8},
        "plan": {
            "mesh": {"pp": 2, "dp": 2, "tp": 16},
            "schemes": [
                {"use": "pipeline/interleaved-1f1b", "over": "pp", "chunks": 3},
                {"use": "tensor/megatron", "over": "tp"},
                {"use": "data/zero-1", "over": "dp"},
            ],
            "partition": [1, 2, 1, 1, 1, 0],
        },
    }
    swept, played = simulate(job, engine="sweep"), simulate(job)
    assert played.breakdown.parts == pytest.approx(swept.breakdown.parts, abs=1e-9 * swept.step_time)
    assert played.breakdown.parts["dp"] > 0


@pytest.mark.parametrize("use", ["v-half", "zb-auto"])
def test_chunks_on_one_gpu_are_scheduled_without_messages(use: str) -> None:
    plan = {"mesh": {"pp": 1}, "schemes": [{"use": f"pipeline/{use}", "over": "pp"}]}
    model = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 64, "seq": 64}
    one = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 2}, "plan": plan}
    parts = simulate(one).parts
    assert parts["pp"] == parts["bubble"] == 0
