"""A step put together: the simulator's own program, in which the kernels of every action last as long as was measured.

What one device by itself does not show stays as it is forecast: collectives, messages between stages, who waits for
whom. So the play is that of the forecast, and the difference is that of the actions' times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from simulator.costs.costs import Costs
from simulator.engine.play import play
from simulator.engine.task_time import task_seconds
from simulator.forecast.simulate import build_program
from simulator.ir.ops import COMPUTE, Collective, Op, Work
from simulator.plan.plan import Plan
from simulator.program.block import FREE, SUMS, BlockPrices, Price, PricedBlock
from simulator.program.categories import COMPUTING
from simulator.program.program import Program
from simulator.program.task import Task
from simulator.report.metrics import Z90
from validation.measurements.forecasts import Forecaster
from validation.measurements.measurement import ForecastValue

Turn = tuple[int, str]
"""A virtual stage and a kind of action."""


def price_of(forecaster: Forecaster, alone: bool = False) -> Price:
    """Prices as in a whole step; alone: communication within a stage takes no time."""
    plan = forecaster.plan
    costs = Costs(plan.job.cluster, plan.mesh, plan.job.framework.effective_rates, calibration=forecaster.calibration)

    def price(work: Work) -> tuple[float, float, float]:
        if alone and isinstance(work, Collective):
            return FREE
        return costs.estimate(work)

    return price


def actions(forecaster: Forecaster) -> tuple[dict[Turn, ForecastValue], list[ForecastValue]]:
    """Seconds of an action of each stage and kind, without what other devices would have a part in; and of the update
    of each device."""
    plan = forecaster.plan
    _, program = build_program(plan, price_of(forecaster, alone=True))
    tasks = {(slot.stage, slot.kind): task for slot, task in zip(program.timetable.slots, program.tasks, strict=True)}
    found = {turn: _value(task, program, plan) for turn, task in tasks.items()}
    return found, [_value(task, program, plan) for task in program.updates]


def _value(task: Task, program: Program, plan: Plan) -> ForecastValue:
    """How long a task takes that begins on a device where nothing runs, with an interval as a step's."""
    span = task_seconds(task, program.host)
    sums = task.sums[: len(COMPUTING)]
    busy, weighted = sums[:, SUMS.index("seconds")], sums[:, SUMS.index("weighted")]
    framework = plan.job.framework
    terms = (weighted / max(float(busy.sum()), 1e-30)).tolist()
    reach = Z90 * math.hypot(framework.spread, framework.spread_experts if plan.job.model.moe else 0.0, *terms)
    return ForecastValue(value=span, low=span * math.exp(-reach), high=span * math.exp(reach))


def step(plan: Plan, price: Price, seconds: Mapping[Turn, float], updates: Sequence[float]) -> float:
    """Seconds of a step whose actions last `seconds` and whose updates last `updates`, a device each.

    price: of all that is sent. The host is not played: it is in the measured times.
    """
    _, program = build_program(plan, price)
    slots = program.timetable.slots
    tasks = [lasting(task, seconds[slot.stage, slot.kind]) for slot, task in zip(slots, program.tasks, strict=True)]
    tails = [lasting(task, given) for task, given in zip(program.updates, updates, strict=True)]
    measured = replace(program, tasks=tasks, updates=tails, host=0.0)
    return play(measured).span + plan.job.framework.step_overhead_s


def lasting(task: Task, seconds: float) -> Task:
    """The same task with kernels that take `seconds` together, each its part of them."""
    own = sum(part.count * float(np.sum(np.array(part.seconds)[_kernels(part.block.ops)])) for part in task.parts)
    factor = seconds / own if own else 1.0
    return replace(task, parts=tuple(_stretched(part, factor) for part in task.parts))


def _stretched(part: PricedBlock, factor: float) -> PricedBlock:
    times = np.where(_kernels(part.block.ops), factor, 1.0) * np.array(part.seconds)
    seconds = tuple(times.tolist())
    return PricedBlock(BlockPrices(part.block, seconds, part.spread, part.latency), part.count)


def _kernels(ops: Sequence[Op]) -> Any:
    """Which ops are measured: what runs beside them or is sent is not."""
    return np.array([op.stream == COMPUTE and not isinstance(op.work, Collective) for op in ops], bool)
