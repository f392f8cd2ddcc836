"""What the degrees of a plan decide alone, whatever its micro-batches and its schedule: memory of parameters, gradients
and optimizer state, time of the optimizer update and of the gradient reductions, of every pipeline device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from simulator.forecast.resident_memory import resident_of_devices
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.stages import device_params, lower_stages
from simulator.ir.ops import COMPUTE, Transfer
from simulator.plan.plan import Plan
from simulator.program.block import Price
from simulator.program.program import one_of


@dataclass(frozen=True)
class DeviceStates:
    """Memory of states, and times that follow from degrees alone.

    resident: bytes on a GPU that live through the whole step [devices].
    update: time of the update's kernels [devices] [s].
    reductions: time of all gradient reductions on their stream [devices] [s].
    each: time of the data-parallel collectives in every micro-batch on their stream [devices] [s].
    plan, price: the plan, and the prices of ops of its first device.
    """

    resident: np.ndarray
    update: np.ndarray
    reductions: np.ndarray
    each: np.ndarray
    plan: Plan
    price: Price

    def hop(self, nbytes: int) -> float:
        """Time of a message of `nbytes` bytes between two stages, sent in as many shares as it may be [s]."""
        if self.plan.shape.p == 1:
            return 0.0
        if self.plan.job.framework.scatter_gather_tensors_in_pipeline:
            nbytes //= self.plan.tensor_ranks
        return float(sum(self.price(Transfer(nbytes, self.plan.pipeline_axis, 0, 1))[::2]))


def device_states(plan: Plan, shared: SharedWork) -> DeviceStates:
    """The states of every device of a plan with a flush."""
    stages, updates = lower_stages(plan, shared.units)
    resident = [sum(one.values()) for one in resident_of_devices(plan, device_params(plan, stages))]
    costs, (update, reductions, each) = shared.device_costs(plan), np.zeros((3, plan.devices))
    for device, price in enumerate(one.estimate for one in costs):
        if updates:
            own = [op.work for op in updates[device].forward if op.stream == COMPUTE and op.work is not None]
            update[device] = sum(price(work)[0] for work in own)
        busy: dict[str, float] = defaultdict(float)
        for index, stage in enumerate(stages):
            if plan.device(index) == device:
                for op in (op for side in one_of(stage).behind for op in side.ops):
                    busy[op.stream] += price(op.work)[0] if op.work is not None else 0.0
        reductions[device] = max(busy.values(), default=0.0)
        own_stages = [one_of(stage) for index, stage in enumerate(stages) if plan.device(index) == device]
        for stage_ops in own_stages:
            for unit_run in stage_ops.unit_runs:
                ops = (*unit_run.fragment.forward, *unit_run.fragment.backward)
                works = [op.work for op in ops if op.stream == "data" and op.work is not None]
                each[device] += unit_run.count * sum(price(work)[0] for work in works)
    return DeviceStates(np.array(resident), update, reductions, each, plan, costs[0].estimate)
