"""PartIR's propagation along one axis: a dim spreads over the tensors that have it, and stops at conflicts.

An operator that is not decided takes the dim of its decided neighbours, if they agree and it has the dim. It is not
completed otherwise: what no dim reaches is whole (Alabed et al. 2025, arXiv 2401.11202). Neighbours are
operators of one factor of a table, so of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from meshcast.experiments.planning.table import FactorTable


def spread_dims(table: FactorTable, decided: Mapping[str, str], allows: Callable[[str, str], bool]) -> dict[str, str]:
    """The dims of all operators that propagation reaches, those decided included.

    decided: dims by operator. allows: whether an operator has a legal layout with a dim.
    Operators are decided in rounds: in each, all whose decided neighbours agree.
    """
    found = dict(decided)
    near: dict[str, set[str]] = {name: set() for name in table.choices}
    for factor in table.factors:
        for name in factor.scope:
            near[name].update(set(factor.scope) - {name})
    fresh: dict[str, str] = dict(found)
    while fresh:
        fresh = {}
        for name in table.choices.keys() - found.keys():
            dims = {found[other] for other in near[name] if found.get(other)}
            legal = {dim for dim in dims if allows(name, dim)}
            if len(legal) == 1:
                fresh[name] = legal.pop()
        found |= fresh
    return found
