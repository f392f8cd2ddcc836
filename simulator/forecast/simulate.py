"""From a job to a report: lower every distinct stage, price the ops, play the step, read off the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hardware.cluster import Cluster
from simulator.costs.costs import Costs, Estimate
from simulator.engine.play import Engine, Uses, alone, durations, played
from simulator.ir.modules import Update
from simulator.ir.ops import BYTES, Exchange, Fragment, Param, StageOps, Transfer, Work
from simulator.job.job import Job, load_job, located
from simulator.lowering.lower import Known, Lowering, by_axes, shards_at_rest
from simulator.plan.plan import Plan
from simulator.program.block import Price, Prices
from simulator.program.build import EveryStageOps, Program, build, one_of, task_of
from simulator.program.timetable import Timetable, timetable
from simulator.report.report import Forecast, Report
from simulator.scheduling.schedule import Durations, PipelineShape, Schedule, ScheduleItem, weight_versions

T = TypeVar("T")


class SharedWork:
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

    def timetable(
        self, schedule: Schedule, shape: PipelineShape, lasting: Durations | None = None, every: int = 0
    ) -> Timetable:
        key = schedule.use, schedule.options, shape, lasting, every
        return _kept(self._timetables, key, lambda: timetable(schedule, shape, lasting, every))

    def costs(self, plan: Plan, cluster: Cluster | None = None) -> Costs:
        """The prices on the plan's cluster, or on another of as many GPUs."""
        cluster, rates = cluster or plan.job.cluster, plan.job.framework.speeds
        same = cluster, tuple(rates.items())
        kernels: dict[Work, Estimate] = _kept(self._kernels, same, dict)
        return _kept(
            self._costs,
            (same, tuple(plan.mesh.axes.items())),
            lambda: Costs(cluster, plan.mesh, rates, kernels=kernels),
        )


MOST_KEPT = 300
"""Entries of one kind that a workshop keeps: what one grid of plans has in common is fewer, and each may be a MiB."""


MEETING = "traffic that meets on a GPU's links shares them fairly; kernels get the multiprocessors that it leaves"
"""What the engine `shared` takes for granted."""


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
    shared_work: SharedWork | None = None,
) -> Report:
    """The forecast of one training step.

    engine: how it is played; all but `shared` give the same answer. skip: see simulator.engine.play. workshop: what
    jobs share, where there are many.
    Raises PlanError, ModelError or CatalogError for a job that is wrong; a job that does not fit in memory is no error.
    """
    shop = shared_work or SharedWork()
    shop.tidy()
    plan = Plan(job if isinstance(job, Job) else load_job(job), shop.divisible)
    with located(*plan.job.origin):
        costs = shop.costs(plan)
        own = [shop.costs(plan, cluster) for cluster in plan.clusters]
    prices = [one.estimate for one in own]
    stages, program = programmed(plan, prices, shop)
    borrowed = (*costs.assumed, *(costs.of_experts if plan.job.model.moe else ()))
    forward = (op for stage in stages for unit_run in one_of(stage).unit_runs for op in unit_run.fragment.forward)
    borrowed += costs.of_exchanges if any(isinstance(op.work, Exchange) for op in forward) else ()
    borrowed += costs.of_host(op.work for task in (*program.tasks, *program.updates) for op, _ in task.counted())
    borrowed += (MEETING,) if engine == "shared" else ()
    play = forecast(plan, stages, program, borrowed, engine, skip, [one.use for one in own])
    if plan.schedule.at_run_time:
        play = replace(play, anew=lambda orders: programmed(plan, prices, shop, orders)[1])
    if plan.period == 1:
        return Report(play)
    usual = programmed(plan, prices, shop, rare=False)[1]
    return Report(play, forecast(plan, stages, usual, borrowed, engine, skip, [one.use for one in own]))


def forecast(
    plan: Plan,
    stages: EveryStageOps,
    program: Program,
    assumed: Sequence[str] = (),
    engine: Engine = "matrices",
    skip: bool = True,
    uses: Sequence[Uses] = (),
) -> Forecast:
    """Plays a program and its memory. engine, skip, uses: see `simulator.engine.play.played`."""
    held = [resting(plan, params) for params in device_params(plan, stages)]
    for device, params in enumerate(device_params(plan, stages)) if plan.every else ():
        versions = weight_versions(plan.schedule, plan.shape, device, program.timetable.orders[device])
        held[device]["parameters"] += stashed(plan, params, versions)
    if nbytes := sum(scheme.buffers for scheme in plan.schemes):
        for states in held:
            states["buffers"] = float(nbytes)
    return Forecast(plan, played(program, engine, skip, uses), held, assumed)


def programmed(
    plan: Plan,
    price: Prices,
    shared_work: SharedWork | None = None,
    orders: Sequence[Sequence[ScheduleItem]] | None = None,
    rare: bool = True,
) -> tuple[EveryStageOps, Program]:
    """Lowers a plan: its stages, and the program of its step at the given prices. orders: in place of the plan's. rare:
    with what runs in one step of a period only."""
    prices = [price] * plan.shape.p if callable(price) else price
    shop = shared_work or SharedWork()
    framework = plan.job.framework
    host = 0.0 if framework.cuda_graphs else framework.launch_s
    plan.settle(_Slice(plan, prices, shop.units, host))
    stages, updates = lowered(plan, shop.units)
    if not rare:
        often = {id(one): replace(one, forward=[op for op in one.forward if op.when != "period"]) for one in updates}
        updates = [often[id(one)] for one in updates]
    lasting = None
    if plan.schedule.needs_durations:
        of_stages = [prices[plan.device(stage)] for stage in range(plan.shape.stages)]
        lasting = durations([one_of(stage) for stage in stages], of_stages, plan.pipeline_axis, host)
    if orders is None:
        table = shop.timetable(plan.schedule, plan.run, lasting, plan.every)
    else:
        table = timetable(plan.schedule, plan.run, lasting, plan.every, orders)
    return stages, build(table, stages, prices, plan.pipeline_axis, framework.overlap.pp, updates, host)


def lowered(plan: Plan, known: Known | None = None) -> tuple[EveryStageOps, list[Fragment]]:
    """Every virtual stage, equal ones once, and the update of every device. known: units that were lowered before."""
    last = plan.parts - 1
    made: dict[Hashable, StageOps | Sequence[StageOps]] = {}
    stages = []
    for index in range(plan.shape.stages):
        part = plan.part(index)
        embeds = part == last and plan.device(index) in plan.holders(0)
        slices = [plan.stage(part, blocks) for blocks in plan.slices]
        spared = plan.schedule.idle_roles(plan.shape, index)
        key = (tuple((unit.children, unit.count) for unit in slices[0].units), embeds, spared)
        if key not in made:
            lowering = lowering_of(plan, known, spared)
            stages_ops = [lowering.run(stage, embeds) for stage in slices]
            made[key] = stages_ops if len(stages_ops) > 1 else stages_ops[0]
        stages.append(made[key])
    made_updates: dict[Hashable, Fragment] = {}
    updates = []
    for device, params in enumerate(device_params(plan, stages)):
        mine = (id(stage) for i, stage in enumerate(stages) if plan.device(i) == device)
        shared = _shared(plan, device, stages)
        if (held := (*mine, shared)) not in made_updates:
            made_updates[held] = lowering_of(plan, known).lower(_update(plan, device, params, shared))
        updates.append(made_updates[held])
    return stages, updates


def lowering_of(plan: Plan, known: Known | None = None, spared: Sequence[str] = ()) -> Lowering:
    """spared: roles of the plan's schemes that do nothing here."""
    framework = plan.job.framework
    schemes = [scheme for scheme in plan.schemes if scheme.role not in spared]
    return Lowering(plan.mesh, schemes, framework.regather, known, framework.fused_gradients)


class _Slice:
    """How long a slice takes on a stage in the middle of the pipeline, with the messages that bring it there.

    Of slices of equal length the time grows in proportion to what lies before them, up to an attention window if there
    is one: so it is forecast where that begins and ends.
    """

    def __init__(self, plan: Plan, prices: Sequence[Price], known: Known, host: float) -> None:
        self.plan, self.host, self.lowering = plan, host, lowering_of(plan, known)
        self.part = plan.parts // 2
        self.price = prices[plan.device(self.part)]
        self._known: dict[int, tuple[list[int], list[float]]] = {}

    def __call__(self, tokens: int, before: int) -> float:
        if tokens not in self._known:
            most = self.plan.blocks.seq - tokens
            places = sorted({0, min(self.plan.job.model.window or 0, most), most})
            self._known[tokens] = places, [self._forecast(tokens, place) for place in places]
        return float(np.interp(before, *self._known[tokens]))

    def _forecast(self, tokens: int, before: int) -> float:
        blocks = self.plan.blocks.cut(before, before + tokens)
        stage_ops = self.lowering.run(self.plan.stage(self.part, blocks))
        seconds = sum(alone(task_of(stage_ops, kind, self.price, again=False), self.host) for kind in ("F", "BW"))
        if self.plan.shape.p > 1:
            work = Transfer(stage_ops.unit_runs[0].nbytes, self.plan.pipeline_axis, 0, 1)
            seconds += 2 * sum(self.price(work)[::2])
        return seconds


def device_params(plan: Plan, stages: EveryStageOps) -> list[tuple[tuple[Param, int], ...]]:
    """The parameters that one rank of every device holds, each with the number of its copies."""
    held: list[list[tuple[Param, int]]] = [[] for _ in range(plan.shape.p)]
    for index, stage in enumerate(stages):
        held[plan.device(index)] += one_of(stage).params()
    return [tuple(params) for params in held]


def _shared(plan: Plan, device: int, stages: EveryStageOps) -> tuple[tuple[tuple[int, ...], int], ...]:
    """What several devices of the pipeline hold, and sum the gradients of: devices, and elements on one rank.

    Of stages that are there twice every rank sums what it updates; a table is summed whole, for both of its uses.
    """
    found: dict[tuple[int, ...], int] = defaultdict(int)

    def add(holders: tuple[int, ...], params: Iterable[tuple[Param, int]], state: str) -> None:
        if device in holders and len(holders) > 1:
            trained = [(param, n) for param, n in params if param.trained]
            cut = (n * param.size // plan.mesh.size(shards_at_rest(plan.schemes, state, param)) for param, n in trained)
            found[holders] += sum(cut)

    for index, stage in enumerate(stages):
        if plan.device(index) == device:
            add(plan.holders(plan.part(index)), one_of(stage).params(), "optimizer")
    # A tied output layer is a copy of the embedding's table.
    ends = plan.holders(0), plan.holders(plan.parts - 1)
    if ends[0] != ends[1]:
        tied = [(param, n) for param, n in one_of(stages[-1]).params() if param.tied]
        add(tuple(sorted({*ends[0], *ends[1]})), tied, "gradients")
    return tuple((holders, elements) for holders, elements in sorted(found.items()) if elements)


def _update(
    plan: Plan,
    device: int,
    params: tuple[tuple[Param, int], ...],
    shared: tuple[tuple[tuple[int, ...], int], ...],
) -> Update:
    framework = plan.job.framework
    state = BYTES[framework.main_weights] + 2 * BYTES[framework.moments]
    return Update(
        f"update {device}",
        tuple((param, count) for param, count in params if param.trained),
        BYTES[framework.gradients],
        BYTES[framework.gradients] + state,
        state + (BYTES[framework.weights] if framework.weights != framework.main_weights else 0),
        shared,
        plan.pipeline_axis,
        clipped=plan.schedule.flush,
    )


def resting(plan: Plan, params: tuple[tuple[Param, int], ...]) -> dict[str, float]:
    """Bytes of the states that live through the whole step on one rank, by category.

    Weights that rest cut are those that the optimizer updates, where the schemes say so; of others it has a copy in its
    own format, unless it is the same. Frozen weights and second copies only compute. What rests elsewhere takes no
    memory.
    """
    framework = plan.job.framework
    compute, full, moments = BYTES[framework.weights], BYTES[framework.main_weights], 2 * BYTES[framework.moments]
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0.0)
    for param, size in by_axes(params):
        at_rest = {state: plan.mesh.size(shards_at_rest(plan.schemes, state, param)) for state in found}
        cut = at_rest["parameters"] > 1 and all(scheme.updates_weights for scheme in plan.schemes)
        second = [axes for scheme in plan.schemes if (axes := scheme.secondary_shards(param)) is not None]
        found["parameters"] += sum(size * compute / plan.mesh.size(axes) for axes in second)
        if not param.trained:
            found["parameters"] += size * compute / at_rest["parameters"]
            continue
        main = full if framework.main_weights != framework.weights and not cut else 0
        found["parameters"] += size * (full if cut else compute) / at_rest["parameters"]
        found["gradients"] += size * BYTES[framework.gradients] / at_rest["gradients"]
        found["optimizer"] += size * (main + moments) / at_rest["optimizer"]
    return {state: 0.0 if any(s.offloads(state) for s in plan.schemes) else found[state] for state in found}


def stashed(plan: Plan, params: tuple[tuple[Param, int], ...], versions: int) -> float:
    """Bytes of the older versions of the weights on one rank, where it holds so many: in the format they compute in."""
    nbytes = BYTES[plan.job.framework.weights]
    trained = [(param, size) for param, size in by_axes(params) if param.trained]
    cut = (size / plan.mesh.size(shards_at_rest(plan.schemes, "parameters", param)) for param, size in trained)
    return float((versions - 1) * nbytes * sum(cut))
