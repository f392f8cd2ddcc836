"""`search --compare`: a given plan beside the best one, and whether the space holds it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import meshcast
from meshcast.experiments.search.certificate.comparison import compare_plans, load_plans
from meshcast.experiments.search.certificate.settings import differing_settings
from meshcast.experiments.search.options import SearchOptions
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.limits import Limits
from meshcast.experiments.search.space.membership import find_point, list_outside
from meshcast.experiments.search.space.short_form import read_short_form
from meshcast.experiments.search.space.space import Space
from meshcast.hardware.errors import MeshcastError, PlanError
from meshcast.simulator.loading.load import load_job
from tests.experiments.cli.samples import ROOT, run
from tests.experiments.search.spaces import TINY

PLAN: dict[str, Any] = {
    **TINY,
    "batch": {"global": 16, "micro": 1, "sequence": 2048},
    "plan": {"tp": 4, "pp": 2, "chunks": 2, "zero": 1},
}

DENSE: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 6},
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 8192},
    "plan": {
        "tp": [1, 2, 8], "pp": [1, 2, 4, 8], "cp": [1, 2], "schedule": "auto", "chunks": "auto", "partition": "auto",
        "zero": "auto", "recompute": "auto", "recompute_layers": "auto", "sequence_parallel": "auto", "offload": "auto",
    },
    "framework": {"name": "megatron-core", "set": {"overlap": {"tp": "auto", "dp": "auto", "updated_weights": "auto"}}},
}  # fmt: skip

EXPERTS: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 4},
    "cluster": "dgx-h100:2",
    "batch": {"global": 16, "micro": 1, "sequence": 4096},
    "plan": {"tp": [1, 2], "pp": [1, 2], "ep": "auto", "schedule": "auto", "chunks": "auto", "zero": "auto"},
}


def drawn_points(space: Space, count: int) -> list[tuple[Any, Any, Any]]:
    """Points of a space, drawn evenly over its groups."""
    rng, groups, found = random.Random(7), space.groups(), list[Any]()
    while len(found) < count:
        group = rng.choice(groups)
        if pipelines := space.pipelines(group):
            pipeline = rng.choice(pipelines)
            found.append((group, pipeline, rng.choice(space.steps(group, pipeline.pp))))
    return found


@pytest.mark.parametrize("job", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_a_point_is_found_again_in_its_job(job: dict[str, Any], long: bool) -> None:
    """Whether its plan is written in short or in long form: with its values, and nothing that these cannot say."""
    space, read = open_search(job, limits=Limits()).space, 0
    for point in drawn_points(space, 150):
        try:
            made = load_job(space.job_of(*point))
        except MeshcastError:  # such as options that a schedule refuses
            continue
        made = load_job({**made.as_written, "plan": made.to_dict()["plan"]}) if long else made
        form, read = read_short_form(made, space.named), read + 1
        assert form.others == {} and find_point(space, form.values) == point
        assert list_outside(space, form) == []
    assert read > 100


def test_every_plan_of_the_search_is_inside_and_not_faster() -> None:
    jobs = [one.job for one in meshcast.search(TINY, top=10).forecasts]
    found = meshcast.search(TINY, top=10, compare=jobs)
    best = found.best[0].report.step_time
    assert len(found.compared) == len(jobs) > 1 and all(one.inside and one.restated is None for one in found.compared)
    for given, one in zip(found.forecasts, found.compared, strict=True):
        assert one.report.step_time == given.forecast.step_time and one.fits
        assert one.factor == one.factor_at_most == given.forecast.step_time / best >= 1
        values = {field: value for field, value in given.changes.items() if value != found.best[0].changes[field]}
        assert {*one.differences} <= {*values, "plan.schedule", "plan.partition"}
        assert bool(one.differences) == (one.factor > 1)


def compared(plan: Mapping[str, Any], job: Mapping[str, Any] = TINY, **options: Any) -> Any:
    (found,) = meshcast.search(job, top=1, compare=[plan], **options).compared
    return found


OUTSIDE: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"plan": {"tp": 8}}, "plan.tp", 8, "the search took 1, 2, 4"),
    ({"plan": {"tp": 4, "recompute": "full"}}, "plan.recompute", "full", "the job of the search states none"),
    ({"plan": {"tp": 4, "zero": 3}}, "plan.zero", "zero-3", "the search took ddp, zero-1"),
    ({"precision": {"gradients": "bf16"}}, "precision.gradients", "bf16", "the job of the search has fp32"),
    ({"framework": "torchtitan"}, "framework.name", "torchtitan", "the job of the search has megatron-core"),
    (
        {"plan": {"pp": 2, "schedule": "gpipe"}},
        "plan.schedule", "gpipe", "the search took 1f1b, interleaved-1f1b",
    ),
    (
        {"plan": {"pp": 2, "partition": [1, 3]}},
        "plan.partition", [1, 3], "the job of the search states even",
    ),
    (
        {"batch": {**PLAN["batch"], "micro": 2}, "plan": {"mesh": {"dp": 2, "tp": 4}, "schemes": [
            {"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron", "over": "tp"},
            {"use": "tensor/domino"}]}},
        "plan.schemes.tensor", "domino + megatron", "a search does not vary it; in short form it would be megatron",
    ),
    (
        {"plan": {"mesh": {"tp": 4, "dp": 2}, "schemes": [
            {"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]}},
        "plan.mesh", "tp 4 x dp 2", "a search does not vary it; in short form it would be dp 2 x tp 4",
    ),
    (
        {"plan": {"stages": [{"tp": 4}, {"tp": 4}]}},
        "plan.stages", "with degrees or batches of their own", "a search does not vary it",
    ),
]  # fmt: skip
"""Changes of a plan; the field that is outside of the search then, its value, and why."""


@pytest.fixture(scope="module")
def compared_outside() -> Any:
    """All of `OUTSIDE`, compared by one search."""
    return meshcast.search(TINY, top=1, compare=[{**PLAN, **change} for change, *_ in OUTSIDE]).compared


@pytest.mark.parametrize("number", range(len(OUTSIDE)), ids=[field for _, field, *_ in OUTSIDE])
def test_a_field_outside_is_named(compared_outside: Any, number: int) -> None:
    found, (_, field, value, why) = compared_outside[number], OUTSIDE[number]
    (one,) = [one for one in found.outside if one.field == field]
    assert not found.inside and one.value == value and one.why.startswith(why)
    assert field in found.differences


def test_what_no_search_varies_is_left_out_of_the_restated_plan() -> None:
    mesh = {"mesh": {"tp": 4, "dp": 2}, "schemes": [
        {"use": "data/zero-1", "over": "dp"}, {"use": "tensor/megatron-sp", "over": "tp"}]}  # fmt: skip
    found = compared({**PLAN, "plan": mesh})
    assert found.restated.step_time == meshcast.simulate({**PLAN, "plan": {"tp": 4, "zero": 1}}).step_time
    assert found.to_dict()["restated"]["step_time_s"] == found.restated.step_time


def test_limits_of_the_search_exclude_a_plan() -> None:
    (one,) = compared(PLAN, where=["plan.tp * plan.pp <= 4"]).outside
    assert (one.field, one.why) == ("plan", "it violates plan.tp * plan.pp <= 4")
    assert compared(PLAN, where=["plan.tp * plan.pp <= 8"]).inside
    tight = compared({**PLAN, "plan": {"tp": 1, "zero": 0}}, memory_margin=0.7)
    assert tight.inside and tight.report.fits and not tight.fits
    space = open_search(TINY, limits=SearchOptions(near_measured=True).limits).space
    form = read_short_form(load_job({**PLAN, "plan": {"tp": 4, "pp": 2, "chunks": 2, "zero": 0}}))
    measured = meshcast.search(TINY, top=1, near_measured=True).best
    outside = list_outside(space, form)
    assert [one.why for one in outside] == [
        "nobody has published a run of its schedule, degrees and micro-batch on as many GPUs"
    ]
    assert all(list_outside(space, read_short_form(one.report.job)) == [] for one in measured)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "llama3-8b"}, "plan 1 model.layers is 32: the model must be that of the search, and there it is 4"),
        ({"cluster": "dgx-h100:2"}, "plan 1 cluster is '16 x h100-sxm': the cluster must be that of the search, and"),
        ({"cluster": "dgx-a100:1"}, "and there it is 8 x h100-sxm. Compare plans of one task, or search this job"),
        ({"batch": {"global": 32, "sequence": 2048}}, "plan 1 batch.global is 32: the batch must be that of the sear"),
        ({"batch": {"global": 16, "sequence": 4096}}, "plan 1 batch.sequence is 4096: the batch must be that of the"),
        ({"train": {"mode": "lora"}}, "plan 1 train.mode is 'lora': the set of parameters that are trained must be"),
        ({"plan": {"tp": "auto"}}, "plan 1 plan: it leaves fields open, and a single plan is compared. Give every f"),
        ({"plan": {"tp": 3}}, "plan.tp is 3"),
    ],
)  # fmt: skip
def test_other_tasks_are_refused_before_the_search(change: dict[str, Any], words: str) -> None:
    calls = list[Any]()
    with pytest.raises(PlanError) as error:
        meshcast.search(TINY, compare=[{**PLAN, **change}], watch=calls.append)
    assert words in str(error.value) and not calls
    with pytest.raises(PlanError, match="compare: it is a list of jobs"):
        meshcast.search(TINY, compare=PLAN)  # type: ignore[arg-type]


def test_a_plan_that_belies_the_proof_is_an_error() -> None:
    search = open_search(TINY, top=1)
    search.run()
    given = load_plans(search, [PLAN])
    assert compare_plans(search, given)[0].factor_at_most
    search.certificate.incumbent = search.certificate.open_bound = 1e6
    with pytest.raises(PlanError, match=r"plan 1: a plan of the space takes .* s, and none should take less than 1e"):
        compare_plans(search, given)


def test_no_plan_fits() -> None:
    job = {**TINY, "model": "llama3-70b", "plan": {"tp": [1, 2]}}
    found = compared({**PLAN, "model": "llama3-70b", "plan": {"tp": 2}}, job)
    assert found.inside and found.factor is None and found.differences == {} and not found.fits
    assert found.to_dict()["peak_device_gib"][0] is None


PUBLISHED = ROOT / "examples" / "published-plans"


@pytest.mark.parametrize(
    ("space", "plan"),
    [
        ("search-gpt3-175b", ROOT / "examples/gpt3-175b-dgx-a100.yaml"),
        ("search-gpt3-175b", PUBLISHED / "gpt3-175b-selective.yaml"),
        ("search-gpt3-1t", PUBLISHED / "gpt3-1t.yaml"),
        ("search-gpt3-1t-2021", PUBLISHED / "gpt3-1t.yaml"),
        ("search-llama3-405b", ROOT / "examples/llama3-405b-dgx-h100.yaml"),
        ("search-llama3-405b-128k", ROOT / "examples/llama3-405b-128k-dgx-h100.yaml"),
        ("search-deepseek-v3", ROOT / "examples/deepseek-v3-h800.yaml"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_published_plans_lie_in_the_spaces_of_their_examples(space: str, plan: Path) -> None:
    """docs/search.md has their factors."""
    search = open_search(PUBLISHED / f"{space}.yaml")
    (given,) = load_plans(search, [plan])
    assert list_outside(search.space, read_short_form(given.job, search.space.named)) == []
    assert differing_settings(search.space.loaded, given.job) == {}


def test_the_command(tmp_path: Path) -> None:
    job, plan, other = tmp_path / "job.yaml", tmp_path / "plan.yaml", tmp_path / "other.yaml"
    job.write_text(yaml.safe_dump(TINY), "utf-8")
    plan.write_text(yaml.safe_dump(PLAN), "utf-8")
    other.write_text(yaml.safe_dump({**PLAN, "plan": {"tp": 8, "fsdp": True}}), "utf-8")
    answer = json.loads(run("search", job, "--compare", plan, "--compare", other, "--json").stdout)
    one, outside = answer["compared"]
    best = answer["best"][0]
    assert one["plan"] == str(plan) and one["inside"] and one["factor"] == one["step_time_s"] / best["step_time_s"] > 1
    (field,) = [each for each in one["differences"] if each["field"] == "plan.tp"]
    assert field["values"] == [best["plan"]["plan.tp"], 4]
    added = sum(own - theirs for theirs, own in one["breakdown_s"].values())
    assert added == pytest.approx(one["step_time_s"] - best["step_time_s"])
    assert one["peak_device_gib"][0] == best["peak_device_gib"]
    assert [each["field"] for each in outside["outside"]] == ["plan.tp"]
    page = " ".join(run("search", job, "--compare", plan, "--compare", other).stdout.split())
    assert "times the" in page and "the search had this plan among its own" in page and "part of the step" in page
    assert "not in it: plan.tp is 8; the search took 1, 2, 4" in page
    assert "compared" not in json.loads(run("search", job, "--json").stdout)
    plan.write_text(yaml.safe_dump({**PLAN, "model": "llama3-8b"}), "utf-8")
    wrong = run("search", job, "--compare", plan)
    assert wrong.exit_code == 2 and wrong.stdout == "" and f"{plan} model.layers is 32" in wrong.stderr
