"""From a job to a report: resolve the plan, lower every distinct stage, price the ops, play the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware.errors import PlanError
from simulator.costs.calibration.calibration import Calibration
from simulator.costs.estimate import Uses
from simulator.costs.regimes import least_known
from simulator.engine.play import Engine, play
from simulator.forecast.planning import resolve_plan
from simulator.forecast.program import build_program
from simulator.forecast.resident_memory import offloaded_bytes, resident_of_devices
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.stages import device_params
from simulator.job.job import Job
from simulator.job.load import load_job
from simulator.job.locate import locate_errors
from simulator.plan.plan import Plan
from simulator.program.program import EveryStageOps, Program, variants_of
from simulator.report.forecast import Forecast
from simulator.report.report import Report

CONTENTION = "communication shares links max-min fairly, and kernels get the multiprocessors that it leaves"
"""Assumption of the engine `shared`."""


def simulate(
    job: Job | str | Path | Mapping[str, Any],
    engine: Engine = "matrices",
    skip: bool = True,
    shared_work: SharedWork | None = None,
    calibration: Calibration | None = None,
) -> Report:
    """The forecast of one training step, or of the step of a forward-only job.

    job: a job, the path of a job file, or its mapping.
    engine: `matrices`, `sweep` and `simpy` give the same answer; `shared` adds contention for links and
    multiprocessors.
    skip: whether the engine may jump over a steady state that is proven to repeat, see `simulator.engine.play.play`.
    shared_work: lowered units, timetables and prices that many jobs share.
    calibration: the coefficients of all costs; by default those of `shared_work`, or those that ship with meshcast.

    Raises PlanError, ModelError or CatalogError for a wrong job. A job that does not fit in memory is no error.
    """
    shared = shared_work or SharedWork(calibration)
    if calibration not in (None, shared.calibration):
        raise ValueError("shared work was priced with another calibration")
    shared.forget_excess()
    given = job if isinstance(job, Job) else load_job(job)
    plan = resolve_plan(given, shared)
    if plan.steps == 1:
        return Report(*_forecast_plan(plan, engine, skip, shared))
    if numbers := sorted({scheme.steps for scheme in plan.every_scheme} - {1, plan.steps}):
        rule = f"the routing of one stage has {plan.steps} steps, that of another {numbers[0]}"
        raise PlanError("plan", rule, "Give all stages routing of as many steps")
    every = [plan, *(resolve_plan(given.model_copy(update={"step": step}), shared) for step in range(1, plan.steps))]
    found = [_forecast_plan(one, engine, skip, shared)[0] for one in every]
    most = max(found, key=lambda one: max(peak.total for peak in one.peaks))
    return Report(most, [(1 / plan.steps, one) for one in found])


def _forecast_plan(
    plan: Plan, engine: Engine, skip: bool, shared: SharedWork
) -> tuple[Forecast, Sequence[tuple[float, Forecast]]]:
    """The forecast of the step of a plan; of a plan with a period also those of all its steps with their shares."""
    with locate_errors(*plan.job.origin):
        costs = shared.costs(plan)
        device_costs = shared.device_costs(plan)
    prices = [one.estimate for one in device_costs]
    uses = [one.use for one in device_costs]
    stages, program = build_program(plan, prices, shared)
    assumed = (*costs.assumed, *(costs.assumed_experts if plan.job.model.moe else ()))
    variants = (one for stage in stages for one in variants_of(stage))
    forward = (op for one in variants for unit_run in one.unit_runs for op in unit_run.fragment.forward)
    assumed += costs.assumed_exchanges(op.work for op in forward)
    tasks = dict.fromkeys((*program.tasks, *program.updates))  # slots share their tasks
    assumed += costs.assumed_hosts(op.work for task in tasks for op, _ in task.count_ops())
    assumed += (CONTENTION,) if engine == "shared" else ()
    regime = least_known(plan.job.framework.regime, *(one.regime for one in device_costs))
    forecast = replace(play_forecast(plan, stages, program, assumed, engine, skip, uses), regime=regime)
    if plan.schedule.reorders_at_run_time:
        forecast = replace(forecast, rebuild=lambda orders: build_program(plan, prices, shared, orders)[1])
    if plan.period == 1:
        return forecast, ()
    usual = build_program(plan, prices, shared, periodic=False)[1]
    share, other = 1 / plan.period, play_forecast(plan, stages, usual, assumed, engine, skip, uses)
    return forecast, [(share, forecast), (1 - share, other)]


def play_forecast(
    plan: Plan,
    stages: EveryStageOps,
    program: Program,
    assumed: Sequence[str] = (),
    engine: Engine = "matrices",
    skip: bool = True,
    uses: Sequence[Uses] = (),
) -> Forecast:
    """Plays a program, and adds the memory that lives through the whole step. engine, skip, uses: see `play`."""
    every_params = device_params(plan, stages)
    own = [plan.on(device) for device in range(plan.devices)]
    offloaded = [offloaded_bytes(*one) for one in zip(own, every_params, strict=True)]
    resident = resident_of_devices(plan, every_params, program)
    return Forecast(plan, play(program, engine, skip, uses), resident, offloaded, assumed)
