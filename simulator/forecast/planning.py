"""Resolves the plan of a job at the prices of its forecast: `partition: by-cost` and balanced slices need durations."""

from __future__ import annotations

from collections.abc import Sequence

from meshcast.simulator.engine.peak_memory import peaks
from meshcast.simulator.engine.play import play
from meshcast.simulator.forecast.layer_costs import SliceTimes, stage_layer_costs
from meshcast.simulator.forecast.program import build_program, device_prices, host_launch_seconds
from meshcast.simulator.forecast.resident_memory import resident_of_devices, state_bytes
from meshcast.simulator.forecast.saved_tensors import price_stage_tensors
from meshcast.simulator.forecast.shared_work import SharedWork
from meshcast.simulator.forecast.stages import device_params
from meshcast.simulator.ir.capabilities import MeasuresMemory, schemes_with
from meshcast.simulator.ir.ops import Work
from meshcast.simulator.job.job import Job
from meshcast.simulator.plan.checks import check_alike
from meshcast.simulator.plan.partition import LayerCosts
from meshcast.simulator.plan.plan import Plan, replace_scheme
from meshcast.simulator.plan.pricing import StageTensors
from meshcast.simulator.plan.resolve import resolve
from meshcast.simulator.program.block import Price, Prices
from meshcast.simulator.program.program import EveryStageOps, Program


def resolve_plan(job: Job, shared_work: SharedWork | None = None, price: Prices | None = None) -> Plan:
    """Returns the resolved plan of `job`.

    price: of the ops of slices, for all devices or for each; by default that of the plan's clusters.
    Raises PlanError for the first rule that the plan breaks.
    """
    shared = shared_work or SharedWork()
    pricing = ForecastPricing(shared, price)
    plan = resolve(job, pricing, shared.parts_of_plans)
    measures = any(scheme.measures_memory for scheme in schemes_with(plan.every_scheme, MeasuresMemory))
    return _place_states(plan, pricing) if measures else plan


class ForecastPricing:
    """Tells what a plan is resolved with, as the forecast computes it; its methods are those of `JobPricing`."""

    def __init__(self, shared: SharedWork, price: Prices | None = None) -> None:
        """Prices plans.

        shared: units, timetables and prices of earlier jobs.
        price: see `resolve_plan`.
        """
        self._shared, self._price = shared, price

    def price_layers(self, plan: Plan) -> list[LayerCosts]:
        return stage_layer_costs(plan, lambda device_plan, cluster: self._shared.costs(device_plan, cluster).estimate)

    def price_work(self, plan: Plan, work: Work) -> float:
        return self._shared.costs(plan, plan.ranks.clusters[0]).estimate(work).seconds

    def price_slices(self, plan: Plan) -> SliceTimes:
        return SliceTimes(plan, self._prices(plan), self._shared.units, host_launch_seconds(plan))

    def play_step(self, plan: Plan) -> float:
        return play(self.build(plan)[1]).span

    def measure_peaks(self, plan: Plan) -> list[float]:
        stages, program = self.build(plan)
        resident = resident_of_devices(plan, device_params(plan, stages), program)
        return [float(peak.total) for peak in peaks(program, resident)]

    def price_tensors(self, plan: Plan) -> list[StageTensors]:
        stages, _ = self.build(plan)
        every_costs = self._shared.device_costs(plan)
        return [price_stage_tensors(plan, device, stages[device], costs) for device, costs in enumerate(every_costs)]

    def build(self, plan: Plan) -> tuple[EveryStageOps, Program]:
        """Returns the lowered stages of a plan, and the program of its step."""
        return build_program(plan, self._prices(plan), self._shared)

    def _prices(self, plan: Plan) -> Sequence[Price]:
        """Returns the prices of ops on every device."""
        if self._price is not None:
            return device_prices(plan, self._price)
        return [costs.estimate for costs in self._shared.device_costs(plan)]


def _place_states(plan: Plan, pricing: ForecastPricing) -> Plan:
    """Returns the plan after a warm-up step, in which schemes measure what memory they may use for states.

    Raises PlanError where stages or replicas differ.
    """
    check_alike(plan, schemes_with(plan.every_scheme, MeasuresMemory)[0].use)
    stages, program = pricing.build(plan)
    used = [peak.total for peak in peaks(program, [{} for _ in range(plan.ranks.devices)])]
    states = [state_bytes(plan, params) for params in device_params(plan, stages)]
    # The device that has least room decides.
    tightest = max(range(plan.ranks.devices), key=lambda device: used[device] + sum(states[device].values()))
    memory = min(float(cluster.gpu.memory) for cluster in plan.ranks.clusters)

    for scheme in schemes_with(plan.schemes, MeasuresMemory):
        if scheme.measures_memory:
            plan = replace_scheme(plan, scheme, scheme.place_states(memory, used[tightest], states[tightest]))
    return plan
