"""The rule by which families of nearly equal cases are thinned."""

from __future__ import annotations

from typing import Any

import pytest

from tests.thinning import mark_slow, thinned, thinned_grid


def kept(cases: list[Any]) -> list[Any]:
    return [case for case in cases if not hasattr(case, "marks")]


def test_cases_are_kept_by_number_by_name_or_by_a_rule() -> None:
    assert kept(thinned(range(7), keep=3)) == [0, 3, 6]
    assert kept(thinned({"a": 1, "b": 2}, keep=("b",))) == ["b"]
    assert kept(thinned([("a", 1), ("b", 2)], keep=lambda case: case[1] == 1)) == [("a", 1)]


def test_a_grid_keeps_every_value_of_every_axis() -> None:
    axes = "abcde", (1, 2), (True, False, None)
    cases = thinned_grid(*axes)
    assert len(cases) == 30 and len(kept(cases)) == 5
    for axis, values in zip(axes, zip(*kept(cases), strict=True), strict=True):
        assert set(values) == set(axis)


def test_the_others_are_slow_and_keep_their_marks_and_id() -> None:
    slow = mark_slow(pytest.param("a", 1, id="one", marks=pytest.mark.torch))
    assert (slow.values, slow.id, [mark.name for mark in slow.marks]) == (("a", 1), "one", ["torch", "slow"])
    assert mark_slow(("a", 1)).values == ("a", 1) and mark_slow("a").values == ("a",)
