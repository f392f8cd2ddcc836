"""A step assembled from measured actions: the forecast's program with the measured durations of kernels in it.

What a single device does not show stays as forecast: collectives, messages between stages, waiting. Step and forecast
therefore differ only by the durations of the actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.ir.ops import COMPUTE, Collective, Op
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import BlockPrices, Price, PricedBlock
from meshcast.simulator.program.task import Task
from meshcast.validation.stages.action_forecasts import StageAction


def assemble_step(plan: Plan, price: Price, seconds: Mapping[StageAction, float], updates: Sequence[float]) -> float:
    """Returns the seconds of a step with measured durations of its actions.

    price: prices communication.
    seconds: duration of each stage's actions [s]; it includes the host's time, so the program runs without a host.
    updates: duration of each device's optimizer update [s].
    """
    _, program = build_program(plan, price)
    slots = program.timetable.slots
    tasks = [
        set_duration(task, seconds[slot.stage, slot.kind]) for slot, task in zip(slots, program.tasks, strict=True)
    ]
    tails = [set_duration(task, duration) for task, duration in zip(program.updates, updates, strict=True)]
    measured = replace(program, tasks=tasks, updates=tails, host=0.0)
    return play(measured).span + plan.job.framework.step_overhead_s


def set_duration(task: Task, seconds: float) -> Task:
    """Returns the task with its kernels scaled so that together they take `seconds`."""
    total = sum(
        part.count * float(np.sum(np.array(part.seconds)[_measured_ops(part.block.ops)])) for part in task.parts
    )
    factor = seconds / total if total else 1.0
    return replace(task, parts=tuple(_stretch(part, factor) for part in task.parts))


def _stretch(part: PricedBlock, factor: float) -> PricedBlock:
    """Returns the block with the durations of its kernels multiplied by `factor`."""
    times = np.where(_measured_ops(part.block.ops), factor, 1.0) * np.array(part.seconds)
    return PricedBlock(BlockPrices(part.block, tuple(times.tolist()), part.sigma, part.latency), part.count)


def _measured_ops(ops: Sequence[Op]) -> Any:
    """Returns the mask of the ops that were measured: computation, not communication or side streams."""
    return np.array([op.stream == COMPUTE and not isinstance(op.work, Collective) for op in ops], bool)
