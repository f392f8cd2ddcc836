"""Searches of fields that name schemes, and of units of FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshcast
from meshcast.experiments.search.search_job import open_search
from meshcast.experiments.search.space.space import Space
from meshcast.simulator.forecast.step import forecast_step
from meshcast.simulator.loading.load import load_job
from tests.draws import drawn
from tests.experiments.search.spaces import TINY, open_space, plans_of

NODE: dict[str, Any] = {**TINY, "batch": {"global": 16, "micro": 1, "sequence": 4096}}
EXPERTS: dict[str, Any] = {**NODE, "model": {"preset": "mixtral-8x7b", "layers": 4}}
NAMED = [None, "ring", "sequence/ulysses"]
STRIPED = {"use": "ring", "balance": "striped"}


@pytest.mark.parametrize(
    ("job", "open_fields", "keys", "values"),
    [
        (NODE, {"cp": [1, 2], "cp_scheme": NAMED}, ("cp", "cp_scheme"),
         [(1, "all-gather"), (2, "all-gather"), (2, "ring"), (2, "ulysses")]),
        (NODE, {"tp": [1, 4], "tp_scheme": [None, "summa-2d", "flux"], "sequence_parallel": "auto"},
         ("tp", "tp_scheme", "sequence_parallel"),
         [(1, None, True), (4, None, True), (4, None, False), (4, "flux", True), (4, "flux", False),
          (4, "summa-2d", None)]),
        (EXPERTS, {"ep": [1, 4], "ep_scheme": ["deepep", "scattermoe"]}, ("ep", "ep_scheme"),
         [(1, "all-to-all"), (1, "scattermoe"), (4, "deepep"), (4, "scattermoe")]),
        (NODE, {"tp": [4, 8], "dp_scheme": [None, "mics", "zero-offload"]}, ("tp", "dp_scheme"),
         [(4, "zero-1"), (4, "mics"), (4, "zero-offload"), (8, "zero-1"), (8, "zero-offload")]),
        (NODE, {"zero": "auto", "prefetch": "auto"}, ("fsdp", "prefetch"),
         [(False, None)] * 4 + [(True, 0), (True, 1), (True, 2)]),
    ],
)  # fmt: skip
def test_schemes_and_their_options_vary_where_they_have_an_effect(
    job: dict[str, Any], open_fields: dict[str, Any], keys: tuple[str, ...], values: list[tuple[Any, ...]]
) -> None:
    plans = [tuple(plan.get(key) for key in keys) for plan in plans_of(open_space(job, **open_fields))]
    assert sorted(plans, key=str) == sorted(values, key=str)


def test_units_vary_with_fsdp_alone() -> None:
    plans = plans_of(open_space(NODE, zero="auto", reshard="auto", unit=[1, 2]))
    units = [(plan.get("reshard", True), plan.get("unit", 1)) for plan in plans if plan["fsdp"]]
    assert units == [(True, 1), (True, 2), (False, 1), (False, 2)]
    assert all("reshard" not in plan and "unit" not in plan for plan in plans if not plan["fsdp"])
    best = meshcast.search({**NODE, "plan": {"fsdp": True, "reshard": False, "unit": [1, 2]}}, top=2).best
    stated = ("fsdp", True), ("reshard", False)
    assert {tuple(plan.job["plan"].items()) for plan in best} == {stated, (*stated, ("unit", 2))}


def test_prefetched_units_save_time_and_take_memory() -> None:
    job = {**NODE, "cluster": "dgx-h100:4", "batch": {"global": 32, "micro": 1, "sequence": 1024}}
    none, two = (forecast_step(load_job({**job, "plan": {"fsdp": True, "prefetch": count}})) for count in (0, 2))
    assert none.step_time > two.step_time and none.peak_device < two.peak_device


def test_a_list_of_modules_is_one_value_of_recompute() -> None:
    assert open_space(NODE, tp=[1, 2], recompute=["norm", "act"]).values["recompute"] == (("norm", "act"),)
    assert open_space(NODE, recompute=[["norm"], "none"]).stated_values()["plan.recompute"] == [["norm"], "none"]
    assert open_space(NODE, recompute=[["core_attn"], "selective"]).values["recompute"] == ("selective",)


def test_options_that_are_defaults_make_no_other_scheme() -> None:
    listed = ["deepep", {"use": "deepep"}, {"use": "expert/deepep", "sms": 8}]
    space = open_space(EXPERTS, ep=[4], ep_scheme=listed)
    assert space.stated_values()["plan.ep_scheme"] == ["deepep", {"use": "deepep", "sms": 8}]
    job = {**EXPERTS, "plan": {"ep": [4], "ep_scheme": listed}}
    best = meshcast.search(job, where=["plan.ep_scheme == 'deepep'"]).best
    assert {str(plan.changes["plan.ep_scheme"]) for plan in best} == {"deepep"}
    keys = {key: [1, 2] for key in ("tp", "cp", "ep")}
    schemes = {f"{key}_scheme": "auto" for key in keys}
    assert open_space(EXPERTS, **keys, **schemes).groups() == open_space(EXPERTS, **keys).groups()


def test_auto_opens_the_fields_that_a_plan_does_not_state() -> None:
    whole, beside = open_space(NODE, auto=None), open_space(NODE, auto=True, tp=4, cp_scheme=["all-gather", "ring"])
    auto = Space({**NODE, "plan": "auto"}, Path("."))
    assert whole.open == auto.open and not auto.named and not open_space(NODE, tp="auto").named
    assert {*beside.open} == {*whole.open} - {"plan.tp"} | {"plan.cp_scheme"}
    assert beside.values["tp"] == (4,) and beside.values["pp"] == whole.values["pp"]
    assert {group.sequence for group in beside.groups()} == {"all-gather", "ring"}
    schemes = open_space(NODE, auto=True, dp_scheme=["zero-1", "mics"])
    assert {*schemes.open} == {*whole.open} - {"plan.zero"} | {"plan.dp_scheme"}
    assert "plan.zero" not in open_space(NODE, auto=True, fsdp=True, prefetch="auto").open
    batch = {**NODE["batch"], "micro": "auto"}
    assert open_space({**NODE, "batch": batch}, auto=False, tp="auto").open == ("plan.tp", "batch.micro")


def test_a_scheme_without_plans_breaks_a_rule() -> None:
    job = {**NODE, "batch": {**NODE["batch"], "micro": [1, 2]}, "plan": {"tp": [8], "tp_scheme": [None, "summa-2d"]}}
    certificate = meshcast.search(job).certificate
    assert certificate.plans == 4 and certificate.invalid == 2


@pytest.mark.parametrize(
    ("searched", "plan"),
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
    searched: dict[str, Any], plan: dict[str, Any]
) -> None:
    batch = {**NODE["batch"], "micro": 2}  # rows of a square share the sequences
    compare = [{**NODE, "batch": batch, "plan": plan}, {**NODE, "batch": batch, "plan": {**plan, "pp": 2}}]
    job = {**NODE, "batch": {**batch, "micro": [1, 2]}, "plan": searched}
    inside, outside = meshcast.search(job, top=1, compare=compare).compared
    assert inside.inside and inside.restated is None and inside.factor is not None and inside.factor >= 1
    assert [field.field for field in outside.outside] == ["plan.pp"]


def test_a_compared_plan_without_the_schemes_of_a_search_is_outside() -> None:
    job = {**NODE, "plan": {"cp": [2], "cp_scheme": ["ring", "ulysses"]}}
    (plan,) = meshcast.search(job, top=1, compare=[{**NODE, "plan": {"cp": 2}}]).compared
    assert [(field.field, field.value) for field in plan.outside] == [("plan.cp_scheme", "all-gather")]


def test_constraints_name_schemes() -> None:
    job = {**NODE, "plan": {"cp": [2], "cp_scheme": ["all-gather", "ring"]}}
    best = meshcast.search(job, where=["plan.cp_scheme == 'ring'"]).best
    assert {plan.changes["plan.cp_scheme"] for plan in best} == {"ring"}
    assert open_search(job).space.stated_values()["plan.cp_scheme"] == ["all-gather", "ring"]
