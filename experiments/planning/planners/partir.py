"""PartIR: tactics of the user, applied in order; each shards a few operators along an axis, and propagates.

A tactic names a dim for some operators. Along its axis an operator that is not decided yet takes the dim of a tensor
that it shares with a decided operator; where neighbours have different dims, propagation stops (Alabed et al. 2025,
arXiv 2401.11202). What earlier tactics decided stays; what none reached is whole. The default is the paper's schedule
of a Transformer: samples over the outer axes, then Megatron's heads and feed-forward channels and the vocabulary over
the innermost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh
from meshcast.experiments.planning.planner import Proposal, SpaceOptimum
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.ir.scheme import Paper


class Tactic(NamedTuple):
    """A step of a schedule: an axis of the mesh, and the dim of each operator that it shards first."""

    axis: str
    dims: Mapping[str, str]


def batch_tactic(axis: str) -> Tactic:
    """Returns BP: the samples of the inputs."""
    return Tactic(axis, {"embedding": "b"})


def megatron_tactic(axis: str) -> Tactic:
    """Returns MP: the heads of attention and the channels of feed-forward layers."""
    return Tactic(axis, {"qkv": "a", "up": "f"})


def embedding_tactic(axis: str) -> Tactic:
    """Returns EMB: the vocabulary of the matrices at both ends."""
    return Tactic(axis, {"embedding": "v", "head": "v"})


class PartIR(OperatorPlanner):
    """tactics: the schedule; empty: the paper's schedule of a Transformer."""

    paper = Paper("arXiv:2401.11202", "PartIR: Composing SPMD Partitioning Strategies for Machine Learning", 2025)
    restrictions = (
        "cut a pipeline",
        "give layers layouts of their own",
        "store parameters sharded finer than their operators (the tactics Z2 and Z3)",
        "look at time",
    )

    def __init__(self, tactics: Sequence[Tactic] = ()) -> None:
        self.tactics = tuple(tactics)

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        axes = [*physical_mesh(problem)]
        default = [batch_tactic(axis) for axis in axes[:-1]]
        default += [megatron_tactic(axes[-1]), embedding_tactic(axes[-1])]
        known = [
            Tactic(axis, {name: dim for name, dim in dims.items() if name in table.choices}) for axis, dims in default
        ]
        assignment = self.apply(table, self.tactics or known, axes)
        return self.price_fitting(table, problem, assignment, len(assignment))

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds the space by its only plan, which the rules of the user leave."""
        return SpaceOptimum(proposal.value, "one plan")

    def apply(self, table: FactorTable, tactics: Sequence[Tactic], axes: Sequence[str]) -> dict[str, int]:
        """Returns the assignment after all tactics. Raises PlanError for an axis or an operator that there is not."""
        options: Mapping[str, Sequence[Dims]] = table.choices  # type: ignore[assignment]
        dims: dict[str, dict[str, str]] = {name: {} for name in options}
        for number, (axis, wanted) in enumerate(tactics):
            if axis not in axes:
                raise PlanError(f"tactics[{number}]", "the mesh has no such axis", nearest(axis, [*axes]), axis)
            for name, dim in wanted.items():
                if name not in options:
                    raise PlanError(f"tactics[{number}]", "no such operator", nearest(name, [*options]), name)
                layout = {**dims[name], axis: dim}
                if axis not in dims[name] and _place(options[name], layout, axes) is None:
                    rule = f"{name} has no layout in which {axis} shards {dim}"
                    raise PlanError(f"tactics[{number}]", rule, "Name a dim that it has and that divides", dim)
            fresh = {name: dim for name, dim in wanted.items() if axis not in dims[name]}

            def allows(name: str, dim: str, axis: str = axis) -> bool:
                return _place(options[name], {**dims[name], axis: dim}, axes) is not None

            before = {name: by_axis[axis] for name, by_axis in dims.items() if axis in by_axis}
            for name, dim in spread_dims(table, {**before, **fresh}, allows).items():
                dims[name][axis] = dim
        return {
            name: (options[name].index(_write_layout(by_axis, axes)) if by_axis else _whole(options[name]))
            for name, by_axis in dims.items()
        }


def _place(options: Sequence[Dims], layout: Mapping[str, str], axes: Sequence[str]) -> int | None:
    """Returns the number of the option that shards these dims and no others; None if it is not legal."""
    wanted = _write_layout(layout, axes)
    return [*options].index(wanted) if wanted in options else None


def _whole(options: Sequence[Dims]) -> int:
    """Returns the number of the option that shards nothing; operators of experts have no other."""
    return next(place for place, layout in enumerate(options) if not any(dim for _, dim in layout))


def _write_layout(layout: Mapping[str, str], axes: Sequence[str]) -> Dims:
    return tuple((axis, layout.get(axis, "")) for axis in axes)


def spread_dims(table: FactorTable, decided: Mapping[str, str], allows: Callable[[str, str], bool]) -> dict[str, str]:
    """Returns the dims of all operators that propagation along an axis reaches, those decided included.

    An operator that is not decided takes the dim of its decided neighbours, those of a common factor, if they agree
    and it has the dim; all that can do so at once. What no dim reaches is whole.

    decided: dims by operator. allows: whether an operator has a legal layout with a dim.
    """
    dims_of = dict(decided)
    near: dict[str, set[str]] = {name: set() for name in table.choices}
    for factor in table.factors:
        for name in factor.scope:
            near[name].update(set(factor.scope) - {name})
    fresh: dict[str, str] = dict(dims_of)
    while fresh:
        fresh = {}
        for name in table.choices.keys() - dims_of.keys():
            dims = {dims_of[other] for other in near[name] if dims_of.get(other)}
            legal = {dim for dim in dims if allows(name, dim)}
            if len(legal) == 1:
                fresh[name] = legal.pop()
        dims_of |= fresh
    return dims_of
