"""The layouts of the operators of a stage on some GPUs, by programs over its own layers.

A stage has some layers of the model, and perhaps its embedding or its output layer. Its table is that of `list_factors`
with as many layers: the objective of layouts is linear in their number. So what is optimal for two numbers of layers is
so for all between them, and few programs give the optima of all ranges.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from meshcast.experiments.planning.cores.elimination import eliminate
from meshcast.experiments.planning.cores.ilp import solve_table
from meshcast.experiments.planning.pricing.operators import UnitTable, list_units
from meshcast.experiments.planning.problem import Allowed, Dims
from meshcast.experiments.planning.table import Assignment, Factor, FactorTable, Optimum
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.plan.plan import Plan

StageLayout = Mapping[str, Dims]
"""The layout of every operator that a stage may have."""


class StageOperators:
    """The operators of a stage on a mesh.

    plan: a plan of the whole model as a single stage on the mesh. axes: that shard.
    """

    def __init__(
        self, plan: Plan, axes: tuple[str, ...], shared: SharedWork, microbatches: int, allowed: Allowed
    ) -> None:
        units = list_units(plan, axes, shared, allowed)
        self.microbatches, self.depth = microbatches, plan.model_parts.model.layers
        self.choices, self.tied = units.choices, units.tie()
        kept = {name: range(len(options)) for name, options in self.choices.items()}

        def price(tables: list[UnitTable]) -> list[Factor]:
            operators = [factor for table in tables for factor in table.operator_factors()]
            return operators + [factor.price(kept) for table in tables for factor in table.tensor_factors()]

        self.begin, self.layers, self.end = (price([*tables]) for tables in (units.begin, units.layers, units.end))

    def table(self, layers: int, begin: bool, end: bool) -> FactorTable:
        """Returns the table of a stage of so many layers, of the kinds that the model has in their shares, with the
        embedding and with the output layer."""
        share = layers / self.depth
        factors = [Factor(factor.scope, *(share * array for array in factor[1:])) for factor in self.layers]
        factors += [*(self.begin if begin else ()), *(self.end if end else ()), *(self.tied if begin and end else ())]
        names = dict.fromkeys(name for factor in factors for name in factor.scope)
        return FactorTable({name: self.choices[name] for name in names}, factors, self.microbatches)

    def layouts(self, memory: float) -> list[StageLayout]:
        """Returns the layouts that are optimal for some number of layers, with or without the ends of the model; where
        the fastest for the whole model needs more than a memory, the fastest within it, too [bytes]."""
        distinct: dict[tuple[Dims, ...], StageLayout] = {}
        for begin, end in product((False, True), repeat=2):
            for assignment in self._optima(begin, end):
                layout = self._complete(assignment)
                distinct.setdefault(tuple(layout[name] for name in sorted(layout)), layout)
        whole = self.table(self.depth, True, True)
        fastest = eliminate(whole)
        if fastest is not None and whole.cost(fastest.assignment).nbytes > memory:
            within = solve_table(whole, memory)
            if within is not None:
                layout = self._complete(within.assignment)
                distinct.setdefault(tuple(layout[name] for name in sorted(layout)), layout)
        return [*distinct.values()]

    def _optima(self, begin: bool, end: bool) -> Iterator[Assignment]:
        """Yields the optima of 1 to all layers: numbers between two of equal optimum have the same."""

        def solve(layers: int) -> Optimum | None:
            return eliminate(self.table(layers, begin, end))

        pending = [(1, solve(1), self.depth, solve(self.depth))]
        while pending:
            low, fewest, high, most = pending.pop()
            if fewest is None or most is None:
                return
            yield from (fewest.assignment, most.assignment)
            table = self.table(low, begin, end)
            same = table.value(most.assignment) <= fewest.value * (1 + 1e-9)
            if not same and high - low > 1:
                middle = solve((low + high) // 2)
                pending += [(low, fewest, (low + high) // 2, middle), ((low + high) // 2, middle, high, most)]

    def _complete(self, assignment: Assignment) -> StageLayout:
        """Returns a layout with the best of the operators at the ends that an assignment has not."""
        whole = self.table(self.depth, True, True)
        kept = {
            name: [assignment[name]] if name in assignment else range(len(options))
            for name, options in whole.choices.items()
        }
        best = eliminate(whole.take(kept))
        numbers = {name: kept[name][place] for name, place in best.assignment.items()} if best else assignment
        return {name: self.choices[name][number] for name, number in numbers.items()}
