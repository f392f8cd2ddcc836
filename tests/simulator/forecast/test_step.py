"""Duration and peak memory of a step, asked for without a report."""

from __future__ import annotations

import gc
import json
from dataclasses import fields, replace
from itertools import islice, product
from typing import Any

import pytest

from meshcast.hardware.errors import PlanError
from meshcast.simulator import SharedWork, load_job, simulate
from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.layer_costs import stage_layer_costs
from meshcast.simulator.forecast.planning import ForecastPricing, resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.resident_memory import stashed_weight_bytes
from meshcast.simulator.forecast.shared_gradients import sum_shared_gradients
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.forecast.step import StepAndMemory, forecast_step
from meshcast.simulator.forecast.workers import ALLOCATIONS, collect_garbage_rarely
from meshcast.simulator.ir.ops import Op, Param, StoredFormat
from meshcast.simulator.lowering.scope import traits_of
from meshcast.simulator.report.figures import row_of
from meshcast.simulator.report.report import Report
from meshcast.validation.contract.played import PAID, Ideal, play_job
from meshcast.validation.selfcheck.drawn_jobs import draw_jobs
from tests.draws import drawn
from tests.golden.rewrite import names, playable, stored

GPT3 = {"model": "gpt3-175b", "cluster": "dgx-a100:128", "batch": {"global": 1536, "micro": 1}}


def of_report(report: Report) -> StepAndMemory:
    return StepAndMemory(report.step_time, report.peak_allocated, report.peak_device, report.fit.held, report.fit.room)


RARE = ("pipeline-pipedream", "data-local-sgd")
"""Golden jobs without a flush, and with rare communication."""


GOLDEN = [*RARE, *[name for name in [*names()][::12] if playable(name)]]


@pytest.mark.parametrize("name", drawn(GOLDEN, keep=GOLDEN[:5]))
def test_golden_jobs(name: str) -> None:
    """Equal figures, exactly, of every twelfth golden job."""
    job = load_job(stored(name).job)
    assert forecast_step(job) == of_report(simulate(job))


def test_steps_of_jobs_that_share_work_are_those_of_each_alone() -> None:
    """Equal figures, exactly, or the same error, whatever was forecast before."""

    def answer(job: dict[str, Any], shared: SharedWork) -> StepAndMemory | str:
        try:
            return forecast_step(job, shared)
        except PlanError as error:
            return str(error)

    grid, shared = product((1, 8), (1, 4), (1, 2), (0, 1), ("none", "full")), SharedWork()
    names = "tp", "pp", "chunks", "zero", "recompute"
    jobs = [GPT3 | {"plan": dict(zip(names, plan, strict=True))} for plan in islice(grid, 3, None, 4)]
    steps = [answer(job, shared) for job in jobs]
    assert steps == [answer(job, SharedWork()) for job in jobs]
    assert {type(step) for step in steps} == {StepAndMemory, str}


def test_routing_that_drifts_from_step_to_step() -> None:
    routing = {"zipf": 1.0, "drift": 0.1, "steps": 3}
    schemes = [{"use": "expert/all-to-all", "over": ["ep"], "routing": routing}, {"use": "data/zero-1", "over": ["dp"]}]
    plan = {"mesh": {"dp": 8}, "views": {"experts": {"ep": 8}}, "schemes": schemes}
    job = load_job({"model": {"preset": "mixtral-8x7b", "layers": 2}, "cluster": "dgx-h100:1", "plan": plan})
    assert len(simulate(job).step_kinds) == 3
    assert forecast_step(job) == forecast_step(resolve_plan(job)) == of_report(simulate(job))


def test_plans_that_share_their_work() -> None:
    """Micro-batches of several sizes, and several numbers of chunks, share updates, states and buckets of gradients:
    every answer is that of the job alone, to the byte."""
    shared, seconds = SharedWork(), set()
    for micro, chunks in product((1, 4), (1, 3)):
        plan, batch = {"tp": 8, "pp": 8, "chunks": chunks}, {"global": 1536, "micro": micro}
        job = load_job({**GPT3, "batch": batch, "plan": plan})
        together, alone = (simulate(job, shared_work=work) for work in (shared, SharedWork()))
        assert json.dumps(together.to_dict()) == json.dumps(alone.to_dict())
        assert forecast_step(job, shared) == forecast_step(resolve_plan(job, shared), shared) == of_report(alone)
        seconds.add(alone.step_time)
    # Of each number of chunks those of the first device, of the last one and of the others.
    assert len(seconds) == 4 and len(shared.states) == len(shared.stages.updates) == 2 * 3


def test_what_drawn_plans_share_changes_no_figure() -> None:
    """Passes without side ops are the same task on several meshes, frameworks and plans are completed once: every
    column of a sweep is that of the job alone, to the bit."""
    shared, compared = SharedWork(), 0
    for described, _ in islice(draw_jobs(56), 2):
        node, _, count = described["cluster"].partition(":")
        others = ({"cluster": f"{node}:{2 * int(count)}"}, {"plan": {**described["plan"], "recompute": "full"}})
        for changes in ({}, *others):
            job = {**described, **changes}
            try:
                together, alone = (simulate(load_job(job), shared_work=work) for work in (shared, SharedWork()))
            except PlanError:
                continue  # a change that the plan does not admit
            assert row_of(together) == row_of(alone)
            compared += 1
    assert compared >= 3


@pytest.mark.parametrize("node, networks", [("dgx-a100", 1), ("p4d", 0)])
def test_reaches_of_messages_on_several_meshes(node: str, networks: int) -> None:
    """They are kept by cluster, except where messages share ports."""
    shared = SharedWork()
    for pp in (2, 8):
        job = load_job({"model": "llama3-8b", "cluster": f"{node}:8", "plan": {"tp": 4, "pp": pp}})
        assert forecast_step(job, shared) == forecast_step(job)
    assert sum(bool(pairs) for pairs in shared._pairs.values()) == networks


def test_what_schemes_may_know_of_a_parameter() -> None:
    """`traits_of` has every field of a parameter but its ops."""
    param = Param("w", 2, 4, ("dp",), Op("ready"), Op("used"))
    others: dict[str, Any] = {"size": 3, "total": 5, "name": "v", "partial": (), "view": "experts", "matrix": 2}
    others |= {"tied": True, "copies": (("tp",), 2), "trained": False, "in_layer": False, "shape": (1, 2)}
    others |= {"stored": StoredFormat(0.5), "split": (("tp", 1),), "recipe": "mxfp8"}
    assert {*others} == {field.name for field in fields(Param)} - {"ready", "used"}
    assert all(traits_of(replace(param, **{name: value})) != traits_of(param) for name, value in others.items())
    assert traits_of(replace(param, ready=Op("other"))) == traits_of(param)


def test_costs_of_layers_add_up_to_the_passes_of_the_model() -> None:
    """On one GPU nothing runs beside the kernels."""
    model = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq": 128, "tied": False}
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 1}, "batch": {"global": 1}}
    flat, plan = play_job(job, PAID).flat, resolve_plan(load_job(job), price=PAID)
    (costs,) = stage_layer_costs(plan, lambda *_: PAID)
    passes = sum(seconds for op, seconds in zip(flat.ops, flat.seconds, strict=True) if op.phase != "U")
    assert costs.begin + sum(costs.layers) + costs.end == pytest.approx(passes, rel=1e-3)
    assert len(costs.layers) == 4 and len({*costs.layers}) == 1 and min(costs.begin, costs.end) > 0


@pytest.mark.parametrize("usual", [700, 1_000_000])  # of Python, of a command
def test_garbage_is_looked_for_as_before_behind_many_forecasts(usual: int) -> None:
    found = gc.get_threshold()
    gc.set_threshold(usual, *found[1:])
    try:
        with pytest.raises(ValueError), collect_garbage_rarely():
            assert gc.get_threshold()[0] == ALLOCATIONS
            raise ValueError
        assert gc.get_threshold() == (usual, *found[1:])
    finally:
        gc.set_threshold(*found)


def test_plans_that_do_not_fit_or_break_a_rule() -> None:
    assert not forecast_step({**GPT3, "plan": {"tp": 1, "pp": 2}}).fits
    with pytest.raises(PlanError, match=r"plan\.tp is 5"):
        forecast_step({**GPT3, "cluster": "dgx-a100:10", "batch": {"global": 80}, "plan": {"tp": 5, "pp": 8}})


@pytest.mark.parametrize("m", [6, 8])
def test_orders_planned_with_durations_are_kept_where_their_step_is_no_longer(m: int) -> None:
    """Recomputation makes backward passes the longest: planned with that, orders are others, and not always shorter."""
    model = {"layers": 8, "hidden": 64, "heads": 8, "vocab": 128, "seq": 16}
    plan = {"pp": 2, "schedule": "v-half", "recompute": "full"}
    cluster, batch, price = {"gpu": "h100-sxm", "gpus": 2}, {"global": m, "micro": 1}, Ideal()
    resolved = resolve_plan(load_job({"model": model, "cluster": cluster, "batch": batch, "plan": plan}), price=price)
    ways = [build_program(resolved, price, by_durations=planned)[1] for planned in (True, False, None)]
    (planned, fixed, chosen), (orders, others, _) = (
        [play(program).span for program in ways],
        [program.timetable.orders for program in ways],
    )
    assert orders != others and chosen == min(planned, fixed)


SMALL = {"layers": 4, "hidden": 64, "heads": 8, "vocab": 32, "seq": 16, "tied": False, "positions": "rope"}


def test_the_step_that_a_plan_is_resolved_with_is_that_of_its_forecast() -> None:
    job = {"model": SMALL, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "batch": {"global": 4}, "plan": {"pp": 2}}
    report = simulate(job)
    assert ForecastPricing(SharedWork()).play_step(report.play.plan) == report.play.step.span


def test_older_weights_of_a_pipeline_without_a_flush_take_two_bytes_each() -> None:
    plan = {"mesh": {"pp": 2}, "schemes": [{"use": "pipeline/pipedream", "over": "pp"}]}
    played = play_job({"model": SMALL, "cluster": {"gpu": "h100-sxm", "gpus": 2}, "batch": {"global": 4}, "plan": plan})
    for device, params in enumerate(device_params(played.plan, played.stages)):
        elements = sum(param.size for param in played.list_held(device))
        stashed = [stashed_weight_bytes(played.plan, params, versions) for versions in (1, 2, 4)]
        assert stashed == [0, 2 * elements, 3 * 2 * elements]


def test_sharded_weights_are_whole_unit_by_unit_while_they_are_saved() -> None:
    """In the format of the main weights; layers here are the largest units."""
    job = {"model": SMALL, "cluster": {"gpu": "h100-sxm", "gpus": 4}, "batch": {"global": 4}, "plan": {"fsdp": True}}
    report = simulate(job | {"framework": {"name": "megatron-core", "set": {"memory": {"saves": "units"}}}})
    model = report.job.model
    (outside,) = report.play.outside_steps
    assert outside.saved == 4 * model.layer_parameters() > 4 * (2 * model.vocab + 2) * model.hidden


def test_a_tied_table_is_summed_between_the_ends_of_each_pipeline() -> None:
    model = {"layers": 6, "hidden": 64, "heads": 4, "vocab": 512, "seq": 64}
    sides = [{"microbatches": 2, "stages": [{"layers": 6 // depth}] * depth} for depth in (2, 3)]
    job = {"model": model, "cluster": {"gpu": "h100-sxm", "gpus": 5}, "plan": {"replicas": sides}}
    plan = resolve_plan(load_job({**job, "batch": {"global": 4}}))
    sums = sum_shared_gradients(plan, lower_stages(plan)[0])
    within = [[each.meeting for each in of_device if not each.replicas] for of_device in sums]
    first, second = ["sum among devices [0, 1]"], ["sum among devices [2, 4]"]
    assert within == [first, first, second, [], second]
