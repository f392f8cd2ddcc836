"""Searches of fields that name schemes, and of units of FSDP."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import meshcast
from meshcast.experiments.search.frontier.bounds import PointBounds
from meshcast.experiments.search.frontier.group_bounds import GroupBounds
from meshcast.experiments.search.space.space import Space
from meshcast.hardware.errors import PlanError
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.experiments.search.test_bounds import hold_bounds
from tests.experiments.search.test_search import check_against_brute_force

NODE: dict[str, Any] = {
    "model": {"preset": "llama3-8b", "layers": 4},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 2], "sequence": 4096},
}
EXPERTS: dict[str, Any] = {
    "model": {"preset": "mixtral-8x7b", "layers": 4},
    "cluster": "dgx-h100:1",
    "batch": {"global": 16, "micro": [1, 4], "sequence": 2048},
}

STRIPED = {"use": "ring", "balance": "striped"}
RECOMPUTE = ["none", "full", ["norm", "act"], ["layernorm"]]

SPACES: dict[str, dict[str, Any]] = {
    "tensor": {**NODE, "plan": {"tp": [1, 4], "pp": [1, 2], "tp_scheme": [None, "async-tp", "summa-2d"]}},
    "sequence": {
        **NODE,
        "plan": {"cp": [1, 2, 4], "pp": [1, 2], "cp_scheme": [None, "ulysses", "ring", "megatron-cp", "wallfacer"]},
    },
    "expert": {**EXPERTS, "plan": {"ep": [1, 4], "pp": [1, 2], "ep_scheme": ["all-to-all", "deepep", "tutel", "lina"]}},
    "options": {
        **EXPERTS,
        "plan": {"ep": [1, 4], "ep_scheme": ["deepep", {"use": "deepep", "sms": 8}], "recompute": RECOMPUTE},
    },
    "data": {
        **NODE,
        "plan": {"tp": [1, 4, 8], "pp": [1, 2], "dp_scheme": ["fsdp", "mics", "zero-plus-plus", "zero-offload"]},
    },
    "units": {
        **NODE,
        "plan": {"tp": [1, 4], "pp": [1, 2], "zero": "auto", "reshard": "auto", "unit": "auto"},
    },
    "prefetch": {**NODE, "plan": {"tp": [1, 4], "pp": [1, 2], "fsdp": True, "unit": [1, 2], "prefetch": "auto"}},
}  # fmt: skip


# The other families are among those whose bounds are tested below.
@pytest.mark.parametrize("name", drawn(SPACES, keep=("tensor", "options")))
def test_a_search_finds_what_brute_force_finds(name: str) -> None:
    check_against_brute_force(SPACES[name])


def space_of(job: dict[str, Any], **plan: Any) -> Space:
    return Space({**job, "plan": plan}, Path("."))


def plans_of(space: Space) -> list[dict[str, Any]]:
    return [
        space.job_of(group, pipeline, step)["plan"]
        for group in space.groups()
        for pipeline in space.pipelines(group)
        for step in space.choices(group, pipeline)
    ]


def test_schemes_vary_where_their_degree_is_above_one() -> None:
    one = {**NODE, "batch": {**NODE["batch"], "micro": 1}}
    plans = plans_of(space_of(one, cp=[1, 2], cp_scheme=[None, "ring", "sequence/ulysses"]))
    assert [(plan["cp"], plan["cp_scheme"]) for plan in plans] == [
        (1, "all-gather"), (2, "all-gather"), (2, "ring"), (2, "ulysses"),
    ]  # fmt: skip
    space = space_of(one, tp=[1, 4], tp_scheme=[None, "summa-2d", "flux"], sequence_parallel="auto")
    found = [(plan["tp"], plan.get("tp_scheme"), plan.get("sequence_parallel")) for plan in plans_of(space)]
    assert sorted(found, key=str) == sorted(
        [(1, None, True), *((4, name, sp) for name in (None, "flux") for sp in (True, False)), (4, "summa-2d", None)],
        key=str,
    )
    plans = plans_of(space_of({**EXPERTS, "batch": one["batch"]}, ep=[1, 4], ep_scheme=["deepep", "scattermoe"]))
    assert [(plan["ep"], plan["ep_scheme"]) for plan in plans] == [
        (1, "all-to-all"), (1, "scattermoe"), (4, "deepep"), (4, "scattermoe"),
    ]  # fmt: skip
    plans = plans_of(space_of(one, tp=[4, 8], dp_scheme=[None, "mics", "zero-offload"]))
    assert [(plan["tp"], plan["dp_scheme"]) for plan in plans] == [
        (4, "zero-1"), (4, "mics"), (4, "zero-offload"), (8, "zero-1"), (8, "zero-offload"),
    ]  # fmt: skip


def test_a_list_of_modules_is_one_value_of_recompute() -> None:
    space = space_of(NODE, tp=[1, 2], recompute=["norm", "act"])
    assert space.values["recompute"] == (("norm", "act"),)
    assert space_of(NODE, recompute=[["norm"], "none"]).stated_values()["plan.recompute"] == [["norm"], "none"]
    assert space_of(NODE, recompute=[["core_attn"], "selective"]).values["recompute"] == ("selective",)


def test_options_that_are_defaults_make_no_other_scheme() -> None:
    given = ["deepep", {"use": "deepep"}, {"use": "expert/deepep", "sms": 8}]
    space = space_of(EXPERTS, ep=[4], ep_scheme=given)
    assert space.stated_values()["plan.ep_scheme"] == ["deepep", {"use": "deepep", "sms": 8}]
    found = meshcast.search({**EXPERTS, "plan": {"ep": [4], "ep_scheme": given}}, where=["plan.ep_scheme == 'deepep'"])
    assert {str(plan.changes["plan.ep_scheme"]) for plan in found.best} == {"deepep"}


def test_units_vary_with_fsdp_alone() -> None:
    one = {**NODE, "batch": {**NODE["batch"], "micro": 1}}
    plans = plans_of(space_of(one, zero="auto", reshard="auto", unit=[1, 2]))
    units = [(plan.get("reshard", True), plan.get("unit", 1)) for plan in plans if plan["fsdp"]]
    assert units == [(True, 1), (True, 2), (False, 1), (False, 2)]
    assert all("reshard" not in plan and "unit" not in plan for plan in plans if not plan["fsdp"])
    kept = {**one, "plan": {"fsdp": True, "reshard": False, "unit": [1, 2]}}
    best = meshcast.search(kept, top=2).best
    assert {tuple(plan.job["plan"].items()) for plan in best} == {
        (("fsdp", True), ("reshard", False)), (("fsdp", True), ("reshard", False), ("unit", 2)),
    }  # fmt: skip


def test_prefetch_varies_with_fsdp_alone() -> None:
    one = {**NODE, "batch": {**NODE["batch"], "micro": 1}}
    plans = plans_of(space_of(one, zero="auto", prefetch="auto"))
    assert [plan["prefetch"] for plan in plans if plan["fsdp"]] == [0, 1, 2]
    assert all("prefetch" not in plan for plan in plans if not plan["fsdp"])
    several = {**NODE, "cluster": "dgx-h100:4", "batch": {"global": 32, "micro": 1, "sequence": 1024}}
    none, two = (forecast_step(load_job({**several, "plan": {"fsdp": True, "prefetch": one}})) for one in (0, 2))
    assert none.step_time > two.step_time and none.peak_device < two.peak_device


def test_auto_opens_the_fields_that_a_plan_does_not_state() -> None:
    whole, beside = space_of(NODE, auto=None), space_of(NODE, auto=True, tp=4, cp_scheme=["all-gather", "ring"])
    assert whole.open == Space({**NODE, "plan": "auto"}, Path(".")).open
    assert {*beside.open} == {*whole.open} - {"plan.tp"} | {"plan.cp_scheme"}
    assert beside.values["tp"] == (4,) and beside.values["pp"] == whole.values["pp"]
    assert {group.sequence for group in beside.groups()} == {"all-gather", "ring"}
    schemes = space_of(NODE, auto=True, dp_scheme=["zero-1", "mics"])
    assert {*schemes.open} == {*whole.open} - {"plan.zero"} | {"plan.dp_scheme"}
    assert "plan.zero" not in space_of(NODE, auto=True, fsdp=True, prefetch="auto").open
    assert space_of(NODE, auto=False, tp="auto").open == ("plan.tp", "batch.micro")
    plan = {"auto": True, "pp": 2, "tp": 4, "cp_scheme": ["all-gather", "ring"]}
    found = meshcast.search({**NODE, "plan": plan}, within=0.5)
    assert found.best[0].job["plan"]["pp"] == 2


def test_auto_is_what_a_plan_without_the_key_has() -> None:
    keys = {"tp_scheme": "auto", "cp_scheme": "auto", "ep_scheme": "auto"}
    space = space_of(EXPERTS, tp=[1, 2], cp=[1, 2], ep=[1, 2], **keys)
    plain = space_of(EXPERTS, tp=[1, 2], cp=[1, 2], ep=[1, 2])
    assert space.groups() == plain.groups()
    assert not space_of(NODE, tp="auto").named and not Space({**NODE, "plan": "auto"}, Path(".")).named


def test_a_scheme_without_plans_breaks_a_rule() -> None:
    certificate = meshcast.search({**NODE, "plan": {"tp": [8], "tp_scheme": [None, "summa-2d"]}}).certificate
    assert certificate.plans == 4 and certificate.invalid == 2


def test_constraints_name_schemes() -> None:
    job = {**NODE, "plan": {"cp": [2], "cp_scheme": ["all-gather", "ring"]}}
    found = meshcast.search(job, where=["plan.cp_scheme == 'ring'"])
    assert {plan.changes["plan.cp_scheme"] for plan in found.best} == {"ring"}
    job = {**NODE, "plan": {"dp_scheme": ["zero-1", "mics"]}}
    with pytest.raises(PlanError, match=r"those of plan\.dp_scheme"):
        meshcast.search(job, where=["plan.zero <= 1"])


@pytest.mark.parametrize(
    ("searched", "given"),
    drawn(
        [
            ({"fsdp": True, "reshard": "auto", "unit": "auto"}, {"fsdp": True, "reshard": False, "unit": 2}),
            ({"fsdp": True, "prefetch": [0, 1]}, {"fsdp": True}),
            ({"tp": [4], "tp_scheme": [None, "summa-2d"]}, {"tp": 4, "tp_scheme": "summa-2d"}),
            ({"tp": [4], "tp_scheme": [None, "flux"]}, {"tp": 4, "tp_scheme": "flux"}),
            ({"cp": [1, 2], "cp_scheme": ["all-gather", "ring"]}, {"cp": 2, "cp_scheme": "ring"}),
            ({"cp": [1, 2], "cp_scheme": ["all-gather", "ring"]}, {"cp": 1}),
            ({"dp_scheme": ["zero-1", "mics"]}, {"dp_scheme": "mics"}),
            ({"recompute": [["norm", "act"], "selective"]}, {"recompute": ["norm", "act"]}),
            ({"recompute": ["selective", "full"]}, {"recompute": ["core_attn"]}),
            ({"cp": 2, "cp_scheme": ["ring", STRIPED]}, {"cp": 2, "cp_scheme": STRIPED}),
        ],
        keep=5,
    ),
)
def test_a_compared_plan_is_read_with_the_schemes_that_a_search_names(
    searched: dict[str, Any], given: dict[str, Any]
) -> None:
    batch = {**NODE["batch"], "micro": 2}  # rows of a square share the sequences
    compare = [{**NODE, "batch": batch, "plan": given}, {**NODE, "batch": batch, "plan": {**given, "pp": 2}}]
    inside, outside = meshcast.search({**NODE, "plan": searched}, top=1, compare=compare).compared
    assert inside.inside and inside.restated is None and inside.factor is not None and inside.factor >= 1
    assert [one.field for one in outside.outside] == ["plan.pp"]


def test_a_compared_plan_without_the_schemes_of_a_search_is_outside() -> None:
    job = {**NODE, "plan": {"cp": [1, 2], "cp_scheme": ["ring", "ulysses"]}}
    plan = {**NODE, "batch": {**NODE["batch"], "micro": 1}, "plan": {"cp": 2}}
    (found,) = meshcast.search(job, top=1, compare=[plan]).compared
    assert [(one.field, one.value) for one in found.outside] == [("plan.cp_scheme", "all-gather")]


DRAWN: dict[str, dict[str, Any]] = {
    "tensor": {
        "cluster": "dgx-h100:2",
        "plan": {"tp": [2, 4, 8], "tp_scheme": [None, "domino", "flux", "userbuffers", "summa-2d", "tesseract"]},
    },
    "sequence": {
        "cluster": "dgx-h100:2",
        "batch": {"global": 32, "sequence": 8192},
        "plan": {"cp": [2, 4, 8], "cp_scheme": ["ulysses", "ring", "burst-attention", "dist-flash-attn", "wallfacer"]},
    },
    "expert": {
        "model": {"preset": "mixtral-8x7b", "layers": 4},
        "cluster": "dgx-h100:2",
        "plan": {"ep": [2, 8], "ep_scheme": ["deepep", "tutel", "comet", "gshard", "fastermoe", "schemoe", "janus"]},
    },
    "data": {
        "cluster": "dgx-h100:2",
        "plan": {"dp_scheme": ["mics", "zero-plus-plus", "byteps", "gemini", "cephalo", "diloco", "zero-infinity"]},
    },
    "units": {
        "cluster": "dgx-h100:2",
        "plan": {"zero": 1, "fsdp": True, "reshard": "auto", "unit": [1, 2, 3], "prefetch": [0, 1, 2, 3]},
    },
}


def draw(name: str, seed: int, wanted: int) -> list[tuple[float, float]]:
    """Bounds over forecasts, of time and memory, of drawn points."""
    given = {**NODE, "batch": {"global": 32, "sequence": 4096}, **DRAWN[name]}
    overlap = dict.fromkeys(("tp", "dp", "pp"), "auto")
    plan = dict.fromkeys(("tp", "pp", "schedule", "chunks", "partition", "recompute", "order"), "auto")
    job = {
        **given,
        "batch": {**given["batch"], "micro": "auto"},
        "framework": {"name": "megatron-core", "set": {"overlap": overlap}},
        "plan": {**plan, **given["plan"]},
    }
    space, rng, found = Space(job, Path(".")), random.Random(seed), list[tuple[float, float]]()
    groups, every_group = GroupBounds(space, PointBounds(space)), space.groups()
    while len(found) < wanted:
        group = rng.choice(every_group)
        if pipelines := space.pipelines(group):
            pipeline = rng.choice(pipelines)
            step = rng.choice(space.choices(group, pipeline))
            if (ratios := hold_bounds(groups, (group, pipeline, step))) is not None:
                found.append(ratios)
    return found


@pytest.mark.parametrize("name", drawn(DRAWN, keep=("sequence",)))
def test_no_bound_is_above_its_forecast(name: str) -> None:
    ratios = draw(name, 0, 8)
    assert max(time for time, _ in ratios) > 0.7 and max(memory for _, memory in ratios) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("seed", range(1, 5))
def test_no_bound_is_above_its_forecast_at_many_points(name: str, seed: int) -> None:
    draw(name, seed, 50)
