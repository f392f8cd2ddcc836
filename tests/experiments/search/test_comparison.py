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
from tests.experiments.search.spaces import TINY, Point
from tests.strategies import EVERY_EXAMPLE

PLAN: dict[str, Any] = {
    **TINY,
    "batch": {**TINY["batch"], "micro": 1},
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


def draw_points(space: Space, count: int) -> list[Point]:
    """Draws points of a space evenly over its groups."""
    rng, groups, points = random.Random(7), space.groups(), list[Point]()
    while len(points) < count:
        group = rng.choice(groups)
        if pipelines := space.pipelines(group):
            pipeline = rng.choice(pipelines)
            points.append((group, pipeline, rng.choice(space.steps(group, pipeline.pp))))
    return points


@pytest.mark.parametrize(("name", "long"), [("dense", False), ("dense", True), ("experts", False), ("experts", True)])
def test_a_point_is_read_again_from_its_job(name: str, long: bool) -> None:
    """Whether its plan is written in short or in long form: with its values, and nothing that these cannot say."""
    space, read = open_search({"dense": DENSE, "experts": EXPERTS}[name], limits=Limits()).space, 0
    drawn = 60 if EVERY_EXAMPLE else 20
    for point in draw_points(space, drawn):
        try:
            job = load_job(space.job_of(*point))
        except MeshcastError:  # such as options that a schedule refuses
            continue
        job = load_job({**job.as_written, "plan": job.to_dict()["plan"]}) if long else job
        form, read = read_short_form(job, space.named), read + 1
        assert form.others == {} and find_point(space, form.values) == point
        assert list_outside(space, form) == []
    assert read > 2 / 3 * drawn


def test_every_plan_of_the_search_is_inside_and_not_faster() -> None:
    search = open_search(TINY, top=10)
    search.run()
    best, plans = search.best[0], load_plans(search, [plan.job for plan in search.forecasts])
    compared = compare_plans(search, plans)
    assert len(compared) > 1 and all(plan.inside and plan.restated is None and plan.fits for plan in compared)
    for forecast, plan in zip(search.forecasts, compared, strict=True):
        step = forecast.forecast.step_time
        assert plan.report.step_time == step
        assert plan.factor == plan.factor_at_most == step / best.forecast.step_time >= 1
        values = {field for field, value in forecast.changes.items() if value != best.changes[field]}
        assert {*plan.differences} <= {*values, "plan.schedule", "plan.partition"}
        assert bool(plan.differences) == (plan.factor > 1)


def compare(plan: Mapping[str, Any], job: Mapping[str, Any] = TINY, **options: Any) -> Any:
    """Returns a plan as it is compared with the best one of a job."""
    (compared,) = meshcast.search(job, top=1, compare=[plan], **options).compared
    return compared


def in_long_form(*schemes: str, **mesh: int) -> dict[str, Any]:
    entries: list[dict[str, Any]] = [{"use": use, "over": over} for use, over in map(str.split, schemes)]
    return {"mesh": mesh, "schemes": entries}


SWAPPED = in_long_form("data/zero-1 dp", "tensor/megatron-sp tp", tp=4, dp=2)
DOMINO = in_long_form("data/zero-1 dp", "tensor/megatron tp", dp=2, tp=4)
DOMINO["schemes"].append({"use": "tensor/domino"})

OUTSIDE: list[tuple[dict[str, Any], str, Any, str]] = [
    ({"plan": {"tp": 8}}, "plan.tp", 8, "the search took 1, 2, 4"),
    ({"plan": {"tp": 4, "recompute": "full"}}, "plan.recompute", "full", "the job of the search states none"),
    ({"plan": {"tp": 4, "zero": 3}}, "plan.zero", "zero-3", "the search took ddp, zero-1"),
    ({"precision": {"gradients": "bf16"}}, "precision.gradients", "bf16", "the job of the search has fp32"),
    ({"framework": "torchtitan"}, "framework.name", "torchtitan", "the job of the search has megatron-core"),
    ({"plan": {"pp": 2, "schedule": "gpipe"}}, "plan.schedule", "gpipe", "the search took 1f1b, interleaved-1f1b"),
    ({"plan": {"pp": 2, "partition": [1, 3]}}, "plan.partition", [1, 3], "the job of the search states even"),
    ({"plan": DOMINO, "batch": {**TINY["batch"], "micro": 2}}, "plan.schemes.tensor", "domino + megatron",
     "a search does not vary it; in short form it would be megatron"),
    ({"plan": SWAPPED}, "plan.mesh", "tp 4 x dp 2", "a search does not vary it; in short form it would be dp 2 x tp 4"),
    ({"plan": {"stages": [{"tp": 4}, {"tp": 4}]}}, "plan.stages", "with degrees or batches of their own",
     "a search does not vary it"),
]  # fmt: skip
"""Changes of a plan; the field that is outside of the search then, its value, and why."""


def test_a_field_outside_is_named() -> None:
    """What no search varies is left out of the restated plan."""
    plans: Any = meshcast.search(TINY, top=1, compare=[{**PLAN, **change} for change, *_ in OUTSIDE]).compared
    for compared, (_, field, value, why) in zip(plans, OUTSIDE, strict=True):
        (outside,) = [outside for outside in compared.outside if outside.field == field]
        assert not compared.inside and outside.value == value and outside.why.startswith(why)
        assert field in compared.differences
        if field == "plan.mesh":
            assert compared.restated.step_time == meshcast.simulate({**PLAN, "plan": {"tp": 4, "zero": 1}}).step_time
            assert compared.to_dict()["restated"]["step_time_s"] == compared.restated.step_time


def test_limits_of_the_search_exclude_a_plan() -> None:
    (outside,) = compare(PLAN, where=["plan.tp * plan.pp <= 4"]).outside
    assert (outside.field, outside.why) == ("plan", "it violates plan.tp * plan.pp <= 4")
    tight = compare({**PLAN, "plan": {"tp": 1, "zero": 0}}, memory_margin=0.7, where=["plan.tp * plan.pp <= 8"])
    assert tight.inside and tight.report.fits and not tight.fits
    search = open_search(TINY, top=1, limits=SearchOptions(near_measured=True).limits)
    search.run()
    form = read_short_form(load_job({**PLAN, "plan": {"tp": 4, "pp": 2, "chunks": 2, "zero": 0}}))
    why = "nobody has published a run of its schedule, degrees and micro-batch on as many GPUs"
    assert [outside.why for outside in list_outside(search.space, form)] == [why]
    assert all(list_outside(search.space, read_short_form(load_job(plan.job))) == [] for plan in search.best)


def test_other_tasks_are_refused_before_the_search() -> None:
    """tests/refusals has the messages."""
    calls = list[Any]()
    with pytest.raises(PlanError, match="the model must be that of the search"):
        meshcast.search(TINY, compare=[{**PLAN, "model": "llama3-8b"}], watch=calls.append)
    assert not calls


def test_a_plan_that_belies_the_proof_is_an_error() -> None:
    search = open_search(TINY, top=1)
    search.run()
    plans = load_plans(search, [PLAN])
    assert compare_plans(search, plans)[0].factor_at_most
    search.certificate.incumbent = search.certificate.open_bound = 1e6
    with pytest.raises(PlanError, match=r"plan 1: a plan of the space takes .* s, and none should take less than 1e"):
        compare_plans(search, plans)


def test_no_plan_fits() -> None:
    job = {**TINY, "model": "llama3-70b", "plan": {"tp": [1, 2]}}
    compared = compare({**PLAN, "model": "llama3-70b", "plan": {"tp": 2}}, job)
    assert compared.inside and compared.factor is None and compared.differences == {} and not compared.fits
    assert compared.to_dict()["peak_device_gib"][0] is None


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
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_plans_lie_in_the_spaces_of_their_examples(space: str, plan: Path) -> None:
    """docs/search.md has their factors."""
    search = open_search(PUBLISHED / f"{space}.yaml")
    (loaded,) = load_plans(search, [plan])
    assert list_outside(search.space, read_short_form(loaded.job, search.space.named)) == []
    assert differing_settings(search.space.loaded, loaded.job) == {}


def test_the_command(tmp_path: Path) -> None:
    job, plan, other = tmp_path / "job.yaml", tmp_path / "plan.yaml", tmp_path / "other.yaml"
    for path, content in ((job, TINY), (plan, PLAN), (other, {**PLAN, "plan": {"tp": 8, "fsdp": True}})):
        path.write_text(yaml.safe_dump(content), "utf-8")
    words = "search", job, "--compare", plan, "--compare", other
    answer = json.loads(run(*words, "--json").stdout)
    (slower, outside), best = answer["compared"], answer["best"][0]
    assert slower["plan"] == str(plan) and slower["inside"]
    assert slower["factor"] == slower["step_time_s"] / best["step_time_s"] > 1
    (field,) = [difference for difference in slower["differences"] if difference["field"] == "plan.tp"]
    assert field["values"] == [best["plan"]["plan.tp"], 4]
    added = sum(second - first for first, second in slower["breakdown_s"].values())
    assert added == pytest.approx(slower["step_time_s"] - best["step_time_s"])
    assert slower["peak_device_gib"][0] == best["peak_device_gib"]
    assert [field["field"] for field in outside["outside"]] == ["plan.tp"]
    page = " ".join(run(*words).stdout.split())
    assert "times the" in page and "the search had this plan among its own" in page and "part of the step" in page
    assert "not in it: plan.tp is 8; the search took 1, 2, 4" in page
    plan.write_text(yaml.safe_dump({**PLAN, "model": "llama3-8b"}), "utf-8")
    wrong = run("search", job, "--compare", plan)
    assert wrong.exit_code == 2 and wrong.stdout == "" and f"{plan} model.layers is 32" in wrong.stderr
