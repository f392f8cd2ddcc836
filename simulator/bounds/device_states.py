"""What the degrees of a plan decide alone, whatever its micro-batches and its schedule: memory of parameters, gradients
and optimizer state, time of the optimizer update and of the gradient reductions, of every pipeline device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshcast.hardware.records import dataclass
from meshcast.simulator.bounds.collectives import COPIES, DATA, UnitCollectives, unit_collectives
from meshcast.simulator.forecast.resident_memory import resident_of_devices
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params, lower_stages
from meshcast.simulator.ir.capabilities import MeasuresMemory, ShardsStates, schemes_with
from meshcast.simulator.ir.ops import COMPUTE, Op, Transfer
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import Price
from meshcast.simulator.program.program import one_of

NORM = "norm"
"""The meeting of all devices at the norm of the gradients."""


@dataclass(frozen=True)
class DeviceStates:
    """Memory of states, and times that follow from degrees alone.

    resident: bytes on a GPU that live through the whole step [devices].
    update: time of the update, from the end of all passes [devices] [s].
    summed: time of the gradient reductions after all passes, before the norm [devices] [s].
    collectives: the data-parallel collectives of every unit, by their stream.
    whole: bytes of gathered weights and of unreduced gradients of every virtual stage that live from the first to the
        last micro-batch [2, stages].
    plan: the plan.
    """

    resident: np.ndarray
    update: np.ndarray
    summed: np.ndarray
    collectives: tuple[UnitCollectives, ...]
    whole: np.ndarray
    plan: Plan

    def at_least(self) -> DeviceStates:
        """Returns these states, of a data scheme of which nothing else is known: its collectives and its update may
        take no time, and where it measures memory first its states may lie elsewhere."""
        measures = any(scheme.measures_memory for scheme in schemes_with(self.plan.schemes, MeasuresMemory))
        none, whole = np.zeros_like(self.update), np.zeros_like(self.whole)
        collectives = tuple(units.without_time() for units in self.collectives)
        resident = np.zeros_like(self.resident) if measures else self.resident
        return replace(self, resident=resident, update=none, summed=none, collectives=collectives, whole=whole)


def hop_seconds(plan: Plan, nbytes: int, shared: SharedWork) -> float:
    """Returns the time of a message of `nbytes` bytes between two stages, sent in as many shares as it may be [s]."""
    if plan.shape.p == 1:
        return 0.0
    if plan.job.framework.scatter_gather_tensors_in_pipeline:
        nbytes //= plan.ranks.tensor_ranks
    price = shared.device_costs(plan)[0].estimate
    return float(sum(price(Transfer(nbytes, plan.ranks.pipeline_axis, 0, 1))[::2]))


def device_states(plan: Plan, shared: SharedWork) -> DeviceStates:
    """Returns the states of every device of a plan with a flush."""
    stages, updates = lower_stages(plan, shared.units)
    resident = [sum(held.values()) for held in resident_of_devices(plan, device_params(plan, stages), any_batch=True)]
    update, summed = np.zeros((2, plan.ranks.devices))
    for device, price in enumerate(costs.estimate for costs in shared.device_costs(plan)):
        if updates:
            update[device] = _play_update(updates[device].forward, price)
            summed[device] = _sum_before_norm(updates[device].forward, price)
    whole = np.array([(one_of(stage).whole_weights, one_of(stage).whole_gradients) for stage in stages], float).T
    has_copies = any(scheme.replica_axes for scheme in schemes_with(plan.schemes, ShardsStates))
    streams = (DATA, COPIES) if has_copies else (DATA,)
    collectives = tuple(unit_collectives(plan, stages, shared, stream) for stream in streams)
    return DeviceStates(np.array(resident), update, summed, collectives, whole, plan)


def _play_update(ops: Sequence[Op], price: Price) -> float:
    """Returns the time of an update from when all devices meet for the norm of the gradients, each op after those that
    it waits for and those before it on its stream; of an update without that the time of its kernels [s]."""
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
    """Returns the time of the reductions of an update that the norm of the gradients waits for, in turn on each stream
    [s]."""
    meetings = [number for number, op in enumerate(ops) if op.meeting == NORM]
    ends, streams = dict[Op, float](), defaultdict[str, float](float)
    for op in ops[: meetings[0] if meetings else 0]:
        if op.stream in (DATA, COPIES) and op.work is not None:
            begin = max([streams[op.stream], *(ends[other] for other in op.after if other in ends)])
            ends[op] = streams[op.stream] = begin + price(op.work)[0]
    return max(ends.values(), default=0.0)
