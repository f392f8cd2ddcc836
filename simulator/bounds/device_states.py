"""What the degrees of a plan decide alone, whatever its micro-batches and its schedule: memory of parameters, gradients
and optimizer state, time of the optimizer update and of the gradient reductions, of every pipeline device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from simulator.forecast.resident_memory import resident_of_devices
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.stages import device_params, lower_stages
from simulator.ir.ops import COMPUTE, Collective, Op, StageOps, Transfer
from simulator.plan.plan import Plan
from simulator.program.block import Price
from simulator.program.program import EveryStageOps, one_of

DATA = "data"
"""The stream of data-parallel collectives."""

NORM = "norm"
"""The meeting of all devices at the norm of the gradients."""


@dataclass(frozen=True)
class DeviceStates:
    """Memory of states, and times that follow from degrees alone.

    resident: bytes on a GPU that live through the whole step [devices].
    update: time of the update, from the end of all passes [devices] [s].
    summed: time of the gradient reductions after all passes, before the norm [devices] [s].
    each: time of the data-parallel collectives in every micro-batch on their stream [devices] [s].
    each_reductions: that of the reductions among them [devices] [s].
    each_gathers: that of the all-gathers that follow a pass of another unit [devices] [s].
    beside: times on the stream of data-parallel collectives, of the embedding, of every layer and of the output layer:
        of the gathers of weights before their first use, of those before backward passes, and of the reductions of
        gradients once a step [3, layers + 2] [s].
    whole_weights, whole_gradients: bytes of gathered weights and of unreduced gradients that live from the first to the
        last micro-batch [devices].
    plan: the plan.
    """

    resident: np.ndarray
    update: np.ndarray
    summed: np.ndarray
    each: np.ndarray
    each_reductions: np.ndarray
    each_gathers: np.ndarray
    beside: np.ndarray
    whole_weights: np.ndarray
    whole_gradients: np.ndarray
    plan: Plan

    def beside_parts(self, layers: Sequence[int]) -> np.ndarray:
        """`beside` of the parts of a model [3, parts] [s]. layers: of every part."""
        units = np.array(layers)
        units[[0, -1]] += 1
        return np.asarray(np.add.reduceat(self.beside, np.cumsum([0, *units[:-1]]), axis=1) * (units > 0))


def hop_seconds(plan: Plan, nbytes: int, shared: SharedWork) -> float:
    """Time of a message of `nbytes` bytes between two stages, sent in as many shares as it may be [s]."""
    if plan.shape.p == 1:
        return 0.0
    if plan.job.framework.scatter_gather_tensors_in_pipeline:
        nbytes //= plan.tensor_ranks
    price = shared.device_costs(plan)[0].estimate
    return float(sum(price(Transfer(nbytes, plan.pipeline_axis, 0, 1))[::2]))


def device_states(plan: Plan, shared: SharedWork) -> DeviceStates:
    """The states of every device of a plan with a flush."""
    stages, updates = lower_stages(plan, shared.units)
    resident = [sum(one.values()) for one in resident_of_devices(plan, device_params(plan, stages))]
    costs = shared.device_costs(plan)
    update, summed, each, reduced, gathered, weights, gradients = np.zeros((7, plan.devices))
    for device, price in enumerate(one.estimate for one in costs):
        if updates:
            update[device] = _play_update(updates[device].forward, price)
            summed[device] = _sum_before_norm(updates[device].forward, price)
        own_stages = [one_of(stage) for index, stage in enumerate(stages) if plan.device(index) == device]
        for stage_ops in own_stages:
            weights[device] += stage_ops.whole_weights
            gradients[device] += stage_ops.whole_gradients
            for unit_run in stage_ops.unit_runs:
                ops = (*unit_run.fragment.forward, *unit_run.fragment.backward)
                own = [(op.phase, price(op.work)[0]) for op in ops if op.stream == DATA and op.work is not None]
                each[device] += unit_run.count * sum(seconds for _, seconds in own)
                reduced[device] += unit_run.count * sum(seconds for phase, seconds in own if phase == "W")
                follows = [phase for phase, name in (("F", unit_run.residual_in), ("B", unit_run.residual_out)) if name]
                gathered[device] += unit_run.count * sum(seconds for phase, seconds in own if phase in follows)
    beside = _beside_units(plan, stages, shared)
    found = update, summed, each, reduced, gathered, beside, weights, gradients
    return DeviceStates(np.array(resident), *found, plan)


def _beside_units(plan: Plan, stages: EveryStageOps, shared: SharedWork) -> np.ndarray:
    """`DeviceStates.beside`; of a layer that several devices hold, the least."""
    found = np.full((3, plan.model.layers + 2), inf)
    costs, known = shared.device_costs(plan), dict[tuple[int, int], np.ndarray]()
    for index, stage in enumerate(stages):
        device, part = plan.device(index), plan.part(index)
        key = id(stage), id(costs[device])
        if key not in known:
            known[key] = _beside_stage(one_of(stage), costs[device].estimate)
        layers, units = plan.layers_of(part), known[key]
        before = units.shape[1] - len(layers) - (plan.parts == 1) if part == 0 else 0
        ends = [(0, units[:, :before]), (-1, units[:, before + len(layers) :])]
        for at, own in [(at, own.sum(axis=1)) for at, own in ends if own.size]:
            found[:, at] = np.minimum(found[:, at], own)
        places = slice(layers.start + 1, layers.stop + 1)
        found[:, places] = np.minimum(found[:, places], units[:, before : before + len(layers)])
    return found


def _beside_stage(stage_ops: StageOps, price: Price) -> np.ndarray:
    """The rows of `DeviceStates.beside` for the units of a stage [3, units] [s].

    Every unit takes its share of the bytes of an op, were all ops as fast a byte as the fastest one of their kind: no
    other division of the same bytes takes less.
    """
    runs = stage_ops.unit_runs
    widths = [len(run.fragment.params) for run in runs for _ in range(run.count)]
    unit = np.repeat(np.arange(len(widths)), widths)
    sizes = stage_ops.of_params([param.size for param, _ in stage_ops.params()])
    found = np.zeros((3, len(widths)))
    for row, sides in zip(found, (stage_ops.ahead, stage_ops.again, stage_ops.behind), strict=True):
        rates = dict[Hashable, float]()
        parts = list[tuple[Hashable, float, np.ndarray]]()
        for side in sides:
            for op, params in zip(side.ops, np.split(side.params, side.starts[1:]), strict=True):
                if op.stream == DATA and isinstance(work := op.work, Collective) and work.nbytes:
                    kind = work.operation, work.axes
                    rates[kind] = min(rates.get(kind, inf), price(work)[0] / work.nbytes)
                    parts.append((kind, work.nbytes / sizes[params].sum(), params))
        for group, nbytes, params in parts:
            np.add.at(row, unit[params], rates[group] * nbytes * sizes[params])
    return found


def _play_update(ops: Sequence[Op], price: Price) -> float:
    """Time of an update from when all devices meet for the norm of the gradients, each op after those that it waits for
    and those before it on its stream; of an update without that the time of its kernels [s]."""
    if not any(op.meeting == NORM for op in ops):
        return sum(price(op.work)[0] for op in ops if op.stream == COMPUTE and op.work is not None)
    ends, streams = dict[Op, float](), defaultdict[str, float](float)
    for op in ops:
        before = [ends[other] for other in op.after if other in ends]
        if before or op.meeting == NORM:
            begin = max([streams[op.stream], *before])
            ends[op] = streams[op.stream] = begin + (price(op.work)[0] if op.work is not None else 0.0)
    return max(ends.values())


def _sum_before_norm(ops: Sequence[Op], price: Price) -> float:
    """Time of the reductions of an update that the norm of the gradients waits for, one after another [s]."""
    meetings = [number for number, op in enumerate(ops) if op.meeting == NORM]
    reductions = [op for op in ops[: meetings[0] if meetings else 0] if op.stream == DATA and op.work is not None]
    return sum(price(op.work)[0] for op in reductions if op.work is not None)
