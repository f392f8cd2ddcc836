"""Searches against brute force, their certificates, and the command."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from meshcast.experiments.cli.app import app
from meshcast.experiments.search.frontier.branch_and_bound import Search
from meshcast.experiments.search.frontier.objectives import NEAR
from meshcast.experiments.search.space.space import LayerGroup, Space
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator import simulate
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.step import forecast_step, play_job
from tests.draws import drawn

SMALL = {
    "model": {"preset": "llama3-8b", "layers": 8},
    "cluster": "dgx-h100:1",
    "batch": {"global": 32, "micro": [1, 2], "sequence": 4096},
    "plan": {"tp": [1, 2, 4], "pp": [1, 2, 4], "schedule": ["1f1b", "interleaved-1f1b", "zb-h1"], "chunks": [1, 2]},
}


def search(job: dict[str, Any], **options: Any) -> Search:
    made = Search([Space(job, Path("."))], **options)
    made.run()
    return made


@cache
def search_small() -> Search:
    return search(SMALL)


def every_job(space: Space) -> Iterator[dict[str, Any]]:
    for group in space.groups():
        for pipeline in space.pipelines(group):
            for step in space.choices(group, pipeline):
                yield space.job_of(group, pipeline, step)


def draw(seed: int) -> dict[str, Any]:
    """A small space."""
    rng = random.Random(seed)
    plan = {
        "tp": rng.sample([1, 2, 4, 8], 2),
        "pp": rng.sample([1, 2, 4], 2),
        "schedule": rng.sample(["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "hanayo", "breadth-first"], 3),
        "chunks": [1, 2],
        "zero": rng.sample([0, 1, 2, 3], 2),
        "recompute": rng.sample(["none", "selective", "full"], rng.choice([1, 2])),
    }
    model = {"preset": rng.choice(["llama3-8b", "opt-6.7b"]), "layers": rng.choice([4, 8])}
    batch = {"global": rng.choice([16, 32]), "micro": rng.sample([1, 2, 4], 2), "sequence": 2048}
    return {"model": model, "cluster": rng.choice(["dgx-h100:1", "dgx-a100:1"]), "batch": batch, "plan": plan}


def check_against_brute_force(job: dict[str, Any]) -> None:
    found, shared = search(job), SharedWork()
    steps, plans = [], [*every_job(found.space)]
    for one in plans:
        try:
            forecast = forecast_step(one, shared)
        except MeshcastError:
            continue
        steps += [forecast.step_time] if forecast.fits else []
    assert found.best[0].forecast.step_time == pytest.approx(min(steps), rel=1e-12)
    near = [one for one in sorted(steps) if one < (1 + NEAR) * min(steps)][: found.top]
    assert [one.forecast.step_time for one in found.best[: len(near)]] == pytest.approx(near, rel=1e-12)
    certificate = found.certificate
    assert certificate.complete and certificate.gap == 0.0
    cut = certificate.invalid + certificate.memory_bound + certificate.time_bound
    assert cut + certificate.exact == certificate.plans == len(plans)


@pytest.mark.parametrize("seed", drawn(range(2), keep=2))
def test_a_search_finds_what_brute_force_finds(seed: int) -> None:
    check_against_brute_force(draw(seed))


LAYERS: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 5},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 2048},
    "plan": {"tp": 2, "pp": [1, 2, 4], "chunks": [1, 2], "zero": 1, "partition": "auto"},
}
"""Five layers, which two and four stages do not divide."""


@pytest.mark.slow
def test_every_number_of_layers_is_recomputed() -> None:
    plan = {**LAYERS["plan"], "recompute": "auto", "recompute_layers": "auto"}
    job = {**LAYERS, "plan": plan}
    check_against_brute_force(job)
    plans = {(one["plan"]["recompute"], one["plan"].get("recompute_layers")) for one in every_job(search(job).space)}
    full = {("full", number) for number in (None, 1, 2, 3, 4)}
    assert plans == {("none", None), ("selective", None), *full}


def test_the_first_and_the_last_stage_may_have_fewer_layers() -> None:
    lists = {str(one["plan"]["partition"]) for one in every_job(search(LAYERS).space)}
    # 3 stages inside 4 x 2 with a layer each are too many; 5 + 2 layers are divided by no number of stages.
    assert lists == {"even", "[2, 3]", "[3, 2]", "[0, 2, 2, 1]", "[1, 2, 2, 0]"}
    check_against_brute_force(LAYERS)


def test_a_stated_number_of_layers_holds_where_layers_are_recomputed() -> None:
    plan = {**LAYERS["plan"], "recompute": ["none", "full"], "recompute_layers": 2}
    plans = {
        (one["plan"]["recompute"], one["plan"].get("recompute_layers"))
        for one in every_job(search({**LAYERS, "plan": plan}).space)
    }
    assert {("none", None), ("full", 2)} <= plans


@pytest.mark.parametrize(
    "stated",
    drawn(
        [
            {"zero": 1, "fsdp": True},
            {"zero": 3},
            {"zero": 1, "recompute": "full", "recompute_layers": 1},
            {"zero": 1, "offload": ["activations"]},
            {"zero": 0, "sequence_parallel": False, "schedule": "zb-h1"},
        ],
        keep=4,
    ),
)
def test_stated_fields_hold_in_the_bounds(stated: dict[str, Any]) -> None:
    check_against_brute_force({**LAYERS, "plan": {"tp": [1, 2], "pp": [1, 2, 5], **stated}})


def test_what_a_framework_rules_out_is_not_tried() -> None:
    plan = {"tp": [1, 2], "pp": [1, 2], "zero": 1}
    nothing = {"sharded_weights": False, "gradients": False}
    settings: dict[str, Any] = {"launch_blocking": True, "overlap": {**nothing, "dp": "auto", "pp": "auto"}}
    framework = {"name": "megatron-deepspeed", "set": settings}
    check_against_brute_force({**LAYERS, "plan": plan, "framework": framework})
    settings["overlap"] = {**nothing, "dp": [False, True]}
    with pytest.raises(PlanError, match="overlap"):
        Space({**LAYERS, "plan": plan, "framework": framework}, Path("."))


EXPERTS: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 2},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": 1, "sequence": 2048},
    "plan": {"tp": [1, 4, 8], "ep": [1, 2, 4], "etp": "auto", "pp": [1, 2], "zero": [1, 3]},
}
"""A layer with experts on eight GPUs."""


@pytest.mark.slow
def test_expert_tensor_parallelism_is_searched() -> None:
    check_against_brute_force(EXPERTS)
    space = search(EXPERTS).space
    found = dict[tuple[int, int], list[int | None]]()
    for group in space.groups():
        found.setdefault((group.tp, group.ep), []).append(group.etp)
    # Without expert parallelism experts are sharded like everything else, or whole on every rank; with it, 1 is usual.
    assert found[1, 1] == found[1, 4] == [None] and found[4, 1] == [None, 1] and found[4, 2] == [None, 2, 4]
    assert found[8, 2] == [None, 2, 4] and found[8, 4] == [None, 2]
    assert space.stated_values()["plan.etp"] == [None, 1, 2, 4, 8]


def test_listed_degrees_of_experts_are_all_tried_once() -> None:
    plan = {"tp": 4, "ep": [1, 2], "etp": [None, 1, 2]}
    space = Space({**EXPERTS, "plan": plan}, Path("."))
    assert [(group.ep, group.etp) for group in space.groups()] == [(1, None), (1, 1), (1, 2), (2, None), (2, 2)]


def test_experts_alone_shard_states_where_ranks_hold_the_same_ones() -> None:
    # Eight tensor ranks hold two halves of the experts, four times each.
    space = Space({**EXPERTS, "plan": {"tp": 8, "ep": [2, 8], "zero": [1, 3]}}, Path("."))
    few, all_of_them = ([step.data for step in space.steps(group, 1)] for group in space.groups())
    assert few == ["zero-1", "zero-3"] and all_of_them == ["zero-1"]


def test_experts_open_their_degrees() -> None:
    dense = Space({**SMALL, "plan": "auto"}, Path("."))
    experts = Space({**EXPERTS, "plan": "auto"}, Path("."))
    assert "plan.etp" not in dense.open and "plan.etp" in experts.open


COPIES: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "micro": 1, "sequence": 4096},
    "plan": {"tp": [2, 8], "cp": [1, 2], "pp": [1, 2], "zero": "auto", "shard": "auto"},
}
"""Two nodes, of which each may hold a copy of the states."""


def shards_of(space: Space) -> set[tuple[int, str, int | None]]:
    """The data-parallel ranks of all points, their data scheme, and the ranks that share a copy."""
    return {
        (space.data_ranks(group, pipeline.place)[0], step.data, step.shard)
        for group in space.groups()
        for pipeline in space.pipelines(group)
        for step in space.choices(group, pipeline)
    }


@pytest.mark.slow
def test_copies_of_shards_are_searched() -> None:
    check_against_brute_force(COPIES)
    found = shards_of(Space(COPIES, Path(".")))
    # Four ranks of a node share tp = 2 with neighbours; two with cp = 2 as well. With tp = 8 a node has one rank.
    assert {shard for _, _, shard in found} == {None, 2, 4}
    assert {(dp, shard) for dp, data, shard in found if data == "fsdp" and shard} == {(8, 4), (4, 2)}
    assert {data for _, data, shard in found if shard} == {"zero-1", "fsdp"}
    assert all((dp, data, None) in found for dp in (1, 2, 4, 8) for data in ("ddp", "zero-3") if dp > 1)


def test_listed_shards_are_tried_where_they_divide_the_replicas() -> None:
    job = {**COPIES, "plan": {"tp": 2, "pp": [1, 2, 4], "zero": [0, 1], "shard": [1, 4, None]}}
    found = shards_of(Space(job, Path(".")))
    both = {(dp, data, None) for dp in (8, 4, 2) for data in ("ddp", "zero-1")}
    assert found == both | {(8, "zero-1", 1), (4, "zero-1", 1), (2, "zero-1", 1), (8, "zero-1", 4)}
    check_against_brute_force(job)


def test_a_stated_shard_holds_at_all_degrees() -> None:
    job = {**COPIES, "plan": {"tp": [2, 4], "zero": "auto", "shard": 4}}
    four = {(4, data, None) for data in ("ddp", "zero-1", "zero-2", "zero-3", "fsdp")}
    assert shards_of(Space(job, Path("."))) == four | {(8, "zero-1", 4), (8, "fsdp", 4)}
    check_against_brute_force(job)


def test_orders_of_the_mesh_are_searched() -> None:
    plan = {"tp": [1, 4], "pp": "auto", "zero": 1, "shard": "auto", "order": "auto"}
    job = {**COPIES, "batch": {"global": 32, "micro": 1, "sequence": 2048}, "plan": plan}
    check_against_brute_force(job)
    space = Space(job, Path("."))
    usual, replicas_out = "pp-dp-cp-tp", "dp-pp-cp-tp"
    found = {
        (pipeline.pp, space.data_ranks(group, pipeline.place)[0], pipeline.mesh_order, step.shard)
        for group in space.groups()
        for pipeline in space.pipelines(group)
        for step in space.choices(group, pipeline)
    }
    # Without a pipeline, or without replicas, both are one plan.
    several = {(pp, dp) for pp, dp, _, _ in found if pp > 1 and dp > 1}
    assert {(pp, dp) for pp, dp, order, _ in found if order == replicas_out} == several == {(2, 8), (4, 4), (2, 2)}
    # Of the ranks along dp a node has fewer if the stages of a pipeline are in it as well.
    assert {shard for *_, order, shard in found if order == usual} == {None, 2, 8}
    assert {(pp, dp, shard) for pp, dp, order, shard in found if order == replicas_out and shard} == {
        (2, 8, 4),
        (4, 4, 2),
    }


def test_sequences_too_short_for_context_parallelism_are_searched_without_it() -> None:
    model = {"layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq": 512}
    space = Space({"model": model, "cluster": "dgx-h100:1", "batch": {"global": 8}, "plan": "auto"}, Path("."))
    assert space.values["cp"] == (1,) and space.groups()


def test_one_node_has_no_copies_of_shards() -> None:
    one = Space({**COPIES, "cluster": "dgx-h100:1", "plan": "auto"}, Path("."))
    two = Space({**COPIES, "plan": "auto"}, Path("."))
    assert not {"plan.shard", "plan.order"} & {*one.open} and "plan.order" in two.open
    assert two.values["shard"] == (None, "node")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_searches_find_what_brute_force_finds(seed: int) -> None:
    check_against_brute_force(draw(seed))


@pytest.mark.parametrize(
    "stated",
    drawn(
        [{"recompute": "full"}, {"zero": 3}, {"fsdp": True}, {"recompute": "full", "recompute_layers": 2}]
        + [{"offload": ["activations", "optimizer"]}, {"order": "dp-pp-cp-tp", "shard": "auto", "fsdp": True}],
        keep=4,
    ),
)
def test_bounds_hold_with_stated_fields(stated: dict[str, Any]) -> None:
    # Bounds ask for layers without recompute and offloading, of replicas with whole states.
    check_against_brute_force({**COPIES, "plan": {"tp": [2, 4], "pp": [1, 2], **stated}})


def test_few_plans_are_forecast() -> None:
    found = search_small()
    assert found.certificate.exact < found.certificate.plans / 3
    assert found.best[0].forecast == forecast_step(found.best[0].job)


def test_a_search_within_a_gap_proves_that_gap() -> None:
    exact, near = search_small(), search(SMALL, within=0.2)
    assert near.certificate.gap <= 0.2 and near.certificate.exact <= exact.certificate.exact
    best = exact.best[0].forecast.step_time
    assert near.certificate.open_bound <= best <= near.best[0].forecast.step_time <= best / 0.8


def test_an_interrupted_search_says_what_is_proven() -> None:
    made = Search([Space(SMALL, Path("."))])

    def stop(certificate: Any) -> None:
        if certificate.exact == 2:
            raise KeyboardInterrupt

    found = made.run(stop)
    assert not found.complete and found.exact == 2 and made.best
    assert min(found.open_bound, found.incumbent) <= search_small().certificate.incumbent


def let_enter(monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """Lets groups of so many kinds of units enter a search at a time."""
    for name in ("MANY_UNITS", "UNITS_AT_ONCE"):
        monkeypatch.setattr(f"meshcast.experiments.search.frontier.branch_and_bound.{name}", units)


@pytest.mark.parametrize("units", [1, 32])
def test_an_interrupted_search_leaves_open_what_it_has_not_decided(units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    let_enter(monkeypatch, units)
    best, left = search_small().certificate.incumbent, list[int]()
    for number in (1, 2, 9, 17):
        made, reports = Search([Space(SMALL, Path("."))]), itertools.count(1)
        made.count()

        def stop(_: Any, reports: Any = reports, number: int = number) -> None:
            if next(reports) == number:
                raise KeyboardInterrupt

        found = made.run(stop)
        assert not found.complete and found.decided + found.open == found.plans
        assert min(found.open_bound, found.incumbent) <= best
        assert made._outside is None or found.open_bound == 0.0
        left.append(found.open)
    assert left == sorted(left, reverse=True) and left[0] == found.plans and left[-1] > 0
    assert found.to_dict()["open"] == left[-1] and search_small().certificate.open == 0


def test_groups_that_enter_some_at_a_time_are_searched_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    let_enter(monkeypatch, 1)
    made, bounded = Search([Space(SMALL, Path("."))]), list[LayerGroup]()
    bound = made.clusters[0].bounds.prices.bound_kernels

    def note(group: LayerGroup) -> float:
        bounded.append(group)
        return bound(group)

    monkeypatch.setattr(made.clusters[0].bounds.prices, "bound_kernels", note)
    before = list[int]()
    made.run(lambda found: before.append(len(bounded)) if found.exact == 1 else None)
    assert 0 < before[0] < len(bounded) == made.certificate.groups == len({*bounded})
    assert [plan.values for plan in made.best] == [plan.values for plan in search_small().best]
    assert made.certificate.complete and made.certificate.decided == made.certificate.plans


ALONE: dict[str, dict[str, Any]] = {
    "schedules without 1F1B": {"schedule": ["zb-h2", "zb-v"], "chunks": [1, 2]},
    "chunks without 1": {"schedule": ["1f1b", "interleaved-1f1b"], "chunks": [2, 4]},
    "neither": {"schedule": ["interleaved-1f1b"], "chunks": [2, 4]},
    "stated chunks": {"schedule": ["interleaved-1f1b", "hanayo"], "chunks": 2},
}


@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE)
def test_changes_hold_values_that_the_job_lists(fields: dict[str, Any]) -> None:
    space = Space({**SMALL, "plan": {"tp": [2, 4], "pp": [1, 2], **fields}}, Path("."))
    stated, alone = space.stated_values(), list[float]()
    for group in space.groups():
        for pipeline in space.pipelines(group):
            point = group, pipeline, space.choices(group, pipeline)[0]
            changes = space.changes(*point)
            assert all(value in stated[field] for field, value in changes.items())
            if pipeline.pp == 1:
                plain = {**SMALL, "plan": {"tp": group.tp}, "batch": {**SMALL["batch"], "micro": group.micro}}
                steps = [forecast_step(job, SharedWork()).step_time for job in (space.job_of(*point), plain)]
                assert steps[0] == steps[1]
                alone.append(steps[0])
    assert len(alone) == 4


def test_an_interruption_inside_a_forecast_proves_no_more_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = Search([Space(SMALL, Path("."))]), []

    def stop_at_the_second(job: Any, shared: Any) -> Any:
        asked.append(made._heap[0].value)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return play_job(job, shared)

    bounds = list[float]()
    monkeypatch.setattr("meshcast.experiments.search.frontier.plan_search.play_job", stop_at_the_second)
    found = made.run(lambda certificate: bounds.append(certificate.open_bound))
    assert not found.complete and found.open_bound == bounds[-1] <= asked[-1]
    assert found.open > 0 and found.decided + found.open == found.plans


def test_an_interruption_before_all_groups_are_bounded_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Search([Space(SMALL, Path("."))])

    def stop(group: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(made.clusters[0].bounds.prices, "bound_kernels", stop)
    assert made.run().gap == 1.0


def test_chunks_alone_take_the_schedule_that_a_plan_takes() -> None:
    job = {**SMALL, "plan": {"pp": 4, "chunks": [1, 2]}}
    found = search(job)
    assert {one.changes["plan.chunks"] for one in found.best} <= {1, 2}
    steps = [forecast_step(one) for one in every_job(found.space)]
    assert len(steps) == 4 and found.best[0].forecast.step_time == min(one.step_time for one in steps if one.fits)


def test_a_field_that_is_null_has_its_default() -> None:
    plan = {"tp": [1, 2], "pp": 2, "chunks": None}
    assert (
        search({**SMALL, "plan": plan}).best[0].forecast
        == search({**SMALL, "plan": {"tp": [1, 2], "pp": 2}}).best[0].forecast
    )


def test_plan_auto_opens_every_field_of_the_plan() -> None:
    job = {"model": "llama3-8b", "cluster": "dgx-h100:1", "batch": {"global": 32}, "plan": "auto"}
    space = Space(job, Path("."))
    assert {"plan.tp", "plan.pp", "plan.schedule", "plan.zero", "batch.micro"} <= {*space.open}
    assert space.values["tp"] == (1, 2, 4, 8) and space.values["ep"] == (1,)
    jobs = [json.dumps(one, sort_keys=True) for one in islice(every_job(space), 2000)]
    assert len({*jobs}) == len(jobs)


# ------------------------------------------------------------------------------------------- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["search", *words])


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def test_the_answer_holds_plans_and_certificate(job_file: Path, tmp_path: Path) -> None:
    result = run(str(job_file), "--json", "--top", "2", "--jobs-to", str(tmp_path / "best"))
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    best, certificate = answer["best"], answer["certificate"]
    assert len(best) == 2 and best[0]["step_time_s"] == certificate["incumbent_s"]
    assert sum(certificate["cut"].values()) + certificate["exact"] == certificate["space"]["plans"]
    assert certificate["violations"] == 0 and certificate["gap"] == 0
    for number, one in enumerate(best, 1):
        report = simulate(tmp_path / "best" / f"job-{number}.yaml")
        assert report.step_time == pytest.approx(one["step_time_s"], rel=1e-12)


def test_the_page_shows_plans_and_proof(job_file: Path) -> None:
    result = run(str(job_file), "--top", "2")
    assert result.exit_code == 0
    proof = "no plan of the space that fits with 95 % is faster in the model"
    for words in ("slower by", proof, "break a rule", "published"):
        assert words in result.stdout


@pytest.mark.parametrize("gap", ["-1%", "2", "few"])
def test_a_wrong_gap_is_refused(job_file: Path, gap: str) -> None:
    result = run(str(job_file), "--within", gap)
    assert result.exit_code == 2 and "a gap is a share of the step" in result.output
