"""What the degrees of a plan decide alone, whatever its micro-batches and its schedule: memory of parameters, gradients
and optimizer state, time of the optimizer update and of the gradient reductions, of every pipeline device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from simulator.forecast.resident_memory import resident_of_devices
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.stages import device_params, lower_stages
from simulator.ir.ops import COMPUTE, Collective, Op, SideOps, Transfer
from simulator.plan.plan import Plan
from simulator.program.block import Price
from simulator.program.program import one_of

DATA = "data"
"""The stream of data-parallel collectives."""

NORM = "norm"
"""The meeting of all devices at the norm of the gradients."""


@dataclass(frozen=True)
class DeviceStates:
    """Memory of states, and times that follow from degrees alone.

    resident: bytes on a GPU that live through the whole step [devices].
    update: time of the update, from the end of all passes [devices] [s].
    reductions: time of all gradient reductions on their stream beside the passes [devices] [s].
    summed: time of the gradient reductions after all passes, before the norm [devices] [s].
    each: time of the data-parallel collectives in every micro-batch on their stream [devices] [s].
    each_reductions: that of the reductions among them [devices] [s].
    each_gathers: that of the all-gathers that follow a pass of another unit [devices] [s].
    gathers: time of the all-gathers of updated weights before their first use [devices] [s].
    in_order: times on one stream of these all-gathers, of those before backward passes, and of the reductions [3,
        devices] [s].
    whole_weights, whole_gradients: bytes of gathered weights and of unreduced gradients that live from the first to the
        last micro-batch [devices].
    plan: the plan.
    """

    resident: np.ndarray
    update: np.ndarray
    reductions: np.ndarray
    summed: np.ndarray
    each: np.ndarray
    each_reductions: np.ndarray
    each_gathers: np.ndarray
    gathers: np.ndarray
    in_order: np.ndarray
    whole_weights: np.ndarray
    whole_gradients: np.ndarray
    plan: Plan


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
    costs, times = shared.device_costs(plan), np.zeros((7, plan.devices))
    update, reductions, summed, each, reduced, gathered, gathers = times
    in_order, (weights, gradients) = np.zeros((3, plan.devices)), np.zeros((2, plan.devices))
    for device, price in enumerate(one.estimate for one in costs):
        if updates:
            update[device] = _play_update(updates[device].forward, price)
            summed[device] = _sum_before_norm(updates[device].forward, price)
        own_stages = [one_of(stage) for index, stage in enumerate(stages) if plan.device(index) == device]
        reductions[device] = _longest_stream([side for stage in own_stages for side in stage.behind], price)
        gathers[device] = _longest_stream([side for stage in own_stages for side in stage.ahead], price)
        for row, name in zip(in_order, ("ahead", "again", "behind"), strict=True):
            sides = [side for stage in own_stages for side in getattr(stage, name)]
            row[device] = _busy_seconds(sides, price).get(DATA, 0.0)
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
    found = (
        np.array(resident),
        update,
        reductions,
        summed,
        each,
        reduced,
        gathered,
        gathers,
        in_order,
        weights,
        gradients,
    )
    return DeviceStates(*found, plan)


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


def _longest_stream(besides: Iterable[SideOps], price: Price) -> float:
    """Time of the ops beside the passes on the stream that has most of them [s], as `_busy_seconds` counts it."""
    return max(_busy_seconds(besides, price).values(), default=0.0)


def _busy_seconds(besides: Iterable[SideOps], price: Price) -> dict[str, float]:
    """Time of the ops beside the passes by stream, were all as fast a byte as the fastest one of their kind [s]: no
    other division of the same bytes takes less."""
    rates, nbytes = dict[Hashable, float](), defaultdict[tuple[str, Hashable], float](float)
    for op in (op for side in besides for op in side.ops):
        if isinstance(work := op.work, Collective) and work.nbytes:
            kind = work.operation, work.axes
            nbytes[op.stream, kind] += work.nbytes
            rates[kind] = min(rates.get(kind, inf), price(work)[0] / work.nbytes)
    busy: dict[str, float] = defaultdict(float)
    for (stream, group), size in nbytes.items():
        busy[stream] += size * rates[group]
    return busy
