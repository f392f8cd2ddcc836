"""What ran fits: an assumed field that the memory of a run contradicts has its next likely value."""

from __future__ import annotations

from typing import Any

import pytest

from meshcast.validation.published.answer import answer
from meshcast.validation.published.open_plans import forecast_run
from tests.validation.published.runs import row

LARGE: dict[str, Any] = {"batch__micro": 16, "batch__global": 1024, "mesh__vpp": 1, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("stated", "field"),
    [
        ({"recompute__kind": None}, "recompute.kind"),
        ({"recompute__kind": "selective", "recompute__modules": None}, "recompute.modules"),
    ],
)
def test_recomputation_that_is_not_stated_is_full_where_nothing_less_fits(stated: dict[str, Any], field: str) -> None:
    """16 sequences of 8,192 tokens over 4 tensor ranks and 16 layers do not fit without it."""
    made = answer(row(**LARGE, **stated))
    assert made["replaced"] == {field: "full"} and field in made["assumed"]
    assert made["predicted"]["fits"] and made["misfit"] is None
    mapped, report = forecast_run(row(**LARGE, **stated))
    assert report.step_time == made["predicted"]["step_time_s"]
    assert report.step_time == forecast_run(row(**LARGE, recompute__kind="full"))[1].step_time
    assert f"sigmas.{field}" in report.sigmas and mapped.replaced == ((field, "full"),)


def test_states_that_a_run_does_not_shard_are_sharded_where_nothing_else_fits() -> None:
    large = {"model__layers": 128, "model__ffn": 16384, "mesh__vpp": 1, "schedule": "1f1b"}
    plain = {"stack": "megatron-lm-2021", "sharding": None, "shard_group": None, "grad_dtype": "fp32"}
    forecast = answer(row(**large, **plain))
    assert forecast["replaced"] == {"sharding": "zero1"} and forecast["predicted"]["fits"]
    assert not answer(row(**large, **{**plain, "sharding": "none"}))["predicted"]["fits"]


def test_what_fits_keeps_its_usual_values() -> None:
    made = answer(row(recompute__kind=None))
    assert made["replaced"] == {} and "recompute.kind" in made["assumed"]


@pytest.mark.parametrize("filled", [[], ["sharding:convention"]])
def test_sharding_that_only_convention_says_is_that_with_which_a_run_fits(filled: list[str]) -> None:
    """Whole states of 8 billion parameters, 18 bytes each."""
    few = {"mesh__pp": 1, "mesh__vpp": 1, "schedule": None, "mesh__tp": 1, "mesh__dp": 64, "recompute__kind": "full"}
    made = answer(row(sharding="none", filled=filled, **few))
    assert made["replaced"] == ({"sharding": "zero1"} if filled else {}) and bool(filled) == made["predicted"]["fits"]
    assert ("sharding" in made["assumed"]) == bool(filled)


def test_stated_fields_are_not_doubted() -> None:
    made = answer(row(**LARGE))
    assert not made["predicted"]["fits"] and made["replaced"] == {}
    wrong = "no assumed field explains it: a stated field or the memory model is wrong (activations "
    assert made["misfit"].startswith(wrong)


def test_a_profile_in_the_place_of_another_is_named() -> None:
    assert "nemo in the place of mlperf-nemo" in answer(row(**LARGE, stack="mlperf-nemo"))["misfit"]
