"""From a job to a report: lower every distinct stage, price the ops, play the step, read off the answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simulator.costs import Costs
from simulator.engine.memory import Peak, peaks
from simulator.engine.program import Builder, Price, Program, StageProgram
from simulator.engine.simpy_engine import Times, play
from simulator.job import Job, load_job
from simulator.lowering import Lowering, rests
from simulator.ops import BYTES, Fragment, Param, Work
from simulator.plan import Plan
from simulator.report.report import Play, Report
from simulator.sites import Update


def simulate(job: Job | str | Path | Mapping[str, Any]) -> Report:
    """The forecast of one training step.

    Raises PlanError, ModelError or CatalogError for a job that is wrong; a job that does not fit in memory is no error.
    """
    plan = Plan(job if isinstance(job, Job) else load_job(job))
    costs = Costs(plan.job.cluster, plan.mesh, plan.job.framework.rates)

    def price(work: Work) -> tuple[float, float]:
        estimate = costs.estimate(work)
        return estimate.seconds, estimate.latency

    _, program, times, tops = played(plan, price)
    return Report(Play(plan, program, times, tops, costs))


def played(plan: Plan, price: Price) -> tuple[list[StageProgram], Program, Times, list[Peak]]:
    """Lowers a plan and plays its step at the given prices: stages, program, times, and the peak of every device."""
    stages, updates = lowered(plan)
    overlap = plan.job.framework.overlap.pp
    program = Builder(plan.shape, plan.schedule, stages, price, plan.pipeline_axis, overlap, updates).build()
    times = play(program)
    held = [resting(plan, params) for params in device_params(plan, stages)]
    return stages, program, times, peaks(program, times, held)


def lowered(plan: Plan) -> tuple[list[StageProgram], list[Fragment]]:
    """Every virtual stage, equal ones once, and the update of every device."""
    lowering = Lowering(plan.mesh, plan.schemes, plan.job.framework.regather)
    last = plan.shape.stages - 1
    ends = _ends(plan)
    made: dict[tuple[int, bool, bool], StageProgram] = {}
    stages = []
    for index, layers in enumerate(plan.layers):
        key = (layers, index == 0, index == last)
        if key not in made:
            site = plan.stage(index)
            fragment = lowering.run(site, index == last and ends[0] == ends[1])
            entry = None if index == 0 else "received"
            exit = None if index == last else "sent"
            message = 0
            if exit is not None:
                tensor, leaf = lowering.producer[exit]
                message = tensor.nbytes(leaf.leaving(tensor, lowering.division(leaf)), plan.mesh)
            made[key] = StageProgram(fragment, entry, exit, message)
        stages.append(made[key])
    updates = []
    for device, params in enumerate(device_params(plan, stages)):
        updates.append(lowering.lower(_update(plan, device, params, stages)))
    return stages, updates


def device_params(plan: Plan, stages: list[StageProgram]) -> list[tuple[Param, ...]]:
    """The parameters that one rank of every device holds."""
    held: list[list[Param]] = [[] for _ in range(plan.shape.p)]
    for index, stage in enumerate(stages):
        held[plan.schedule.device(plan.shape, index)] += stage.fragment.params
    return [tuple(params) for params in held]


def _ends(plan: Plan) -> tuple[int, int]:
    """The devices of the first and of the last stage."""
    return plan.schedule.device(plan.shape, 0), plan.schedule.device(plan.shape, plan.shape.stages - 1)


def _update(plan: Plan, device: int, params: tuple[Param, ...], stages: list[StageProgram]) -> Update:
    habits = plan.job.framework
    ends = _ends(plan)
    copies = sum(param.size for param in stages[-1].fragment.params if param.tied)
    state = BYTES[habits.main_weights] + 2 * BYTES[habits.moments]
    return Update(
        f"update {device}",
        params,
        BYTES[habits.gradients],
        BYTES[habits.gradients] + state,
        state + (BYTES[habits.weights] if habits.weights != habits.main_weights else 0),
        copies if device in ends and ends[0] != ends[1] else 0,
        plan.pipeline_axis,
        ends,
    )


def resting(plan: Plan, params: tuple[Param, ...]) -> dict[str, float]:
    """Bytes of the states that live through the whole step on one rank, by category."""
    habits, size = plan.job.framework, sum(param.size for param in params)

    def cut(state: str) -> float:
        return size / plan.mesh.size(rests(plan.schemes, state))

    # Weights that are kept in full precision anyway have no second copy.
    main = BYTES[habits.main_weights] if habits.main_weights != habits.weights else 0
    return {
        "parameters": cut("parameters") * BYTES[habits.weights],
        "gradients": cut("gradients") * BYTES[habits.gradients],
        "optimizer": cut("optimizer") * (main + 2 * BYTES[habits.moments]),
    }
