"""Additive tables: variables with options, and factors that price combinations of the options of a few variables.

A *variable* is an operator (or the residual stream), its options the layouts that it may have. A *factor* is an
operator alone, or a tensor with its producer and all its readers: their conversions of layout are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

Option = Hashable
"""A choice of a variable: for an operator the dims that the axes of the mesh shard."""

Assignment = Mapping[str, int]
"""The number of the option that each variable has."""

Kept = Mapping[str, Sequence[int]]
"""The numbers of the options that variables keep."""


class Cost(NamedTuple):
    """Cost of an assignment.

        seconds: of a micro-batch [s].
    once: of a step, besides its micro-batches [s].
        nbytes: memory of a rank [bytes].
    """

    seconds: float
    once: float
    nbytes: float


class Factor(NamedTuple):
    """The cost of every combination of the options of a few variables. All arrays have an axis for each variable.

        scope: the variables.
        seconds: seconds of a micro-batch; infinite where the combination is not allowed [s].
        once: seconds of a step, besides its micro-batches [s].
    nbytes: memory of a rank [bytes].
    """

    scope: tuple[str, ...]
    seconds: np.ndarray
    once: np.ndarray
    nbytes: np.ndarray

    def at(self, assignment: Assignment) -> Cost:
        place = tuple(assignment[name] for name in self.scope)
        return Cost(float(self.seconds[place]), float(self.once[place]), float(self.nbytes[place]))

    def objective(self, microbatches: int) -> np.ndarray:
        """Returns the seconds of a step of every combination [s]."""
        return microbatches * self.seconds + self.once

    def take(self, kept: Kept) -> Factor:
        """Returns the factor of the kept options alone; variables that are not listed keep all."""
        arrays = []
        for array in (self.seconds, self.once, self.nbytes):
            for place, name in enumerate(self.scope):
                if name in kept:
                    array = np.take(array, kept[name], axis=place)
            arrays.append(array)
        return Factor(self.scope, *arrays)


class FactorTable:
    """A table whose objective is the sum of its factors: m x seconds + once, with m micro-batches in a step.

    choices: the options of every variable.
    factors: their costs.
    microbatches: m.
    Raises ValueError for a factor whose arrays do not have the shape that its scope says.
    """

    def __init__(
        self, choices: Mapping[str, Sequence[Option]], factors: Sequence[Factor], microbatches: int = 1
    ) -> None:
        self.choices = {name: tuple(options) for name, options in choices.items()}
        self.factors, self.microbatches = tuple(factors), microbatches
        for factor in self.factors:
            shape = tuple(len(self.choices[name]) for name in factor.scope)
            if any(array.shape != shape for array in factor[1:]):
                shapes = [array.shape for array in factor[1:]]
                raise ValueError(f"the factor over {factor.scope} must have arrays of shape {shape}, it has {shapes}")

    @property
    def assignments(self) -> float:
        return float(math.prod(len(options) for options in self.choices.values()))

    def objective(self, factor: Factor) -> np.ndarray:
        """Returns the seconds of a step of every combination of a factor [s]."""
        return factor.objective(self.microbatches)

    def cost(self, assignment: Assignment) -> Cost:
        costs = [factor.at(assignment) for factor in self.factors]
        return Cost(*(sum(column) for column in zip(*costs, strict=True))) if costs else Cost(0.0, 0.0, 0.0)

    def value(self, assignment: Assignment) -> float:
        """Returns the objective of an assignment [s]."""
        cost = self.cost(assignment)
        return self.microbatches * cost.seconds + cost.once

    def options(self, assignment: Assignment) -> dict[str, Option]:
        """Returns the options that an assignment chooses, by variable."""
        return {name: self.choices[name][number] for name, number in assignment.items()}

    def restrict(self, allowed: Callable[[str, Option], bool]) -> FactorTable:
        """Returns the table of the allowed options alone. This is how a planner declares a restriction of its space.

        allowed: of a variable and an option.
        Raises ValueError for a variable that keeps no option.
        """
        kept = {
            name: [number for number, option in enumerate(options) if allowed(name, option)]
            for name, options in self.choices.items()
        }
        if empty := [name for name, numbers in kept.items() if not numbers]:
            raise ValueError(f"the restriction leaves {empty[0]} no option; it has {list(self.choices[empty[0]])}")
        return self.take(kept)

    def take(self, kept: Kept) -> FactorTable:
        """Returns the table of the kept options of every variable alone."""
        choices = {name: [self.choices[name][number] for number in numbers] for name, numbers in kept.items()}
        return FactorTable(choices, [factor.take(kept) for factor in self.factors], self.microbatches)

    def touching(self) -> dict[str, list[Factor]]:
        factors: dict[str, list[Factor]] = {name: [] for name in self.choices}
        for factor in self.factors:
            for name in factor.scope:
                factors[name].append(factor)
        return factors


class Optimum(NamedTuple):
    """The best assignment of a table that a solver has met.

    assignment: the option of every variable.
    value: its objective; infinite: none is allowed [s].
    visited: candidates, nodes, or entries of tables that were priced.
    bound: no assignment has a lower objective [s]; nan: nothing is proven.
    """

    assignment: dict[str, int]
    value: float
    visited: int
    bound: float = math.nan


class PendingFactor(NamedTuple):
    """A factor that is not priced yet.

    scope: its variables.
    price: of the combinations of the kept options of these, no less than zero.
    """

    scope: tuple[str, ...]
    price: Callable[[Kept], Factor]


class PendingTable(NamedTuple):
    """A table of which only some factors are priced.

    choices: the options of every variable.
    factors: those that are priced.
    pending: the others.
    microbatches: of a step.
    """

    choices: Mapping[str, Sequence[Option]]
    factors: Sequence[Factor]
    pending: Sequence[PendingFactor]
    microbatches: int = 1

    def price_all(self) -> FactorTable:
        kept = {name: range(len(options)) for name, options in self.choices.items()}
        return FactorTable(
            self.choices, [*self.factors, *(factor.price(kept) for factor in self.pending)], self.microbatches
        )
