"""Three engines, one answer: SimPy, the longest-path sweep and the matrices, with and without skipping."""

from __future__ import annotations

import math
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshcast.simulator import simulate
from meshcast.simulator.engine.maxplus import Coordinates
from meshcast.simulator.engine.play import ByMatrices
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import HostLaunch
from meshcast.validation.contract.measure import side_ops_of
from meshcast.validation.contract.played import PAID, Ideal, Played, play_job
from tests.draws import drawn
from tests.simulator.engine.drawn_kinds import KINDS
from tests.simulator.engine.engines import check_alike, check_reports, on_catalog, play_by_engines, simulate_by_engines
from tests.strategies import EVERY_EXAMPLE, PRICES, changed, examples, jobs


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40 if EVERY_EXAMPLE else 2)
@given(data=st.data())
def test_all_engines_give_the_same_report(kind: str, data: st.DataObject) -> None:
    """At the catalog's prices; on whole nodes of it; and where communication, computation or the host is by far the
    slowest, or communication costs nothing. All memory is given back."""
    job: dict[str, Any] = data.draw(KINDS[kind])
    price = data.draw(PRICES | st.sampled_from(["", "dgx-h100"]))
    if isinstance(price, Ideal):
        ways = play_by_engines(job, price)
        assert all(peak.left == pytest.approx(0, abs=1e-6) for peak in ways[0].peaks)
        check_alike(ways)
    else:
        check_reports(on_catalog(job, price) if price and kind != "no barrier" else job)


MODEL = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}


def job(plan: dict[str, Any], gpus: int, batch: int, **framework: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "cluster": {"gpu": "h100-sxm", "gpus": gpus},
        "framework": {"name": "megatron-core", "set": framework},
        "batch": {"global": batch},
        "plan": plan,
    }


def four(use: str, batch: int, *schemes: dict[str, Any], tp: int = 1, **options: Any) -> dict[str, Any]:
    """A job of four stages, whose layers are enough for four chunks each."""
    entries = [{"use": f"pipeline/{use}", "over": "pp", **options}, {"use": "tensor/megatron", "over": "tp"}, *schemes]
    small = job({"mesh": {"pp": 4, "tp": tp}, "schemes": entries}, 4 * tp, batch, launch_s=2e-6)
    return small | {"model": MODEL | {"layers": 16, "seq": 32}}


SLOW_SENDS = {"overlap": {"dp": True, "pp": False}, "launch_s": 2e-6}
OPTIONS: dict[str, dict[str, Any]] = {
    "groups": four("interleaved-1f1b", 10, chunks=2, group=5),
    "groups of two sizes": four("interleaved-1f1b", 11, chunks=4, group=7),
    "slices and chunks": four("seq1f1b", 6, chunks=2, slices=4),
    "balanced slices and chunks": four("seq1f1b", 5, chunks=2, slices=2, balanced=True),
    "pairs": four("chimera", 8, pairs=2),
    "more memory": four("zb-auto", 12, memory_limit=8),
    "little memory": four("zb-auto", 12, {"use": "memory/recompute-selective"}, memory_limit=1),
    "varuna": four("varuna", 12, {"use": "memory/recompute-full"}),
    "transfers": four("bpipe", 10) | {"framework": {"set": SLOW_SENDS}},
    "places": four("bpipe", 10, tp=4) | {"cluster": "dgx-a100:2"},
    "scatter and gather": four("zb-v", 8, tp=2) | {"framework": "megatron-lm-2021"},
    "overlapped passes": four("1f1b", 8, overlap_passes=True),
    "overlapped passes of chunks": four("interleaved-1f1b", 8, chunks=2, overlap_passes=True),
    "deferred output gradients": four("1f1b", 8, deferred_output_gradients=0),
    "some deferred output gradients": four("interleaved-1f1b", 8, chunks=2, deferred_output_gradients=3),
    "experts outside of graphs": job({"ep": 2}, 2, 4, cuda_graphs=["attn", "moe_router"])
    | {"model": MODEL | {"moe": {"experts": 4, "top_k": 2, "expert_ffn": 32}}},
}
"""Options of schedules that no job is drawn with."""


@pytest.mark.parametrize("name", drawn(OPTIONS, keep=lambda name: not name.startswith("balanced")))
def test_all_engines_agree_on_options(name: str) -> None:
    check_reports(OPTIONS[name])


# ----------------------------------------------------------------------------------------------- skipping

PLANS = [{"pp": 4}, {"pp": 4, "tp": 2, "dp": 2}, {"pp": 2, "chunks": 2}, {"pp": 4, "tp": 2, "chunks": 2}]


@pytest.mark.parametrize(
    ("plan", "overlap", "launch"), drawn([*product(PLANS, (True, False), (0.0, 2e-6, 1e-3))], keep=13)
)
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


def test_rounds_are_not_skipped_before_a_slower_host_holds_them_up() -> None:
    """While a pipeline fills, the host gets ahead of the later stages; it loses a little of that in every round."""
    plan, sizes = {"pp": 4}, (4, 96)
    free = play_job(job(plan, *sizes), PAID, engine="matrices")
    launch = 1.03 * free.step.span / issued(free, 3)
    check_alike(play_by_engines(job(plan, *sizes, launch_s=launch), PAID, [("sweep", True), ("matrices", True)]))


# ----------------------------------------------------------------------------------------------- the host


def issued(played: Played, device: int) -> float:
    """Launches of the host of a device, of kernels, collectives and sends, but not of side ops of hooks; where the host
    waits for routers, of all that precedes sends and updates.
    """
    side_ops = {id(op) for chain in played.stages for op in side_ops_of((*chain.ahead, *chain.again, *chain.behind))}
    own = [op for _, op in played.instances(device) if id(op) not in side_ops]
    launched = sum(op.work.number for op in own if isinstance(op.work, HostLaunch))
    return launched or sum(op.issued for op in own)


@examples(40, daily=2)
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


@examples(12, daily=2)
@given(job=jobs())
def test_a_slower_host_never_makes_a_step_shorter(job: dict[str, Any]) -> None:
    launches = (0.0, 1e-12, 1e-7, 1e-6, 1e-3)
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
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 2}, "plan": plan}
    parts = simulate(job).parts
    assert parts["pp"] == parts["bubble"] == 0


@pytest.mark.parametrize(("use", "axis", "follows"), [("tensor/megatron", "tp", True), ("data/fsdp", "dp", False)])
def test_a_stream_whose_results_are_awaited_at_once_follows_the_compute_stream(
    use: str, axis: str, follows: bool
) -> None:
    """All-reduces of a layer stand in the chain of its ops, and weights are gathered ahead of theirs."""
    program = play_job(job({"mesh": {axis: 4}, "schemes": [{"use": use, "over": axis}]}, 4, 4)).program
    axes = Coordinates(program.tasks)
    assert {axes.parts_follow(task.parts, s) for task in program.tasks for s in axes.inside} == {follows}
