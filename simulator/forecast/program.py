"""The program of a plan's step: its stages lowered, priced and put in the order of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from meshcast.simulator.engine.play import play
from meshcast.simulator.engine.task_time import mean_durations, pass_durations
from meshcast.simulator.forecast.lowering import host_waits
from meshcast.simulator.forecast.resident_memory import growing_gradients
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stage_messages import choose_messages
from meshcast.simulator.forecast.stages import lower_stages
from meshcast.simulator.ir.ops import Fragment, StageOps
from meshcast.simulator.job.host_launches import hidden_launch_s
from meshcast.simulator.plan.plan import Plan
from meshcast.simulator.program.block import Price, Prices
from meshcast.simulator.program.build import build
from meshcast.simulator.program.join import join_timetables
from meshcast.simulator.program.program import EveryStageOps, Program, variants_of
from meshcast.simulator.program.timetable import Timetable, timetable
from meshcast.simulator.report.forecast import Forecast
from meshcast.simulator.scheduling.host_copies import CopiesToHost
from meshcast.simulator.scheduling.schedule import PassDurations, ScheduleItem


def build_program(
    plan: Plan,
    price: Prices,
    shared_work: SharedWork | None = None,
    orders: Sequence[Sequence[ScheduleItem]] | None = None,
    periodic: bool = True,
    by_durations: bool | None = None,
) -> tuple[EveryStageOps, Program]:
    """Returns the lowered stages of a plan, and the program of its step.

    Orders that a schedule plans with durations are kept only where their step is no longer than H, the step of orders
    that no duration changes. H is a longest path, so on faster hardware it is no longer: f' <= H' <= H for any step f.

    price: of an op, for all devices or for each.
    orders: the order of every device, in place of the schedule's; stages have the numbers of their own pipeline.
    periodic: with the ops that run in a single step of a period only (`Op.when`).
    by_durations: whether a schedule that plans its orders with durations does so; None: whichever is better.
    """
    shared = shared_work or SharedWork()
    stages, updates = lower_stages(plan, shared.units, shared.stages)
    if not periodic:
        usual = {
            update: replace(update, forward=[op for op in update.forward if op.when != "period"]) for update in updates
        }
        updates = [usual[update] for update in updates]
    played = stages if periodic else _drop_periodic(stages)
    make = partial(_make_program, plan, played, updates, device_prices(plan, price), shared, orders)
    if by_durations is not None or orders is not None or not plans_orders(plan):
        return stages, make(by_durations is not False)
    programs = [make(True), make(False)]
    return stages, min(programs, key=lambda program: Forecast(plan, play(program), (), ()).seconds)


def _drop_periodic(stages: EveryStageOps) -> EveryStageOps:
    """Returns the stages without the side ops of a single step of a period, each stage once."""
    kept: dict[int, StageOps] = {}

    def drop(stage_ops: StageOps) -> StageOps:
        if id(stage_ops) not in kept:
            ahead = [side for side in stage_ops.ahead if side.ops[0].when != "period"]
            kept[id(stage_ops)] = stage_ops if len(ahead) == len(stage_ops.ahead) else replace(stage_ops, ahead=ahead)
        return kept[id(stage_ops)]

    return [drop(stage) if isinstance(stage, StageOps) else [*map(drop, stage)] for stage in stages]


def plans_orders(plan: Plan) -> bool:
    """Says whether durations of passes decide their order."""
    # Without backward passes there are no durations to plan with: the order is that of equally long passes.
    return not plan.job.forward_only and any(pipeline.schedule.needs_durations for pipeline in plan.every_pipeline)


def _make_program(
    plan: Plan,
    stages: EveryStageOps,
    updates: Sequence[Fragment],
    prices: Sequence[Price],
    shared: SharedWork,
    orders: Sequence[Sequence[ScheduleItem]] | None,
    by_durations: bool,
) -> Program:
    """Returns the program of lowered stages and updates; see `build_program`."""
    host, tables, device, stage = host_launch_seconds(plan), [], 0, 0
    for pipeline in plan.every_pipeline:
        its_stages, its_prices = (
            stages[stage : stage + pipeline.shape.stages],
            prices[device : device + pipeline.shape.p],
        )
        durations = _plan_durations(pipeline, its_stages, its_prices, host, shared) if plans_orders(pipeline) else None
        if durations is not None and not by_durations:
            durations = durations.equalised
        its_orders = orders[device : device + pipeline.shape.p] if orders is not None else None
        tables.append(_make_timetable(pipeline, durations, shared, its_orders))
        device, stage = device + pipeline.shape.p, stage + pipeline.shape.stages
    table = join_timetables(tables) if len(tables) > 1 else tables[0]
    return _build_in_order(plan, table, stages, updates, prices, shared)


def _build_in_order(
    plan: Plan,
    table: Timetable,
    stages: EveryStageOps,
    updates: Sequence[Fragment],
    prices: Sequence[Price],
    shared: SharedWork,
) -> Program:
    """Returns the program of a timetable, the first of all jobs if it is the same."""
    host, overlap = host_launch_seconds(plan), plan.job.framework.overlap.pp
    messages, growth = choose_messages(plan), growing_gradients(plan)
    variants = tuple(tuple(variants_of(stage)) for stage in stages)
    sent = messages.traits(variants)
    make = partial(build, table, stages, prices, messages, overlap, updates, host, shared.blocks, growth)
    if sent is None:
        return make()
    made_of = table, variants, tuple(updates), type(messages), sent, overlap, host, growth
    return shared.first_step.build(made_of, prices, make)


def _plan_durations(
    plan: Plan, stages: EveryStageOps, prices: Sequence[Price], host: float, shared: SharedWork
) -> PassDurations:
    """Returns the durations that a schedule plans with."""
    stage_prices = [prices[plan.model_parts.device(stage)] for stage in range(plan.shape.stages)]
    axis = plan.ranks.pipeline_axis if plan.shape.p > 1 else ""
    copies = isinstance(plan.schedule, CopiesToHost) and bool(plan.schedule.copied_stages(plan.shape))
    variants = {n: plan.shape.classes.count(n) for n in sorted({*plan.shape.classes})} or {0: 1}
    every = [
        pass_durations([variants_of(stage)[n] for stage in stages], stage_prices, axis, host, shared.blocks, copies)
        for n in variants
    ]
    durations = every[0]
    if len(every) > 1:
        by_class = dict(zip(variants, every, strict=True))
        each = tuple(by_class[n] for n in plan.shape.classes)
        durations = replace(mean_durations(every, [*variants.values()]), each=each)
    # Gradients are clipped by their global norm, for which all devices meet.
    return replace(durations, barrier=plan.schedule.barrier)


def _make_timetable(
    plan: Plan,
    durations: PassDurations | None,
    shared: SharedWork,
    orders: Sequence[Sequence[ScheduleItem]] | None,
) -> Timetable:
    schedule, shape, interval = plan.schedule, plan.passes.played_shape, plan.passes.update_interval
    if orders is None:
        return shared.timetable(schedule, shape, durations, interval)
    return timetable(schedule, shape, durations, interval, orders)


def device_prices(plan: Plan, price: Prices) -> Sequence[Price]:
    """Returns a price function for each pipeline device."""
    return [price] * plan.ranks.devices if callable(price) else price


def host_launch_seconds(plan: Plan) -> float:
    """Returns the time of the host to launch an op [s]; none with CUDA graphs, or where it is added to every op, or is
    an op."""
    return 0.0 if host_waits(plan.on(0)) else hidden_launch_s(plan.job.framework)
