"""Propagation of layouts: from the operators that are decided to their neighbours, until all are.

The completion of GSPMD (Xu et al. 2021, arXiv 2105.04663, section 3.5), Automap and PartIR, on tables: an operator
takes the layout that reshards least between it and its decided neighbours, in the order of data flow. It needs no rules
for dims: what reshards nothing costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.table import Assignment, Factor, FactorTable


class Neighbours(NamedTuple):
    """The factors of several variables by variable, and the variables whose operators hold large weights."""

    shared: Mapping[str, list[Factor]]
    alone: Mapping[str, list[Factor]]
    with_weights: frozenset[str]


def find_neighbours(table: FactorTable) -> Neighbours:
    """Returns the factors by variable; the update of large weights takes over 1 % of all updates."""
    touching = table.touching()
    shared = {name: [factor for factor in factors if len(factor.scope) > 1] for name, factors in touching.items()}
    alone = {name: [factor for factor in factors if len(factor.scope) == 1] for name, factors in touching.items()}
    updates = {name: sum(float(factor.once.min()) for factor in factors) for name, factors in alone.items()}
    limit = 0.01 * sum(updates.values())
    return Neighbours(shared, alone, frozenset(name for name, once in updates.items() if once > limit))


def propagate(table: FactorTable, decided: Assignment, near: Neighbours) -> dict[str, int]:
    """Completes decided options to an assignment.

    Variables follow in the order of the table, as soon as a neighbour is decided, else the first. A variable takes the
    option of the least conversions with decided neighbours, of several the cheapest by itself.
    """
    assignment = dict(decided)
    left = [name for name in table.choices if name not in assignment]
    while left:
        ready = [name for name in left if any(set(factor.scope) & assignment.keys() for factor in near.shared[name])]
        if not ready:
            ready = left[:1]
        for name in ready[:1]:
            assignment[name] = _best_option(table, name, assignment, near)
            left.remove(name)
    return assignment


def _best_option(table: FactorTable, name: str, assignment: Assignment, near: Neighbours) -> int:
    total = np.zeros(len(table.choices[name]))
    for factor in near.shared[name]:
        if not set(factor.scope) - {name} & assignment.keys():
            continue
        # Undecided readers are taken as they would be at best.
        array = table.objective(factor)
        index = tuple(assignment.get(other, slice(None)) if other != name else slice(None) for other in factor.scope)
        cells = array[index]
        open_axes = [other for other in factor.scope if other == name or other not in assignment]
        axes = tuple(place for place, other in enumerate(open_axes) if other != name)
        total += cells.min(axis=axes) if axes else cells
    cost = sum((table.objective(factor) for factor in near.alone[name]), np.zeros(total.shape))
    return int(np.lexsort((cost, np.round(total, 12)))[0])
