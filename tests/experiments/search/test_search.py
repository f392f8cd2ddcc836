"""Searches against brute force: their points, their best plans, and their certificates when they are interrupted."""

from __future__ import annotations

import itertools
import json
import math
import random
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.certificate import Certificate
from meshcast.experiments.search.space.space import LayerGroup, Space
from meshcast.hardware.errors import PlanError
from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import forecast_step, play_job
from tests.draws import drawn
from tests.experiments.cli.samples import run
from tests.experiments.search.spaces import (
    EXPERTS,
    TINY,
    check_against_brute_force,
    every_point,
    interrupt,
    interrupt_if,
    is_accounted,
    open_space,
    plans_of,
    points_of,
    run_search,
)

SMALL: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 4096},
    "plan": {"tp": [1, 2, 4], "pp": [1, 2, 4], "schedule": ["1f1b", "interleaved-1f1b", "zb-h1"], "chunks": [1, 2]},
}
LAYERS: dict[str, Any] = {
    **TINY,
    "model": {"preset": "llama3-8b", "layers": 5},
    "plan": {"tp": 2, "pp": [1, 2, 4], "chunks": [1, 2], "zero": 1, "partition": "auto"},
}
"""Five layers, which two and four stages do not divide."""
COPIES: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "micro": 1, "sequence": 4096},
    "plan": {"tp": [2, 8], "cp": [1, 2], "pp": [1, 2], "zero": "auto", "shard": "auto"},
}
"""Two nodes, of which each may hold a copy of the states."""

OVERLAP: dict[str, Any] = {"sharded_weights": False, "gradients": False}
DEEPSPEED = {"launch_blocking": True, "overlap": {**OVERLAP, "dp": "auto", "pp": "auto"}}
RECOMPUTED = {**LAYERS["plan"], "recompute": "auto", "recompute_layers": "auto"}
ORDERS = {"tp": [1, 4], "pp": "auto", "zero": 1, "shard": "auto", "order": "auto"}
LISTED = {"tp": 2, "pp": [1, 2, 4], "zero": [0, 1], "shard": [1, 4, None]}
FOUR = {"tp": [2, 4], "zero": "auto", "shard": 4}
LONG: dict[str, Any] = {**TINY, "batch": {**TINY["batch"], "sequence": 4096}}
MIXTRAL: dict[str, Any] = {**TINY, "model": {"preset": "mixtral-8x7b", "layers": 4}}
RING = [None, "ulysses", "ring", "megatron-cp", "wallfacer"]


def draw(seed: int) -> dict[str, Any]:
    """Draws a small space."""
    rng = random.Random(seed)
    schedules = ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "hanayo", "breadth-first"]
    plan = {
        "tp": rng.sample([1, 2, 4, 8], 2), "pp": rng.sample([1, 2, 4], 2), "schedule": rng.sample(schedules, 3),
        "chunks": [1, 2], "zero": rng.sample([0, 1, 2, 3], 2),
        "recompute": rng.sample(["none", "selective", "full"], rng.choice([1, 2])),
    }  # fmt: skip
    model = {"preset": rng.choice(["llama3-8b", "opt-6.7b"]), "layers": rng.choice([4, 8])}
    batch = {"global": rng.choice([16, 32]), "micro": rng.sample([1, 2, 4], 2), "sequence": 2048}
    return {"model": model, "cluster": rng.choice(["dgx-h100:1", "dgx-a100:1"]), "batch": batch, "plan": plan}


def stated(job: dict[str, Any], pp: list[int], **plan: Any) -> dict[str, Any]:
    """Returns a job whose bounds must count what its plan states."""
    return {**job, "plan": {"tp": [2, 4] if job is COPIES else [1, 2], "pp": pp, **plan}}


DAILY: dict[str, dict[str, Any]] = {
    "drawn 0": draw(0),
    "fewer layers at the ends": LAYERS,
    "zero and fsdp": stated(LAYERS, [1, 2, 5], zero=1, fsdp=True),
    "zb-h1": stated(LAYERS, [1, 2, 5], zero=0, sequence_parallel=False, schedule="zb-h1"),
    "split passes of chunks": {
        **TINY,
        "plan": {"tp": [1, 2], "pp": 2, "chunks": [2, 4], "schedule": ["interleaved-zb", "grouped-interleaved"]},
    },
    "framework": {
        **LAYERS,
        "plan": {"tp": [1, 2], "pp": [1, 2], "zero": 1},
        "framework": {"name": "megatron-deepspeed", "set": DEEPSPEED},
    },
    "listed shards": {**COPIES, "plan": LISTED},
    "a stated shard": {**COPIES, "plan": FOUR},
    "orders of the mesh": {**COPIES, "batch": {"global": 32, "micro": 1, "sequence": 2048}, "plan": ORDERS},
    "full recomputation": stated(COPIES, [1, 2], recompute="full"),
    "offload": stated(COPIES, [1, 2], offload=["activations", "optimizer"]),
    "quantised gathers": {
        **TINY,
        "precision": "fp8-tensorwise",
        "framework": {"name": "megatron-core", "set": {"update": {"quantised_weights": True}}},
        "plan": {"tp": [1, 2], "pp": [1, 2], "zero": "auto"},
    },
    "muon": {**TINY, "optimizer": "muon", "plan": {"tp": [1, 2], "pp": [1, 2], "zero": [0, 1, 3]}},
    "tensor schemes": {**LONG, "plan": {"tp": [1, 4], "pp": [1, 2], "tp_scheme": [None, "async-tp", "summa-2d"]}},
    "options of schemes": {
        **MIXTRAL,
        "batch": {**TINY["batch"], "micro": [1, 4]},
        "plan": {
            "ep": [1, 4],
            "ep_scheme": ["deepep", {"use": "deepep", "sms": 8}],
            "recompute": ["none", "full", ["norm", "act"], ["layernorm"]],
        },
    },
}
MORE: dict[str, dict[str, Any]] = {
    **{f"drawn {seed}": draw(seed) for seed in range(1, 22)},
    "recomputed layers": {**LAYERS, "plan": RECOMPUTED},
    "zero-3": stated(LAYERS, [1, 2, 5], zero=3),
    "a recomputed layer": stated(LAYERS, [1, 2, 5], zero=1, recompute="full", recompute_layers=1),
    "offloaded activations": stated(LAYERS, [1, 2, 5], zero=1, offload=["activations"]),
    "experts": EXPERTS,
    "copies of shards": COPIES,
    "zero-3 on two nodes": stated(COPIES, [1, 2], zero=3),
    "fsdp": stated(COPIES, [1, 2], fsdp=True),
    "two recomputed layers": stated(COPIES, [1, 2], recompute="full", recompute_layers=2),
    "replicas outside": stated(COPIES, [1, 2], order="dp-pp-cp-tp", shard="auto", fsdp=True),
    "sequence schemes": {**LONG, "plan": {"cp": [1, 2, 4], "pp": [1, 2], "cp_scheme": RING}},
    "expert schemes": {
        **MIXTRAL,
        "plan": {"ep": [1, 4], "pp": [1, 2], "ep_scheme": ["all-to-all", "deepep", "tutel", "lina"]},
    },
    "data schemes": {
        **LONG,
        "plan": {"tp": [1, 4, 8], "pp": [1, 2], "dp_scheme": ["fsdp", "mics", "zero-plus-plus", "zero-offload"]},
    },
    "units": {**LONG, "plan": {"tp": [1, 4], "pp": [1, 2], "zero": "auto", "reshard": "auto", "unit": "auto"}},
    "prefetch": {**LONG, "plan": {"tp": [1, 4], "pp": [1, 2], "fsdp": True, "unit": [1, 2], "prefetch": "auto"}},
}


@pytest.mark.parametrize("name", drawn([*DAILY, *MORE], keep=DAILY))
def test_a_search_finds_what_brute_force_finds(name: str) -> None:
    check_against_brute_force((DAILY | MORE)[name])


# ------------------------------------------------------------------------------------------- points of spaces


def test_the_first_and_the_last_stage_may_have_fewer_layers() -> None:
    # 3 stages inside 4 x 2 with a layer each are too many; 5 + 2 layers are divided by no number of stages.
    lists = {str(plan["partition"]) for plan in plans_of(open_space(LAYERS))}
    assert lists == {"even", "[2, 3]", "[3, 2]", "[0, 2, 2, 1]", "[1, 2, 2, 0]"}


def test_numbers_of_recomputed_layers_vary_where_layers_are_recomputed() -> None:
    def numbers(**plan: Any) -> set[tuple[str, int | None]]:
        plans = plans_of(open_space(LAYERS, **{**RECOMPUTED, **plan}))
        return {(plan["recompute"], plan.get("recompute_layers")) for plan in plans}

    assert numbers() == {("none", None), ("selective", None), *(("full", count) for count in (None, 1, 2, 3, 4))}
    assert {("none", None), ("full", 2)} <= numbers(recompute=["none", "full"], recompute_layers=2)


def test_degrees_of_experts() -> None:
    """Without expert parallelism experts are sharded as all else, or whole on every rank; with it, 1 is usual."""
    space, degrees = open_space(EXPERTS), dict[tuple[int, int], list[int | None]]()
    for group in space.groups():
        if group.micro == 1:
            degrees.setdefault((group.tp, group.ep), []).append(group.etp)
    assert degrees == {
        (1, 1): [None], (1, 2): [None], (1, 4): [None], (4, 1): [None, 1], (4, 2): [None, 2, 4], (4, 4): [None, 2],
        (8, 1): [None, 1], (8, 2): [None, 2, 4], (8, 4): [None, 2],
    }  # fmt: skip
    assert space.stated_values()["plan.etp"] == [None, 1, 2, 4, 8]
    one = {**EXPERTS, "batch": {"global": 16, "micro": 1, "sequence": 2048}}
    listed = open_space(one, tp=4, ep=[1, 2], etp=[None, 1, 2]).groups()
    assert [(group.ep, group.etp) for group in listed] == [(1, None), (1, 1), (1, 2), (2, None), (2, 2)]
    # Eight tensor ranks hold two halves of the experts, four times each.
    space = open_space(one, tp=8, ep=[2, 8], zero=[1, 3])
    halves, all_experts = ([step.data for step in space.steps(group, 1)] for group in space.groups())
    assert halves == ["zero-1", "zero-3"] and all_experts == ["zero-1"]
    dense, experts = (Space({**job, "plan": "auto"}, Path(".")) for job in (TINY, one))
    assert "plan.etp" not in dense.open and "plan.etp" in experts.open


def shards_of(space: Space) -> set[tuple[int, str, int | None]]:
    """The data-parallel ranks of all points, their data scheme, and the ranks that share a copy."""
    return {
        (space.data_ranks(group, pipeline.place)[0], step.data, step.shard)
        for group, pipeline, step in points_of(space)
    }


def test_ranks_share_copies_inside_nodes_or_as_listed_or_stated() -> None:
    """Four ranks of a node share tp = 2 with neighbours; two with cp = 2 as well. With tp = 8 a node has one rank."""
    shards = shards_of(open_space(COPIES))
    assert {shard for _, _, shard in shards} == {None, 2, 4}
    assert {(dp, shard) for dp, data, shard in shards if data == "fsdp" and shard} == {(8, 4), (4, 2)}
    assert {data for _, data, shard in shards if shard} == {"zero-1", "fsdp"}
    assert all((dp, data, None) in shards for dp in (1, 2, 4, 8) for data in ("ddp", "zero-3") if dp > 1)
    both = {(dp, data, None) for dp in (8, 4, 2) for data in ("ddp", "zero-1")}
    listed = {(8, "zero-1", 1), (4, "zero-1", 1), (2, "zero-1", 1), (8, "zero-1", 4)}
    assert shards_of(open_space(COPIES, **LISTED)) == both | listed
    four = {(4, data, None) for data in ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")}
    assert shards_of(open_space(COPIES, **FOUR)) == four | {(8, "zero-1", 4), (8, "fsdp", 4)}


def test_orders_of_the_mesh_vary_with_stages_and_replicas() -> None:
    """Without a pipeline, or without replicas, both orders are one plan. Of the ranks along dp a node has fewer if the
    stages of a pipeline are in it as well."""
    space, outside = open_space(DAILY["orders of the mesh"]), "dp-pp-cp-tp"
    points = {
        (pipeline.pp, space.data_ranks(group, pipeline.place)[0], pipeline.mesh_order, step.shard)
        for group, pipeline, step in points_of(space)
    }
    several = {(pp, dp) for pp, dp, _, _ in points if pp > 1 and dp > 1}
    assert {(pp, dp) for pp, dp, order, _ in points if order == outside} == several == {(2, 8), (4, 4), (2, 2)}
    assert {shard for *_, order, shard in points if order == "pp-dp-cp-tp"} == {None, 2, 8}
    shared = {(pp, dp, shard) for pp, dp, order, shard in points if order == outside and shard}
    assert shared == {(2, 8, 4), (4, 4, 2)}


def test_plan_auto_opens_every_field_that_makes_a_difference() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 32}, "plan": "auto"}
    space, two = Space(job, Path(".")), Space({**job, "cluster": "dgx-h100:2"}, Path("."))
    assert {"plan.tp", "plan.pp", "plan.schedule", "plan.zero", "batch.micro"} <= {*space.open}
    assert space.values["tp"] == (1, 2, 4, 8) and space.values["ep"] == (1,)
    assert not {"plan.shard", "plan.order"} & {*space.open} and "plan.order" in two.open
    assert two.values["shard"] == (None, "node")
    few = (space.job_of(*point) for group in space.groups()[:60] for point in _points_of_group(space, group))
    jobs = [json.dumps(one, sort_keys=True) for one in islice(few, 1000)]
    assert len({*jobs}) == len(jobs) > 500
    short = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq": 512}
    space = Space({**job, "model": short, "batch": {"global": 8}}, Path("."))
    assert space.values["cp"] == (1,) and space.groups(), "a sequence too short for context parallelism"


def _points_of_group(space: Space, group: LayerGroup) -> list[Any]:
    pipelines = space.pipelines(group)
    return [(group, pipeline, step) for pipeline in pipelines for step in space.choices(group, pipeline)]


ALONE: dict[str, dict[str, Any]] = {
    "schedules without 1F1B": {"schedule": ["zb-h2", "zb-v"], "chunks": [1, 2]},
    "chunks without 1": {"schedule": ["1f1b", "interleaved-1f1b"], "chunks": [2, 4]},
    "neither": {"schedule": ["interleaved-1f1b"], "chunks": [2, 4]},
    "stated chunks": {"schedule": ["interleaved-1f1b", "hanayo"], "chunks": 2},
}


@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE)
def test_changes_hold_values_that_the_job_lists(fields: dict[str, Any]) -> None:
    """Also of plans without a pipeline, which are those without these fields."""
    space, shared = open_space(SMALL, tp=[2, 4], pp=[1, 2], **fields), SharedWork()
    listed, firsts = (
        space.stated_values(),
        {(group, pipeline): (group, pipeline, step) for group, pipeline, step in points_of(space)},
    )
    for point in firsts.values():
        assert all(value in listed[field] for field, value in space.changes(*point).items())
    alone = [point for point in firsts.values() if point[1].pp == 1]
    assert len(alone) == 4
    for group, pipeline, step in alone[:1]:
        plain = {**SMALL, "plan": {"tp": group.tp}, "batch": {**SMALL["batch"], "micro": group.micro}}
        jobs = space.job_of(group, pipeline, step), plain
        assert len({forecast_step(job, shared).step_time for job in jobs}) == 1


def test_what_is_null_or_a_word_of_the_framework_has_its_default() -> None:
    spaces = open_space(SMALL, tp=[1, 2], pp=2, chunks=None), open_space(SMALL, tp=[1, 2], pp=2)
    points = [points_of(space) for space in spaces]
    assert points[0] == points[1]
    jobs = [space.job_of(*points[0][0]) for space in spaces]
    assert forecast_step(jobs[0]) == forecast_step(jobs[1])
    framework = {
        "name": "megatron-deepspeed",
        "set": {"launch_blocking": True, "overlap": {**OVERLAP, "dp": [False, True]}},
    }
    with pytest.raises(PlanError, match="overlap"):
        open_space({**LAYERS, "framework": framework}, tp=[1, 2])


def test_chunks_alone_take_the_schedule_that_a_plan_takes() -> None:
    search = run_search({**SMALL, "plan": {"pp": 4, "chunks": [1, 2]}})
    assert {plan.changes["plan.chunks"] for plan in search.best} <= {1, 2}
    steps = [step for _, step in every_point(search.space) if step is not None]
    assert len(steps) == 4
    assert search.best[0].forecast.step_time == min(step.step_time for step in steps if step.fits)


# --------------------------------------------------------------------------------- certificates and interruptions


@cache
def search_small() -> Search:
    return run_search(SMALL)


def test_few_plans_are_forecast() -> None:
    search = search_small()
    assert search.certificate.exact < search.certificate.plans / 3
    assert search.best[0].forecast == forecast_step(search.best[0].job)


def test_a_search_within_a_gap_proves_that_gap() -> None:
    exact, near = search_small(), run_search(SMALL, within=0.2)
    assert near.certificate.gap <= 0.2 and near.certificate.exact <= exact.certificate.exact
    best = exact.best[0].forecast.step_time
    assert near.certificate.open_bound <= best <= near.best[0].forecast.step_time <= best / 0.8


def let_enter(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Lets groups of so many kinds of units enter a search at a time."""
    for name in ("MANY_UNITS", "UNITS_AT_ONCE"):
        monkeypatch.setattr(f"meshcast.experiments.search.frontier.branch_and_bound.{name}", units)


@pytest.mark.parametrize("units", [1, 32])
def test_an_interrupted_search_leaves_open_what_it_has_not_decided(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_enter(monkeypatch, units)
    best, left = search_small().certificate.incumbent, list[int]()
    for number in (1, 2, 9, 17):
        search, reports = Search([open_space(SMALL)]), itertools.count(1)
        search.count()
        certificate = search.run(lambda _, reports=reports, last=number: next(reports) == last and interrupt())  # type: ignore[misc]
        assert not certificate.complete and is_accounted(certificate)
        assert min(certificate.open_bound, certificate.incumbent) <= best
        assert search._outside is None or certificate.open_bound == 0.0
        left.append(certificate.open)
    assert left == sorted(left, reverse=True) and left[0] == certificate.plans and left[-1] > 0
    assert certificate.to_dict()["open"] == left[-1] and search_small().certificate.open == 0


def test_a_plan_is_forecast_before_its_bound_is_the_smallest() -> None:
    """A group in which plans fit gives one of its best at once, which counts as forecast once."""
    search, exact = Search([open_space(SMALL)]), list[int]()
    certificate = search.run(lambda part: exact.append(part.exact) if part.incumbent < math.inf else None)
    assert exact[0] == 0 < certificate.exact == len({str(plan.changes) for plan in search.forecasts})
    assert is_accounted(certificate) and certificate.open == 0


def test_groups_that_enter_some_at_a_time_are_searched_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    let_enter(monkeypatch, 1)
    search, bounded, before = Search([open_space(SMALL)]), list[LayerGroup](), list[int]()
    bound = search.clusters[0].groups.bound_operators

    def note(group: LayerGroup) -> float:
        bounded.append(group)
        return bound(group)

    monkeypatch.setattr(search.clusters[0].groups, "bound_operators", note)
    search.run(lambda certificate: before.append(len(bounded)) if certificate.incumbent < math.inf else None)
    assert 0 < before[0] < len(bounded) == search.certificate.groups == len({*bounded})
    assert [plan.values for plan in search.best] == [plan.values for plan in search_small().best]
    assert search.certificate.complete and search.certificate.decided == search.certificate.plans


def test_an_interruption_inside_a_forecast_proves_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    search, asked, bounds = Search([open_space(SMALL)]), list[float](), list[float]()

    def stop_at_the_second(job: Any, shared: Any) -> Any:
        asked.append(search._heap[0].value)
        return interrupt() if len(asked) == 2 else play_job(job, shared)

    monkeypatch.setattr("meshcast.experiments.search.frontier.plan_search.play_job", stop_at_the_second)
    certificate = search.run(lambda certificate: bounds.append(certificate.open_bound))
    assert not certificate.complete and certificate.open_bound == bounds[-1] <= asked[-1]
    assert certificate.open > 0 and is_accounted(certificate)


def test_an_interrupted_search_says_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before all groups are bounded, nothing."""
    search = Search([open_space(SMALL)])
    certificate: Certificate = search.run(interrupt_if(lambda certificate: certificate.exact == 2))
    assert not certificate.complete and certificate.exact == len(search.forecasts) >= 2 and search.best
    assert min(certificate.open_bound, certificate.incumbent) <= search_small().certificate.incumbent
    search = Search([open_space(SMALL)])
    monkeypatch.setattr(search.clusters[0].groups, "bound_operators", interrupt)
    assert search.run().gap == 1.0


# ------------------------------------------------------------------------------------------- the command


def test_the_answer_and_the_page_hold_plans_and_certificate(tmp_path: Path) -> None:
    (path := tmp_path / "job.yaml").write_text(yaml.safe_dump(TINY), "utf-8")
    result = run("search", path, "--json", "--top", "2", "--jobs-to", tmp_path / "best")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    best, certificate = answer["best"], answer["certificate"]
    assert len(best) == 2 and best[0]["step_time_s"] == certificate["incumbent_s"]
    assert sum(certificate["cut"].values()) + certificate["exact"] == certificate["space"]["plans"]
    assert certificate["violations"] == 0 and certificate["gap"] == 0
    for number, plan in enumerate(best, 1):
        report = simulate(tmp_path / "best" / f"job-{number}.yaml")
        assert report.step_time == pytest.approx(plan["step_time_s"], rel=1e-12)
    page = run("search", path, "--top", "2").stdout
    proof = "no plan of the space that fits with 95 % is faster in the model"
    assert all(words in page for words in ("slower by", proof, "break a rule", "published"))
