"""Least times of the data-parallel collectives of a plan, of every unit of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from math import inf

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.ir.mesh import Mesh
from meshcast.simulator.ir.ops import Collective, StageOps
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import Price
from meshcast.simulator.program.program import EveryStageOps, one_of

AxesOfGroups = tuple[tuple[str, ...], ...]
"""The axes of several groups of ranks."""

DATA, COPIES = "data", "data-replicas"
"""The streams of data-parallel collectives, and of those between copies of the states."""

LARGE = 2**50
"""Bytes of a collective whose latency does not matter."""


def collective_rates(
    plan: Plan, axes: tuple[str, ...], shared: SharedWork, nbytes: Sequence[int] = (LARGE, LARGE, LARGE)
) -> tuple[float, ...]:
    """Returns the least seconds a byte of an all-reduce, a reduce-scatter and an all-gather along some axes of a plan,
    of collectives with so many bytes at most."""
    if plan.mesh.size(axes) == 1:
        return 0.0, 0.0, 0.0
    price = shared.device_costs(plan)[0].estimate
    operations = zip(("all_reduce", "reduce_scatter", "all_gather"), nbytes, strict=True)
    return tuple(price(Collective(operation, size, axes))[0] / size for operation, size in operations)


def copy_rates(usual: Plan, plan: Plan, groups: AxesOfGroups, elements: np.ndarray, shared: SharedWork) -> np.ndarray:
    """Returns the least seconds a byte of the reductions and of the gathers of a plan with copies of what it shards [2,
    groups].

    Those among ranks that share a copy and the all-reduces among copies are on two streams: the longer stream counts.
    usual: the plan without copies.
    groups: its axes along which gradients are summed.
    elements: their parameters [groups, kinds].
    """
    inside, among = np.zeros((2, 2, len(groups)))
    for number, axes in enumerate(groups):
        copies, sharing = _split_copies(usual.mesh, plan.mesh, axes)
        _, *inside[:, number] = collective_rates(plan, sharing, shared)
        reduce, *_ = collective_rates(plan, copies, shared)
        among[0, number] = reduce / plan.mesh.size(sharing)
    totals = [float((rates.sum(axis=0) @ elements).sum()) for rates in (inside, among)]
    return np.asarray(inside if totals[0] >= totals[1] else among)


def _split_copies(usual: Mesh, mesh: Mesh, axes: tuple[str, ...]) -> AxesOfGroups:
    """Returns the parts of a mesh with copies that join the same ranks as some axes of the usual mesh: those
    along which copies lie, and the others."""
    spans = [(usual.stride(axis), usual.stride(axis) * usual.size(axis)) for axis in axes if axis in usual.axes]
    parts = [part for part in mesh.axes if any(low <= mesh.stride(part) < high for low, high in spans)]
    copies = mesh.parts("replicate")
    return tuple(part for part in parts if part in copies), tuple(part for part in parts if part not in copies)


@dataclass(frozen=True, eq=False)
class UnitCollectives:
    """Times of data-parallel collectives on one stream, of the embedding, of every layer and of the output layer; or
    of the parts or the virtual stages that they make up [s].

    first: gathers of weights before their first use in a step.
    again: those before the first backward pass.
    last: reductions of gradients from the last backward pass on.
    each: all collectives in every micro-batch.
    each_last: the reductions among them.
    each_between: the gathers among them that follow a pass of another unit.
    """

    first: np.ndarray
    again: np.ndarray
    last: np.ndarray
    each: np.ndarray
    each_last: np.ndarray
    each_between: np.ndarray

    @property
    def once(self) -> np.ndarray:
        """All that happen once a step."""
        return self.first + self.again + self.last

    def without_time(self) -> UnitCollectives:
        """Returns the same collectives, if they took no time."""
        return UnitCollectives(**{column.name: np.zeros_like(getattr(self, column.name)) for column in fields(self)})

    def of_stages(self, layers: Sequence[int], part: np.ndarray) -> UnitCollectives:
        """Returns the collectives of virtual stages.

        layers: of every part of the model.
        part: of every stage.
        """
        units = np.array(layers)
        units[0] += 1
        units[-1] += 1
        starts = np.cumsum([0, *units[:-1]])
        rows = np.add.reduceat([getattr(self, column.name) for column in fields(self)], starts, axis=1)
        # Those of the first unit of a pass may run beside the pass before.
        rows[-1] -= np.maximum.reduceat(self.each_between, starts)
        return UnitCollectives(*(rows * (units > 0))[:, part])


def unit_collectives(plan: Plan, stages: EveryStageOps, shared: SharedWork, stream: str = DATA) -> UnitCollectives:
    """Returns the collectives of a plan on a stream; of a layer that several devices hold, the least."""
    least = np.full((6, plan.model_parts.model.layers + 2), inf)
    costs, known = shared.device_costs(plan), dict[tuple[int, int], np.ndarray]()
    for index, stage in enumerate(stages):
        device, part = plan.model_parts.device(index), plan.model_parts.of_stage(index)
        key = id(stage), id(costs[device])
        if key not in known:
            known[key] = _of_stage(one_of(stage), costs[device].estimate, stream)
        layers, units = plan.model_parts.layers_of(part), known[key]
        before = units.shape[1] - len(layers) - (plan.model_parts.count == 1) if part == 0 else 0
        ends = [(0, units[:, :before]), (-1, units[:, before + len(layers) :])]
        for at, sums in [(at, columns.sum(axis=1)) for at, columns in ends if columns.size]:
            least[:, at] = np.minimum(least[:, at], sums)
        places = slice(layers.start + 1, layers.stop + 1)
        least[:, places] = np.minimum(least[:, places], units[:, before : before + len(layers)])
    return UnitCollectives(*least)


def _of_stage(stage_ops: StageOps, price: Price, stream: str) -> np.ndarray:
    """Returns the collectives of the layers of a stage on a stream, in the order of `UnitCollectives` [6, layers] [s].
    Embedding and output layer count as layers.

    Of an op of several units each takes its share of the bytes, were all ops as fast a byte as the fastest op of their
    kind: no other division of the same bytes takes less.
    """
    seconds = np.concatenate([_once_a_step(stage_ops, price, stream), _every_micro_batch(stage_ops, price, stream)])
    # Of several layers in one unit the first has what all of them have.
    layers = [run.layers for run in stage_ops.unit_runs for _ in range(run.count)]
    every = np.zeros((6, sum(layers)))
    every[:, np.cumsum([0, *layers[:-1]])] = seconds
    return every


def _once_a_step(stage_ops: StageOps, price: Price, stream: str) -> np.ndarray:
    """Returns the collectives that happen once a step [3, units] [s]."""
    widths = [len(run.fragment.params) for run in stage_ops.unit_runs for _ in range(run.count)]
    unit = np.repeat(np.arange(len(widths)), widths)
    sizes = stage_ops.of_params([param.size for param, _ in stage_ops.params()])
    seconds = np.zeros((3, len(widths)))
    for row, sides in zip(seconds, (stage_ops.ahead, stage_ops.again, stage_ops.behind), strict=True):
        rates = dict[tuple[str, tuple[str, ...]], float]()
        parts = list[tuple[tuple[str, tuple[str, ...]], float, np.ndarray]]()
        for side in sides:
            for op, params in zip(side.ops, np.split(side.params, side.starts[1:]), strict=True):
                if op.stream == stream and isinstance(work := op.work, Collective) and work.nbytes:
                    kind = work.operation, work.axes
                    rates[kind] = min(rates.get(kind, inf), price(work)[0] / work.nbytes)
                    parts.append((kind, work.nbytes / sizes[params].sum(), params))
        for kind, nbytes, params in parts:
            np.add.at(row, unit[params], rates[kind] * nbytes * sizes[params])
    return seconds


def _every_micro_batch(stage_ops: StageOps, price: Price, stream: str) -> np.ndarray:
    """Returns the collectives that happen in every micro-batch [3, units] [s]."""
    columns = []
    for run in stage_ops.unit_runs:
        ops = (*run.fragment.forward, *run.fragment.backward)
        collectives = [(op.phase, price(op.work)[0]) for op in ops if op.stream == stream and op.work is not None]
        between = [phase for phase, name in (("F", run.residual_in), ("B", run.residual_out)) if name]
        sums = [sum(seconds for phase, seconds in collectives if phase in kinds) for kinds in ("FBWR", "W", between)]
        columns += [sums] * run.count
    return np.array(columns, float).T
