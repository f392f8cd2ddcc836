"""From a job to a report: lower every distinct stage, price the ops, play the step, read off the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from simulator.costs import Costs, Estimate
from simulator.engine.blocks import Price
from simulator.engine.program import Program, build
from simulator.engine.step import Engine, durations, played
from simulator.engine.timetable import Timetable, timetable
from simulator.job import Job, load_job, located
from simulator.lowering import Known, Lowering, by_axes, rests
from simulator.ops import BYTES, Chain, Fragment, Param, Work
from simulator.plan import Plan
from simulator.report.report import Forecast, Report
from simulator.schedule import Durations, Schedule, Shape
from simulator.sites import Update

T = TypeVar("T")


class Workshop:
    """What many jobs have in common, made once: lowered units, timetables, prices. Sharing changes no answer."""

    def __init__(self) -> None:
        self.units: Known = {}
        self.divisible: set[Hashable] = set()
        self._timetables: dict[Hashable, Timetable] = {}
        self._costs: dict[Hashable, Costs] = {}
        self._kernels: dict[Hashable, dict[Work, Estimate]] = {}

    def tidy(self) -> None:
        """Forgets all units where they have become too many."""
        if len(self.units) > MOST_KEPT:
            self.units.clear()
        if len(self.divisible) > 100 * MOST_KEPT:
            self.divisible.clear()

    def timetable(self, schedule: Schedule, shape: Shape, lasting: Durations | None = None) -> Timetable:
        key = schedule.use, schedule.options, shape, lasting
        return _kept(self._timetables, key, lambda: timetable(schedule, shape, lasting))

    def costs(self, plan: Plan) -> Costs:
        cluster, rates = plan.job.cluster, plan.job.framework.rates
        same = cluster, tuple(rates.items())
        kernels: dict[Work, Estimate] = _kept(self._kernels, same, dict)
        return _kept(
            self._costs,
            (same, tuple(plan.mesh.axes.items())),
            lambda: Costs(cluster, plan.mesh, rates, kernels=kernels),
        )


MOST_KEPT = 300
"""Entries of one kind that a workshop keeps: what one grid of plans has in common is fewer, and each may be a MiB."""


def _kept(known: dict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
    if key not in known:
        if len(known) >= MOST_KEPT:
            known.clear()
        known[key] = make()
    return known[key]


def simulate(
    job: Job | str | Path | Mapping[str, Any],
    engine: Engine = "matrices",
    skip: bool = True,
    workshop: Workshop | None = None,
) -> Report:
    """The forecast of one training step.

    engine: how it is played; every engine gives the same answer. skip: see simulator.engine.step. workshop: what jobs
    share, where there are many.
    Raises PlanError, ModelError or CatalogError for a job that is wrong; a job that does not fit in memory is no error.
    """
    shop = workshop or Workshop()
    shop.tidy()
    plan = Plan(job if isinstance(job, Job) else load_job(job), shop.divisible)
    with located(*plan.job.origin):
        costs = shop.costs(plan)
    stages, program = programmed(plan, costs.estimate, shop)
    borrowed = (*costs.assumed, *(costs.of_experts if plan.job.model.moe else ()))
    return Report(forecast(plan, stages, program, borrowed, engine, skip))


def forecast(
    plan: Plan,
    stages: list[Chain],
    program: Program,
    assumed: Sequence[str] = (),
    engine: Engine = "matrices",
    skip: bool = True,
) -> Forecast:
    """Plays a program and its memory."""
    held = [resting(plan, params) for params in device_params(plan, stages)]
    return Forecast(plan, played(program, engine, skip), held, assumed)


def programmed(plan: Plan, price: Price, workshop: Workshop | None = None) -> tuple[list[Chain], Program]:
    """Lowers a plan: its stages, and the program of its step at the given prices."""
    shop = workshop or Workshop()
    stages, updates = lowered(plan, shop.units)
    habits = plan.job.framework
    host = 0.0 if habits.cuda_graphs else habits.launch_s
    lasting = durations(stages, price, plan.pipeline_axis, host) if plan.schedule.weighs else None
    table = shop.timetable(plan.schedule, plan.shape, lasting)
    return stages, build(table, stages, price, plan.pipeline_axis, habits.overlap.pp, updates, host)


def lowered(plan: Plan, known: Known | None = None) -> tuple[list[Chain], list[Fragment]]:
    """Every virtual stage, equal ones once, and the update of every device. known: units that were lowered before."""
    habits = plan.job.framework
    lowering = Lowering(plan.mesh, plan.schemes, habits.regather, known, habits.fused_gradients)
    last = plan.parts - 1
    made: dict[Hashable, Chain] = {}
    stages = []
    for index in range(plan.shape.stages):
        part = plan.part(index)
        embeds = part == last and plan.device(index) in plan.holders(0)
        key = (plan.blocks.runs(plan.layers_of(part)), part == 0, part == last, embeds)
        if key not in made:
            made[key] = lowering.run(plan.stage(part), embeds)
        stages.append(made[key])
    made_updates: dict[Hashable, Fragment] = {}
    updates = []
    for device, params in enumerate(device_params(plan, stages)):
        mine = (id(stage) for i, stage in enumerate(stages) if plan.device(i) == device)
        shared = _shared(plan, device, stages)
        if (held := (*mine, shared)) not in made_updates:
            made_updates[held] = lowering.lower(_update(plan, device, params, shared))
        updates.append(made_updates[held])
    return stages, updates


def device_params(plan: Plan, stages: list[Chain]) -> list[tuple[tuple[Param, int], ...]]:
    """The parameters that one rank of every device holds, each with the number of its copies."""
    held: list[list[tuple[Param, int]]] = [[] for _ in range(plan.shape.p)]
    for index, stage in enumerate(stages):
        held[plan.device(index)] += stage.params()
    return [tuple(params) for params in held]


def _shared(plan: Plan, device: int, stages: list[Chain]) -> tuple[tuple[tuple[int, ...], int], ...]:
    """What several devices of the pipeline hold, and sum the gradients of: devices, and elements of one shard."""
    found: dict[tuple[int, ...], int] = defaultdict(int)

    def add(holders: tuple[int, ...], params: Iterable[tuple[Param, int]]) -> None:
        if device in holders and len(holders) > 1:
            cut = (n * param.size // plan.mesh.size(rests(plan.schemes, "gradients", param)) for param, n in params)
            found[holders] += sum(cut)

    for index, stage in enumerate(stages):
        if plan.device(index) == device:
            add(plan.holders(plan.part(index)), stage.params())
    # A tied output layer is a copy of the embedding's table.
    ends = plan.holders(0), plan.holders(plan.parts - 1)
    if ends[0] != ends[1]:
        add(tuple(sorted({*ends[0], *ends[1]})), [(param, n) for param, n in stages[-1].params() if param.tied])
    return tuple((holders, elements) for holders, elements in sorted(found.items()) if elements)


def _update(
    plan: Plan,
    device: int,
    params: tuple[tuple[Param, int], ...],
    shared: tuple[tuple[tuple[int, ...], int], ...],
) -> Update:
    habits = plan.job.framework
    state = BYTES[habits.main_weights] + 2 * BYTES[habits.moments]
    return Update(
        f"update {device}",
        params,
        BYTES[habits.gradients],
        BYTES[habits.gradients] + state,
        state + (BYTES[habits.weights] if habits.weights != habits.main_weights else 0),
        shared,
        plan.pipeline_axis,
    )


def resting(plan: Plan, params: tuple[tuple[Param, int], ...]) -> dict[str, float]:
    """Bytes of the states that live through the whole step on one rank, by category.

    Weights that rest cut are those that the optimizer updates; others have a copy of their own in its format, unless it
    is the same.
    """
    habits = plan.job.framework
    compute, full, moments = BYTES[habits.weights], BYTES[habits.main_weights], 2 * BYTES[habits.moments]
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for param, size in by_axes(params):
        at_rest = {state: plan.mesh.size(rests(plan.schemes, state, param)) for state in found}
        cut = at_rest["parameters"] > 1
        main = full if habits.main_weights != habits.weights and not cut else 0
        found["parameters"] += size * (full if cut else compute) / at_rest["parameters"]
        found["gradients"] += size * BYTES[habits.gradients] / at_rest["gradients"]
        found["optimizer"] += size * (main + moments) / at_rest["optimizer"]
    return found
