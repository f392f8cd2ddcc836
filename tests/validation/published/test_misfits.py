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
    answered = answer(row(**LARGE, **stated))
    assert answered["replaced"] == {field: "full"} and field in answered["assumed"]
    assert answered["predicted"]["fits"] and answered["misfit"] is None
    mapped, report = forecast_run(row(**LARGE, **stated))
    assert report.step_time == answered["predicted"]["step_time_s"]
    assert report.step_time == forecast_run(row(**LARGE, recompute__kind="full"))[1].step_time
    assert f"sigmas.{field}" in report.sigmas and mapped.replaced == ((field, "full"),)


def test_states_that_a_run_does_not_shard_are_sharded_where_nothing_else_fits() -> None:
    large = {"model__layers": 128, "model__ffn": 16384, "mesh__vpp": 1, "schedule": "1f1b"}
    plain = {"stack": "megatron-lm-2021", "sharding": None, "shard_group": None, "grad_dtype": "fp32"}
    forecast = answer(row(**large, **plain))
    assert forecast["replaced"] == {"sharding": "zero1"} and forecast["predicted"]["fits"]
    assert not answer(row(**large, **{**plain, "sharding": "none"}))["predicted"]["fits"]


def test_what_fits_keeps_its_usual_values() -> None:
    answered = answer(row(recompute__kind=None))
    assert answered["replaced"] == {} and "recompute.kind" in answered["assumed"]


@pytest.mark.parametrize("filled", [[], ["sharding:convention"]])
def test_sharding_that_only_convention_says_is_that_with_which_a_run_fits(filled: list[str]) -> None:
    """Whole states of 8 billion parameters, 18 bytes each."""
    few = {"mesh__pp": 1, "mesh__vpp": 1, "schedule": None, "mesh__tp": 1, "mesh__dp": 64, "recompute__kind": "full"}
    answered = answer(row(sharding="none", filled=filled, **few))
    assert answered["replaced"] == ({"sharding": "zero1"} if filled else {})
    assert bool(filled) == answered["predicted"]["fits"]
    assert ("sharding" in answered["assumed"]) == bool(filled)


def test_stated_fields_are_not_doubted() -> None:
    answered = answer(row(**LARGE))
    assert not answered["predicted"]["fits"] and answered["replaced"] == {}
    wrong = "no assumed field explains it: a stated field or the memory model is wrong (activations "
    assert answered["misfit"].startswith(wrong)


def test_a_profile_in_the_place_of_another_is_named() -> None:
    assert "nemo in the place of mlperf-nemo" in answer(row(**LARGE, stack="mlperf-nemo"))["misfit"]
