"""Planners of operators: they choose a layout for every operator of a table, on some meshes."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import ClassVar

from meshcast.experiments.planning.planner import Planner, PlanProof, Proposal, SpaceOptimum
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.table import Assignment, FactorTable, Optimum
from meshcast.hardware.errors import PlanError


class LayoutPlanner(Planner):
    """Chooses layouts of operators. Customise by: choose_plan; allows where the space is smaller.

    dims: dims that it may shard; empty: all.
    """

    modes: ClassVar[tuple[str, ...]] = ("ours",)
    dims: ClassVar[frozenset[str]] = frozenset()

    def allows(self, name: str, layout: Dims) -> bool:
        return not self.dims or all(not dim or dim in self.dims for _, dim in layout)


class OperatorPlanner(LayoutPlanner):
    """Chooses the layouts of all operators; the best of its meshes counts.

    Customise by: solve; allows and meshes where the space is smaller.

    method: how it proves an optimum.
    """

    method: ClassVar[str] = ""

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        """Yields the meshes that it tries: by default an axis inside a node and an axis over the nodes."""
        yield physical_mesh(problem)

    @abstractmethod
    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        """Returns the best assignment of a table; None if it has none."""

    def price_fitting(self, table: FactorTable, problem: Problem, assignment: Assignment, visited: int) -> Optimum:
        """Returns an assignment with its value, infinite if it does not fit into the memory."""
        fits = table.cost(assignment).nbytes <= problem.memory
        return Optimum(dict(assignment), table.value(assignment) if fits else math.inf, visited)

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        best: Proposal | None = None
        visited, bounds = 0, []
        for axes in self.meshes(problem):
            table = problem.operators(axes, self.allows)
            solved = self.solve(table, problem, budget) or Optimum({}, math.inf, 0, math.inf)
            visited += solved.visited
            bounds.append(solved.bound)
            if solved.value < (best.value if best else math.inf):
                best = Proposal(write_plan(problem, table, solved.assignment, axes), solved.value, visited)
        if best is None:
            raise self.nothing_fits(problem, "Give more GPUs, or more micro-batches")
        proof = None if any(map(math.isnan, bounds)) else PlanProof(min(bounds), best.value, self.method)
        return best._replace(visited=visited, proof=proof)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds the space, where nothing is proven, by the best layouts within the memory of a GPU."""
        job = getattr(problem, "bound_layouts", None)
        if proposal.proof is not None or job is None:
            return super().bound_space(problem, proposal, budget)
        optima = [job(table) for table in self.space(problem)]
        best = min(optima, key=lambda optimum: optimum.value, default=None)
        return best if best is not None and math.isfinite(best.value) else None

    def space(self, problem: Problem) -> Iterator[FactorTable]:
        """Returns the tables of its meshes, with the layouts that it may choose."""
        return (problem.operators(axes, self.allows) for axes in self.meshes(problem))


def physical_mesh(problem: Problem) -> dict[str, int]:
    """Returns axis x over the nodes and y inside a node; x alone on a single node."""
    job = getattr(problem, "job", None)
    inside = min(problem.gpus, job.cluster.gpus_per_node) if job is not None else problem.gpus
    return {"x": problem.gpus // inside, "y": inside} if problem.gpus > inside else {"x": problem.gpus}


def write_plan(problem: Problem, table: FactorTable, assignment: Assignment, axes: Mapping[str, int]) -> dict:
    """Returns the keys ``plan`` and ``batch`` of the job that executes an assignment."""
    annotate = getattr(problem, "annotate", None)
    if annotate is None:
        raise PlanError(f"problem {problem.name}", "its layouts are no plan of a job", "Give the planner a job")
    return dict(annotate(table, assignment, axes))
