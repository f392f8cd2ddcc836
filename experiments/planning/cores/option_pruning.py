"""The optimum of a table of which most is never priced: options that cannot be part of it are left out first.

Costs that are not priced yet count as zero, so the least objective with an option is a lower bound of it. Options whose
bound is above a known objective go; then the smallest factor that is left is priced, and so on (reduced-cost fixing).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from experiments.planning.cores.elimination import eliminate, least_objectives
from experiments.planning.table import FactorTable, Kept, PendingFactor, PendingTable

ROUNDING = 1e-9


class LeastObjective(NamedTuple):
    """What no assignment of a table is below.

    value: [s]. exact: whether it is the optimum. kept: numbers of the options that may be part of it.
    """

    value: float
    exact: bool
    kept: Kept


def bound_objective(table: PendingTable, known: float, cells: int) -> LeastObjective:
    """The least objective of a table.

    known: the objective of some assignment [s]. cells: combinations of options that are priced at most; factors for
    which they do not suffice count as zero.

    Raises ValueError as `eliminate`, or if no assignment is as good as `known`.
    """
    kept: Kept = {name: range(len(options)) for name, options in table.choices.items()}
    priced, pending = FactorTable(table.choices, table.factors, table.microbatches), list(table.pending)
    while True:
        least = least_objectives(priced)
        places = {name: np.flatnonzero(own <= known * (1 + ROUNDING)) for name, own in least.items()}
        if empty := [name for name, own in places.items() if not len(own)]:
            raise ValueError(f"no option of {empty[0]} is part of an assignment of {known} s")
        kept = {name: [kept[name][place] for place in own] for name, own in places.items()}
        priced = priced.take({name: own.tolist() for name, own in places.items()})
        size, place = min(((_count_cells(one, kept), place) for place, one in enumerate(pending)), default=(0, -1))
        if not pending or size > cells:
            break
        cells -= size
        factors = [*priced.factors, pending.pop(place).price(kept)]
        priced = FactorTable(priced.choices, factors, priced.microbatches)
    found = eliminate(priced)
    assert found is not None  # the options that are kept are part of one
    return LeastObjective(found.value, not pending, kept)


def _count_cells(factor: PendingFactor, kept: Kept) -> int:
    found = 1
    for name in factor.scope:
        found *= len(kept[name])
    return found
