"""Groups of ranks of another context-parallel degree than the plan's: views of its mesh, and schemes over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.scheme import Scheme
from meshcast.simulator.job.job import LongPlan, SchemeEntry

DATA, SEQUENCE, INSIDE, OUTSIDE = "dp", "cp", "inside", "outside"
"""Axes of the view of a degree, before a hyphen and the degree."""


def degree_views(plan: LongPlan, degrees: Iterable[int], region: Iterable[str]) -> dict[str, Mapping[str, int]]:
    """Returns the views of a mesh that groups of some context-parallel degrees have, by their names.

    region: axes of the mesh of a pipeline stage, outermost first; those of data and sequence schemes are neighbours.
    """
    axes = list(region)
    row = [i for i, axis in enumerate(axes) if axis in _row(plan)]
    sizes = [plan.mesh[axis] for axis in axes]
    outside, inside = math.prod(sizes[: row[0]]), math.prod(sizes[row[-1] + 1 :])
    ranks = math.prod(sizes[i] for i in row)
    return {
        _view(degree): {
            f"{OUTSIDE}-{degree}": outside,
            f"{DATA}-{degree}": ranks // degree,
            f"{SEQUENCE}-{degree}": degree,
            f"{INSIDE}-{degree}": inside,
        }
        for degree in degrees
    }


def _view(degree: int) -> str:
    return f"groups of {degree}"


def _row(plan: LongPlan) -> set[str]:
    """Returns the axes of the data and sequence schemes of a plan."""
    return {axis for entry in plan.schemes if entry.use.startswith(("data/", "sequence/")) for axis in entry.over}


def parts_of_degree(mesh: Mesh, degree: int) -> dict[str, tuple[str, ...]]:
    """Returns by family the parts of the mesh over which its schemes act in groups of a degree."""
    return {"data": mesh.parts(f"{DATA}-{degree}"), "sequence": mesh.parts(f"{SEQUENCE}-{degree}")}


def schemes_of_degree(schemes: Iterable[Scheme], mesh: Mesh, degree: int) -> tuple[Scheme, ...]:
    """Returns the schemes of a plan as they act in groups of a context-parallel degree."""
    parts = parts_of_degree(mesh, degree)
    return tuple(_over_parts(scheme, parts) if scheme.family in parts else scheme for scheme in schemes)


def _over_parts(scheme: Scheme, parts: Mapping[str, tuple[str, ...]]) -> Scheme:
    sequence_axes = parts["sequence"] if scheme.family == "data" else ()
    made_of = scheme.options, scheme.mesh, scheme.framework, sequence_axes, scheme.pipelined
    return type(scheme)(parts[scheme.family], *made_of)


def plan_of_degree(plan: LongPlan, mesh: Mesh, degree: int) -> LongPlan:
    """Returns the long form of a plan in groups of a context-parallel degree, with the parts of its mesh as axes."""
    parts = parts_of_degree(mesh, degree)

    def of_degree(entry: SchemeEntry) -> SchemeEntry:
        family = entry.use.partition("/")[0]
        over = parts.get(family, mesh.parts(entry.over))
        return entry.model_copy(update={"over": over})

    schemes = tuple(map(of_degree, plan.schemes))
    return plan.model_copy(update={"mesh": dict(mesh.axes), "schemes": schemes})
