"""Exhaustive enumeration: all candidates are priced, and those of least value are tried in full."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Tried(NamedTuple):
    """The candidate that did best in its trial: its place among all that were priced, and the seconds of its trial."""

    place: int
    seconds: float


def try_best(values: Iterable[float], trial: Callable[[int], float], trials: int = 0) -> Tried | None:
    """The best of the candidates of least value by a trial; None if no trial ends.

    values: of all candidates [s]; infinite: not tried. trial: its seconds, infinite for a plan that fails.
    trials: how many are tried; 0: all.
    """
    listed = [*values]
    order = heapq.nsmallest(trials or len(listed), range(len(listed)), key=lambda place: (listed[place], place))
    tried = [Tried(place, trial(place)) for place in order if math.isfinite(listed[place])]
    best = min(tried, key=lambda one: one.seconds, default=None)
    return best if best is not None and math.isfinite(best.seconds) else None
