"""Parameters of tests of which `make test` runs some and `make test-all` all.

A family of nearly equal cases costs more than it finds on every run. The cases that stay hold every scheme, family,
schedule and kind of error once; the others are marked `slow`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

import pytest


def thinned(cases: Iterable[Any], keep: int | Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Values for `pytest.mark.parametrize`, of which `make test` runs those that `keep` names.

    cases: values of one argument; tuples are rows of several.
    keep: every so-manyth case, beginning with the first; or the cases themselves, or a rule that holds for them.
    """

    def stays(number: int, case: Any) -> bool:
        if isinstance(keep, int):
            return number % keep == 0
        return bool(keep(case) if callable(keep) else case in keep)

    return [case if stays(number, case) else mark_slow(case) for number, case in enumerate(cases)]


def thinned_grid(*axes: Iterable[Any]) -> list[Any]:
    """Rows of all combinations of the values of several arguments, of which `make test` runs a diagonal: as many as the
    longest axis has values, with every value of every axis among them.
    """
    values = [list(axis) for axis in axes]
    diagonal = {tuple(n % len(axis) for axis in values) for n in range(max(map(len, values)))}
    places = product(*(range(len(axis)) for axis in values))
    rows = ((place, tuple(axis[n] for axis, n in zip(values, place, strict=True))) for place in places)
    return [row if place in diagonal else mark_slow(row) for place, row in rows]


def mark_slow(case: Any) -> Any:
    """The case as a slow test; marks and the id of a `pytest.param` stay."""
    if hasattr(case, "marks") and hasattr(case, "values"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.slow])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
