"""Forecasts of single pipeline actions: what a device does without any other."""

from __future__ import annotations

import math
from dataclasses import replace

from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.regimes import least_known, residuals
from meshcast.simulator.costs.stragglers import slowest_pace
from meshcast.simulator.engine.task_time import task_seconds
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.ir.ops import Collective, Work
from meshcast.simulator.program.block import FREE, SUMS, Price
from meshcast.simulator.program.categories import COMPUTING
from meshcast.simulator.program.program import Program
from meshcast.simulator.program.task import Task
from meshcast.validation.measurements.forecasts import Forecaster, with_interval
from meshcast.validation.measurements.measurement import ForecastValue

StageAction = tuple[int, str]
"""A virtual stage and a kind of action (F, BW, B or W)."""


def make_price(forecaster: Forecaster, without_collectives: bool = False) -> Price:
    """Returns the price function of a whole step.

    without_collectives: collectives within a stage take no time.
    """
    plan = forecaster.plan
    traits = replace(plan.job.framework.kernel_traits, pace=slowest_pace(1))  # stages are measured one by one
    costs = Costs(plan.job.cluster, plan.mesh, traits, forecaster.calibration)

    def price(work: Work) -> tuple[float, float, float]:
        if without_collectives and isinstance(work, Collective):
            return FREE
        return costs.estimate(work)

    return price


def forecast_actions(forecaster: Forecaster) -> tuple[dict[StageAction, ForecastValue], list[ForecastValue]]:
    """Returns the seconds of each stage's actions without communication, and of each device's optimizer update."""
    plan = forecaster.plan
    _, program = build_program(plan, make_price(forecaster, without_collectives=True))
    tasks = {(slot.stage, slot.kind): task for slot, task in zip(program.timetable.slots, program.tasks, strict=True)}
    actions = {action: _forecast_task(task, program, forecaster) for action, task in tasks.items()}
    return actions, [_forecast_task(task, program, forecaster) for task in program.updates]


def _forecast_task(task: Task, program: Program, forecaster: Forecaster) -> ForecastValue:
    """Returns the seconds of a task that starts on an idle device, with an interval like that of a step."""
    sums = task.sums[: len(COMPUTING)]
    busy, weighted = sums[:, SUMS.index("seconds")], sums[:, SUMS.index("weighted")]
    job = forecaster.plan.job
    terms = (weighted / max(float(busy.sum()), 1e-30)).tolist()
    regime = least_known(job.framework.regime, forecaster.costs.regime)
    sigma = math.hypot(residuals()[regime].sigma, *job.framework.sigmas.values(), *terms)
    return with_interval(task_seconds(task, program.host), sigma)
