"""Planners that divide devices level by level: each adds an axis, and keeps what the levels before have chosen."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations_with_replacement, permutations, product

from meshcast.experiments.planning.cores.elimination import bound_objective, eliminate
from meshcast.experiments.planning.operator_planner import LayoutPlanner, physical_mesh, write_plan
from meshcast.experiments.planning.planner import Proposal, SpaceOptimum
from meshcast.experiments.planning.problem import Allowed, Dims, Problem, SearchBudget

MAX_LAYOUTS, MAX_CELLS = 1_000, 250_000
"""Layouts of an operator, and combinations of layouts, that are priced at most to find the optimum of a space."""

BOUND = "elimination, some conversions free"
"""Method of a bound of a space, some of whose conversions have no price."""


class LevelRule:
    """The layouts at a level: outer axes are decided, inner ones shard nothing.

    allows: of the planner, asked of the axes so far.
    depth: of the level, from 1.
    decided: layouts of the levels before.
    """

    def __init__(self, allows: Allowed, depth: int, decided: Mapping[str, Dims]) -> None:
        self.allows, self.depth, self.decided = allows, depth, decided

    def __call__(self, name: str, layout: Dims) -> bool:
        outer, inner = layout[: self.depth], layout[self.depth :]
        fits = outer[: self.depth - 1] == self.decided.get(name, ())
        return fits and not any(dim for _, dim in inner) and self.allows(name, outer)

    def candidates(self, name: str, dims: Sequence[str], axes: Sequence[str]) -> Iterator[Dims]:
        outer, inner = self.decided.get(name, ()), [(axis, "") for axis in axes[self.depth :]]
        return ((*outer, (axes[self.depth - 1], dim), *inner) for dim in dims)


class SpaceRule:
    """The layouts of all levels at once.

    allows: of the planner.
    groups: numbers of levels that are interchangeable, see `group_levels`.
    kept: layouts that are allowed in any order of interchangeable levels, of every operator; None: all, in
        a single order.
    """

    def __init__(
        self, allows: Allowed, groups: Sequence[Sequence[int]], kept: Mapping[str, Sequence[Dims]] | None = None
    ) -> None:
        self.allows, self.groups, self.kept = allows, groups, kept

    def __call__(self, name: str, layout: Dims) -> bool:
        return self.allows(name, layout)

    def candidates(self, name: str, dims: Sequence[str], axes: Sequence[str]) -> Iterator[Dims]:
        """Returns the layouts that are worth asking about."""
        if self.kept is None:
            usable = [dim for dim in dims if self.allows(name, ((axes[0], dim),))]
            ways = [[*combinations_with_replacement(usable, len(group))] for group in self.groups]
            return (self._lay_out(axes, choice) for choice in product(*ways))
        layouts: dict[Dims, None] = {}
        for layout in self.kept[name]:
            ways = [sorted({*permutations(layout[level][1] for level in group)}) for group in self.groups]
            layouts.update((self._lay_out(axes, choice), None) for choice in product(*ways))
        return iter(layouts)

    def _lay_out(self, axes: Sequence[str], choice: Sequence[Sequence[str]]) -> Dims:
        """Returns the layout in which the levels of every group shard these dims."""
        dims = {
            level: dim
            for group, sharded in zip(self.groups, choice, strict=True)
            for level, dim in zip(group, sharded, strict=True)
        }
        return tuple((axis, dims[level]) for level, axis in enumerate(axes))


def group_levels(widths: Sequence[int], inside: int) -> list[list[int]]:
    """Returns the numbers of the interchangeable levels: of equal width, inside a node of `inside` GPUs or over nodes.

    What an operator alone costs does not depend on which of them shards a dim; conversions between operators may, by
    the order of their collectives.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for level, width in enumerate(widths):
        stride = math.prod(widths[level + 1 :])
        place = "node" if stride * width <= inside else "nodes" if stride % inside == 0 else level
        groups.setdefault((width, place), []).append(level)
    return [*groups.values()]


class LevelPlanner(LayoutPlanner):
    """Customise by: widths; allows where the space is smaller."""

    @abstractmethod
    def widths(self, problem: Problem) -> list[int]:
        """Returns the parts of every level, the outermost first; their product is the number of devices."""

    def choose_plan(self, problem: Problem, budget: SearchBudget) -> Proposal:
        """Returns the plan after all levels.

        While the outer levels are decided, the inner ones shard nothing. Raises PlanError where a level has no plan.
        """
        widths = self.widths(problem) or [1]
        axes = {f"level{number}": width for number, width in enumerate(widths)}
        decided: dict[str, Dims] = {}
        visited, value, table, optimum = 0, math.inf, None, None
        for depth in range(1, len(widths) + 1):
            table = problem.operators(axes, LevelRule(self.allows, depth, dict(decided)))
            optimum = eliminate(table)
            if optimum is None:
                raise self.nothing_fits(problem, f"Level {depth} of {len(widths)} has no legal layouts: use fewer GPUs")
            visited, value = visited + optimum.visited, optimum.value
            decided = {name: layout[:depth] for name, layout in table.options(optimum.assignment).items()}  # type: ignore[index]
        assert table is not None and optimum is not None
        return Proposal(write_plan(problem, table, optimum.assignment, axes), value, visited)

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Returns the best layouts of all levels at once, see `bound_levels`."""
        return bound_levels(problem, self.widths(problem), self.allows, proposal.value)


def bound_levels(problem: Problem, widths: Sequence[int], allows: Allowed, known: float) -> SpaceOptimum | None:
    """Returns the best layouts of all levels at once, without a limit of memory, or a bound where they are too many;
    None without a job or levels. Raises OutOfTime.

    Layouts of operators that differ by the order of interchangeable levels are priced once, to see which may be part of
    a plan as good as a known one; of those all orders are.

    known: value of a plan of the space [s].
    """
    price = getattr(problem, "pending_operators", None)
    if price is None or not widths:
        return None
    axes = {f"level{number}": width for number, width in enumerate(widths)}
    groups = group_levels(widths, [*physical_mesh(problem).values()][-1])
    table = price(axes, SpaceRule(allows, groups))
    alone = bound_objective(table._replace(pending=()), known, 0)
    kept = {name: [table.choices[name][place] for place in numbers] for name, numbers in alone.kept.items()}
    orders = {name: sum(1 for _ in SpaceRule(allows, groups, kept).candidates(name, (), [*axes])) for name in kept}
    if max(orders.values()) > MAX_LAYOUTS:
        return SpaceOptimum(alone.value, BOUND)
    bounded = bound_objective(price(axes, SpaceRule(allows, groups, kept)), known, MAX_CELLS)
    return SpaceOptimum(bounded.value, "pruned elimination" if bounded.exact else BOUND)
