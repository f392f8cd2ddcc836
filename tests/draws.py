"""Parameters of tests, drawn from families of nearly equal cases: a few in `make test`, more in `make test-all`.

The cases that `make test` runs hold every scheme, family, schedule and kind of error once. `make test-all` draws up to
ten times as many; a case that is not drawn is not collected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from itertools import product
from typing import Any

from hypothesis import settings

MORE = 10 if settings.get_current_profile_name() == "all" else 1
"""How many times as many cases as in `make test` are drawn."""


def drawn(cases: Iterable[Any], keep: int | Collection[Any] | Callable[[Any], bool]) -> list[Any]:
    """Draws values for `pytest.mark.parametrize`, in their order.

    cases: values of one argument; tuples are rows of several.
    keep: those of `make test`: every so-manyth case, beginning with the first; or the cases themselves, or a rule that
        holds for them.
    """

    def stays(number: int, case: Any) -> bool:
        if isinstance(keep, int):
            return number % keep == 0
        return bool(keep(case) if callable(keep) else case in keep)

    return _draw(list(cases), stays)


def drawn_grid(*axes: Iterable[Any]) -> list[Any]:
    """Draws combinations of the values of several arguments, of which `make test` runs a diagonal: as many as the
    longest axis has values, with every value of every axis among them.
    """
    values = [list(axis) for axis in axes]
    diagonal = {tuple(n % len(axis) for axis in values) for n in range(max(map(len, values)))}
    places = list(product(*(range(len(axis)) for axis in values)))
    rows = [tuple(axis[n] for axis, n in zip(values, place, strict=True)) for place in places]
    return _draw(rows, lambda number, row: places[number] in diagonal)


def _draw(cases: list[Any], stays: Callable[[int, Any], bool]) -> list[Any]:
    kept = {number for number, case in enumerate(cases) if stays(number, case)}
    others = [number for number in range(len(cases)) if number not in kept]
    kept.update(random.Random(0).sample(others, min(len(others), (MORE - 1) * len(kept))))
    return [cases[number] for number in sorted(kept)]
