"""The solver of integer programs: HiGHS, as scipy has it. The extra `solvers` installs scipy."""

from __future__ import annotations

from typing import Any, NamedTuple

from meshcast.hardware.documents.optional_package import import_optional


class Solver(NamedTuple):
    """What integer programs use of scipy."""

    milp: Any
    Bounds: Any
    LinearConstraint: Any
    coo_matrix: Any


def load_solver() -> Solver:
    """The solver. Raises PlanError if scipy is not installed."""
    user = "planners with integer programs"
    optimize = import_optional("scipy.optimize", "solvers", user)
    sparse = import_optional("scipy.sparse", "solvers", user)
    return Solver(optimize.milp, optimize.Bounds, optimize.LinearConstraint, sparse.coo_matrix)
