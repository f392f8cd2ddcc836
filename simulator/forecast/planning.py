"""Resolves the plan of a job at the prices of its forecast: `partition: by-cost` and balanced slices need durations."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.engine.play import play
from simulator.forecast.layer_costs import SliceTimes, stage_layer_costs
from simulator.forecast.program import build_program, device_prices, host_launch_seconds
from simulator.forecast.shared_work import SharedWork
from simulator.ir.ops import Work
from simulator.job.job import Job
from simulator.plan.partition import LayerCosts
from simulator.plan.plan import Plan
from simulator.plan.resolve import resolve
from simulator.program.block import Price, Prices


def resolve_plan(job: Job, shared_work: SharedWork | None = None, price: Prices | None = None) -> Plan:
    """The resolved plan of `job`.

    price: of the ops of slices, for all devices or for each; by default that of the plan's clusters.
    Raises PlanError for the first rule that the plan breaks.
    """
    shared = shared_work or SharedWork()

    def layer_costs(plan: Plan) -> list[LayerCosts]:
        return stage_layer_costs(plan, lambda own, cluster: shared.costs(own, cluster).estimate)

    def work_seconds(plan: Plan, work: Work) -> float:
        return shared.costs(plan.on(0), plan.clusters[0]).estimate(work).seconds

    def prices(plan: Plan) -> Sequence[Price]:
        own = price if price is not None else [one.estimate for one in shared.device_costs(plan)]
        return device_prices(plan, own)

    def slice_times(plan: Plan) -> SliceTimes:
        return SliceTimes(plan, prices(plan), shared.units, host_launch_seconds(plan))

    def step_seconds(plan: Plan) -> float:
        return play(build_program(plan, prices(plan), shared)[1]).span

    return resolve(job, layer_costs, work_seconds, slice_times, step_seconds, shared.divisible)
