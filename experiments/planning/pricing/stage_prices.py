"""The table of a model's stages at the prices of the forecast: every range of layers, on GPUs used in every way.

A stage is priced as if all stages were alike: its units are lowered and priced alone, its seconds are those of its
units in sequence (`task_seconds`), which is a few per cent above the forecast of the whole stage at most. A stage
fits if weights, gradients, optimizer states, the activations of the micro-batches in flight under 1F1B (as many as
stages from it on) and the peak of a pass do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from meshcast.experiments.planning.stages import StageOption, StageTable
from meshcast.hardware.errors import PlanError
from meshcast.simulator.bounds.unit_prices import LoweredUnits, lower_units, price_units
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.forecast.resident_memory import DeviceParams, resident_bytes
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.ops import BYTES, Collective, Memory
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.plan.plan import Plan

ANNOTATED = "tensor/annotated"


class UnitCosts(NamedTuple):
    """Costs of the embedding, of every layer, and of the output layer with the loss, in stages of an option.

    forward, backward: seconds of a micro-batch [s].
    elements: parameters of a rank.
    states: bytes of their states.
    kept: bytes that a micro-batch in flight keeps.
    peak: bytes that a pass needs above that.
    sums: seconds of a step for sums of gradients over ranks that hold the same annotated weights [s].
    """

    forward: np.ndarray
    backward: np.ndarray
    elements: np.ndarray
    states: np.ndarray
    kept: np.ndarray
    peak: np.ndarray
    sums: np.ndarray


def price_stages(
    options: list[StageOption], resolve: Callable[[StageOption], Plan], shared: SharedWork, memory: float
) -> StageTable:
    """Returns the table of all ranges of layers in all options; an option whose plan breaks a rule is left out.

    resolve: the plan in which all stages are of an option. memory: of a GPU [bytes].
    Raises the last PlanError if no option is left.
    """
    kept, columns = [], []
    error: PlanError | None = None
    for option in options:
        try:
            plan = resolve(option)
        except PlanError as broken:
            error = broken
            continue
        kept.append(option)
        columns.append(_price_option(plan, shared, memory))
    if not kept:
        assert error is not None
        raise error
    return StageTable(tuple(kept), *(np.stack(part, axis=-1) for part in zip(*columns, strict=True)))


def range_totals(figure: np.ndarray) -> np.ndarray:
    """Returns the sums of a figure over all ranges of layers with the ends of the model [units] -> [layers, layers]."""
    layers = len(figure) - 2
    first, last = np.indices((layers, layers))
    sums = np.concatenate([[0.0], np.cumsum(figure[1:-1])])
    return sums[last + 1] - sums[first] + (first == 0) * figure[0] + (last == layers - 1) * figure[-1]


def range_largest(figure: np.ndarray) -> np.ndarray:
    """Returns the largest of a figure over all ranges of layers, as in `range_totals` [units] -> [layers, layers]."""
    layers = len(figure) - 2
    first, last = np.indices((layers, layers))
    rows = np.maximum.accumulate(np.where(first <= last, figure[1:-1][None, :], 0.0), axis=1)
    return np.maximum(rows, np.maximum((first == 0) * figure[0], (last == layers - 1) * figure[-1]))


def _price_option(plan: Plan, shared: SharedWork, memory: float) -> tuple[np.ndarray, ...]:
    """Returns the arrays of a `StageTable` for all ranges of layers in an option [layers, layers]."""
    units = unit_costs(plan, shared)
    layers = plan.model_parts.model.layers
    shape = (layers, layers)
    inside = np.less_equal(*np.indices(shape))

    seconds = range_totals(units.forward + units.backward)
    free = memory - range_totals(units.states) - range_largest(units.peak)
    in_flight = np.floor(free / np.maximum(1.0, range_totals(units.kept)))
    behind = np.where(inside & (free >= 0), np.minimum(in_flight, layers + 1) - 1, -1).astype(int)
    once = _once_seconds(
        plan, shared, np.where(inside, range_totals(units.elements), 0.0), range_totals(units.backward)
    )
    infinite = np.where(inside, 0.0, np.inf)
    return (
        seconds + infinite,
        range_totals(units.forward) + infinite,
        once + range_totals(units.sums) + infinite,
        behind,
    )


def _once_seconds(plan: Plan, shared: SharedWork, elements: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Returns the seconds of the exchange of gradients that the last backward pass does not hide, and of the update."""
    framework, costs = plan.job.framework, shared.costs(plan)
    width, main = (
        BYTES[framework.gradients],
        framework.main_copy_bytes + framework.update.states.element_bytes(framework.moments),
    )
    axes = tuple(axis for axis in plan.mesh.axes if axis == "dp" and plan.mesh.size(axis) > 1)
    seconds = np.zeros(elements.shape)
    for size in np.unique(elements):
        nbytes = round(float(size) * width)
        exchange = costs.estimate(Collective("all_reduce", nbytes, axes)).seconds if axes else 0.0
        written = BYTES[framework.weights] + main
        update = costs.estimate(Memory("adam", round(size * (width + main)), round(size * written))).seconds
        hidden = backward if framework.overlap.dp else np.zeros(())
        seconds = np.where(elements == size, np.maximum(0.0, exchange - hidden) + update, seconds)
    return seconds


def unit_costs(plan: Plan, shared: SharedWork) -> UnitCosts:
    """Returns the costs of the units of a plan whose stages are alike."""
    lowered = lower_units(plan, shared)
    rows = [*_kind_costs(plan, lowered, shared)]
    kinds = [0, *map(int, lowered.of_layer), len(rows) - 1]
    return UnitCosts(*(np.array([rows[kind][place] for kind in kinds]) for place in range(len(rows[0]))))


def _kind_costs(plan: Plan, lowered: LoweredUnits, shared: SharedWork) -> Iterator[tuple[float, ...]]:
    """Yields the costs of a unit of every kind, in the order of `UnitCosts`."""
    prices = price_units(lowered, shared)
    host = hidden_launch_s(plan.job.framework)
    for number, kind in enumerate(prices.kinds):
        times = [task_seconds(kind.tasks[action], host) for action in ("F", "BW")]
        params = DeviceParams(kind.stage_ops.params())
        elements = sum(param.size * count for param, count in params)
        left, forward, backward = prices.stage_memory(((number, 1),))
        peak = max(forward - left, backward, 0.0)
        states = sum(resident_bytes(plan, params).values())
        yield *times, float(elements), states, max(0.0, left), peak, _sum_gradients(plan, params, shared)


def _sum_gradients(plan: Plan, params: DeviceParams, shared: SharedWork) -> float:
    """Returns the seconds of sums of gradients of annotated weights; those of other schemes are in `_once_seconds`."""
    if not any(scheme.use == ANNOTATED for scheme in plan.schemes):
        return 0.0
    width, costs = BYTES[plan.job.framework.gradients], shared.costs(plan)
    works = [
        Collective("all_reduce", round(param.size * count * width), param.partial)
        for param, count in params
        if param.partial and param.trained
    ]
    return sum(costs.estimate(work).seconds for work in works)
