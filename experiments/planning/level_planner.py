"""Planners that divide devices level by level: each adds an axis, and keeps what the levels before have chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experiments.planning.cores.elimination import Optimum
from experiments.planning.operator_planner import OperatorPlanner, write_plan
from experiments.planning.planner import Proposal, SpaceOptimum
from experiments.planning.problem import Allowed, Dims, Problem, SearchBudget
from experiments.planning.table import FactorTable


class LevelRule:
    """The layouts at one level: outer axes are decided, inner ones shard nothing.

    allows: of the planner, asked of the axes so far. depth: of the level, from 1.
    decided: layouts of the levels before.
    """

    def __init__(self, allows: Allowed, depth: int, decided: Mapping[str, Dims]) -> None:
        self.allows, self.depth, self.decided = allows, depth, decided

    def __call__(self, name: str, layout: Dims) -> bool:
        outer, inner = layout[: self.depth], layout[self.depth :]
        fits = outer[: self.depth - 1] == self.decided.get(name, ())
        return fits and not any(dim for _, dim in inner) and self.allows(name, outer)

    def dims_per_axis(self, name: str, dims: Sequence[str], axes: int) -> list[Sequence[str]]:
        """For every axis the dims that are worth asking about, so that few layouts are."""
        outer = [(dim,) for _, dim in self.decided.get(name, ())]
        return [*outer, dims, *[("",)] * (axes - self.depth)]


class LevelPlanner(OperatorPlanner):
    """Customise by: widths, plan; allows where the space is smaller."""

    def widths(self, problem: Problem) -> list[int]:
        """Parts that every level divides the devices into, the outermost first; their product is their number."""
        raise NotImplementedError

    def plan_levels(self, problem: Problem, solve: Callable[[FactorTable], Optimum | None]) -> Proposal:
        """The plan after all levels.

        While the outer levels are decided, the inner ones shard nothing. Raises PlanError where a level has no plan.
        """
        widths = self.widths(problem) or [1]
        axes = {f"level{number}": width for number, width in enumerate(widths)}
        decided: dict[str, Dims] = {}
        visited, value, table, found = 0, math.inf, None, None
        for depth in range(1, len(widths) + 1):
            table = problem.operators(axes, LevelRule(self.allows, depth, dict(decided)))
            found = solve(table)
            if found is None:
                raise self.nothing_fits(problem, f"Level {depth} of {len(widths)} has no legal layouts: use fewer GPUs")
            visited, value = visited + found.visited, found.value
            decided = {name: layout[:depth] for name, layout in table.options(found.assignment).items()}  # type: ignore[index]
        assert table is not None and found is not None
        return Proposal(write_plan(problem, table, found.assignment, axes), value, visited)

    def find_space_optimum(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Not known: a table of all levels at once is too large."""
        return None
