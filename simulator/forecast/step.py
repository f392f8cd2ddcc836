"""The played step of a job, and the two figures that a search asks for: its duration and its peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from meshcast.hardware.errors import PlanError
from meshcast.hardware.records import dataclass
from meshcast.simulator.costs.costs import Costs
from meshcast.simulator.costs.estimate import Uses
from meshcast.simulator.costs.regimes import least_known
from meshcast.simulator.engine.play import Engine, play
from meshcast.simulator.engine.reserved_memory import StateTensors
from meshcast.simulator.forecast.evaluation import make_evaluation, make_reference
from meshcast.simulator.forecast.planning import resolve_plan
from meshcast.simulator.forecast.program import build_program
from meshcast.simulator.forecast.resident_memory import (
    DeviceParams,
    count_outside_steps,
    offloaded_of_devices,
    resident_of_devices,
)
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params
from meshcast.simulator.forecast.state_tensors import state_tensors
from meshcast.simulator.ir.capabilities import VariesSteps, schemes_with
from meshcast.simulator.job.job import Job
from meshcast.simulator.job.locate import locate_errors
from meshcast.simulator.loading.load import load_job
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.program import EveryStageOps, Program, variants_of
from meshcast.simulator.report.energy import KWH
from meshcast.simulator.report.forecast import Assume, Forecast
from meshcast.simulator.report.metrics import Metrics
from meshcast.simulator.scheduling.schedule import ScheduleItem

CONTENTION = "communication shares links max-min fairly, and kernels get the multiprocessors that it leaves"
"""Assumption of the engine `shared`."""

StepKinds = Sequence[tuple[float, Forecast]]
"""Steps of several kinds, each with its share of all steps; empty if all steps are equal."""


@dataclass(frozen=True)
class StepAndMemory:
    """Duration and peak memory of a step: the figures of the same names of a `Report`.

    step_time: [s].
    peak_allocated: memory allocated by tensors on the fullest device [bytes].
    peak_device: memory that nvidia-smi shows on the fullest device [bytes].
    held: what the fullest GPU cannot do without: `peak_device` but for cached blocks [bytes].
    room: how many times its need the fullest GPU, or host that the plan offloads to, has as memory.
    joules: energy of the step, nodes and data centre included [J]; 0 unless it was asked for.
    """

    step_time: float
    peak_allocated: float
    peak_device: float
    held: float
    room: float
    joules: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every GPU, and every host that the plan offloads to, has the memory that it needs."""
        return self.room >= 1


def forecast_step(
    job: Job | Plan | str | Path | Mapping[str, Any], shared_work: SharedWork | None = None, energy: bool = False
) -> StepAndMemory:
    """Computes duration and peak memory of a step, equal to those of `simulate`, without breakdown, interval and words.

    job: a job, its resolved plan, the path of a job file, or its mapping.
    shared_work: lowered units, timetables and prices that many jobs share.
    energy: also the energy of the step.

    Raises PlanError, ModelError or CatalogError for a wrong job. A job that does not fit in memory is no error.
    """
    shared = shared_work or SharedWork()
    return summarise_step(Metrics(*play_job(job if isinstance(job, Job | Plan) else load_job(job), shared)), energy)


def summarise_step(figures: Metrics, energy: bool = False) -> StepAndMemory:
    """Computes duration and peak memory of a forecast. energy: also the energy of the step."""
    joules = figures.energy.kwh * KWH if energy else 0.0
    memory = figures.peak_allocated, figures.peak_device, figures.fit.held, figures.fit.room
    return StepAndMemory(figures.step_time, *memory, joules)


def play_job(
    job: Job | Plan, shared: SharedWork, engine: Engine = "matrices", skip: bool = True
) -> tuple[Forecast, StepKinds]:
    """Plays the step of a job, or of its resolved plan; of a plan whose steps differ, and of several batches that are
    drawn, the step that needs most memory.

    engine, skip: see `simulator.engine.play.play`.
    Raises PlanError for the first rule that the plan breaks.
    """
    shared.forget_excess()
    stated, plan = (job.job, job) if isinstance(job, Plan) else (job, resolve_plan(job, shared))
    if not stated.drawn:
        return _play_steps(stated, plan, engine, skip, shared)
    every = []
    for batch, its_plan in stated.drawn:
        of_batch = stated.model_copy(update={"batch": batch, "plan": its_plan})
        every.append(_play_steps(of_batch, resolve_plan(of_batch, shared), engine, skip, shared))
    kinds = [(share / len(every), forecast) for most, steps in every for share, forecast in (steps or [(1.0, most)])]
    return _fullest([most for most, _ in every]), kinds


def _fullest(forecasts: Sequence[Forecast]) -> Forecast:
    """Returns the forecast that needs most memory."""
    return max(forecasts, key=lambda forecast: max(peak.total for peak in forecast.peaks))


def _play_steps(stated: Job, plan: Plan, engine: Engine, skip: bool, shared: SharedWork) -> tuple[Forecast, StepKinds]:
    """Plays the step of the plan of a job with one batch."""
    if plan.job.batch.rounds:
        return _play_rounds(plan, engine, skip, shared)
    if plan.passes.steps == 1:
        return _play_plan(plan, engine, skip, shared)
    varying = schemes_with(plan.every_scheme, VariesSteps)
    if numbers := sorted({scheme.steps for scheme in varying} - {1, plan.passes.steps}):
        rule = f"the routing of one stage has {plan.passes.steps} steps, that of another {numbers[0]}"
        raise PlanError("plan", rule, "Give all stages routing of as many steps")
    others = (resolve_plan(stated.model_copy(update={"step": step}), shared) for step in range(1, plan.passes.steps))
    forecasts = [_play_plan(step_plan, engine, skip, shared)[0] for step_plan in (plan, *others)]
    return _fullest(forecasts), [(1 / plan.passes.steps, forecast) for forecast in forecasts]


def _play_rounds(plan: Plan, engine: Engine, skip: bool, shared: SharedWork) -> tuple[Forecast, StepKinds]:
    """Plays the step of the ranks in the slowest groups of all rounds, and, where others have more tokens at a time,
    one of those, whose memory counts."""
    from meshcast.simulator.plan.unlike_degrees import with_fullest_groups

    slowest = _play_plan(plan, engine, skip, shared)[0]
    if (fullest := with_fullest_groups(plan)) is None:
        return slowest, [(1.0, slowest)]
    return _play_plan(fullest, engine, skip, shared)[0], [(1.0, slowest)]


def _play_plan(plan: Plan, engine: Engine, skip: bool, shared: SharedWork) -> tuple[Forecast, StepKinds]:
    """Plays the step of a plan; of a plan with a period also those of all its steps with their shares."""
    with locate_errors(*plan.job.origin):
        costs = shared.costs(plan)
        device_costs = shared.device_costs(plan)
    prices = [costs.estimate for costs in device_costs]
    uses = [costs.use for costs in device_costs]
    stages, program = build_program(plan, prices, shared)

    assume = partial(_assumptions, plan, costs, stages, program, engine)
    regime = least_known(plan.job.framework.regime, *(costs.regime for costs in dict.fromkeys(device_costs)))
    forecast = replace(play_forecast(plan, stages, program, assume, engine, skip, uses, shared), regime=regime)
    if job := make_evaluation(plan):
        forecast = replace(forecast, evaluation=_play_plan(resolve_plan(job, shared), engine, skip, shared)[0])
    if job := make_reference(plan):
        reference = _play_plan(resolve_plan(job, shared), engine, skip, shared)[0]
        forecast = replace(forecast, reference=reference, resting=_add_weights(forecast, reference))
    if plan.schedule.reorders_at_run_time:
        forecast = replace(forecast, rebuild=partial(_rebuild_program, plan, shared))
    if plan.passes.period == 1:
        return forecast, ()
    usual = build_program(plan, prices, shared, periodic=False)[1]
    share, other = 1 / plan.passes.period, play_forecast(plan, stages, usual, assume, engine, skip, uses, shared)
    return forecast, [(share, forecast), (1 - share, other)]


def _add_weights(forecast: Forecast, reference: Forecast) -> list[dict[str, float]]:
    """Returns what every device holds through the step with the weights of a reference that is a model of its own."""
    if forecast.plan.job.train.reference != "model":
        return list(forecast.resting)
    both = zip(forecast.resting, reference.resting, strict=True)
    return [{**states, "parameters": states["parameters"] + weights["parameters"]} for states, weights in both]


def fixed_order_step(plan: Plan, shared: SharedWork) -> float:
    """Computes the duration of the step of a plan in orders of passes that no duration changes [s]."""
    prices = [costs.estimate for costs in shared.device_costs(plan)]
    program = build_program(plan, prices, shared, by_durations=False)[1]
    return Forecast(plan, play(program), (), ()).seconds + plan.job.framework.step_overhead_s


def _rebuild_program(plan: Plan, shared: SharedWork, orders: Sequence[Sequence[ScheduleItem]]) -> Program:
    """Returns the program of the same step for other orders."""
    return build_program(plan, [costs.estimate for costs in shared.device_costs(plan)], shared, orders)[1]


def _assumptions(plan: Plan, costs: Costs, stages: EveryStageOps, program: Program, engine: Engine) -> tuple[str, ...]:
    """Lists what the prices of a step had to assume, a sentence each."""
    assumed = (*costs.assumed, *(costs.kernels.assumed_experts if plan.job.model.moe else ()))
    variants = dict.fromkeys(stage_ops for stage in stages for stage_ops in variants_of(stage))
    fragments = dict.fromkeys(unit_run.fragment for stage_ops in variants for unit_run in stage_ops.unit_runs)
    works = [op.work for fragment in fragments for op in fragment.forward]
    assumed += (*costs.kernels.assumed_eager(works), *costs.communication.assumed_exchanges(works))
    tasks = dict.fromkeys((*program.tasks, *program.updates))  # slots share their tasks
    assumed += costs.assumed_hosts(work for task in tasks for work, _ in task.host_works)
    return assumed + ((CONTENTION,) if engine == "shared" else ())


def play_forecast(
    plan: Plan,
    stages: EveryStageOps,
    program: Program,
    assume: Assume = tuple,
    engine: Engine = "matrices",
    skip: bool = True,
    uses: Sequence[Uses] = (),
    shared_work: SharedWork | None = None,
) -> Forecast:
    """Plays a program, and adds the memory that lives through the whole step. engine, skip, uses: see `play`."""
    shared = shared_work or SharedWork()
    every_params = device_params(plan, stages, shared.stages)
    offloaded = offloaded_of_devices(plan, every_params)
    resident = resident_of_devices(plan, every_params, program, shared.states)
    count_outside = partial(count_outside_steps, plan, every_params, shared.states, shared.outside)
    tensors = partial(_list_tensors, plan, every_params, resident)
    played = shared.first_step.play(program, engine, skip, uses)
    return Forecast(plan, played, resident, offloaded, assume, count_outside=count_outside, list_tensors=tensors)


def _list_tensors(
    plan: Plan, every_params: Sequence[DeviceParams], resident: Sequence[dict[str, float]], device: int
) -> StateTensors:
    """Returns the tensors of the states on a rank of a device. resident: bytes through the whole step, by device."""
    return state_tensors(plan.on(device), every_params[device], resident[device])
