"""Tables as integer programs, solved by HiGHS: a binary for each option, a variable for each cell of a factor.

The linearisation is Alpa's (Zheng et al. 2022, arXiv 2201.12023, section 4.2, equations 1-3), for factors of any number
of variables: the cells of a factor sum up, along every variable, to the binaries of its options. Options that a factor
does not tell apart share a cell.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from meshcast.experiments.planning.clock import OutOfTime, seconds_left
from meshcast.experiments.planning.table import Factor, FactorTable, Optimum
from meshcast.hardware.documents.optional_package import import_optional


class Solver(NamedTuple):
    """What integer programs use of scipy, which the extra `solvers` installs."""

    milp: Any
    Bounds: Any
    LinearConstraint: Any
    coo_matrix: Any


def load_solver() -> Solver:
    """Imports the solver. Raises PlanError if scipy is not installed."""
    user = "planners with integer programs"
    optimize = import_optional("scipy.optimize", "solvers", user)
    sparse = import_optional("scipy.sparse", "solvers", user)
    return Solver(optimize.milp, optimize.Bounds, optimize.LinearConstraint, sparse.coo_matrix)


def solve_table(table: FactorTable, memory: float = math.inf) -> Optimum | None:
    """Minimises the objective of a table within the memory of a rank, by branch and bound; None if nothing fits.

    memory: of a rank [bytes].
    Raises OutOfTime if time runs out before an assignment is known.
    """
    solver, program = load_solver(), _Program(table)
    rows, matrix, low, high = program.constraints(solver)
    constraints = [solver.LinearConstraint(matrix, low, high)] if rows else []
    if math.isfinite(memory):
        # In units of the limit, as the solver's tolerances are absolute.
        constraints.append(solver.LinearConstraint(np.array([program.nbytes]) / memory, -np.inf, 1.0))
    scale = max(map(abs, program.costs), default=1.0) or 1.0
    solution = solver.milp(
        np.array(program.costs) / scale,
        integrality=np.array(program.integral),
        bounds=solver.Bounds(0, np.array(program.most)),
        constraints=constraints,
        options={"time_limit": seconds_left(), "mip_rel_gap": 1e-9},
    )
    if solution.status == 2:
        return None
    if solution.x is None:
        raise OutOfTime(f"the solver has found no assignment in its time: {solution.message}")
    assignment = {
        name: int(np.argmax(solution.x[start : start + len(table.choices[name])]))
        for name, start in program.starts.items()
    }
    bound = solution.mip_dual_bound if solution.mip_dual_bound is not None else solution.fun
    return Optimum(assignment, table.value(assignment), int(solution.mip_node_count or 0), float(bound) * scale)


class _Program:
    """Variables and constraints of a table: first the binaries of all options, then the cells of its factors."""

    def __init__(self, table: FactorTable) -> None:
        self.starts: dict[str, int] = {}
        self.costs: list[float] = []
        self.nbytes: list[float] = []
        self.integral: list[int] = []
        self.most: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        self.sums: list[float] = []
        for name, options in table.choices.items():
            self.starts[name] = self._add(np.zeros(len(options)), np.zeros(len(options)), integral=1)
            self._require([(self.starts[name] + place, 1.0) for place in range(len(options))], 1.0)
        for factor in table.factors:
            self._add_factor(table, factor)

    def constraints(self, solver: Solver) -> tuple[int, Any, np.ndarray, np.ndarray]:
        """Returns the number of rows, their matrix, and the sums that they must have."""
        rows, columns, values = zip(*self.entries, strict=True) if self.entries else ((), (), ())
        matrix = solver.coo_matrix((values, (rows, columns)), shape=(len(self.sums), len(self.costs)))
        return len(self.sums), matrix.tocsr(), np.array(self.sums), np.array(self.sums)

    def _add(self, costs: np.ndarray, nbytes: np.ndarray, integral: int) -> int:
        """Adds variables; returns the place of the first. Those of infinite cost must be 0."""
        start, allowed = len(self.costs), np.isfinite(costs)
        self.costs += np.where(allowed, costs, 0.0).tolist()
        self.nbytes += nbytes.tolist()
        self.integral += [integral] * len(costs)
        self.most += allowed.astype(float).tolist()
        return start

    def _require(self, terms: list[tuple[int, float]], total: float) -> None:
        self.entries += [(len(self.sums), place, value) for place, value in terms]
        self.sums.append(total)

    def _add_factor(self, table: FactorTable, factor: Factor) -> None:
        costs, nbytes = table.objective(factor), factor.nbytes
        classes = []
        for axis in range(costs.ndim):
            kept, members = _merge_equal(costs, nbytes, axis)
            costs, nbytes = np.take(costs, kept, axis), np.take(nbytes, kept, axis)
            classes.append(members)
        start = self._add(costs.ravel(), nbytes.ravel(), integral=0)
        if costs.size == 1 and math.isfinite(costs.item()):
            self._require([(start, 1.0)], 1.0)
            return
        places = start + np.arange(costs.size).reshape(costs.shape)
        for axis, name in enumerate(factor.scope):
            for number in range(costs.shape[axis]):
                cells = np.take(places, number, axis).ravel()
                options = np.flatnonzero(classes[axis] == number) + self.starts[name]
                self._require(
                    [*((int(cell), 1.0) for cell in cells), *((int(option), -1.0) for option in options)], 0.0
                )


def _merge_equal(costs: np.ndarray, nbytes: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns options along an axis that a factor tells apart, and for every option the class that it belongs to."""
    rows = [np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (costs, nbytes)]
    _, kept, members = np.unique(np.hstack(rows), axis=0, return_index=True, return_inverse=True)
    return kept, members.ravel()
