"""Mesh-TensorFlow: layout rules of the user, each a dim and the axis of the mesh that shards it everywhere.

A tensor is sharded along every dim that has a rule, and whole along all others; two dims of an operator may not share
an axis (Shazeer et al. 2018, arXiv 1811.02084). The default is the paper's Transformer: samples over the outer axes,
heads, feed-forward channels and vocabulary over the innermost. `auto-mtf` searches for rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from meshcast.experiments.planning.operator_planner import OperatorPlanner, physical_mesh
from meshcast.experiments.planning.planner import Proposal, SpaceOptimum
from meshcast.experiments.planning.problem import Dims, Problem, SearchBudget
from meshcast.experiments.planning.table import FactorTable, Optimum
from meshcast.hardware.errors import PlanError, nearest
from meshcast.simulator.ir.scheme import Paper

MODEL_DIMS = ("a", "f", "v")
"""Heads, feed-forward channels and vocabulary."""


class MeshTensorFlow(OperatorPlanner):
    """The planner with its rules.

    layout: the axis of each dim; empty: the paper's Transformer.
    mesh: sizes of the axes; empty: nodes and GPUs.
    """

    paper = Paper("arXiv:1811.02084", "Mesh-TensorFlow: Deep Learning for Supercomputers", 2018)
    restrictions = (
        "shard a dim of two tensors over different axes",
        "cut a pipeline",
        "look at time",
        "change the user's layout",
    )

    def __init__(self, layout: Mapping[str, str] | None = None, mesh: Mapping[str, int] | None = None) -> None:
        self.layout, self.mesh = dict(layout or {}), dict(mesh or {})

    def plan_axes(self, problem: Problem) -> Mapping[str, int]:
        """Returns the mesh that the rules are about."""
        return self.mesh or physical_mesh(problem)

    def meshes(self, problem: Problem) -> Iterator[Mapping[str, int]]:
        yield self.plan_axes(problem)

    def rules(self, axes: Mapping[str, int], known: set[str]) -> dict[str, str]:
        """Returns the axis of each dim. Raises PlanError for an axis or a dim that there is not."""
        *outer, inner = axes
        default = {dim: inner for dim in MODEL_DIMS} | ({"b": outer[0]} if outer else {})
        layout = self.layout or default
        for dim, axis in layout.items():
            if axis not in axes:
                raise PlanError(f"layout.{dim}", "the mesh has no such axis", nearest(axis, [*axes]), axis)
            if self.layout and dim not in known:
                raise PlanError(f"layout.{dim}", "no operator has such a dim", nearest(dim, sorted(known)), dim)
        return layout

    def solve(self, table: FactorTable, problem: Problem, budget: SearchBudget) -> Optimum | None:
        options: Mapping[str, tuple[Dims, ...]] = table.choices  # type: ignore[assignment]
        axes = self.plan_axes(problem)
        dims = {name: {dim for layout in layouts for _, dim in layout if dim} for name, layouts in options.items()}
        rules = self.rules(axes, set().union(*dims.values()))
        assignment = {}
        for name, layouts in options.items():
            axis_dims: dict[str, str] = {}
            for dim in sorted(dims[name] & rules.keys()):
                if other := axis_dims.get(rules[dim]):
                    rule = f"axis {rules[dim]} shards both {other} and {dim} of {name}"
                    raise PlanError("layout", rule, "Give one of the dims another axis, or none", dict(rules))
                axis_dims[rules[dim]] = dim
            wanted = tuple((axis, axis_dims.get(axis, "")) for axis in axes) if layouts != ((),) else ()  # experts
            if wanted not in layouts:
                rule = f"the dims of {name} do not divide by the axes of {axis_dims}"
                raise PlanError("layout", rule, "Choose a mesh whose axes divide them", dict(axes))
            assignment[name] = layouts.index(wanted)
        return self.price_fitting(table, problem, assignment, len(assignment))

    def bound_space(self, problem: Problem, proposal: Proposal, budget: SearchBudget) -> SpaceOptimum | None:
        """Bounds the space by its only plan, which the rules of the user leave."""
        return SpaceOptimum(proposal.value, "one plan")
