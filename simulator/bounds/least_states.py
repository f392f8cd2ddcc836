"""States of devices at least, from shares of the units of a model and nothing lowered: what a data scheme keeps of a
parameter, and how long its collectives take a parameter at least."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshcast.simulator.bounds.collectives import UnitCollectives
from meshcast.simulator.bounds.device_states import DeviceStates
from meshcast.simulator.bounds.schedule_bound import StagePlaces
from meshcast.simulator.bounds.unit_prices import Stages, UnitLayout
from meshcast.simulator.plan.plan import Plan


class ParameterCosts(NamedTuple):
    """What a data scheme does with a parameter, at least.

    nbytes: states on a GPU [bytes].
    whole: gathered weights and unreduced gradients of a sharded parameter that live from the first to the last
        micro-batch [bytes].
    reductions, gathers: of its gradient and of its weight, by the axes of the sum [s].
    each_reduction, each_gather: how often they happen in a micro-batch; 0: once a step.
    unit: layers whose weights are gathered together.
    """

    nbytes: float
    whole: tuple[float, float]
    reductions: dict[tuple[str, ...], float]
    gathers: dict[tuple[str, ...], float]
    each_reduction: int
    each_gather: int
    unit: int


def least_states(
    plan: Plan, layout: UnitLayout, stages: Stages, place: StagePlaces, costs: ParameterCosts
) -> DeviceStates:
    """Returns the states of the devices of a pipeline, at least.

    plan: a plan with its degrees.
    stages: units of the parts of the model.
    """
    sharded = sum((sizes for axes, sizes in layout.matrices.items() if plan.mesh.size(axes) > 1), 0 * layout.elements)
    held, kept = (
        np.array([sum(elements[kind] * count for kind, count in stage) for stage in stages])[place.part]
        for elements in (layout.elements, sharded)
    )
    devices = np.zeros(plan.ranks.devices)
    return DeviceStates(
        resident=place.sum(held) * costs.nbytes,
        update=devices,
        summed=devices,
        collectives=(_least_collectives(layout, stages, costs),),
        whole=np.outer(costs.whole, kept),
        plan=plan,
    )


def _least_collectives(layout: UnitLayout, stages: Stages, costs: ParameterCosts) -> UnitCollectives:
    reduced, gathered = (
        sum((seconds[axes] * sizes[axes] for axes in sizes), np.zeros(len(layout.elements)))
        for seconds, sizes in ((costs.reductions, layout.reduced), (costs.gathers, layout.matrices))
    )
    of_units = np.repeat(*np.transpose([run for stage in stages for run in stage]))
    nothing = np.zeros(len(of_units))
    if costs.each_reduction:
        reduced, gathered = costs.each_reduction * reduced[of_units], costs.each_gather * gathered[of_units]
        # The first unit of a pass, of a layer or several, may be gathered beside the pass before.
        between = gathered if costs.unit == 1 else nothing
        return UnitCollectives(nothing, nothing, nothing, reduced + gathered, reduced, between)
    first = gathered[of_units] if any(costs.whole) else nothing
    return UnitCollectives(first, nothing, reduced[of_units], nothing, nothing, nothing)
