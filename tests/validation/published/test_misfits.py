"""Runs whose forecast does not fit: the assumed field with whose other value they would, or none."""

from __future__ import annotations

from typing import Any

from meshcast.validation.published.misfits import explain_misfit
from meshcast.validation.published.open_plans import forecast_run
from tests.validation.published.test_mapping import row

LARGE: dict[str, Any] = {"batch__micro": 16, "batch__global": 1024, "mesh__vpp": 1, "schedule": "1f1b"}


def explain(**changes: Any) -> str:
    run = row(**LARGE, **changes)
    mapped, report = forecast_run(run)
    assert not report.fits
    return explain_misfit(run, mapped, report)


def test_the_first_assumed_field_with_which_a_run_fits() -> None:
    """16 sequences of 8,192 tokens over 4 tensor ranks and 16 layers do not fit without recomputation."""
    reason = explain(recompute__kind=None)
    assert reason.startswith("recompute.kind is assumed: with full it needs ")
    assert reason.endswith(" GiB")


def test_stated_fields_are_not_doubted_one_by_one() -> None:
    reason = explain()
    assert reason.startswith("no assumed field explains it: a stated field or the memory model is wrong (activations ")


def test_a_profile_in_the_place_of_another_is_named() -> None:
    assert "megatron-core in the place of megatron-bridge" in explain(stack="megatron-bridge")
