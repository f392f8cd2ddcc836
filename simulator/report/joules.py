"""Energy of the kernels and of the communication of a program beyond the idle power of its GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshcast.hardware.remembered import remember
from meshcast.simulator.costs.power import PowerModel
from meshcast.simulator.ir.ops import COMPUTE
from meshcast.simulator.program.block import BlockPrices
from meshcast.simulator.program.categories import HOST, axis_of
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import PricedSideOps, Task


def sum_joules(program: Program, turns: np.ndarray, models: Sequence[PowerModel]) -> np.ndarray:
    """Returns the energy of the kernels and of the communication of every pipeline device [devices, 2] [J].

    turns: how often every slot runs.
    models: of the power of the GPUs of every device.
    """
    joules, runs = np.zeros((program.devices, 2)), program.count_runs(turns)  # of kernels, of communication
    for name, model in {model.gpu.name: model for model in models}.items():
        devices = [device for device, other in enumerate(models) if other.gpu.name == name]
        of_tasks = np.array([task_joules(task, model) for task in program.distinct])
        joules[devices] = np.cumsum(runs[devices][..., None] * of_tasks, axis=1)[:, -1]
    if program.sent:
        share, limit = np.array([(model.communication, model.limit) for model in models]).T
        lasting = np.array([send.seconds + send.latency for _, send in program.sent])
        ends, counts = program.sent_ends.T, turns[program.sent_slots][:, None]
        np.add.at(joules[:, 1], ends, counts * share[ends] * limit[ends] * lasting[:, None])
    return joules


def task_joules(task: Task, model: PowerModel) -> np.ndarray:
    """Returns the energy of the kernels and of the communication of an action beyond the idle power [J]."""
    joules = np.zeros(2)
    for part in task.parts:
        joules += part.count * block_joules(part.prices, model)
    for side in (*task.ahead, *task.behind):
        joules[1] += side_joules(side, model)
    return joules


def side_joules(side: PricedSideOps, model: PowerModel) -> float:
    """Returns the energy of side ops, all on a stream that computes nothing, beyond the idle power [J]."""
    if axis_of(side.ops[0]) == HOST:
        return 0.0
    return float(model.communication * model.limit * side.lasting.sum())


def block_joules(prices: BlockPrices, model: PowerModel) -> np.ndarray:
    """Returns the energy of the kernels and of the communication of a copy of a block beyond the idle power, computed
    once [J]."""

    def add_up() -> np.ndarray:
        kernels = communication = 0.0
        for op, seconds, lasting in zip(prices.block.ops, prices.seconds, prices.lasting.tolist(), strict=True):
            if op.stream == COMPUTE:
                kernels += model.kernel_joules(op.work, seconds)
            elif axis_of(op) != HOST:
                communication += model.communication * model.limit * lasting
        return np.array([kernels, communication])

    return remember(prices.results, ("joules", model.gpu.name), add_up)
