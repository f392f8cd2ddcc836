"""Coordinate descent over the assignments of a table, and bisection of a weight.

The descent is AutoDDL's (Chen et al. 2024, arXiv 2301.06813): sweep over the operators, choose the best
layout of each given all others, stop when a sweep changes nothing; start again from several seeds. The bisection is
Unity's search under a memory limit (FlexFlow, `src/runtime/graph.cc`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

from meshcast.experiments.planning.cores.elimination import Optimum
from meshcast.experiments.planning.table import Assignment, FactorTable

T = TypeVar("T")


def descend_table(table: FactorTable, starts: Iterable[Assignment] = (), restarts: int = 10, seed: int = 0) -> Optimum:
    """The best of the assignments at which sweeps end.

    starts: assignments to start from. restarts: further ones, drawn at random with `seed`.
    """
    draw, factors = random.Random(seed), table.touching()
    drawn = ({name: draw.randrange(len(options)) for name, options in table.choices.items()} for _ in range(restarts))
    best: Optimum | None = None
    visited = 0
    for start in (*starts, *drawn):
        now, changed = dict(start), True
        while changed:
            changed = False
            for name, options in table.choices.items():
                values = []
                for option in range(len(options)):
                    costs = [factor.at({**now, name: option}) for factor in factors[name]]
                    values.append(sum(table.microbatches * one.seconds + one.once for one in costs))
                visited += len(values)
                option = min(range(len(values)), key=values.__getitem__)
                if values[option] < values[now[name]] - 1e-15 * abs(values[now[name]]):
                    now[name], changed = option, True
        value = table.value(now)
        if best is None or value < best.value:
            best = Optimum(now, value, visited)
    if best is None:
        raise ValueError("descent needs a start: give starts, or restarts of at least 1")
    return best._replace(visited=visited)


def bisect_weight(solve: Callable[[float], T], fits: Callable[[T], bool], high: float, rounds: int = 10) -> T | None:
    """The solution of the smallest weight of memory that fits; None if that of weight `high` does not.

    solve: solution of the problem at a weight of memory [s/byte]. rounds: of bisection between 0 and `high`.
    """
    found = solve(0.0)
    if fits(found):
        return found
    best, low = solve(high), 0.0
    if not fits(best):
        return None
    for _ in range(rounds):
        middle = (low + high) / 2
        tried = solve(middle)
        if fits(tried):
            best, high = tried, middle
        else:
            low = middle
    return best


def largest_weight(table: FactorTable) -> float:
    """A weight of memory at which memory alone decides [s/byte]."""
    finite = [abs(one[math.inf > abs(one)]).max(initial=0.0) for one in map(table.objective, table.factors)]
    gaps = [float(one.nbytes.max() - one.nbytes.min()) for one in table.factors]
    return sum(map(float, finite)) / max(1.0, min((gap for gap in gaps if gap > 0), default=1.0)) * 10
