"""Resolves the plan of a job at the prices of its forecast: `partition: by-cost` and balanced slices need durations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from simulator.engine.peak_memory import peaks
from simulator.engine.play import play
from simulator.forecast.layer_costs import SliceTimes, stage_layer_costs
from simulator.forecast.program import build_program, device_prices, host_launch_seconds
from simulator.forecast.resident_memory import resident_of_devices, state_bytes
from simulator.forecast.shared_work import SharedWork
from simulator.forecast.stages import device_params
from simulator.ir.ops import Work
from simulator.job.job import Job
from simulator.plan.checks import check_alike
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

    def device_peaks(plan: Plan) -> list[float]:
        stages, program = build_program(plan, prices(plan), shared)
        resident = resident_of_devices(plan, device_params(plan, stages), program)
        return [float(peak.total) for peak in peaks(program, resident)]

    plan = resolve(job, layer_costs, work_seconds, slice_times, step_seconds, device_peaks, shared.parts_of_plans)
    return _place_states(plan, prices, shared) if any(one.measures_memory for one in plan.every_scheme) else plan


def _place_states(plan: Plan, prices: Callable[[Plan], Sequence[Price]], shared: SharedWork) -> Plan:
    """The plan after a warm-up step, in which schemes measure what memory they may use for states.

    Raises PlanError where stages or replicas differ.
    """
    check_alike(plan, next(scheme.use for scheme in plan.schemes if scheme.measures_memory))
    stages, program = build_program(plan, prices(plan), shared)
    used = [peak.total for peak in peaks(program, [{} for _ in range(plan.devices)])]
    states = [state_bytes(plan, params) for params in device_params(plan, stages)]
    # The device that has least room decides.
    tightest = max(range(plan.devices), key=lambda device: used[device] + sum(states[device].values()))
    memory = min(float(cluster.gpu.memory) for cluster in plan.clusters)
    schemes = [
        one.place_states(memory, used[tightest], states[tightest]) if one.measures_memory else one
        for one in plan.schemes
    ]
    return replace(plan, schemes=tuple(schemes))
