"""The rule by which cases are drawn from families of nearly equal ones."""

from __future__ import annotations

import pytest

from tests import draws
from tests.draws import drawn, drawn_grid


def test_cases_are_kept_by_number_by_name_or_by_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MORE", 1)
    assert drawn(range(7), keep=3) == [0, 3, 6]
    assert drawn({"a": 1, "b": 2}, keep=("b",)) == ["b"]
    assert drawn([("a", 1), ("b", 2)], keep=lambda case: case[1] == 1) == [("a", 1)]


def test_a_grid_keeps_every_value_of_every_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MORE", 1)
    axes = "abcde", (1, 2), (True, False, None)
    rows = drawn_grid(*axes)
    assert len(rows) == 5
    for axis, values in zip(axes, zip(*rows, strict=True), strict=True):
        assert set(values) == set(axis)


def test_more_cases_are_drawn_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "MORE", 10)
    assert drawn(range(7), keep=3) == list(range(7))
    cases = drawn(range(100), keep=(17, 50))
    assert len(cases) == 20 and {17, 50} <= set(cases) and cases == sorted(cases)
    assert drawn(range(100), keep=(17, 50)) == cases
